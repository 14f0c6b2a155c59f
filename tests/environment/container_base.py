"""A small base system for containers and bubblewrap, from this host's own programs: no registry, no index, seconds.

bash, coreutils, python3 with its library, and the pytest that runs these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from megatron_t1.environment.sandbox.base import DESCRIPTION, FORMAT, ROOT

PROGRAMS = (
    "bash sh cat chmod chown cp cut date dd dirname basename echo env expr false find grep head id kill ln ls mkdir "
    "mkfifo mktemp mv nproc ps pwd readlink rm rmdir sed seq setsid sleep sort stat sync tac tail tar tee test timeout "
    "touch tr true uname uniq wc xargs yes nohup python3 awk diff cmp printf sha256sum md5sum base64 comm paste join"
).split()
SKIPPED = shutil.ignore_patterns("__pycache__", "test", "tests", "idlelib", "lib2to3", "config-3*", "ensurepip", "*.a")
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "os-release": "NAME=minimal\n",
}


def write_base(directory: Path, *, apt: dict[str, str], python: dict[str, str]) -> Path:
    """A base directory (see environment.sandbox.base) whose description says what the caller declares."""
    root = directory / ROOT
    for name in ("usr/bin", "etc", "proc", "dev", "sys", "root", "home", "run", "opt", "srv", "mnt", "var/tmp", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for link in ("bin", "sbin", "lib", "lib64"):
        target = "usr/bin" if link in ("bin", "sbin") else f"usr/{link}"
        (root / target).mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(target)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    binaries = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    for path in binaries:
        shutil.copy2(os.path.realpath(path), root / "usr/bin" / os.path.basename(path))
    libraries = _copy_python(root)
    for library in _libraries([*binaries, *libraries]):
        destination = root / "usr" / re.sub(r"^(/usr)?/", "", library)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(library), destination)
    (directory / DESCRIPTION).write_text(
        json.dumps({"format": FORMAT, "made_from": "this host's programs", "apt": apt, "python": python})
    )
    return directory


def _copy_python(root: Path) -> list[str]:
    """The system python's library and this environment's pytest; returns its shared objects."""
    show = "import sysconfig; print(sysconfig.get_path('stdlib')); print(sysconfig.get_python_version())"
    done = subprocess.run(["/usr/bin/python3", "-I", "-c", show], capture_output=True, text=True, check=True)
    library, version = done.stdout.split()
    shutil.copytree(library, root / library.lstrip("/"), ignore=SKIPPED, symlinks=False, dirs_exist_ok=True)
    packages = root / f"usr/local/lib/python{version}/dist-packages"
    packages.mkdir(parents=True)
    here = Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        shutil.copytree(here / name, packages / name, ignore=SKIPPED)
    shutil.copy2(here / "py.py", packages)
    for found in (*here.glob("pytest-*.dist-info"), *here.glob("pluggy-*.dist-info")):
        shutil.copytree(found, packages / found.name)
    runner = root / "usr/local/bin/pytest"
    runner.parent.mkdir(parents=True)
    runner.write_text("#!/usr/bin/python3\nimport sys\nfrom pytest import console_main\nsys.exit(console_main())\n")
    runner.chmod(0o755)
    return [str(path) for path in Path(library).glob("lib-dynload/*.so")]


def _libraries(files: list[str]) -> set[str]:
    """Shared libraries that these files are linked to, the loader among them."""
    done = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False)
    return {match for match in re.findall(r"(?:=> )?(/\S+\.so[\w.]*) \(0x", done.stdout)}
