"""A tokenizer of which text from outside can't reach the control tokens."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error

_PROBE = "\U0010fffd"  # a character that no vocabulary has as a whole
_SURROGATES = re.compile("[\ud800-\udfff]")


class PlainTokenizer:
    """tokenizer.json by the `tokenizers` library: text is text, control tokens are reached by their name only.

    All added tokens count as special here, also those that the file doesn't mark so (tool-call markers of several
    families), because otherwise the same characters in a tool's output would become the control token. A vocabulary may
    itself hold the text of a control token, as those of SentencePiece do; text is encoded by a copy of it in which this
    entry is unreachable.

    Raises:
        T1Error: no readable tokenizer.json in `model_dir`, or one that encodes characters it doesn't know as a control
            token.
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
            self._plain = Tokenizer.from_str(json.dumps(_without_controls(content)))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise T1Error(
                f"no usable tokenizer: {error}",
                where=str(path),
                remedy="name a model directory with a tokenizer.json (model.path)",
            ) from error
        for tokenizer in (self._tokenizer, self._template, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.sha256 = hashlib.sha256(raw).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(added)
        self._control_names = tuple(token.content for token in added.values())
        if self.controls(self._plain.encode(_PROBE, add_special_tokens=False).ids):
            raise T1Error(
                "the tokenizer has no token for characters that it doesn't know but a control token",
                where=str(path),
                remedy="use a model whose vocabulary has all bytes (byte-level, or byte_fallback)",
            )

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
        ids = self._plain.encode(encodable(text), add_special_tokens=False).ids
        if found := self.controls(ids):
            raise T1Error(
                f"the tokenizer makes the control token {self._tokenizer.id_to_token(found[0])!r} of text",
                where=f"text {text[:80]!r}",
                remedy="use a model whose vocabulary has all bytes (byte-level, or byte_fallback)",
            )
        return np.array(ids, dtype=np.int32)

    def encode_template(self, text: str) -> list[int]:
        """Encode a template's own text, in which control tokens may be written by name. Never for text from outside."""
        return self._template.encode(encodable(text), add_special_tokens=False).ids

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


def encodable(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which is no character and has no bytes."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _without_controls(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json without added tokens, in which the model's own entries of their names can't be written.

    All ids stay. A new name is random, so that no text holds it; merges that make or use such an entry go.
    """
    model = dict(content["model"])
    names = {token["content"]: secrets.token_hex(32) for token in content.get("added_tokens") or []}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: (piece, score) by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("merges"), list):
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_merged(merge))]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown) if unknown in (vocabulary or ()) else unknown
    return {**content, "model": model, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}


def _merged(merge: str | list[str]) -> tuple[str, str, str]:
    """The two pieces of a merge, and what they become."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
