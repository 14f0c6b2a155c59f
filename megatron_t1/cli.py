"""`t1`: leading words choose the command, the rest are Hydra overrides.

Nothing heavy is imported before a command needs it: `t1 --help`, `t1 show` and `t1 run` never import torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_t1 import __version__
from megatron_t1.command_table import COMMANDS, Command
from megatron_t1.errors import ConfigError, T1Error, readable

USAGE_STATUS, FAILURE_STATUS = 2, 1


@dataclass
class Invocation:
    """A parsed command line."""

    command: Command
    arguments: list[str] = field(default_factory=list)  # overrides, or plain arguments
    print_config: bool = False
    multirun: bool = False
    config_dirs: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 when something failed; 2 for a wrong command line or configuration; 128 + N after signal N."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _main(words)
    except ConfigError as error:
        return _report(error, USAGE_STATUS)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `t1 show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        said = readable(error)
        if said is None:
            raise
        return _report(said, FAILURE_STATUS)


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_STATUS
    if words[0] == "--version":
        print(f"megatron-t1 {__version__}")
        return 0
    command, rest = find_command(words)
    if any(word in ("-h", "--help") for word in rest):
        print(usage(command))
        return 0
    invocation = parse(command, rest)
    module, _, function = command.target.partition(":")
    return getattr(importlib.import_module(f"megatron_t1.commands.{module}"), function)(invocation) or 0


def find_command(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that the leading words name, and the remaining words.

    Raises:
        ConfigError: no command has that name; near ones are listed.
    """
    for command in COMMANDS:
        size = len(command.words)
        if tuple(words[:size]) == command.words:
            return command, list(words[size:])
    names = [" ".join(command.words) for command in COMMANDS]
    inside = [name for name in names if name.split()[0] == words[0]]
    if inside:
        raise ConfigError(f"`t1 {words[0]}` needs one more word: " + ", ".join(f"t1 {name}" for name in inside))
    given = " ".join(word for word in words[:2] if "=" not in word and not word.startswith("-"))
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5) or difflib.get_close_matches(words[0], names, n=3)
    raise ConfigError(
        f"there is no command `t1 {given or words[0]}`" + (f"; near: {', '.join(near)}" if near else ""),
        remedy="`t1 --help` lists the commands",
    )


def parse(command: Command, words: Sequence[str]) -> Invocation:
    invocation = Invocation(command)
    if not command.configured:
        invocation.arguments = list(words)
        return invocation
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("-m", "--multirun"):
            invocation.multirun = True
        elif word in ("--cfg", "-c"):
            if not queue or queue.pop(0) != "job":
                raise ConfigError("--cfg takes one word: --cfg job")
            invocation.print_config = True
        elif word == "--cfg=job":
            invocation.print_config = True
        elif word in ("--config-dir", "-cd"):
            if not queue:
                raise ConfigError("--config-dir takes a directory with configuration groups of your own")
            invocation.config_dirs.append(queue.pop(0))
        elif word.startswith("--config-dir="):
            invocation.config_dirs.append(word.partition("=")[2])
        elif word in command.flags:
            invocation.flags.add(word)
        elif word.startswith("-"):
            raise ConfigError(
                f"unknown option {word}",
                where=f"t1 {' '.join(command.words)}",
                remedy=f"options: {', '.join(('--cfg job', '-m', '--config-dir', *command.flags))}",
            )
        else:
            invocation.arguments.append(word)
    return invocation


def overview() -> str:
    width = max(len(" ".join(command.words)) for command in COMMANDS)
    lines = [f"  t1 {' '.join(command.words):<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            f"megatron-t1 {__version__}: reinforcement learning of long-horizon terminal agents on Megatron-Core",
            "",
            "usage: t1 COMMAND [group=option ...] [key=value ...]",
            "",
            *lines,
            "",
            "`t1 COMMAND --help` says more; `t1 run --cfg job` prints every option that is in force.",
            "T1_DEBUG=1 shows the traceback of an error.",
        ]
    )


def usage(command: Command) -> str:
    name = " ".join(command.words)
    lines = [f"t1 {name}: {command.summary}", "", command.details]
    if command.configured:
        from megatron_t1.config.compose import group_names
        from megatron_t1.resources import resource_dir

        groups = group_names([resource_dir("conf")])
        lines += ["", "groups (GROUP=OPTION):"]
        lines += [f"  {group:<11} {', '.join(options)}" for group, options in groups.items()]
        lines += [
            "",
            "options:",
            "  key=value           override one option; `--cfg job` prints all of them and their values",
            "  --cfg job           print the configuration in force, then what clashes in it (exit status 2)",
            "  --config-dir DIR    more group options of your own",
        ]
        if command.words == ("run",):
            lines.append("  -m, --multirun      a sweep over comma-separated values, one run after another")
    return "\n".join(lines)


def _report(error: T1Error, status: int) -> int:
    if os.environ.get("T1_DEBUG") == "1":
        traceback.print_exc()
    else:
        from megatron_t1.printable import printable

        print("error: " + "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
