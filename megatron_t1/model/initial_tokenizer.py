"""The start model's tokenizer: byte-level BPE in which every word of the tasks' pools becomes one token.

The pre-tokenizer keeps a leading space with its word and splits digits and punctuation one by one, so that a name in an
instruction and the same name in a command share a token: a tiny model has to learn to copy it (see docs on learning).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from megatron_t1.errors import T1Error

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"
CONTROL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, TOOL_CALL_OPEN, TOOL_CALL_CLOSE)
ROLES = ("system", "user", "assistant", "tool")

PIECES = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\n|\s+"
MAX_VOCAB = 4096  # of a tokenizer whose size the architecture leaves open
SMALLEST_VOCAB = 256 + len(CONTROL_TOKENS)


def train_tokenizer(corpus: Iterable[str], *, vocab_size: int = 0):
    """Train a `tokenizers.Tokenizer` on `corpus`.

    Args:
        corpus: texts; merges are learnt from pieces that occur at least twice.
        vocab_size: largest size including control tokens; 0: `MAX_VOCAB`. All 256 bytes are always in it.

    Raises:
        T1Error: the corpus is empty or `vocab_size` is too small.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    size = vocab_size or MAX_VOCAB
    if size < SMALLEST_VOCAB:
        raise T1Error(
            f"a vocabulary of {size} can't hold 256 bytes and {len(CONTROL_TOKENS)} control tokens",
            where="model.architecture.vocab_size",
            remedy=f"use at least {SMALLEST_VOCAB}, or 0 for what the corpus needs",
        )
    texts = list(corpus)
    if not any(texts):
        raise T1Error(
            "the corpus for the tokenizer is empty", remedy="generate tasks first; their texts are what it learns"
        )
    roles = [f"{role}\n" for role in ROLES] * 2  # twice: each role word becomes one token
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    return tokenizer


def chat_template() -> str:
    """Jinja template of the `chatml_bash` format: what the token stream writes, for other programs' use."""
    call = json.dumps(TOOL_CALL_OPEN), json.dumps(TOOL_CALL_CLOSE)
    return (
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.content %}{{- message.content }}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- set arguments = (call.function or call).arguments %}"
        f"{{{{- {call[0]} + (arguments if arguments is string else arguments.command) + {call[1]} }}}}"
        "{%- endfor %}"
        "{{- '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
