"""The token stream over a long episode: 300 turns, 200k tokens, the vocabulary of Qwen3.5.

    python benchmarks/stream.py [--turns N] [--tokens N] [--repeats N]

Three ways to get from a sampled turn to the next prompt, turn by turn in the same run: this package (stream and chat
format), the bridge of `renderers` over the whole history, and rendering and encoding the whole conversation again. All
three use the same tokenizer. Rendering again is done at every tenth turn and counted tenfold. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' vocabulary and engine answers

from megatron_t1.rollout.formats import load_format
from megatron_t1.rollout.formats.shell_tool import SYSTEM
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import Origin
from tests.conformance.turns import Turns
from tests.conformance.vocabularies import qwen35
from tests.rollout.conftest import completion

WORDS = (
    "error warning src/model/layers.py tests passed 12.5% def return self.config import numpy as np total 48 drwxr-x "
    "root root 4096 the file was not found Traceback (most recent call last): for index, value in enumerate(rows): é ✓"
).split(" ")
EVERY = 10  # turns between two renderings of everything
TARGET_RATIO, TARGET_BYTES = 1.2, 16.0


@dataclass
class Run:
    """CPU seconds of each turn, by way."""

    ours: list[float] = field(default_factory=list)
    bridge: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    bytes_per_token: float = 0.0  # the most that it was at any turn
    tokens: int = 0
    first_other: int | None = None  # first token that rendering again writes differently


def measure(chat, turns: int, tokens: int, seed: int) -> Run:
    """Play one episode in all three ways."""
    source = random.Random(seed)
    text = lambda words: " ".join(source.choice(WORDS) for _ in range(words))  # noqa: E731
    per_turn = tokens // turns
    words = max(4, round((per_turn - 60) / 1.65))
    model = Turns(chat, "qwen3.5")
    conversation, stream, run = chat.begin("Do the task."), TokenStream(), Run()
    stream.append(conversation.prompt, Origin.PROMPT)
    history = conversation.prompt.tolist()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Do the task."}]
    renderer, tools = chat._renderer, chat._tools
    for number in range(turns):
        sampled = model.call(text(words // 3), reasoning=text(words // 6), arguments=True)
        answer, output = completion(sampled, len(stream)), text(words // 2)

        began = time.process_time()
        stream.append_sampled(answer)
        for span in conversation.reply(output, answer.ids):
            stream.append(span.ids, span.origin)
        run.ours.append(time.process_time() - began)
        run.bytes_per_token = max(run.bytes_per_token, stream.nbytes / len(stream))

        reply = {"role": "tool", "content": output, "tool_call_id": f"call_{number}", "name": "bash"}
        turn = sampled.tolist()
        began = time.process_time()
        history = renderer.bridge_to_next_turn(history, turn, [reply], tools=tools).token_ids
        run.bridge.append(time.process_time() - began)
        if history != stream.ids.tolist():
            sys.exit(f"turn {number}: the bridge over the whole history gives other tokens")

        parsed = renderer.parse_response(turn, tools=tools)
        calls = [
            {"id": f"call_{number}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in parsed.tool_calls
        ]
        thought = {"reasoning_content": parsed.reasoning_content} if parsed.reasoning_content else {}
        messages += [{"role": "assistant", "content": parsed.content or "", "tool_calls": calls, **thought}, reply]
        if number % EVERY == EVERY - 1 or number == turns - 1:
            began = time.process_time()
            rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            run.again.append(time.process_time() - began)
    run.tokens = len(stream)
    differs = np.flatnonzero(np.array(rendered[: len(stream)]) != stream.ids[: len(rendered)])
    run.first_other = int(differs[0]) if len(differs) else None
    return run


def growth(seconds: list[float]) -> float:
    """Median of the last third of the turns over that of the first third: 1 means that a turn's cost doesn't grow."""
    third = len(seconds) // 3
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        chat = load_format("renderers:qwen3.5", qwen35(Path(directory)))
        runs = [measure(chat, options.turns, options.tokens, seed) for seed in range(options.repeats)]
    middle = lambda values: statistics.median(list(values))  # noqa: E731
    table = Table(title=f"{options.turns} turns, {middle(run.tokens for run in runs):,.0f} tokens, Qwen3.5 vocabulary")
    for column in ("way", "CPU seconds", "ratio", "last third / first third of the turns"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, ways in (("this package", "ours"), ("renderers' bridge", "bridge"), ("rendering again", "again")):
        scale = EVERY if ways == "again" else 1
        total = middle(sum(getattr(run, ways)) * scale for run in runs)
        ratio = middle(sum(getattr(run, ways)) * scale / sum(run.bridge) for run in runs)
        grows = middle(growth(getattr(run, ways)) for run in runs)
        table.add_row(name, f"{total:.2f}", f"{ratio:.2f}", f"{grows:.2f}")
    console = Console()
    console.print(table)
    ratio = middle(sum(run.ours) / sum(run.bridge) for run in runs)
    most = max(run.bytes_per_token for run in runs)
    console.print(
        f"ids, origins, log-probs, turns and edits: at most {most:.1f} bytes per token (target {TARGET_BYTES})"
    )
    console.print(f"time over that of renderers' bridge: {ratio:.2f} (target {TARGET_RATIO})")
    console.print(f"first token that rendering again changes: {runs[0].first_other}")
    return 0 if ratio <= TARGET_RATIO and most <= TARGET_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
