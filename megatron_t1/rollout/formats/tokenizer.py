"""A tokenizer of which text from outside can't reach the control tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_t1.errors import T1Error


class PlainTokenizer:
    """tokenizer.json by the `tokenizers` library: text is text, control tokens are reached by their name only.

    All added tokens count as special here, also those that the file doesn't mark so (tool-call markers of several
    families), because otherwise the same characters in a tool's output would become the control token.

    Raises:
        T1Error: no readable tokenizer.json in `model_dir`.
    """

    def __init__(self, model_dir: str | Path):
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        try:
            raw = path.read_bytes()
            content = json.loads(raw)
            self._template = Tokenizer.from_str(raw.decode())
            for token in content.get("added_tokens") or []:
                token["special"] = True
            self._tokenizer = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise T1Error(
                f"no usable tokenizer: {error}",
                where=str(path),
                remedy="name a model directory with a tokenizer.json (model.path)",
            ) from error
        self._tokenizer.encode_special_tokens = True
        for tokenizer in (self._tokenizer, self._template):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.sha256 = hashlib.sha256(raw).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(added)
        self._control_names = tuple(token.content for token in added.values())

    def control(self, token: str) -> int:
        """Id of a control token. Raises T1Error when the tokenizer has none of that name."""
        found = self._tokenizer.token_to_id(token)
        if found is None or found not in self.control_ids:
            raise T1Error(
                f"the tokenizer has no control token {token!r}",
                where="model.chat_format",
                remedy="choose the chat format that this model was made for",
            )
        return found

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], without beginning-of-sequence and without control tokens whatever `text` says."""
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        if len(ids) and self.control_ids.intersection(ids.tolist()):
            raise AssertionError("a control token was encoded from text")
        return ids

    def encode_template(self, text: str) -> list[int]:
        """Encode a template's own text, in which control tokens may be written by name. Never for text from outside."""
        return self._template.encode(text, add_special_tokens=False).ids

    def encode_around(self, template: Sequence[str], outside: str) -> list[int]:
        """The parts of a template's text with `outside`, as plain text, between each two of them."""
        ids = self.encode_template(template[0])
        plain = self.encode(outside).tolist() if len(template) > 1 else []
        for part in template[1:]:
            ids = [*ids, *plain, *self.encode_template(part)]
        return ids

    def controls(self, ids: Iterable[int]) -> list[int]:
        """The control tokens among `ids`, in order."""
        return [token for token in ids if token in self.control_ids]

    def names_control(self, text: str) -> bool:
        """Whether `text` contains the name of a control token."""
        return any(name in text for name in self._control_names)

    def token_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary by its name; None when there is none."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: np.ndarray) -> str:
        """Text with control tokens shown; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
