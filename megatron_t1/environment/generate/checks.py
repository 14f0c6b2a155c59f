"""Checks of generated tasks: data that becomes one pytest-compatible function each in tests/test_outputs.py.

The script needs nothing but the standard library: it runs under pytest, and alone, where it writes CTRF and reward.txt.
A check opens regular files only, so that a pipe left by the agent can't hold it up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TEST_SH = """\
#!/bin/bash
# -I -S: no environment variables and no user or site packages of the agent take part
exec python3 -I -S /tests/test_outputs.py
"""

_SCRIPT = '''\
"""Checks of this task, one function each: pytest runs them, and so does this file alone."""

import os
import stat

ROOT = {root!r}
LOGS = "/logs/verifier"


def path(name):
    return os.path.join(ROOT, name)


def read(name):
    """Content of a regular file; None where there is none."""
    if not os.path.isfile(path(name)):
        return None
    with open(path(name), encoding="utf-8", errors="replace") as file:
        return file.read()


def lines(name):
    return (read(name) or "").splitlines()


def git_object(digest):
    import zlib

    with open(path(".git/objects/" + digest[:2] + "/" + digest[2:]), "rb") as file:
        return zlib.decompress(file.read()).partition(b"\\0")[2]


def git_head():
    return git_object((read(".git/refs/heads/main") or "").strip()).decode()


{functions}

def main():
    results = []
    for name, check in sorted(globals().items()):
        if name.startswith("test_"):
            try:
                check()
                results.append((name, "passed"))
            except Exception:
                results.append((name, "failed"))
    passed = sum(status == "passed" for _, status in results)
    tests = ", ".join('{{"name": "%s", "status": "%s", "duration": 0}}' % result for result in results)
    counts = '"tests": %d, "passed": %d, "failed": %d' % (len(results), passed, len(results) - passed)
    summary = '{{' + counts + ', "pending": 0, "skipped": 0, "other": 0, "start": 0, "stop": 0}}'
    with open(LOGS + "/ctrf.json", "w") as file:
        file.write('{{"results": {{"tool": {{"name": "t1"}}, "summary": %s, "tests": [%s]}}}}\\n' % (summary, tests))
    with open(LOGS + "/reward.txt", "w") as file:
        file.write("%d\\n" % (passed == len(results)))


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Check:
    """`expression` is Python over the script's helpers; `name` says in words what holds when it is true."""

    name: str
    expression: str


def is_file(name: str) -> Check:
    return Check(f"{name} exists", f"os.path.isfile(path({name!r}))")


def is_gone(name: str) -> Check:
    return Check(f"{name} is gone", f"not os.path.lexists(path({name!r}))")


def is_directory(name: str) -> Check:
    return Check(f"{name} is a directory", f"os.path.isdir(path({name!r}))")


def contains(name: str, text: str) -> Check:
    return Check(f"{name} has exactly the right content", f"read({name!r}) == {text!r}")


def contains_number(name: str, number: int) -> Check:
    return Check(f"{name} holds the number", f"(read({name!r}) or '').strip() == {str(number)!r}")


def has_line(name: str, line: str) -> Check:
    return Check(f"{name} has the line {line}", f"{line!r} in lines({name!r})")


def last_line(name: str, line: str) -> Check:
    return Check(f"{name} ends with {line}", f"lines({name!r})[-1:] == [{line!r}]")


def has_mode(name: str, mode: int) -> Check:
    return Check(f"{name} has mode {mode:o}", f"stat.S_IMODE(os.lstat(path({name!r})).st_mode) == 0o{mode:o}")


def none_with_extension(extension: str) -> Check:
    return Check(
        f"no {extension} file is left", f"not [name for name in os.listdir(ROOT) if name.endswith({'.' + extension!r})]"
    )


def json_value(name: str, key: str, value: str) -> Check:
    return Check(f"{name} has {value} for {key}", f"__import__('json').loads(read({name!r})).get({key!r}) == {value!r}")


def git_branch_exists(branch: str) -> Check:
    return Check(f"branch {branch} exists", f"read('.git/refs/heads/{branch}') is not None")


def git_on_main() -> Check:
    return Check("the current branch is main", "read('.git/HEAD') == 'ref: refs/heads/main\\n'")


def git_last_message(message: str) -> Check:
    return Check(f"the last commit says {message}", f"git_head().partition('\\n\\n')[2].strip() == {message!r}")


def git_tracks(name: str) -> Check:
    return Check(
        f"{name} is committed", f"b' {name}\\0' in git_object(git_head().partition('\\n')[0].partition(' ')[2])"
    )


def test_script(checks: Iterable[Check], root: str) -> str:
    """Source of tests/test_outputs.py; the functions are numbered, so that names are unique and keep their order."""
    functions = []
    for number, check in enumerate(checks, 1):
        slug = re.sub(r"\W+", "_", check.name).strip("_").lower()
        functions.append(f"def test_{number}_{slug}():\n    assert {check.expression}\n\n")
    return _SCRIPT.format(root=root, functions="\n".join(functions))
