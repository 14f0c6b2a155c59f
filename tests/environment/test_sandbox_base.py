"""Base systems: made from a tarball or directory, mapped from FROM, written by RUN and by nobody afterwards."""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from megatron_t1 import cli
from megatron_t1.config.compose import absolute
from megatron_t1.config.schema import Config, SandboxConfig
from megatron_t1.environment.sandbox import make_base as making
from megatron_t1.environment.sandbox.base import base_for, load_base
from megatron_t1.environment.sandbox.interface import Change
from megatron_t1.environment.sandbox.make_base import make_base
from megatron_t1.environment.task import Task
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error

PROGRAMS = ("bash", "cat", "ls", "ln", "rm", "mkdir", "touch", "stat", "id", "sleep", "cp", "mv")
STATUS = (
    "Package: bash\nStatus: install ok installed\nVersion: 5.2\nProvides: shell (= 5), sh\n\n"
    "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
)
DOCKERFILE = (
    "FROM lab/small:1\nRUN apt-get update && apt-get install -y bash && ln -s /usr/bin/cat /usr/bin/dog\n"
    "RUN pip install made-up==1.5 && mkdir -p /opt/made && touch /opt/made/here\nCOPY note.txt /usr/share/note.txt\n"
    "WORKDIR /where\n"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts overlays")


def _tree() -> dict[str, bytes | str]:
    """A root file system of a few programs of this host: path -> content, or target of a link after "->"."""
    found: dict[str, bytes | str] = {
        "bin": "->usr/bin",
        "lib": "->usr/lib",
        "lib64": "->usr/lib64",
        "sbin": "->usr/sbin",
    }
    for name in PROGRAMS:
        program = Path(shutil.which(name, path="/usr/bin:/bin"))
        found[f"usr/bin/{name}"] = program.read_bytes()
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            found["usr" + library.removeprefix("/usr")] = Path(library).read_bytes()
    found["usr/bin/sh"] = "->bash"
    found["usr/sbin/nothing"] = b""
    found["etc/passwd"] = b"root:x:0:0:root:/root:/bin/bash\nother:x:12:12::/:/bin/sh\n"
    found["var/lib/dpkg/status"] = STATUS.encode()
    found["usr/local/lib/python3.11/dist-packages/made_up-1.5.dist-info/METADATA"] = b"Name: Made_Up\nVersion: 1.5\n"
    return found


@pytest.fixture(scope="module")
def tarball(tmp_path_factory):
    path = tmp_path_factory.mktemp("tar") / "root.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in _tree().items():
            member = tarfile.TarInfo(f"./{name}")
            if isinstance(content, str):
                member.type, member.linkname, content = tarfile.SYMTYPE, content[2:], b""
            member.size, member.mode, member.uid = len(content), 0o4755, 12
            archive.addfile(member, io.BytesIO(content))
        device = tarfile.TarInfo("./dev/null")
        device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
        archive.addfile(device)
    return path


@pytest.fixture(scope="module")
def base(tarball, open_directory):
    make_base(open_directory / "small", SandboxConfig(), source=tarball)
    return str(open_directory / "small")


@pytest.fixture
def task(open_path):
    directory = open_path / "task"
    directory.mkdir()
    (directory / "environment").mkdir()
    (directory / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (directory / "environment" / "note.txt").write_text("noted\n")
    (directory / "tests").mkdir()
    (directory / "tests" / "test.sh").write_text(
        "[ $(dog /where/answer) = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    return Task("t", "", directory)


def test_what_is_in_it(base):
    root, description = Path(base, "root"), json.loads(Path(base, "base.json").read_text())
    assert description["apt"] == {"bash": "5.2", "shell": "", "sh": ""}
    assert description["python"] == {"made-up": "1.5"}
    owner = SandboxConfig.host_uid if os.geteuid() == 0 else os.geteuid()
    for path in (root, root / "usr/bin/bash", root / "etc/passwd", root / "dev"):
        assert path.stat().st_uid == owner, path
    assert root.joinpath("usr/bin/cat").stat().st_mode & 0o7777 == 0o755  # no set-user bit
    assert list(root.joinpath("dev").iterdir()) == []
    assert "other" in root.joinpath("etc/passwd").read_text() and root.joinpath("etc/nsswitch.conf").exists()


def test_a_directory_is_as_good(base, open_path):
    inventory = make_base(open_path / "again", SandboxConfig(), source=Path(base, "root"))
    assert inventory == load_base(base).inventory
    with pytest.raises(T1Error, match="something already"):
        make_base(open_path / "again", SandboxConfig(), source=Path(base, "root"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "no such tarball"), (b"no archive", "status 2"), ({"manifest.json": b"[]"}, "an image's layers"),
     ({"x": b""}, "not a root file system")],
)  # fmt: skip
def test_what_is_no_root_is_refused_and_leaves_nothing(open_path, content, problem):
    source = open_path / "source.tar"
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content:
        with tarfile.open(source, "w") as archive:
            for name, data in content.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    with pytest.raises(T1Error, match=problem):
        make_base(open_path / "out", SandboxConfig(), source=source)
    assert not any((open_path / "out").iterdir())


def test_a_pipe_is_not_waited_for(open_path):
    os.mkfifo(open_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        make_base(open_path / "out", SandboxConfig(), source=open_path / "pipe")


def test_a_tarball_can_not_write_elsewhere(open_path):
    victim = open_path / "victim"
    victim.mkdir(mode=0o777)
    victim.chmod(0o777)
    with tarfile.open(open_path / "evil.tar", "w") as archive:
        for name, kind, target in (("usr", tarfile.DIRTYPE, ""), ("out", tarfile.SYMTYPE, str(victim)),
                                   ("out/a", tarfile.REGTYPE, ""), (f"{victim}/b", tarfile.REGTYPE, ""),
                                   ("../" * 20 + f"{victim}/c", tarfile.REGTYPE, "")):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o755
            archive.addfile(member)
    try:
        make_base(open_path / "out", SandboxConfig(), source=open_path / "evil.tar")
    except T1Error:
        pass
    assert list(victim.iterdir()) == []


@needs_root
def test_a_closed_place_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(T1Error, match="can't enter") as caught:
        make_base(closed / "out", SandboxConfig(), source=tmp_path)
    assert "chmod o+x" in caught.value.remedy


def test_missing_mmdebstrap_names_the_remedy(open_path, monkeypatch):
    monkeypatch.setattr(making.shutil, "which", lambda name: None)
    with pytest.raises(T1Error) as caught:
        make_base(open_path / "out", SandboxConfig())
    assert "--from" in caught.value.remedy


def test_the_command(tarball, open_path, capsys):
    assert cli.main(["tasks", "base", str(open_path / "made"), "--from", str(tarball)]) == 0
    assert "1 Python packages" in capsys.readouterr().out
    assert load_base(str(open_path / "made")).inventory.apt["bash"] == "5.2"


def test_images_are_mapped(base):
    config = SandboxConfig(images={"lab/*:1": base, "lab/*": "/none"})
    assert base_for("lab/small:1", config).name == "small"
    assert base_for("debian:12", config).host
    with pytest.raises(T1Error, match="no base system") as caught:
        base_for("lab/small:2", config)
    assert "t1 tasks base" in caught.value.remedy
    assert base_for("debian:12", SandboxConfig(base=base)).name == "small"


def test_directories_of_bases_are_absolute_and_names_of_images_stay(base):
    parent, name = os.path.split(base)
    config = Config()
    config.env.sandbox = SandboxConfig(base=name, images={"a": name, "b": "debian:12"})
    sandbox = absolute(config, parent).env.sandbox
    assert (sandbox.base, sandbox.images) == (base, {"a": base, "b": "debian:12"})
    assert config.env.sandbox.base == name and absolute(Config(), parent).env.sandbox.base == ""


@needs_root
def test_the_build_writes_the_system_and_the_agent_does_not(in_sandbox, task, base):
    before = _fingerprint(base)

    async def body(sandbox):
        await sandbox.start(task)
        none = await sandbox.changes()
        first = await sandbox.run(
            "dog /usr/share/note.txt; ls /opt/made; pwd; id -u other; touch /usr/bin/x; rm /bin/cat; rm -r /opt/made;"
            " echo changed > /etc/passwd; mkdir /etc/new; rm /var/lib/dpkg/status; echo 42 > answer",
            60,
        )
        changed = await sandbox.changes()
        got = await sandbox.get_files(["/etc/passwd", "/usr/share/note.txt"], 100)
        verdict = await verify(sandbox, task)
        await sandbox.start(task)
        again = await sandbox.run("ls /etc/new /opt/made; ls /where", 60)
        return none, first, changed, got, verdict, again, sandbox.guarantees()

    none, first, changed, got, verdict, again, said = in_sandbox(body, images={"lab/small:1": base})
    assert none == []
    assert first.output.startswith("noted\nhere\n/where\n12\n")
    assert first.output.count("Read-only file system") == 2
    assert changed == [
        Change("/etc/new", "added"), Change("/etc/passwd", "modified"), Change("/opt/made", "removed"),
        Change("/opt/made/here", "removed"), Change("/var/lib/dpkg/status", "removed"),
        Change("/where/answer", "added"),
    ]  # fmt: skip
    assert got.files == {"/etc/passwd": b"changed\n", "/usr/share/note.txt": b"noted\n"}
    assert verdict.solved
    assert "cannot access '/etc/new'" in again.output and again.output.endswith("here\n")
    assert said["system"].startswith("overlay of ")
    assert _fingerprint(base) == before


@needs_root
def test_tampering_with_the_system_does_not_count(in_sandbox, task, base):
    """The agent moves /etc with the loader's cache away, plants libraries and programs, and a false dog."""

    async def body(sandbox):
        verdicts = []
        for command in (
            "mv /etc /old; mkdir /etc; echo /x.so > /etc/ld.so.preload; touch /etc/ld.so.cache",
            "rm /bin /lib64; mkdir /bin /lib64; cp /usr/bin/bash /bin/dog",
            "mkdir /usr/local/bin; mv /usr /elsewhere; rm -rf /usr/bin",
        ):
            await sandbox.start(task)
            await sandbox.run(f"{command}; echo 41 > answer", 60)
            verdicts.append(await verify(sandbox, task))
        return verdicts

    for verdict in in_sandbox(body, base=base):
        assert (verdict.trusted, verdict.passed, verdict.total) == (True, 0, 1), verdict.reason


def test_without_an_overlay_the_base_is_read_only(in_sandbox, make_task, base, monkeypatch):
    monkeypatch.setattr("megatron_t1.environment.sandbox.bubblewrap.may_mount_overlays", lambda *_: False)

    async def body(sandbox):
        await sandbox.start(make_task({"a": "a"}))
        return await sandbox.run(
            "ls /usr/bin | while read -r name; do echo -n .; done; touch /usr/x; cat a", 60
        ), sandbox

    result, sandbox = in_sandbox(body, base=base)
    assert result.output.startswith("." * (len(PROGRAMS) + 1)) and result.output.endswith("a")
    assert "Read-only" in result.output
    assert "read-only, also for RUN" in sandbox.guarantees()["system"]


def _fingerprint(base: str) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_mode) for path in Path(base).rglob("*"))


AS_USER = """
import asyncio, os, pathlib, tempfile
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.make_base import make_base
from megatron_t1.environment.task import Task
async def main(base):
    sandbox = BubblewrapSandbox(SandboxConfig(base=base, disk_mb=24, max_files=900))
    try:
        for _ in range(2):
            await sandbox.start(Task("t", "", pathlib.Path({task!r})))
            script = "dog /usr/share/note.txt; touch /usr/x; rm /etc/passwd; rm -r /opt/made; mkdir /opt/made;"
            script += "echo 41 > answer"
            print((await sandbox.run(script, 60)).output.replace(chr(10), ";"))
            print(*(f"{{change.kind}}:{{change.path}}" for change in await sandbox.changes()))
            run = await sandbox.run_verifier(Task("t", "", pathlib.Path({task!r})), 60, ("reward.txt",))
            print(run.files, run.output)
        print(sandbox.guarantees()["system"].split()[0], sandbox.guarantees()["disk"])
    finally:
        await sandbox.stop()
with tempfile.TemporaryDirectory() as folder:
    make_base(folder + "/base", SandboxConfig(), source={tarball!r})
    asyncio.run(main(folder + "/base"))
mine = f"{{tempfile.gettempdir()}}/t1-sandboxes-{{os.getuid()}}"
print(open("/proc/mounts").read().count(mine), os.listdir(mine))
"""


@pytest.mark.slow
def test_a_normal_user_has_overlays_and_a_bounded_disk_too(as_normal_user, tarball, task, open_path):
    """In a namespace of its own, of which nothing is left."""
    shown = open_path / "root.tar.gz"
    shutil.copy(tarball, shown)
    lines = as_normal_user(AS_USER.format(task=str(task.directory), tarball=str(shown))).splitlines()
    for said, changes, verdict in (lines[:3], lines[3:6]):
        assert said.startswith("noted;touch: cannot touch '/usr/x': Read-only file system;")
        assert changes == "removed:/etc/passwd removed:/opt/made/here added:/where/answer"
        assert verdict.startswith("{'reward.txt': b'0\\n'}")
    assert lines[6] == "overlay 24 MB, 900 files, a tmpfs of its own"
    assert lines[7] == "0 []"
