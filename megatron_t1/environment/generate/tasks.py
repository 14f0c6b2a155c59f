"""Join parts to tasks, from a seed: the train and held-out sets, and what demonstrations are made of.

Everything here is a pure function of (options, seed): no file, no clock, no process.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_t1.config.schema import GenerateConfig
from megatron_t1.environment.generate import checks
from megatron_t1.environment.generate.families import FAMILIES, Draw, Part
from megatron_t1.environment.generate.pools import POOLS, Pool
from megatron_t1.environment.task import DEFAULT_WORKDIR, Task, TaskContent
from megatron_t1.errors import ConfigError, T1Error

SEPARATOR = " ; "  # between the instructions of the parts
DIFFICULTIES = {1: "easy", 2: "easy", 3: "medium", 4: "hard"}
DEMONSTRATION_PARTS = (1, 2)
LONG_DEMONSTRATION_PARTS = (3, 4)  # of the share that `demonstration_long_share` asks for
SKIPPED_SHARE = 0.1  # parts that a demonstration of several leaves out, scaled by demonstration_noise
AGENT_TIMEOUT_S, VERIFIER_TIMEOUT_S = 120.0, 30.0
MAX_TRIES = 1000


@dataclass(frozen=True)
class GeneratedTask:
    """Attributes:
    fingerprint: SHA-256 over initial files and reference commands: two wordings of one job have the same.
    """

    task: Task
    families: tuple[str, ...]
    parts: tuple[Part, ...]
    fingerprint: str


def chosen_families(config: GenerateConfig) -> tuple[str, ...]:
    """Families in force. Raises ConfigError naming every option of `generate` that can't work."""
    problems = []
    if config.pool not in POOLS:
        problems.append(f"generate.pool={config.pool}: choose {' or '.join(POOLS)}")
    unknown = [name for name in config.families if name not in FAMILIES]
    if unknown:
        problems.append(f"generate.families: unknown {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    pool = POOLS.get(config.pool, POOLS["full"])
    families = tuple(dict.fromkeys(config.families)) or pool.families or tuple(FAMILIES)
    if not 1 <= config.min_parts <= config.max_parts:
        problems.append(
            f"generate.min_parts={config.min_parts}, max_parts={config.max_parts}: 1 <= min <= max is needed"
        )
    most = max(config.max_parts, *DEMONSTRATION_PARTS)
    if most > min(len(families), max(DIFFICULTIES)):
        problems.append(f"{most} parts in one task: at most {max(DIFFICULTIES)}, and one family for each of them")
    for name in ("train", "held_out", "demonstrations"):
        if getattr(config, name) < 0:
            problems.append(f"generate.{name}={getattr(config, name)} is negative")
    if config.demonstration_noise < 0:
        problems.append(f"generate.demonstration_noise={config.demonstration_noise} is negative")
    if not 0.0 <= config.demonstration_long_share <= 1.0:
        problems.append(f"generate.demonstration_long_share={config.demonstration_long_share} isn't in 0 to 1")
    if problems:
        raise ConfigError("; ".join(problems), where="generate", remedy="correct these options")
    return families


def make_task(name: str, rng: random.Random, pool: Pool, families: tuple[str, ...], parts: int) -> GeneratedTask:
    """One task of `parts` different families."""
    draw = Draw(rng, pool)
    names = tuple(rng.sample(families, parts))
    made = tuple(FAMILIES[family].make(draw) for family in names)
    files = {
        path: (content if isinstance(content, bytes) else content.encode(), 0o644)
        for path, content in sorted(draw.files.items())
    }
    commands = [part.command for part in made]
    script = checks.test_script([item for part in made for item in part.checks], DEFAULT_WORKDIR)
    fingerprint = _fingerprint(commands, files, draw.directories)
    task = Task(
        name=name,
        instruction=SEPARATOR.join(rng.choice(part.instructions) for part in made),
        content=TaskContent(
            files=files,
            directories=tuple(draw.directories),
            tests={"test.sh": (checks.TEST_SH.encode(), 0o755), "test_outputs.py": (script.encode(), 0o644)},
            solution={"solve.sh": (("#!/bin/bash\nset -e\n" + "\n".join(commands) + "\n").encode(), 0o755)},
        ),
        workdir=DEFAULT_WORKDIR,
        agent_timeout_s=AGENT_TIMEOUT_S,
        verifier_timeout_s=VERIFIER_TIMEOUT_S,
        metadata={
            "difficulty": DIFFICULTIES[parts],
            "category": "terminal",
            "families": list(names),
            "checks": 2 * parts,
            "fingerprint": fingerprint,
        },
    )
    return GeneratedTask(task, names, made, fingerprint)


def plan_sets(config: GenerateConfig, seed: int) -> tuple[list[GeneratedTask], list[GeneratedTask]]:
    """The train and the held-out tasks: all of different content."""
    families, seen = chosen_families(config), set()
    return (
        _distinct(config, seed, "train", config.train, families, seen),
        _distinct(config, seed, "held_out", config.held_out, families, seen),
    )


def demonstration_tasks(
    config: GenerateConfig, seed: int, count: int | None = None
) -> Iterator[tuple[Task, list[str]]]:
    """Tasks of one or two parts (a share of three or four) with the commands of a scripted, imperfect agent.

    A part gets a wrong command with its family's probability, or is left out; both are scaled by
    `demonstration_noise`. No task has the content of a train or held-out task of the same options and seed.

    Args:
        count: how many; None: `config.demonstrations`.
    """
    families, pool = chosen_families(config), POOLS[config.pool]
    train, held_out = plan_sets(config, seed)
    taken = {generated.fingerprint for generated in (*train, *held_out)}
    count = config.demonstrations if count is None else count
    made, index = 0, 0
    while made < count:
        rng = random.Random(f"{seed}/demonstration/{index}")
        long = rng.random() < config.demonstration_long_share
        parts = rng.choice(LONG_DEMONSTRATION_PARTS if long else DEMONSTRATION_PARTS)
        generated = make_task(f"demonstration-{index:06d}", rng, pool, families, parts)
        index += 1
        if generated.fingerprint not in taken:
            made += 1
            yield generated.task, _imperfect_commands(generated, rng, config.demonstration_noise)


def _imperfect_commands(generated: GeneratedTask, rng: random.Random, noise: float) -> list[str]:
    commands = []
    for family, part in zip(generated.families, generated.parts, strict=True):
        if len(generated.parts) > 1 and rng.random() < SKIPPED_SHARE * noise:
            continue
        wrong = rng.random() < FAMILIES[family].noise * noise
        commands.append(rng.choice(part.wrong) if wrong else part.command)
    return commands


def _distinct(
    config: GenerateConfig, seed: int, name: str, count: int, families: tuple[str, ...], seen: set[str]
) -> list[GeneratedTask]:
    made: list[GeneratedTask] = []
    index = repeats = 0
    while len(made) < count:
        rng = random.Random(f"{seed}/{name}/{index}")
        parts = rng.randint(config.min_parts, config.max_parts)
        generated = make_task(f"{name}-{len(made):05d}", rng, POOLS[config.pool], families, parts)
        index += 1
        if generated.fingerprint not in seen:
            seen.add(generated.fingerprint)
            made.append(generated)
            repeats = 0
        elif (repeats := repeats + 1) > MAX_TRIES:
            raise T1Error(
                f"only {len(made)} different tasks of {count} found for the set {name}",
                where=f"generate.pool={config.pool}, families={', '.join(families)}",
                remedy="ask for fewer tasks, more families or parts, or the full pool",
            )
    return made


def _fingerprint(commands: list[str], files: dict[str, tuple[bytes, int]], directories: list[str]) -> str:
    state = hashlib.sha256(json.dumps([sorted(commands), sorted(directories)]).encode())
    for path, (content, mode) in files.items():
        state.update(f"\0{path}\0{mode}\0{len(content)}\0".encode() + content)
    return state.hexdigest()
