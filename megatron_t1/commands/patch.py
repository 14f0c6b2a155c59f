"""`t1 patch`: the patches of this package on somebody's Megatron checkout."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.errors import T1Error

ACTIONS = ("status", "apply", "revert", "diff")


def patch(invocation: Invocation) -> int:
    parser = Parser(prog="t1 patch", add_help=False)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--checkout", metavar="DIR", required=True)
    parser.add_argument("--only", metavar="NAME", action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--patches", metavar="DIR", help="declarations of your own instead of those shipped")
    options = parser.parse_args(invocation.arguments)
    missing = [name for name in ("libcst", "packaging") if importlib.util.find_spec(name) is None]
    if missing:
        raise T1Error(f"`t1 patch` needs {' and '.join(missing)}", remedy="pip install 'megatron-t1[patch]'")
    from megatron_t1.patching.declaration import load_patches
    from megatron_t1.patching.tree import Tree

    patches = load_patches(Path(options.patches) if options.patches else None)
    tree = Tree(options.checkout)
    action = {"status": _status, "apply": _apply, "revert": _revert, "diff": _diff}[options.action]
    return action(tree, patches, options)


def _status(tree, patches, options: argparse.Namespace) -> int:
    from megatron_t1.patching import operations

    findings = operations.status(tree, patches, options.only)
    print(f"{tree.root}: megatron-core {tree.version or 'of unknown version'}")
    _print_findings(findings, patches)
    cut_off = operations.interrupted(tree)
    if cut_off:
        print("A change of this checkout is being made, or was cut off: the next apply or revert takes it back first.")
    return int(cut_off or any(finding.state in ("conflict", "damaged", "outdated") for finding in findings))


def _apply(tree, patches, options: argparse.Namespace) -> int:
    from megatron_t1.patching import operations

    plan, findings = operations.apply(tree, patches, options.only, dry_run=options.dry_run)
    _print_findings([finding for finding in findings if finding.name not in plan.patches], patches)
    _print_plan(plan, "would apply" if options.dry_run else "applied")
    return 0


def _revert(tree, patches, options: argparse.Namespace) -> int:
    from megatron_t1.patching import operations

    plan = operations.revert(tree, patches, options.only, dry_run=options.dry_run)
    _print_plan(plan, "would revert" if options.dry_run else "reverted")
    for file in plan.kept:
        print(f"  edited since it was patched; the edits stay: {file}")
    return 0


def _diff(tree, patches, options: argparse.Namespace) -> int:
    from megatron_t1.patching import operations

    print(operations.diff(tree, patches, options.only), end="")
    return 0


def _print_plan(plan, verb: str) -> None:
    print(f"{verb}: {', '.join(plan.patches)}" if plan.patches else "nothing to do")
    for file in plan.changes:
        print(f"  {file}")


def _print_findings(findings, patches) -> None:
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        title = patches[finding.name].title if finding.name in patches else "(not of this version of megatron-t1)"
        print(f"  {finding.name:<{width}}  {finding.state:<10}  {title}")
        for line in finding.detail.splitlines():
            print(f"  {'':<{width}}  {'':<10}  {line}")
