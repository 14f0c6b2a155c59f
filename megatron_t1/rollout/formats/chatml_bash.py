"""ChatML with one tool, a shell: the format of the tiny models.

<|im_start|>user\\n INSTRUCTION <|im_end|>\\n<|im_start|>assistant\\n
<tool_call> COMMAND </tool_call><|im_end|>                              sampled
\\n                                                                      repair
<|im_start|>tool\\n OBSERVATION <|im_end|>\\n<|im_start|>assistant\\n      environment
done<|im_end|>                                                          sampled: a turn without a call submits
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_t1.rollout.formats.protocol import (
    ONE_CALL,
    Command,
    FormatProblem,
    Span,
    Submit,
    TurnByTurn,
    command_problem,
)
from megatron_t1.rollout.formats.tokenizer import PlainTokenizer
from megatron_t1.trajectory.record import Origin

SUBMISSION = "done"


class ChatmlBash:
    """See the module; `model_dir` holds the tokenizer."""

    name = "chatml_bash"

    def __init__(self, model_dir: str | Path):
        self.tokenizer = PlainTokenizer(model_dir)
        self.tokenizer_sha256 = self.tokenizer.sha256
        self._start = self.tokenizer.control("<|im_start|>")
        self._end = self.tokenizer.control("<|im_end|>")
        self._call = self.tokenizer.control("<tool_call>")
        self._call_end = self.tokenizer.control("</tool_call>")
        self.stop_ids = (self._end, self.tokenizer.control("<|endoftext|>"))
        self._newline = self.tokenizer.encode("\n")
        self._header = {role: self._join(self._start, f"{role}\n") for role in ("user", "assistant", "tool")}

    def begin(self, instruction: str) -> TurnByTurn:
        return TurnByTurn(self, instruction)

    def open(self, instruction: str) -> np.ndarray:
        return self._join(self._header["user"], instruction, self._end, self._newline, self._header["assistant"])

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        if len(sampled_ids) == 0 or int(sampled_ids[-1]) not in self.stop_ids:
            return FormatProblem("turn cut off", cut_off=True)
        body = sampled_ids[:-1]
        calls, ends = np.flatnonzero(body == self._call), np.flatnonzero(body == self._call_end)
        stray = self.tokenizer.control_ids - {self._call, self._call_end}
        if stray.intersection(body.tolist()):
            return FormatProblem("control token in turn")
        if len(calls) == 0 and len(ends) == 0:
            return Submit(self.tokenizer.decode(body))
        if len(calls) != 1 or len(ends) != 1 or calls[0] > ends[0]:
            return FormatProblem(ONE_CALL)
        if self.tokenizer.decode(body[ends[0] + 1 :]).strip():
            return FormatProblem("text after call")
        text = self.tokenizer.decode(body[calls[0] + 1 : ends[0]]).strip()
        problem = command_problem(text)
        return FormatProblem(problem) if problem else Command(text)

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]:
        closed = len(sampled_ids) > 0 and int(sampled_ids[-1]) == self._end
        repair = self._newline if closed else self._join(self._end, self._newline)
        header = self._header[role or "tool"]
        answer = self._join(header, observation, self._end, self._newline, self._header["assistant"])
        return [Span(repair, Origin.REPAIR), Span(answer, Origin.ENVIRONMENT)]

    def command(self, text: str) -> np.ndarray:
        return self._join(self._call, text, self._call_end, self._end)

    def submission(self) -> np.ndarray:
        return self._join(SUBMISSION, self._end)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids)

    def _join(self, *parts: str | int | np.ndarray) -> np.ndarray:
        """One int32 array of control ids, encoded texts and ready arrays; each text is encoded by itself."""
        arrays = []
        for part in parts:
            if isinstance(part, str):
                arrays.append(self.tokenizer.encode(part))
            else:
                arrays.append(np.atleast_1d(np.asarray(part, dtype=np.int32)))
        return np.concatenate(arrays)
