"""A trajectory as a person reads it: decoded, coloured by where the tokens came from, with the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from megatron_t1.errors import IncompleteError
from megatron_t1.paths import RunPaths
from megatron_t1.printable import printable
from megatron_t1.report.show import make_console, make_table, read_manifest
from megatron_t1.trajectory.record import Origin, Trajectory
from megatron_t1.trajectory.store import RolloutStore

STYLES = {
    Origin.PROMPT: "cyan",
    Origin.SAMPLED: "bold green",
    Origin.DEMONSTRATION: "bold yellow",
    Origin.ENVIRONMENT: "blue",
    Origin.REPAIR: "magenta reverse",
}

# Control characters that a sandbox printed are shown, not obeyed by the reader's terminal.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def stores(run_dir: str | Path) -> Iterator[tuple[str, RolloutStore]]:
    """Rollouts and evaluations of a run: ("rollouts/iter_0000", store), ..."""
    root = RunPaths.of(run_dir).root
    for kind in ("rollouts", "evaluations"):
        for directory in sorted((root / kind).glob("iter_*")):
            if directory.is_dir():
                yield f"{kind}/{directory.name}", RolloutStore(directory)


def find_trajectory(run_dir: str | Path, trajectory_id: str) -> tuple[str, Trajectory]:
    """The trajectory with that id: `ID`, or `rollouts/iter_0003/ID` where several iterations have one.

    Raises:
        IncompleteError: there is none.
    """
    prefix, _, name = trajectory_id.rpartition("/")
    found = [(place, store) for place, store in stores(run_dir) if place.endswith(prefix) and name in store]
    if not found:
        raise IncompleteError(
            f"no trajectory {trajectory_id}", where=str(run_dir), remedy="`t1 show RUN --trajectories` lists them"
        )
    place, store = found[-1]
    return place, store.load(name)


def print_trajectories(run_dir: str | Path, console: Console | None = None) -> None:
    """One line for each trajectory of the run."""
    console = console or make_console()
    table = make_table()
    for title in ("trajectory", "checks", "reward", "tokens", "turns", "ended"):
        table.add_column(title, justify="right" if title in ("checks", "reward", "tokens", "turns") else "left",
                         overflow="fold")  # fmt: skip
    for place, store in stores(run_dir):
        for name, header in sorted(store.headers().items()):
            verdict = header.verdict
            checks = "untrusted" if verdict is None or not verdict.trusted else f"{verdict.passed}/{verdict.total}"
            reward = f"{header.reward['total']:.2f}" if "total" in header.reward else ""
            counts = [str(header.counts.get(key, "")) for key in ("tokens", "turns")]
            table.add_row(f"{place}/{name}", checks, reward, *counts, header.end_reason)
    console.print(table)


def print_transcript(run_dir: str | Path, trajectory_id: str, console: Console | None = None) -> None:
    """The trajectory's text with its origins in colour, and each check's outcome."""
    console = console or make_console()
    config = read_manifest(run_dir)["config"]
    place, trajectory = find_trajectory(run_dir, trajectory_id)
    header = trajectory.header
    console.print(f"[bold]{place}/{header.trajectory_id}[/bold]  task {header.task}, attempt {header.attempt}, "
                  f"ended: {header.end_reason}", highlight=False)  # fmt: skip
    console.print(Text.assemble(*((f" {origin.name.lower()} ", style) for origin, style in STYLES.items())))
    console.print(transcript(trajectory, Path(config["model.path"])))
    _print_numbers(trajectory, console)
    _print_verdict(trajectory, console)


def transcript(trajectory: Trajectory, model_dir: Path) -> Text:
    """Decode each run of tokens of one origin by itself; special tokens stay visible."""
    decode = token_decoder(model_dir)
    text = Text()
    position = 0
    for origin, run in groupby(trajectory.origin.tolist()):
        length = len(list(run))
        piece = decode(trajectory.ids[position : position + length].tolist())
        text.append(piece, style=STYLES[Origin(origin)])
        position += length
    return text


def token_decoder(model_dir: Path) -> Callable[[list[int]], str]:
    """Text of ids with the tokenizer of `model_dir`; special tokens and control characters are shown.

    Raises:
        IncompleteError: there is no readable tokenizer.json.
    """
    path = model_dir / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any unreadable file
        raise IncompleteError(f"the tokenizer can't be read: {error}", where=str(path)) from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False).translate(VISIBLE)


def _print_numbers(trajectory: Trajectory, console: Console) -> None:
    sampled = trajectory.origin == Origin.SAMPLED
    facts = [f"{len(trajectory)} tokens", f"{int(trajectory.loss_mask.sum())} trained on"]
    if sampled.any():
        facts.append(f"mean log-prob {float(np.mean(trajectory.logprobs[sampled])):.3f}")
    if trajectory.routes is not None:
        layers, top_k = trajectory.routes.shape[1:]
        facts.append(f"routes of {layers} layers, top-{top_k}, {int(trajectory.routed.sum())} rows")
    facts += [f"{name} {value}" for name, value in sorted(trajectory.header.counts.items())]
    console.print(", ".join(facts), style="dim", highlight=False)


def _print_verdict(trajectory: Trajectory, console: Console) -> None:
    verdict = trajectory.header.verdict
    for step in trajectory.header.steps:
        console.print(f"step {printable(step.describe())}", highlight=False, markup=False)
    if verdict is None:
        console.print("not verified", highlight=False)
        return
    if not verdict.trusted:
        console.print(f"untrusted verdict: {printable(verdict.reason)}", style="red", highlight=False, markup=False)
        return
    reward = ", ".join(f"{name} {value:g}" for name, value in trajectory.header.reward.items())
    console.print(
        f"checks passed: {verdict.passed}/{verdict.total} (when nothing is done: {verdict.baseline}); reward: {reward}",
        highlight=False,
    )
    for name, passed in sorted(verdict.checks.items()):
        mark, style = ("passed", "green") if passed else ("failed", "red")
        console.print(Text.assemble("  ", (mark, style), f"  {printable(name)}"))
