"""The one error type a user is meant to read.

Raise `T1Error` for everything that is wrong with what came from outside (configuration, tasks, checkpoints, rollouts,
the machine). Anything else that escapes is a defect of this package. Importable without torch.
"""

from __future__ import annotations


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
