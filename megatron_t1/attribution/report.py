"""`t1 gap` in the terminal: one table of settings, one of shares, and the worst tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_t1.attribution.settings import BASELINE, COMPONENTS, TOGETHER_MORE
from megatron_t1.report.show import make_table

FEW = 4  # trajectories; fewer have hardly an interval; ours
LARGE = 100.0  # a change of more than this many times the gap is shown as a factor


def print_report(report: Mapping[str, Any], console: Console, *, worst: int) -> None:
    """Print what `findings` found, with the facts about the run around it."""
    settings = {setting["name"]: setting for setting in report["settings"]}
    baseline = settings[BASELINE]
    console.print(
        f"{report['run']}: rollout {report['iteration']}, sampled with policy {report['policy']}; "
        f"{report['sample']} of {report['trajectories']} trajectories, {baseline['tokens']:,} sampled tokens",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{baseline['label']}: mean |log p trainer - log p sampler| {baseline['gap']:.2e} nats, "
        f"KL {baseline['kl']:.1e}, largest {baseline['largest']:.1e}",
        highlight=False,
    )
    if report["of_other_policies"]:
        console.print(
            f"{report['of_other_policies']} trajectories have turns that another policy sampled, by what they state",
            style="red",
            highlight=False,
        )
    for setting in report["settings"]:
        if setting["not_finite"]:
            console.print(
                f"{setting['label']}: {setting['not_finite']:,} tokens have no finite log-prob and are left out",
                style="red",
                highlight=False,
            )
    if report["sample"] < FEW:
        console.print(
            f"{report['sample']} trajectories say little about others: nothing can be attributed with any certainty",
            style="red",
            highlight=False,
        )
    console.print(settings_table(report))
    more = settings.get(TOGETHER_MORE)
    if more is not None:
        console.print(
            f"one by one, what raises it most of each component adds {report['sum_of_changes']:.1e}, "
            f"together {more['change']:.1e}: the rest is interaction\n",
            highlight=False,
        )
    console.print(shares_table(report))
    tokens = report["retokenised"]
    if tokens is not None and tokens["changed"]:
        console.print(
            f"rendered and encoded again, {tokens['changed']} of {report['sample']} trajectories get other ids; "
            f"{tokens['lost']:,} of their {tokens['tokens']:,} sampled tokens have no counterpart"
            + (": there is none to compare" if tokens["lost"] == tokens["tokens"] else ""),
            highlight=False,
        )
    for component, reason in report["not_measured"].items():
        console.print(f"not measured: {component}: {escape(reason)}", style="dim", highlight=False)
    if worst:
        console.print(worst_table(baseline, settings, worst))


def settings_table(report: Mapping[str, Any]) -> Table:
    """Every setting: the gap under it, its change against training's with the 95% interval, KL, routes."""
    table = make_table("one thing otherwise each time (means over sampled tokens, nats)")
    table.add_column("component")
    table.add_column("instead", overflow="fold")
    for title in ("gap", "change [95%]", "x gap", "KL", "routes\ndiffer"):
        table.add_column(title, justify="right", no_wrap=True)
    order = {name: number for number, name in enumerate(["", *COMPONENTS])}
    for setting in sorted(report["settings"], key=lambda s: (_is_joint(s), order[s["component"]])):
        own = setting["name"] == BASELINE
        routes = setting["routes"].get("route_difference")
        table.add_row(
            setting["component"],
            escape(setting["label"]),
            _nats(setting["gap"]),
            "" if own else f"{_signed(setting['change'])} ±{_nats(setting['error'])}",
            "" if own else _factor(setting),
            _nats(setting["kl"]),
            "" if routes is None else f"{routes:.2%}",
            style="bold" if own else "",
        )
    return table


def shares_table(report: Mapping[str, Any]) -> Table:
    """What the gap under training consists of; the shares in turn and the remainder add up to 100%."""
    table = make_table("what this gap consists of")
    table.add_column("component")
    table.add_column("share alone [95%]", justify="right")
    table.add_column("in turn", justify="right")
    table.add_column("shown by", overflow="fold")
    labels = {setting["name"]: setting["label"] for setting in report["settings"]}
    found = report["attribution"]
    for component in COMPONENTS:
        share = found["shares"].get(component)
        if share is None:
            continue
        alone = f"{share['alone']:.1%} ±{_percent(share['error'])}" if share["setting"] else "0"
        table.add_row(component, alone, _share(share["in_turn"]), escape(labels.get(share["setting"], "")))
    table.add_row("remainder", "", f"{found['remainder']:.1%}", "none of these: kernels, order of sums, anything else")
    table.add_row("interaction", "", _share(found["interaction"]), "what the second column has more than the first")
    return table


def worst_table(baseline: Mapping[str, Any], settings: Mapping[str, Any], count: int) -> Table:
    table = make_table(f"the tokens that differ most ({baseline['label']})")
    for title in ("trajectory", "token", "turn", "sampler", "trainer\n- sampler", "explained by", "text"):
        right = title in ("token", "turn", "sampler", "trainer\n- sampler")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for token in baseline["worst"][:count]:
        explained = settings[token["explained_by"]]["label"] if token["explained_by"] else ""
        text = Text.assemble((_one_line(token["before"][-40:]), "dim"), (f"«{_one_line(token['text'])}»", "bold"),
                             (_one_line(token["after"][:16]), "dim"))  # fmt: skip
        table.add_row(
            token["trajectory"], str(token["token"]), str(token["turn"]), f"{token['sampler']:.4f}",
            f"{token['difference']:+.1e}", escape(explained), text,
        )  # fmt: skip
    return table


def _is_joint(setting: Mapping[str, Any]) -> bool:
    """Whether a setting differs from training's in several components."""
    return not setting["component"] and setting["name"] != BASELINE


def _share(value: float) -> str:
    return f"{value:.1%}" if value else "0"


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1e}" if value else "0"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"


def _factor(setting: Mapping[str, Any]) -> str:
    """The gap as a multiple of what it is under training on the same tokens."""
    if setting["gap"] is None or setting["change"] is None:
        return "-"
    before = setting["gap"] - setting["change"]
    if not before:
        return "-"
    factor = setting["gap"] / before
    return f"{factor:,.0f}" if factor >= LARGE else f"{factor:.2f}"
