"""The one error type a user is meant to read.

Raise `T1Error` for everything that is wrong with what came from outside (configuration, tasks, checkpoints, rollouts,
the machine). Anything else that escapes is a defect of this package. Importable without torch.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class T1Error(Exception):
    """What is wrong, where, and what to do about it.

    Args:
        problem: one sentence that says what is wrong, with expected and found values.
        where: the file, option, trajectory, token, layer or task concerned.
        remedy: what the reader can do.
    """

    def __init__(self, problem: str, *, where: str = "", remedy: str = ""):
        self.problem, self.where, self.remedy = problem, where, remedy
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self):
        return (_rebuild, (type(self), self.problem, self.where, self.remedy))


def _rebuild(cls: type[T1Error], problem: str, where: str, remedy: str) -> T1Error:
    return cls(problem, where=where, remedy=remedy)


class ConfigError(T1Error):
    """Options that clash or can't work; `problem` lists all of them."""


class MismatchError(T1Error):
    """Two parts disagree about a fact (sampling contract, checkpoint shape, tokenizer); names both values."""


class IncompleteError(T1Error):
    """Something on disk is missing, truncated or not what its marker says."""


LOOP = "Symlink loop from "  # how pathlib begins to say so
_PATH = "name a path that exists"
_OS_REMEDIES = {
    errno.ENOSPC: "free some space there, or name another directory; then start the same command again",
    errno.EDQUOT: "free some of the quota, or name another directory; then start the same command again",
    errno.EROFS: "name a directory on a file system that can be written",
    errno.EACCES: "give this user the right to it, or name another path",
    errno.EPERM: "give this user the right to it, or name another path",
    errno.ENOENT: _PATH,
    errno.ELOOP: _PATH,
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ENOTDIR: "name a directory; a file is in its way",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
# What only some environments have (pyproject.toml): module -> what it is installed as, and the extra that asks for it.
_PACKAGES = {
    "torch": ("torch", "train"),
    "megatron": ("megatron-core", "train"),
    "vllm": ("vllm", "rollout"),
    "transformers": ("transformers", "rollout"),
    "renderers": ("renderers", "rollout"),
    "httpx": ("httpx", "rollout"),
    "jinja2": ("jinja2", "rollout"),
    "libcst": ("libcst", "patch"),
}


def readable(error: BaseException) -> T1Error | None:
    """What a user can read of an error from outside: a T1Error, an OSError, a package that this environment lacks, or a
    task group that holds one of them.

    Returns:
        None for everything else, which is a defect and needs its traceback.
    """
    if isinstance(error, T1Error):
        return error
    if isinstance(error, OSError):
        path = error.filename if error.filename2 is None else error.filename2
        return T1Error(
            f"{error.strerror or error}"
            + (f" ({errno.errorcode[error.errno]})" if error.errno in errno.errorcode else ""),
            where="" if path is None else str(path),
            remedy=_OS_REMEDIES.get(error.errno or 0, "T1_DEBUG=1 shows where it happened"),
        )
    if isinstance(error, RuntimeError) and str(error).startswith(LOOP):  # of pathlib
        return T1Error("links lead in a circle (ELOOP)", where=str(error).removeprefix(LOOP).strip("'"), remedy=_PATH)
    if isinstance(error, ModuleNotFoundError) and (package := _PACKAGES.get((error.name or "").partition(".")[0])):
        name, extra = package
        return T1Error(
            f"{name} isn't installed in this environment (no module {error.name})",
            where=sys.executable,
            remedy=f"run it in an environment that has it: pip install 'megatron-t1[{extra}]', or an image of docker/",
        )
    if isinstance(error, BaseExceptionGroup):
        found = [readable(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    return None


def warn(text: str) -> None:
    """A line on stderr, where that can be written: a log on a full disk ends nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Let an OSError that names no file (a disk that is full when it is written to) name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
