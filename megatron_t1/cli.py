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
from megatron_t1.errors import ConfigError, T1Error, readable

USAGE_STATUS, FAILURE_STATUS = 2, 1


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    target: str  # "module:function" in megatron_t1.commands; called with the Invocation
    summary: str
    details: str
    configured: bool = True  # takes Hydra overrides; otherwise plain arguments


COMMANDS = (
    Command(
        ("run",), "run:run", "the whole training: rollout, critic, actor, export, repeated",
        """\
Starts, or goes on with, the training in run.dir. What is finished (RUN/manifest.json) is not repeated; once
a step is, options that decide what is computed, and the files in model.path, must be those the run was started with.
Phases run one at a time, each in processes of its own; RUN/phases/iter_NNNN/PHASE/logs holds what they said.

  t1 run experiment=quickstart
  t1 run run.dir=runs/quickstart                    go on, with what the run was started with
  t1 run experiment=quickstart loop.iterations=6    go on for longer
  t1 run -m experiment=learn run.seed=0,1,2         a sweep: one run after another, each in its own directory""",
    ),
    Command(
        ("rollout",), "run:phase", "one rollout phase of a run",
        """\
Samples one iteration's trajectories: starts the engine, runs the episodes in sandboxes, verifies, writes
RUN/rollouts/iter_NNNN. Episodes that are already there are not repeated.

  t1 rollout run.dir=runs/quickstart iteration=0    iteration=-1 (default): the first that is not finished""",
    ),
    Command(
        ("train", "sft"), "run:sft", "supervised fine-tuning on demonstrations: the model a training starts from",
        """\
Reads model.path and train.sft.demonstrations, writes RUN/model. Use a run.dir of its own.

  t1 train sft run.dir=runs/sft model.path=models/tiny_start train.sft.demonstrations=tasks/demonstrations""",
    ),
    Command(
        ("train", "critic"), "run:phase", "one critic phase of a run",
        """\
Values, advantages and returns for one iteration's rollouts, then the value update. Writes RUN/values/iter_NNNN and
RUN/checkpoints/critic. The actor's files are not touched.

  t1 train critic run.dir=runs/quickstart""",
    ),
    Command(
        ("train", "actor"), "run:phase", "one actor phase of a run",
        """\
The PPO update of the policy, with the experts of the rollout replayed. Writes RUN/checkpoints/actor.

  t1 train actor run.dir=runs/quickstart""",
    ),
    Command(
        ("export",), "run:phase", "the newest actor as a Hugging Face directory",
        """\
Writes RUN/hf/iter_NNNN, which vLLM and transformers load.

  t1 export run.dir=runs/quickstart""",
    ),
    Command(
        ("eval",), "run:evaluate", "evaluate a policy of a run, or any model, on held-out tasks",
        """\
Without a run in run.dir, evaluates model.path there (policy 0). In a run, evaluates the policy of iteration=N, or the
newest exported one.

  t1 eval run.dir=runs/base model.path=models/my_model eval.tasks=tasks/held_out eval.attempts=4
  t1 eval run.dir=runs/quickstart
  t1 eval run.dir=runs/again model.path=runs/quickstart/hf/iter_0003 eval.tasks=tasks/held_out eval.attempts=8

A run keeps to its own eval options, so that its evaluations stay comparable. Other ones (attempts, tasks, max_turns,
temperature, limit) go to a run.dir of their own, as in the last line; `t1 compare A B` compares two of them.""",
    ),
    Command(
        ("tasks", "generate"), "inputs:generate", "write Harbor-format terminal tasks and prove each of them",
        """\
Writes generate.out/train and generate.out/held_out: disjoint by content; the reference solution of each passes all its
checks, and what passes when nothing is done is recorded.

  t1 tasks generate generate.out=tasks generate.train=500 generate.held_out=200""",
    ),
    Command(
        ("tasks", "demonstrate"), "inputs:demonstrate", "demonstrations of a scripted policy, for `t1 train sft`",
        """\
Runs a scripted policy through the same agent loop and sandboxes and writes its records to train.sft.demonstrations.
They are imperfect on purpose (generate.demonstration_noise), so that reinforcement learning has something to repair.

  t1 tasks demonstrate generate.demonstrations=7000""",
    ),
    Command(
        ("model", "init"), "inputs:init_model", "a small random model with its own tokenizer, from a seed",
        """\
Writes model.path: config.json, safetensors, tokenizer. The tokenizer is trained on text the task generator makes.

  t1 model init model=tiny model.path=models/tiny_start run.seed=0""",
    ),
    Command(
        ("show",), "inspect:show", "what a run did so far, or the transcript of one trajectory",
        """  t1 show RUN                        steps with time, speed, reward, checks, explained variance, KL, gap
  t1 show RUN --trajectory ID        tokens decoded, coloured by where they came from, with the verdict
  t1 show RUN --trajectories         ids of all trajectories
  t1 show RUN --plots                write RUN/plots/*.png again""",
        configured=False,
    ),
    Command(
        ("import", "jsonl"), "import_:jsonl", "records of other people's token ids, masks and log-probs (JSON lines)",
        """\
One trajectory on each line; docs/token-streams.md describes the fields.

  t1 import jsonl FILE ... --out DIR
  --contract FILE       the sampling contract of lines that state none, as JSON: PPO needs one
  --run RUN --iteration N   instead of --out: as the rollout of that iteration, for `t1 train` by hand""",
        configured=False,
    ),
    Command(
        ("import", "harbor"), "import_:harbor", "records of Harbor trials or ATIF trajectories with token ids",
        """\
PATH: a trial, a directory of trials, a trial's result.json, or an ATIF file. Writes an exchange log as well, so that
`t1 audit` can show what was made of it.

  t1 import harbor PATH ... --out DIR
  --scale X             reward of one passed check, where the verifier's ctrf.json counts them (default 0.25)
  --contract FILE, --run RUN --iteration N   as for `t1 import jsonl`""",
        configured=False,
    ),
    Command(
        ("inspect",), "inspect:inspect", "one record, shard or exchange log: header, spans, where the loss is",
        """\
  t1 inspect RUN/rollouts/iter_0003/x.shard.safetensors                    the records in it
  t1 inspect RUN/rollouts/iter_0003/x.shard.safetensors --trajectory ID    one of them
  t1 inspect RUN/rollouts/iter_0003/exchange.0.x.log                       what the engine was asked and answered
  --tokenizer DIR       text instead of ids, with the tokenizer.json of a model directory
  --all                 every span of a long trajectory""",
        configured=False,
    ),
    Command(
        ("audit",), "audit:audit", "does training see exactly the tokens that the sampler saw and produced?",
        """\
PATH: a run, a directory of records, a shard or a record. Compares every trajectory, as training reads it, with the log
of the exchange with the engine that lies beside the records: tokens inside and outside the loss, mask, log-probs,
turns, routes, sampling contract. Exit status 1 when anything differs, 2 when something can't be read.

  t1 audit RUN
  t1 audit RUN/rollouts/iter_0003 --report audit.json
  --report FILE         everything that was found, as JSON, with the SHA-256 of all files read
  --baseline rerender   beside it: what decoding, parsing, rendering and encoding again would have done
  --rescore N           score N trajectories of each directory again with the engine (prompt log-probabilities)
  --model DIR           model directory for the last two; default: the run's own
  --chat-format NAME    of the baseline; default: the records' own""",
        configured=False,
    ),
    Command(
        ("compare",), "inspect:compare", "is run B better than run A? Paired bootstrap over tasks and attempts",
        """  t1 compare RUN_A RUN_B             newest evaluations of two runs
  t1 compare RUN                     first and newest evaluation of one run
  t1 compare A/evaluations/iter_0000 B/evaluations/iter_0003
  --seed N --samples N               of the bootstrap""",
        configured=False,
    ),
    Command(
        ("patch",), "patch:patch", "patches for a Megatron checkout of your own: status, apply, revert, diff",
        """  t1 patch status --checkout DIR     what each patch is to the checkout; exit status 1 when one doesn't fit
  t1 patch diff   --checkout DIR     what the patches change, as a unified diff
  t1 patch apply  --checkout DIR     all that fit, or nothing; again: nothing more happens
  t1 patch revert --checkout DIR     the files are byte for byte what they were
  --only NAME                        this patch only; may be repeated
  --dry-run                          say what would be done, and write nothing
  --patches DIR                      declarations of your own

DIR is a Megatron-LM checkout, or a directory that holds megatron/core (site-packages). Nothing in it is run.
docs/patches.md lists the patches.""",
        configured=False,
    ),
)  # fmt: skip


@dataclass
class Invocation:
    """A parsed command line."""

    command: Command
    arguments: list[str] = field(default_factory=list)  # overrides, or plain arguments
    print_config: bool = False
    multirun: bool = False
    config_dirs: list[str] = field(default_factory=list)


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
        elif word.startswith("-"):
            raise ConfigError(
                f"unknown option {word}",
                where=f"t1 {' '.join(command.words)}",
                remedy="options: --cfg job, -m, --config-dir",
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
        print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
