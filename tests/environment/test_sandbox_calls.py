"""The filter of system calls: its program against a slow interpreter, its numbers against the kernel's headers, and in
a real sandbox."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.environment.sandbox.calls import ARCHITECTURES
from megatron_t1.environment.sandbox.seccomp import REFUSED, assemble, filter_program

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
NAMES_WITH_RULES = {"clone", "clone3", "unshare", "ioctl", "socket", "socketpair"}


def run(program, number, audit, *arguments):
    """Interpret a classic BPF program on a struct seccomp_data, instruction by instruction."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number - (1 << 32) if number >= 1 << 31 else number, audit, 0, *arguments)
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = program[position]
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
            position += 1
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += 1 + (if_true if holds else if_false)


def expected(architecture, number, audit, *arguments):
    """The rules in words."""

    def refused(number):
        return 0x00050000 | number

    name = {value: key for key, value in architecture.calls.items()}.get(number)
    low = [argument & 0xFFFFFFFF for argument in arguments]
    if audit != architecture.audit or (architecture.has_x32 and number >= 0x40000000):
        return refused(errno.ENOSYS)
    if name == "clone3":
        return refused(errno.ENOSYS)
    if name in REFUSED:
        return refused(errno.EPERM)
    namespaces = 0x7E020000
    if name == "clone" and low[0] & namespaces or name == "unshare" and low[0] & (namespaces | 0x80):
        return refused(errno.EPERM)
    if name == "ioctl" and low[1] in (0x5412, 0x541C):
        return refused(errno.EPERM)
    if name in ("socket", "socketpair") and low[0] not in (1, 2, 10, 16):
        return refused(errno.EAFNOSUPPORT)
    return 0x7FFF0000


@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
@settings(deadline=None)
@given(data=st.data())
def test_program_is_the_rules(machine, data):
    architecture = ARCHITECTURES[machine]
    program = assemble(architecture)
    known = sorted(architecture.calls.values())
    number = data.draw(st.sampled_from(known) | st.integers(0, 600) | st.integers(0, 2**32 - 1))
    audit = data.draw(st.sampled_from([architecture.audit] * 5 + [0x40000003, 0]))
    flags = st.sampled_from([0, 1, 2, 10, 16, 17, 40, 38, 0x5412, 0x541C, 0x10000000, 0x00020000, 0x80, 0x01200011])
    arguments = [data.draw(flags | st.integers(0, 2**64 - 1)) for _ in range(2)]
    assert run(program, number, audit, *arguments) == expected(architecture, number, audit, *arguments)


@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
def test_program_is_well_formed(machine):
    program = assemble(ARCHITECTURES[machine])
    assert len(program) < 4096  # BPF_MAXINSNS
    assert filter_program(machine) == b"".join(struct.pack("<HBBI", *step) for step in program)
    for position, (code, if_true, if_false, _) in enumerate(program):
        assert code == 0x06 or position + 1 + max(if_true, if_false) < len(program)
        assert max(if_true, if_false) < 256


@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
def test_numbers_are_the_kernels(machine):
    header = next((Path(name) for name in HEADERS[machine] if Path(name).exists()), None)
    if header is None:
        pytest.skip("no kernel headers (linux-libc-dev)")
    numbers = dict(re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    calls = ARCHITECTURES[machine].calls
    assert {name: int(numbers[name]) for name in calls if name in numbers} == {
        name: number for name, number in calls.items() if name in numbers
    }
    # what the headers have and is to be refused, the filter knows
    assert {name for name in REFUSED | NAMES_WITH_RULES if name in numbers} <= calls.keys()


def test_an_unknown_machine_has_no_filter():
    assert filter_program("vax") is None


PROBE = r"""
import ctypes, errno, os, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(numbers[name], *arguments)
    return "allowed" if result >= 0 else errno.errorcode[ctypes.get_errno()]
numbers = NUMBERS
for name in ("mount", "keyctl", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "kexec_load", "setns"):
    print(name, call(name, 0, 0, 0, 0, 0))
print("unshare", call("unshare", 0x10000000), call("unshare", 0x400))
print("clone3", call("clone3", 0, 0))
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET):
    try: socket.socket(family, socket.SOCK_STREAM).close(); print("socket allowed")
    except OSError as error: print("socket", errno.errorcode[error.errno])
pair, server = socket.socketpair(), socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname())
thread = threading.Thread(target=lambda: print("thread")); thread.start(); thread.join()
spawned = os.posix_spawn("/usr/bin/true", ["true"], {})
print(subprocess.run(["true"]).returncode, os.waitpid(spawned, 0)[1])
"""


@pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="no filter for this machine")
def test_in_a_sandbox(in_sandbox, make_task):
    numbers = ARCHITECTURES[platform.machine()].calls

    async def body(sandbox):
        await sandbox.start(make_task({"probe.py": PROBE.replace("NUMBERS", repr(numbers))}))
        return await sandbox.run("grep Seccomp: /proc/self/status; python3 -I probe.py", 60)

    lines = in_sandbox(body).output.splitlines()
    assert lines[0].split() == ["Seccomp:", "2"]
    assert lines[1:9] == [
        f"{name} EPERM"
        for name in "mount keyctl bpf perf_event_open userfaultfd io_uring_setup kexec_load setns".split()
    ]
    assert lines[9:] == [
        "unshare EPERM allowed", "clone3 ENOSYS", "socket EAFNOSUPPORT", "socket EAFNOSUPPORT", "socket EAFNOSUPPORT",
        "thread", "0 0",
    ]  # fmt: skip
