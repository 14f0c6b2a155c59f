"""What an agent might try, and what shows on the host that it was held. Run as root and as a normal user; plain Python
without the test tools, so that it also runs where only the package is."""

import asyncio
import os
import socket
import subprocess
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.task import Task, TaskContent

PYTHON = "python3 -I -c '{}'"
CONNECT = PYTHON.format('import socket; socket.create_connection(("{}", {}), 2)')
# name -> a command that must fail
REFUSED = {
    "network, internet": CONNECT.format("1.1.1.1", 53),
    "network, the host's loopback": CONNECT.format("127.0.0.1", "PORT"),
    "network, datagrams": PYTHON.format(
        'import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))'
    ),
    "network, packets": PYTHON.format("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "network, virtual machine's host": PYTHON.format("import socket; socket.socket(socket.AF_VSOCK)"),
    "the host's abstract sockets": PYTHON.format(
        'import socket; socket.socket(socket.AF_UNIX).connect("\\0" + "ABSTRACT")'
    ),
    "host files": "cat SECRET",
    "host files through /proc": "cat /proc/1/rootSECRET",
    "host files through dots": "cat ../../../../../../../..SECRET",
    "sysctl": "echo 5 > /proc/sys/kernel/printk",
    "sysctl, core pattern": "echo '|/bin/true' > /proc/sys/kernel/core_pattern",
    "sysctl, remount": "mount -o remount,rw /proc/sys",
    "sysrq": "echo b > /proc/sysrq-trigger",
    "kernel memory": "head -c 1 /proc/kcore",
    "kernel log": "dmesg",
    "own limits": "ulimit -f unlimited && ulimit -u unlimited",
    "priority of others": "renice -n -5 -p 1",
    "oom protection": "echo -1000 > /proc/self/oom_score_adj",
    "ptrace of the driver": PYTHON.format(
        "import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(16, DRIVER, 0, 0) != 0)"
    ),
    "memory of the driver": "head -c 1 /proc/DRIVER/mem",
    "signal to the driver": "kill -9 DRIVER",
    "namespaces of the host": "nsenter -t 1 -m true && nsenter -t DRIVER -m true",
    "new user namespace": "unshare -Ur true",
    "new mount namespace": "unshare -m true",
    "mount": "mount -t tmpfs none /mnt",
    "bind over the system": "mount --bind /tmp /usr",
    "unmount": "umount -l /proc",
    "write the system": "touch /usr/bin/x",
    "replace a program": "cp /usr/bin/true /usr/bin/bash",
    "move the system": "mv /usr /usr2",
    "device, make": "mknod /tmp/null c 1 3",
    "device, disk": "head -c 1 /dev/sda || head -c 1 /dev/vda",
    "device, memory": "head -c 1 /dev/mem",
    "device, directory": "touch /dev/x",
    "chroot": "chroot / /bin/true",
    "owner": "touch /tmp/o && chown 12345 /tmp/o",
    "set-user program": "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && setpriv --reuid 65534 /tmp/id",
    "host name": "hostname changed",
    "clock": "date -s 2000-01-01",
    "control groups": "ls /sys/fs/cgroup",
    "keys of the session": PYTHON.format(
        "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall({}, 0, -3, 0) < 0)".format(
            {"x86_64": 250, "aarch64": 219}.get(os.uname().machine, 0)
        )
    ),
    "typing into the terminal": PYTHON.format(
        'import fcntl, os; fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x5412, b"x")'
    ),
}
# name -> a command that may do what it likes, within its time; afterwards the sandbox starts again
SURVIVED = {
    "fork bomb": ":(){ :|:& };:",
    "fork bomb that is never reaped": "python3 -I -c 'import os\nwhile True:\n try: os.fork()\n except OSError: pass'",
    "memory": "python3 -I -c 'x = []\nwhile True: x.append(bytearray(10 << 20))'",
    "memory of the shell": "x=$(yes)",
    "disk": "for n in 1 2 3 4 5 6 7 8 9; do head -c 20000000 /dev/zero > /tmp/f$n; done; cat /dev/zero > /dev/shm/x",
    "inodes": "mkdir /tmp/n; cd /tmp/n; seq 100000 | xargs touch",
    "output": "yes | head -c 500000000",
    "output on standard error, without lines": "cat /dev/zero >&2",
    "file handles": "python3 -I -c 'import os\nwhile True: os.dup(1)'",
    "kill everything": "kill -9 -1",
    "signals are ignored": "trap '' TERM INT HUP QUIT; sleep 100",
    "daemons that ignore signals": "for n in 1 2 3; do (setsid bash -c \"trap '' TERM HUP; sleep MARK\" &) ; done",
    "double fork": "python3 -I -c 'import os\nif os.fork() == 0:\n os.setsid()\n"
    ' if os.fork() == 0: os.execvp("sleep", ["sleep", "MARK"])\'',
    "deep directories": 'python3 -I -c \'import os\nfor n in range(3000):\n os.mkdir("d"); os.chdir("d")\'',
    "stopped processes": "sleep MARK & kill -STOP $!; kill -STOP $$",
}
LIMITS = dict(memory_mb=128, disk_mb=48, max_files=3000, file_size_mb=16, max_processes=40)


def host_state() -> dict[str, str]:
    """What a sandbox could have changed for others."""
    names = ("/proc/sys/kernel/printk", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname")
    state = {name: Path(name).read_text() for name in names}
    others = ("t1-sandbox", "/containers/", "/tmp/")  # come and go with other programs
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if not any(o in line for o in others)]
    return state | {"mounts": "\n".join(mounts), "bash": str(Path("/usr/bin/bash").stat().st_mtime_ns)}


def marked(mark: str) -> int:
    """Processes of the host that have the mark in their command line."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                count += f"sleep\0{mark}\0".encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return count


async def abuse(secret: str) -> list[str]:
    """Try everything; returns what was not held."""
    task, mark, problems = Task("t", "", content=TaskContent({"a.txt": (b"a", 0o644)})), f"3{os.getpid()}.5", []
    before = host_state()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0t1-abuse-{os.getpid()}")
    abstract.listen()
    bystander = subprocess.Popen(["sleep", "1000"])
    sandbox = BubblewrapSandbox(SandboxConfig(**LIMITS))
    with socket.create_server(("127.0.0.1", 0)) as server, abstract:
        places = {
            "PORT": str(server.getsockname()[1]), "ABSTRACT": f"t1-abuse-{os.getpid()}", "SECRET": secret,
            "DRIVER": str(bystander.pid), "MARK": mark,
        }  # fmt: skip

        def filled(command: str) -> str:
            for name, value in places.items():
                command = command.replace(name, value)
            return command

        try:
            await sandbox.start(task)
            for name, command in REFUSED.items():
                result = await sandbox.run(f"( {filled(command)} ) 2>&1", 20)
                if result.exit_code == 0 or result.timed_out:
                    problems.append(f"{name}: {result}")
            for name, command in SURVIVED.items():
                await sandbox.run(filled(command), 0.7)
                after = await sandbox.run("echo alive", 10)
                await sandbox.start(task)
                fresh = await sandbox.run("cat a.txt; ls /tmp", 20)
                if fresh.output != "a" or marked(mark):
                    problems.append(f"{name}: {after} {fresh} {marked(mark)} left")
        finally:
            await sandbox.stop()
        if bystander.poll() is not None:
            problems.append("a process of the host was killed")
        bystander.kill()
        bystander.wait()
    after = host_state()
    problems += [
        f"{name} changed: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]
    ]
    return problems


def main(secret: str) -> None:
    for problem in asyncio.run(abuse(secret)):
        print(problem)
    print("done")
