"""A stand-in for the program apptainer: instances are directories, `exec` runs in bubblewrap on this host's /usr.

What it was called with is appended to $STUB_HOME/calls as JSON lines. Nothing is isolated but what bubblewrap isolates.
"""

import json
import os
import shutil
import sys
from pathlib import Path

HOME = Path(os.environ["STUB_HOME"])
FLAGS = {"--containall", "--cleanenv", "--no-home", "--uts", "--fakeroot", "--no-privs", "--net", "--force"}


def options(words):
    """(values by option, what follows them)."""
    found, words = {}, list(words)
    while words and words[0].startswith("--"):
        name = words.pop(0)
        found.setdefault(name, []).append("" if name in FLAGS else words.pop(0))
    return found, words


def main(words):
    with open(HOME / "calls", "a") as log:
        log.write(json.dumps(words) + "\n")
    if words[:2] == ["instance", "start"]:
        found, (image, name) = options(words[2:])
        root = Path(found["--overlay"][0]) / "root"
        for folder in ("etc", "tmp", "root", "app", "run"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for link in ("bin", "lib", "lib64", "sbin"):
            if not (root / link).is_symlink():
                (root / link).symlink_to(f"usr/{link}")
        state = {"root": str(root), "image": image, "binds": found.get("--bind", [])}
        (HOME / name).write_text(json.dumps(state))
    elif words[:2] == ["instance", "stop"]:
        (HOME / words[-1]).unlink()
    elif words[0] == "exec":
        found, (instance, *command) = options(words[1:])
        state = json.loads((HOME / instance.removeprefix("instance://")).read_text())
        bwrap = [shutil.which("bwrap"), "--bind", state["root"], "/", "--ro-bind", "/usr", "/usr"]
        bwrap += ["--proc", "/proc", "--dev", "/dev", "--unshare-all", "--clearenv", "--setenv", "PATH", "/usr/bin"]
        for bind in state["binds"]:
            source, target, *mode = bind.split(":")
            bwrap += ["--ro-bind" if mode == ["ro"] else "--bind", source, target]
        for variable in found.get("--env", []):
            bwrap += ["--setenv", *variable.split("=", 1)]
        os.execv(bwrap[0], [*bwrap, "--", *command])
    else:
        sys.exit(f"unknown: {words}")


main(sys.argv[1:])
