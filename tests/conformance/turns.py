"""Turns as a model of a family would write them: with reasoning, arguments, parallel calls, or cut off."""

from __future__ import annotations

import re

import numpy as np

from megatron_t1.rollout.formats import ChatFormat

# Reasoning before a call, where the family's turn doesn't show it anyway ({} is the reasoning).
_REASONING = {
    "gemma4": "<|channel>thought\n{}<channel|>",
    "inkling": "<|content_thinking|>{}<|end_message|><|message_model|>",
    "llama-3": "",  # a call stands alone
    "headers, trimmed": "",
}
# How an argument is added after the command, by what the call looks like.
_ARGUMENTS = (
    (r'("command": ?"(?:[^"\\]|\\.)*")', r'\1, "options": {"é": [1, {"deep": false}]}, "flag": false'),
    (r"(<parameter=command>\n.*?\n</parameter>)", r"\1\n<parameter=flag>\nfalse\n</parameter>"),
    (r"(<arg_value(:\w+)?>.*?</arg_value(?::\w+)?>)(\n?)",
     r"\1\3<arg_key\2>flag</arg_key\2>\3<arg_value\2>false</arg_value\2>\3"),
    (r'(<(\S*)parameter name="command"( string=)?.*?</\S*parameter>)',
     lambda m: f'{m[1]}\n<{m[2]}parameter name="flag"{" string=" * bool(m[3])}{chr(34) * bool(m[3])}'
               f'{"false" + chr(34) if m[3] else ""}>false</{m[2]}parameter>'),
    (r'(command:<\|"\|>.*?<\|"\|>)', r'\1,flag:false,options:{é:[1,{deep:false}]}'),
)  # fmt: skip
# One call of a section of calls.
_CALL_IN_SECTION = (
    r"<\|tool_call_begin\|>.*<\|tool_call_end\|>|<｜tool▁call▁begin｜>.*<｜tool▁call▁end｜>"
    r"|<(\S*)invoke.*</\1invoke>|<tool_call:\w+>.*</tool_call:\w+>"
)


class Turns:
    """Sampled turns for one chat format; `family` is the part after "renderers:" or the template's name."""

    def __init__(self, chat: ChatFormat, family: str):
        self.chat, self.family = chat, family
        self.tokenizer = chat.tokenizer

    def call(self, command: str = "ls", *, reasoning: str = "", arguments: bool = False) -> np.ndarray:
        """A call; with `arguments` that are nested, not ASCII and false."""
        ids = self.chat.command(command)
        text, stop = self.chat.decode(ids[:-1]), ids[-1:]
        if arguments:
            text = self._with_arguments(text)
        return np.concatenate([self._ids(self._with_reasoning(text, reasoning)), stop])

    def answer(self, reasoning: str = "") -> np.ndarray:
        """A turn without a call."""
        ids = self.chat.submission()
        return np.concatenate([self._ids(self._with_reasoning(self.chat.decode(ids[:-1]), reasoning)), ids[-1:]])

    def parallel(self) -> list[np.ndarray]:
        """Turns with a call twice: one after the other, and within one section of calls where the family has those."""
        ids = self.chat.command("ls")
        text = self.chat.decode(ids[:-1])
        reasoning, closed, call = text.rpartition("</think>")
        inner = re.search(_CALL_IN_SECTION, text, re.DOTALL)
        twice = [reasoning + closed + call + call.lstrip()]
        if inner:
            twice.append(text[: inner.end()] + inner[0] + text[inner.end() :])
        return [np.concatenate([self._ids(text), ids[-1:]]) for text in twice]

    def ended_by(self, stop: int) -> np.ndarray:
        """A call that ends with another of the family's stop tokens."""
        return np.array([*self.chat.command("ls")[:-1], stop], np.int32)

    def cut_in_call(self) -> np.ndarray:
        ids = self.chat.command("echo red > docs/alpha.txt")
        return ids[: len(ids) // 2 + 2]

    def cut_in_character(self) -> np.ndarray:
        """Cut within the bytes of one character of the command."""
        ids = self.chat.command("echo \u2603\u2603").tolist()
        snowman = self.tokenizer.encode("\u2603").tolist()
        assert len(snowman) > 1, "the vocabulary has this character as one token"
        at = next(i for i in range(len(ids)) if ids[i + 1 : i + 1 + len(snowman) - 1] == snowman[1:])
        return np.array(ids[: at + 2], np.int32)

    def cut_in_reasoning(self) -> np.ndarray:
        whole = self.call(reasoning="I look at the files first and think")
        text = self.chat.decode(whole)
        return self._ids(text[: text.index(" files")] if " files" in text else text[: len(text) // 2])

    def _with_reasoning(self, text: str, reasoning: str) -> str:
        if not reasoning:
            return text
        if self.family in _REASONING:
            return _REASONING[self.family].format(reasoning) + text
        closed = re.search(r"</think\S*?>", text)
        if closed:
            opened = re.match(r"\s*<think\S*?>\n?", text)
            at = opened.end() if opened else 0
            return text[:at] + reasoning + text[at:]
        space = text[: len(text) - len(text.lstrip())]
        return f"{space}{reasoning}\n{text.lstrip()}"

    def _with_arguments(self, text: str) -> str:
        for pattern, added in _ARGUMENTS:
            found, count = re.subn(pattern, added, text, count=1, flags=re.DOTALL)
            if count:
                return found
        return text

    def _ids(self, text: str) -> np.ndarray:
        """The model writes control tokens by sampling them; how the rest is split is its own affair (dynamo#8630)."""
        return np.array(self.tokenizer.encode_template(text), np.int32)
