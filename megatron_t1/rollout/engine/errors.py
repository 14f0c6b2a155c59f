"""What can go wrong with the engine, by what has to happen next."""

from __future__ import annotations

from megatron_t1.errors import T1Error


class EngineLost(T1Error):
    """The engine's process ended or never became ready: the phase can't go on."""


class EngineRequestFailed(T1Error):
    """One request failed on a living engine (time-out, abort, server error): the episode may be tried again."""


class EngineAnswerInvalid(T1Error):
    """The engine answered something that breaks the contract: retrying would only hide it."""
