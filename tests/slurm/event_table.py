"""The table of docs/slurm-events.md: one row for each event, replaced when it is driven again.

A row of real phases isn't replaced by one of light phases.
"""

from __future__ import annotations

from pathlib import Path

from cluster_events import EVENTS, Event, Recovery

BEGIN, END = "<!-- table of events: make slurm-events -->", "<!-- end of the table -->"
HEADER = [
    "| mode | event | during | phases | what followed | work goes on after | whole training | weights |",
    "|---|---|---|---|---|---|---|---|",
]


def write_row(path: Path, event: Event, recovery: Recovery, distance: float | None) -> None:
    """Put the row in its place, in the order of EVENTS.

    Args:
        distance: of weights and optimizer state to those of the undisturbed training, over a tensor's largest; None:
            the phases were light.
    """
    before, _, rest = path.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {tuple(cells(line)[:3]): line for line in table.splitlines()[3:] if line.startswith("|")}
    goes_on = f"{recovery.work_goes_on_s:.0f} s" if recovery.work_goes_on_s else "not disturbed"
    key = (event.mode, event.name, shown_phase(event))
    if distance is None and key in rows and cells(rows[key])[3] == "real":
        return
    if distance is None:
        kind, weights = "light", "—"
    else:
        kind, weights = "real", f"differ by {distance:.0e}" if distance else "equal"
    row = (*key, kind, recovery.answer, goes_on, f"{recovery.total_s:.0f} s", weights)
    rows[key] = f"| {' | '.join(row)} |"
    order = [(each.mode, each.name, shown_phase(each)) for each in EVENTS]
    lines = [rows[key] for key in order if key in rows]
    path.write_text(f"{before}{BEGIN}\n" + "\n".join([*HEADER, *lines]) + f"\n{END}{after}")


def shown_phase(event: Event) -> str:
    return {"critic": "training"}.get(event.phase, event.phase)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
