"""The tokenizer as `renderers` asks for it. Templates may write control tokens by name; text from outside may not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron_t1.rollout.formats.tokenizer import PlainTokenizer

PLACEHOLDER = "\ue000outside\ue001"  # private-use characters: no template writes them


class RenderersTokenizer:
    """`renderers.base.Tokenizer` over a `PlainTokenizer`."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: PlainTokenizer, name_or_path: str):
        self._tokenizer = tokenizer
        self._encode: Callable[[str], list[int]] = tokenizer.encode_template
        self.name_or_path = name_or_path

    def encode(self, text: str, *_, **__) -> list[int]:
        return self._encode(text)

    def decode(self, token_ids: Any, *_, skip_special_tokens: bool = False, **__) -> str:
        return self._tokenizer.decode(np.atleast_1d(np.asarray(token_ids, dtype=np.int64)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Encode everything as plain text: for families that name their control tokens by id only."""
        self._encode = lambda text: self._tokenizer.encode(text).tolist()
        try:
            yield
        finally:
            self._encode = self._tokenizer.encode_template

    @contextlib.contextmanager
    def placing(self, outside: str) -> Iterator[None]:
        """Encode `outside`, as plain text, wherever the template writes the placeholder."""
        self._encode = lambda text: self._tokenizer.encode_around(text.split(PLACEHOLDER), outside)
        try:
            yield
        finally:
            self._encode = self._tokenizer.encode_template
