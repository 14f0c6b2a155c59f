"""A real Slurm (controller, node daemons, munge) with several virtual nodes on this machine, in one directory."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from megatron_t1.processes import start_ticks

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")

SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmdParameters=config_overrides
MailProg=/bin/true
Prolog={base}/prolog.sh
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
BatchStartTimeout=120
MessageTimeout=60
KillWait=5
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=2,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO
{partitions}
"""
MAY_LACK = """\
#!/bin/bash
if [[ -e {base}/no_{what}_$SLURMD_NODENAME ]]; then exit 127; fi
"""


def unavailable() -> str:
    """Why no virtual cluster can be started here; empty when one can."""
    missing = [name for name in NEEDED if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}); apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "the virtual Slurm's daemons are started as root"


def search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class VirtualCluster:
    """Daemons of one cluster; each can be killed and started again on its own.

    Args:
        base: its directory: short, since socket paths have a length limit.
        partitions: name -> nodes, beside `debug`, which has all.
    """

    def __init__(
        self, base: Path, *, nodes: int = 2, cpus: int = 8, gpus: int = 8, partitions: dict[str, str] | None = None
    ):
        self.base, self.cpus, self.gpus, self.partitions = base, cpus, gpus, partitions or {}
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "PATH": search_path(),
            "SLURM_CONF": str(base / "slurm.conf"),
        }

    def start(self) -> None:
        for name in ("state", "spool", "log", "run", "munge", *(f"spool/{node}" for node in self.names)):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self._configure()
        prolog = self.base / "prolog.sh"
        prolog.write_text(MAY_LACK.format(base=self.base, what="prolog"))
        prolog.chmod(0o755)
        munge = self.base / "munge"
        for directory in (self.base, munge):
            directory.chmod(0o755)
        key = munge / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._run(
            "munged", f"--key-file={key}", f"--socket={munge}/munge.sock", f"--pid-file={munge}/munged.pid",
            f"--log-file={munge}/munged.log", f"--seed-file={munge}/munged.seed",
        )  # fmt: skip
        self._run("slurmctld", "-c")
        for node in self.names:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, name: str) -> None:
        """Start a node's daemon; after `kill_node` it ends what is left of jobs that have gone elsewhere."""
        self._run("slurmd", "-N", name)

    @contextmanager
    def broken(self, node: str, how: str) -> Iterator[None]:
        """A node that starts no job meanwhile: its "prolog" fails, or `interpreter` isn't there ("interpreter")."""
        mark = self.base / f"no_{how}_{node}"
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def interpreter(self) -> Path:
        """This Python, under a name that not every node may have."""
        path = self.base / "python"
        path.write_text(MAY_LACK.format(base=self.base, what="interpreter") + f'exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node's daemon alone, as when a node is cut off: the controller loses it, its processes go on."""
        self._kill(self.base / "run" / f"slurmd.{name}.pid")

    def start_controller(self) -> None:
        """With the state that the last one saved."""
        self._run("slurmctld")

    def kill_controller(self) -> None:
        """SIGKILL: what it has not saved yet is lost."""
        self._kill(self.base / "run" / "slurmctld.pid")

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until every node is there, and free; what Slurm has drained of itself an administrator takes back."""
        for node in self.output("sinfo", "-h", "-p", "debug", "-N", "-t", "drain", "-o", "%N").split():
            self.output("scontrol", "update", f"NodeName={node}", "State=RESUME")

        def idle() -> bool:
            return set(self.output("sinfo", "-h", "-p", "debug", "-N", "-o", "%T").split()) == {"idle"}

        self.wait(idle, seconds, "idle nodes")

    def _kill(self, pid_file: Path) -> None:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: start_ticks(pid) is None, 10, f"the end of process {pid}")
        pid_file.unlink()

    def stop(self) -> None:
        subprocess.run(["scancel", "-u", "root"], env=self.env, capture_output=True)
        time.sleep(0.5)
        for path in (*self.base.glob("run/*.pid"), self.base / "munge" / "munged.pid"):
            with closing(open(path)) as file:
                try:
                    os.kill(int(file.read()), signal.SIGTERM)
                except (ProcessLookupError, ValueError):
                    continue
        time.sleep(0.5)

    def submit(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> int:
        """sbatch; returns the job number."""
        done = self._run("sbatch", "--parsable", *arguments, cwd=cwd, env={**self.env, **(env or {})})
        return int(done.stdout.strip().partition(";")[0])

    def state(self, job: int) -> str:
        return self.shown(job, "JobState")

    def exit_code(self, job: int) -> str:
        """`status:signal` of the batch script."""
        return self.shown(job, "ExitCode")

    def queue(self) -> set[int]:
        """Jobs that wait or work."""
        return {int(word) for word in self.output("squeue", "-h", "-o", "%A").split()}

    def shown(self, job: int, field: str) -> str:
        """A field of a job as the controller has it; "UNKNOWN" where the job has none."""
        for word in self.output("scontrol", "show", "job", str(job), "-o").split():
            if word.startswith(f"{field}="):
                return word.partition("=")[2]
        return "UNKNOWN"

    def finish(self, job: int, seconds: float = 120) -> str:
        """Wait for the end of a job; returns its state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.wait(lambda: self.state(job) in ended, seconds, f"the end of job {job}")
        return self.state(job)

    def output(self, *command: str) -> str:
        return self._run(*command).stdout

    @staticmethod
    def wait(condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.1)

    def _run(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None):
        done = subprocess.run(command, env=env or self.env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        port, node_port, *ports = free_ports(2 + len(self.names))
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs={self.cpus} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 RealMemory=20000{gres} State=UNKNOWN"
            for name, own in zip(self.names, ports, strict=True)
        )
        partitions = "\n".join(
            f"PartitionName={name} Nodes={own} MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO"
            for name, own in self.partitions.items()
        )
        text = SLURM_CONF.format(
            host=host, base=self.base, port=port, node_port=node_port, nodes=nodes, partitions=partitions
        )
        (self.base / "slurm.conf").write_text(text)
        devices = f"NodeName=n[1-{len(self.names)}] Name=gpu Count={self.gpus} File=/dev/tty[0-{self.gpus - 1}]\n"
        (self.base / "gres.conf").write_text("AutoDetect=off\n" + (devices if self.gpus else ""))
