"""What can go wrong with a patch, for the reader of `t1 patch`."""

from __future__ import annotations

from megatron_t1.errors import T1Error


class PatchError(T1Error):
    """A patch can't be applied or reverted; nothing has been changed."""


class DeclarationError(T1Error):
    """A patch.toml of this package is malformed."""


class PlaceError(PatchError):
    """The source isn't what a patch expects; `problem` shows what it expects and what stands there."""


class MissingError(PlaceError):
    """A class or function that a patch changes isn't defined in the file."""
