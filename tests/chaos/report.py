"""What a campaign of kills came to, as a page of Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.kills import KINDS


def write_report(trainings: Sequence[dict[str, Any]], *, undisturbed_s: float, seed: int) -> str:
    """What was killed and where, what that cost, and how equal the trainings were.

    Args:
        trainings: lines of a campaign's book.
        undisturbed_s: what the launches of an undisturbed training take together.
    """
    failed = [training["failed"] for training in trainings if training["failed"]]
    trainings = [training for training in trainings if not training["failed"]]
    kills = [kill for training in trainings for kill in training["kills"]]
    if not kills:
        return "\n".join(["# Kills", "", "none", "", *failed, ""])
    seconds = sum(training["seconds"] for training in trainings)
    cost = (seconds - undisturbed_s * len(trainings)) / len(kills)
    launchers = Counter(training["launcher"] for training in trainings)
    options = Counter(training["options"] for training in trainings)
    by_launcher = ", ".join(f"{count} {name}" for name, count in sorted(launchers.items()))
    return "\n".join(
        [
            "# Kills",
            "",
            f"`make chaos`: {len(kills)} processes killed (SIGKILL) at random moments of {len(trainings)} trainings",
            f"({by_launcher}), seed {seed}, in {seconds / 60:.0f} minutes. An undisturbed training takes",
            f"{undisturbed_s:.0f} s; a kill cost {cost:.1f} s on average: what its phase had done, and a new start.",
            "",
            *(f"- {count} trainings with `{words}`" for words, count in sorted(options.items())),
            "",
            *_equality(trainings),
            "",
            *_table(kills),
            "",
            *_writes(kills),
            *(f"\n**Ended otherwise, not counted above:** {reason}" for reason in failed),
            "",
        ]
    )


def _equality(trainings: Sequence[dict[str, Any]]) -> list[str]:
    equal = sum(not training["records"] for training in trainings)
    lines = [
        "Each of these ended with the steps, token ids, rewards, data cursor, seeds, versions, optimizer steps and",
        "learning rates of the undisturbed one. No finished trajectory was played again; no process, mount, sandbox or",
        f"control group was left. In {equal} trainings all records were equal, and so, to the bit, were exports,",
        "weights and optimizer states of both roles.",
    ]
    other = [max(training["weights"], training["optimizer"]) for training in trainings if training["records"]]
    if other:
        lines += [
            f"In {len(other)} some tokens had other experts in a near tie (a prefix cache changes the last bits);",
            f"weights and optimizer states differ there by at most {max(other):.1e} of a tensor's largest element.",
        ]
    return lines


def _table(kills: Sequence[dict[str, Any]]) -> list[str]:
    phases = sorted({kill["phase"] for kill in kills})
    lines = ["| killed | " + " | ".join(phases) + " | all | loop went on |", "|---" * (len(phases) + 3) + "|"]
    for kind in KINDS:
        own = [kill for kill in kills if kill["kind"] == kind]
        cells = [str(sum(kill["phase"] == phase for kill in own)) for phase in phases]
        lines.append(f"| {kind} | {' | '.join(cells)} | {len(own)} | {sum(k['status'] is None for k in own)} |")
    return lines


def _writes(kills: Sequence[dict[str, Any]]) -> list[str]:
    struck = Counter(kill["writing"] for kill in kills if kill["writing"])
    names = ", ".join(f"{name} {count}" for name, count in struck.most_common()) or "none"
    gone = statistics.median([kill["cost_s"] for kill in kills if kill["status"] is not None] or [0.0])
    return [
        f"{sum(struck.values())} of them struck a process while it wrote a file: {names}.",
        f"From a kill to the end of the loop and all its processes: {gone:.1f} s (median).",
    ]
