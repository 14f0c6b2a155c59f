"""`t1 convert check`: is a checkpoint complete, and does a layout load every tensor of it exactly once?"""

from __future__ import annotations

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.errors import ConfigError
from megatron_t1.printable import printable


def check(invocation: Invocation) -> int:
    parser = Parser(prog="t1 convert check", add_help=False)
    parser.add_argument("checkpoint")
    parser.add_argument("overrides", nargs="*", default=[], metavar="layout=NAME")
    parser.add_argument("--config-dir", action="append", default=[])
    options = parser.parse_intermixed_args(invocation.arguments)
    from megatron_t1.config.compose import compose
    from megatron_t1.config.validate import phase_layout_problems
    from megatron_t1.model.accounting import account_for

    if other := [word for word in options.overrides if not word.startswith(("layout=", "layout."))]:
        raise ConfigError(
            f"{other[0]!r} has no part in this: the model is what the checkpoint's config.json says",
            where="t1 convert check",
            remedy="give a checkpoint, and options of layout",
        )
    layout = compose(options.overrides, config_dirs=options.config_dir).layout if options.overrides else None
    if layout is not None and (wrong := phase_layout_problems(layout)):
        raise ConfigError("; ".join(wrong), where="t1 convert check")
    account = account_for(options.checkpoint, layout)
    a, names = account.architecture, account.names
    print(
        f"{a.family}: {a.num_hidden_layers} layers, {a.num_experts} experts; names begin with {names.prefix}, "
        f"{'one tensor for all experts of a layer' if names.fused_experts else 'one tensor for each expert matrix'}"
    )
    for name, part in account.parts.items():
        types = ", ".join(f"{count:,} {printable(code)}" for code, count in sorted(part.types.items()) if code)
        numbers = f"{part.numbers:>18,} numbers   {types}" if account.files else ""
        print(f"  {name:40} {part.tensors:>7,} tensors {numbers}".rstrip())
    print(
        f"names, shapes and types compared; headers of {account.files} files read"
        if account.files
        else "only names compared: no weight file is there, only the index"
    )
    if account.layout:
        _print_layout(account.layout, layout)
    for problem in account.problems:
        print(f"PROBLEM: {printable(problem)}")
    count = "1 problem" if len(account.problems) == 1 else f"{len(account.problems)} problems"
    print(count if account.problems else "every tensor is accounted for, exactly once")
    return 1 if account.problems else 0


def _print_layout(numbers: dict, layout) -> None:
    sizes = " ".join(f"{name}{size}" for name, size in layout.sizes.items())
    print(f"{layout.processes} ranks, {sizes}: numbers on one rank")
    for stage, (dense, expert) in sorted(numbers.items()):
        print(f"  pipeline rank {stage:>2} {dense:>16,} dense {expert:>16,} of experts")
