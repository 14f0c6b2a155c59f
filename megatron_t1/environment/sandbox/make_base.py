"""Make a base system once: from Debian's packages, a root file system's tarball, or a directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.base import DESCRIPTION, ROOT, Inventory, write_description
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.oneshot import run_script
from megatron_t1.environment.sandbox.process import find_bwrap, host_identity
from megatron_t1.environment.sandbox.root import ETC, SKELETON, PrivateRoot, remove_tree
from megatron_t1.errors import T1Error
from megatron_t1.regular import open_regular

SUITE = "bookworm"
DEBIAN_PACKAGES = "ca-certificates,file,git,less,procps,python3,python3-pip,tmux"
PIP_TIMEOUT_S = 1800.0
# name of the tar option -> first bytes of a file compressed that way
COMPRESSIONS = {"--gzip": b"\x1f\x8b", "--bzip2": b"BZh", "--xz": b"\xfd7zXZ", "--zstd": b"\x28\xb5\x2f\xfd"}
LAYERED = ("manifest.json", "index.json", "oci-layout")  # of `docker save` and OCI: layers, not a file system


def make_base(
    out: str | Path,
    config: SandboxConfig,
    *,
    source: str | Path = "",
    suite: str = SUITE,
    mirror: str = "",
    packages: str = DEBIAN_PACKAGES,
    pip: Sequence[str] = (),
) -> Inventory:
    """Write a base to `out`, which must not exist or be empty.

    Args:
        config: env.sandbox: the user that will own it, and limits while it is made.
        source: tarball (as `docker export` writes) or directory of a root file system; empty: mmdebstrap makes one.
        suite, mirror, packages: of Debian, for mmdebstrap; packages with commas between.
        pip: requirements to install with the base's own pip, from wheels that this host's pip downloads.

    Raises:
        T1Error: a program is missing or fails, with its own words.
    """
    out = Path(out).resolve()
    if out.exists() and any(out.iterdir()):
        raise T1Error("there is something already", where=str(out), remedy="name a new directory")
    owner = host_identity(config)
    closed = [str(folder) for folder in out.parents if folder.exists() and not folder.stat().st_mode & 0o001]
    if owner is not None and closed:
        raise T1Error(
            f"the user that sandboxes run as (uid {owner}) can't enter", where=", ".join(closed), remedy="chmod o+x"
        )
    root = out / ROOT
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o755)
    root.mkdir()
    if owner is not None:
        os.chown(root, owner, owner)
    try:
        with tempfile.TemporaryDirectory(prefix="t1-base-") as scratch:
            if not source:
                source, made_from = Path(scratch) / "root.tar", f"mmdebstrap {suite} {packages}"
                _debian(source, suite, mirror, packages)
            else:
                made_from = str(source)
            _unpack(Path(source), root, owner)
            _complete(root, owner)
            if pip:
                Path(scratch).chmod(0o755)
                asyncio.run(_install(root, owner, config, tuple(pip), Path(scratch)))
        return write_description(out, " ".join([made_from, *pip]))
    except BaseException:
        remove_tree(root)
        (out / DESCRIPTION).unlink(missing_ok=True)
        raise


def _debian(tarball: Path, suite: str, mirror: str, packages: str) -> None:
    program = shutil.which("mmdebstrap")
    if not program:
        raise T1Error(
            "mmdebstrap is not installed",
            where="PATH",
            remedy="apt-get install mmdebstrap, or give a root file system with --from",
        )
    command = [program, "--quiet", "--variant=minbase", f"--include={packages}", suite, str(tarball)]
    _run([*command, *([mirror] if mirror else [])], "mmdebstrap")


def _unpack(source: Path, root: Path, owner: int | None) -> None:
    """With tar, as the user that sandboxes run as, in a namespace where nothing but the new root can be written.

    Devices and owners are left out: nobody could make them there.
    """
    if not source.exists():
        raise T1Error("there is no such tarball or directory", where=str(source), remedy="check --from")
    tar = ["/usr/bin/tar", "--extract", "--file=-", "--directory=/mnt", "--no-same-owner", "--preserve-permissions"]
    tar += [
        "--delay-directory-restore",
        "--exclude=./dev/*",
        "--exclude=dev/*",
        "--exclude=./proc/*",
        "--exclude=./sys/*",
    ]
    inside = [find_bwrap(), "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            inside += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            inside += ["--ro-bind", f"/{name}", f"/{name}"]
    inside += ["--bind", str(root), "/mnt", "--dev", "/dev", "--proc", "/proc", "--"]
    with _as_tar(source) as (stream, compression):
        _run([*inside, *tar, *compression], f"unpacking {source}", stdin=stream, owner=owner)
    if any((root / name).exists() for name in LAYERED) or not (root / "usr").is_dir():
        raise T1Error(
            "this is not a root file system" + (": an image's layers" if (root / LAYERED[0]).exists() else ""),
            where=str(source),
            remedy="docker create IMAGE, then docker export CONTAINER > FILE",
        )


@contextmanager
def _as_tar(source: Path) -> Iterator[tuple[IO[bytes], list[str]]]:
    """A stream that tar can read, and its option for it."""
    if source.is_dir():
        excluded = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
        command = ["tar", "--create", "--one-file-system", *excluded, "--directory", str(source), "."]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            yield process.stdout, []
        finally:
            process.stdout.close()
            process.wait()
        return
    with open_regular(source) as file:
        start = os.pread(file.fileno(), 6, 0)
        yield file, [option for option, magic in COMPRESSIONS.items() if start.startswith(magic)]


def _complete(root: Path, owner: int | None) -> None:
    """The directories and files that every sandbox has; no file keeps a set-user bit."""
    made = PrivateRoot(root, owner)
    for name, mode in SKELETON.items():
        path = root / name
        if not path.is_dir() and not path.is_symlink():
            path.mkdir()
            if owner is not None:
                os.chown(path, owner, owner)
            path.chmod(mode)
    for name, text in ETC.items():
        if name in ("hosts", "hostname") or not (root / "etc" / name).exists():
            made.files.write(f"/etc/{name}", text.encode(), 0o644)
    for path, status in Inside(root, None).walk():
        if status.st_mode & 0o6000 and not stat.S_ISLNK(status.st_mode):
            (root / path).chmod(status.st_mode & 0o1777)


class _WritableRoot(PrivateRoot):
    """A base while packages are installed in it: its own system, writable."""

    def system_mounts(self) -> list[str]:
        return []

    def prepare_run(self) -> None:
        pass


async def _install(
    root: Path, owner: int | None, config: SandboxConfig, wanted: tuple[str, ...], scratch: Path
) -> None:
    writable = _WritableRoot(root, owner, root)
    limits = SandboxConfig(host_uid=config.host_uid, memory_mb=1 << 20, file_size_mb=1 << 20, cpu_seconds=100_000)

    async def run(script: str, *arguments: str, binds: Sequence[str] = ()) -> str:
        status, output = await run_script(
            limits, writable, script, arguments=arguments, binds=binds, env={"PIP_BREAK_SYSTEM_PACKAGES": "1"},
            output_path=scratch / "output", timeout_s=PIP_TIMEOUT_S,
        )  # fmt: skip
        if status != 0:
            raise T1Error(
                f"status {status}: {output.text()[0][-800:].strip()}", where=f"in the base: {script}",
                remedy="give a base that has python3 and pip, or requirements that it can install",
            )  # fmt: skip
        return output.text()[0].strip()

    version = await run("""exec python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'""")
    wheels = scratch / "wheels"
    wheels.mkdir()
    _run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), "--only-binary=:all:",
         "--python-version", version, *wanted],
        "pip download",
    )  # fmt: skip
    for path in (wheels, *wheels.iterdir()):
        path.chmod(0o755)
    await run(
        'exec python3 -m pip install --no-index --find-links /mnt --no-cache-dir --root-user-action=ignore "$@"',
        *wanted,
        binds=("--ro-bind", str(wheels), "/mnt"),
    )


def _run(command: list[str], what: str, stdin: IO[bytes] | int = subprocess.DEVNULL, owner: int | None = None) -> None:
    identity = {} if owner is None else {"user": owner, "group": owner, "extra_groups": []}
    done = subprocess.run(
        command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, **identity
    )
    if done.returncode != 0:
        raise T1Error(
            f"status {done.returncode}: {done.stderr.strip()[-800:]}", where=what, remedy="mend what it complains about"
        )
