"""Generated tasks: sound, different, the same from the same seed, and hard to pass by a wrong command."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from megatron_t1.config.schema import GenerateConfig
from megatron_t1.environment.generate.families import FAMILIES, Draw
from megatron_t1.environment.generate.pools import POOLS
from megatron_t1.environment.generate.sets import generate_sets, prove
from megatron_t1.environment.generate.tasks import chosen_families, demonstration_tasks, make_task, plan_sets
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import ConfigError, T1Error


def _commands(generated):
    return [part.command for part in generated.parts]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_reference_passes_and_wrong_commands_do_not(family, in_sandbox):
    generated = make_task("t", random.Random(f"1/{family}"), POOLS["small"], (family,), 1)

    async def body(sandbox):
        async def passed(commands):
            await sandbox.start(generated.task)
            for command in commands:
                await sandbox.run(command, 10)
            verdict = await verify(sandbox, generated.task)
            assert verdict.trusted and verdict.total == 2, verdict.reason
            return verdict.passed

        assert await passed(_commands(generated)) == 2
        assert await passed([]) < 2
        for wrong in generated.parts[0].wrong:
            assert await passed([wrong]) < 2, wrong

    in_sandbox(body)


def test_checks_run_under_pytest_too(in_sandbox, tmp_path):
    generated = make_task("t", random.Random(5), POOLS["full"], tuple(FAMILIES), 4)
    source = generated.task.content.tests["test_outputs.py"][0].decode()
    names = [line.split()[1].partition("(")[0] for line in source.splitlines() if line.startswith("def test_")]
    assert len(names) == len(set(names)) == 8

    async def body(sandbox):
        await sandbox.start(generated.task)
        return await verify(sandbox, generated.task)

    verdict = in_sandbox(body)
    assert sorted(verdict.checks) == sorted(names)
    scope = {"__name__": "collected"}
    exec(compile(source, "test_outputs.py", "exec"), scope)
    scope["ROOT"] = str(tmp_path)
    with pytest.raises((AssertionError, OSError)):
        for name in names:
            scope[name]()


def test_parts_share_no_file():
    for seed in range(200):
        draw = Draw(random.Random(seed), POOLS["small"])
        parts = [FAMILIES[name].make(draw) for name in random.Random(seed).sample(sorted(FAMILIES), 4)]
        assert all(len(part.checks) == 2 and part.wrong and part.instructions for part in parts)
        assert all(part.command not in part.wrong for part in parts)


def test_sets_are_reproducible_and_disjoint():
    config = GenerateConfig(train=300, held_out=150, pool="small")
    train, held_out = plan_sets(config, 0)
    again, _ = plan_sets(config, 0)
    other, _ = plan_sets(config, 1)
    assert [item.task for item in train] == [item.task for item in again]
    assert {item.fingerprint for item in train} != {item.fingerprint for item in other}
    fingerprints = [item.fingerprint for item in (*train, *held_out)]
    assert len(set(fingerprints)) == 450
    assert {len(item.parts) for item in train} == {2, 3, 4}
    assert {item.task.metadata["difficulty"] for item in train} == {"easy", "medium", "hard"}
    assert {family for item in train for family in item.families} == set(POOLS["small"].families)


def test_demonstrations_avoid_the_sets_and_are_imperfect():
    config = GenerateConfig(
        train=400, held_out=400, pool="small", families=["chmod", "create", "copy"], min_parts=1, max_parts=2
    )
    taken = {(item.task.instruction, str(item.task.content.files)) for part in plan_sets(config, 0) for item in part}
    demonstrations = list(demonstration_tasks(config, 0, 500))
    assert len(demonstrations) == 500
    assert not {(task.instruction, str(task.content.files)) for task, _ in demonstrations} & taken
    assert [task.instruction for task, _ in demonstration_tasks(config, 0, 20)] == [
        task.instruction for task, _ in demonstrations[:20]
    ]
    assert all(len(commands) <= task.instruction.count(" ; ") + 1 for task, commands in demonstrations)
    perfect = list(demonstration_tasks(replace(config, demonstration_noise=0.0), 0, 500))
    solution = {task.name: task.content.solution["solve.sh"][0].decode().splitlines()[2:] for task, _ in perfect}
    assert all(commands == solution[task.name] for task, commands in perfect)
    differing = sum(commands != solution[task.name] for task, commands in demonstrations)
    assert 100 < differing < 350


def test_a_share_of_demonstrations_is_long():
    config = GenerateConfig(pool="small", train=0, held_out=0, demonstration_long_share=0.25)
    parts = [task.instruction.count(" ; ") + 1 for task, _ in demonstration_tasks(config, 0, 1000)]
    assert set(parts) == {1, 2, 3, 4}
    assert 190 < sum(count > 2 for count in parts) < 310


def test_bad_options_are_listed_together():
    config = GenerateConfig(pool="huge", families=["create", "fly"], min_parts=3, max_parts=2, train=-1)
    with pytest.raises(ConfigError) as caught:
        chosen_families(config)
    for part in ("pool=huge", "unknown fly", "min_parts=3", "train=-1"):
        assert part in caught.value.problem


def test_too_many_tasks_of_too_few_words():
    config = GenerateConfig(
        train=100_000, held_out=0, pool="small", families=["make_tree", "create"], min_parts=1, max_parts=1
    )
    with pytest.raises(T1Error, match="different tasks"):
        plan_sets(config, 0)


def test_generate_sets_proves_and_writes(tmp_path):
    config = GenerateConfig(train=12, held_out=6, workers=4)
    manifest = asyncio.run(generate_sets(config, 3, tmp_path / "out", quiet=True))
    train, held_out = load_tasks(tmp_path / "out/train"), load_tasks(tmp_path / "out/held_out")
    assert (len(train), len(held_out)) == (12, 6)
    assert manifest["sets"]["train"]["baseline_checks"] == sum(task.baseline for task in train)
    assert all(0 <= task.baseline < task.metadata["checks"] for task in train)
    assert manifest == json.loads((tmp_path / "out/manifest.json").read_text())
    assert {task.metadata["fingerprint"] for task in train} == set(manifest["sets"]["train"]["fingerprints"].values())
    assert asyncio.run(generate_sets(config, 3, tmp_path / "out", quiet=True)) == manifest
    with pytest.raises(T1Error, match="another seed"):
        asyncio.run(generate_sets(config, 4, tmp_path / "out", quiet=True))


def test_generate_sets_touches_only_its_own_folder(tmp_path):
    config = GenerateConfig(train=2, held_out=1, workers=2)
    (tmp_path / "train" / "precious").mkdir(parents=True)
    with pytest.raises(T1Error, match="something else: train"):
        asyncio.run(generate_sets(config, 0, tmp_path, quiet=True))
    assert (tmp_path / "train" / "precious").exists()
    (tmp_path / ".generating").touch()  # left by an interrupted generation
    asyncio.run(generate_sets(config, 0, tmp_path, quiet=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held_out", "manifest.json", "train"]
    assert len(load_tasks(tmp_path / "train")) == 2


def test_unsound_tasks_are_refused(in_sandbox, tmp_path):
    generated = make_task("t", random.Random(1), POOLS["small"], ("create",), 1)
    solution = {"solve.sh": (b"#!/bin/bash\ntrue\n", 0o755)}
    lazy = replace(generated, task=replace(generated.task, content=replace(generated.task.content, solution=solution)))
    always = {**generated.task.content.tests, "test_outputs.py": (
        b"open('/logs/verifier/ctrf.json', 'w').write('{\"results\": {\"tests\": ['"
        b"'{\"name\": \"a\", \"status\": \"passed\"}, {\"name\": \"b\", \"status\": \"passed\"}]}}')\n",
        0o644)}  # fmt: skip
    trivial = replace(generated, task=replace(generated.task, content=replace(generated.task.content, tests=always)))

    async def body(sandbox):
        with pytest.raises(T1Error, match="the reference passes 0 of 2"):
            await prove(sandbox, lazy, tmp_path / "lazy")
        with pytest.raises(T1Error, match="doing nothing passes 2 of 2"):
            await prove(sandbox, trivial, tmp_path / "trivial")
        assert not (tmp_path / "trivial").exists()

    in_sandbox(body)
