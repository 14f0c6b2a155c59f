"""The system calls a sandbox may make: a classic BPF program for seccomp, assembled here.

What is refused is what reaches a part of the kernel that namespaces don't divide, or makes new namespaces (whose
capabilities open much of the kernel to an unprivileged process): the list that container engines refuse, and socket
families other than the local and the internet ones (a virtual machine's host answers on AF_VSOCK whatever the network
namespace). Layout of the data and the instructions: Linux, include/uapi/linux/seccomp.h and bpf_common.h.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from functools import cache

from megatron_t1.environment.sandbox.calls import ARCHITECTURES, Architecture

# offsets in struct seccomp_data; arguments are 64 bits, of which flags and families use the low half
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
X32_BIT = 0x40000000

# CLONE_NEWTIME is a signal's bit for clone, and of unshare alone
NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
NEW_TIME = 0x00000080
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, for names of interfaces
TERMINAL_INJECTION = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX: typing into the terminal one was started from

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


@cache
def filter_program(machine: str = "") -> bytes | None:
    """The filter as bwrap's --seccomp reads it (an array of struct sock_filter), for this machine; None: not known."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in assemble(architecture))


def open_filter() -> int | None:
    """A descriptor that reads the program; None where there is no filter for this machine."""
    program = filter_program()
    if program is None:
        return None
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.write(writing, program)  # far below a pipe's capacity
    os.close(writing)
    return reading


def assemble(architecture: Architecture) -> list[Instruction]:
    """Refusals first, then: allowed."""
    calls = architecture.calls
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture.audit),
        _refuse(errno.ENOSYS),  # a 32-bit call: another table of numbers
        (LOAD, 0, 0, NUMBER),
    ]
    if architecture.has_x32:
        program += [(JUMP_AT_LEAST, 0, 1, X32_BIT), _refuse(errno.ENOSYS)]
    for name in sorted(REFUSED & calls.keys()):
        program += [(JUMP_EQUAL, 0, 1, calls[name]), _refuse(errno.EPERM)]
    # Its flags lie in memory, where no filter can look; without it, clone is used, which every libc can do.
    program += [(JUMP_EQUAL, 0, 1, calls["clone3"]), _refuse(errno.ENOSYS)]
    program += _when(calls["clone"], 0, [(JUMP_ANY_BIT, 0, 1, NAMESPACE_FLAGS), _refuse(errno.EPERM)])
    program += _when(calls["unshare"], 0, [(JUMP_ANY_BIT, 0, 1, NAMESPACE_FLAGS | NEW_TIME), _refuse(errno.EPERM)])
    program += _when(
        calls["ioctl"],
        1,
        [step for code in TERMINAL_INJECTION for step in ((JUMP_EQUAL, 0, 1, code), _refuse(errno.EPERM))],
    )
    allowed = [(JUMP_EQUAL, len(FAMILIES) - index, 0, int(family)) for index, family in enumerate(FAMILIES)]
    for name in ("socket", "socketpair"):
        program += _when(calls[name], 0, [*allowed, _refuse(errno.EAFNOSUPPORT)])
    return [*program, (RETURN, 0, 0, ALLOW)]


def _refuse(number: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | number)


def _when(call: int, argument: int, steps: list[Instruction]) -> list[Instruction]:
    """`steps` look at an argument's low half, for one call; after them this call is allowed."""
    body = [(LOAD, 0, 0, ARGUMENTS + 8 * argument), *steps, (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), call), *body]


REFUSED = frozenset(
    """
    acct add_key bpf clock_adjtime clock_settime create_module delete_module fanotify_init finit_module fsconfig fsmount
    fsopen fspick get_kernel_syms init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp
    kexec_file_load kexec_load keyctl listmount lookup_dcookie modify_ldt mount mount_setattr move_mount
    move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd
    pivot_root process_madvise query_module quotactl quotactl_fd reboot request_key set_mempolicy_home_node setns
    settimeofday statmount swapoff swapon syslog sysfs umount2 uselib userfaultfd ustat vhangup adjtimex chroot
    migrate_pages setdomainname sethostname
    """.split()
)
