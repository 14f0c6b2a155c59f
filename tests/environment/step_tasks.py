"""A task of three steps in Harbor's format, to be changed by a test, and how it is played in any sandbox."""

from __future__ import annotations

from megatron_t1.environment.loading import load_task
from megatron_t1.environment.steps import begin_step
from megatron_t1.environment.verifier import verify

SETUP_S = 2.0
CTRF = """\
#!/bin/bash
/usr/bin/python3 -I - <<'END'
import json, os
checks = {%s}
tests = [{"name": name, "status": "passed" if passed else "failed"} for name, passed in checks.items()]
json.dump({"results": {"tests": tests}}, open("/logs/verifier/ctrf.json", "w"))
END
"""
TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 50
[verifier]
timeout_sec = 40
[verifier.env]
WHO = "task"
[[steps]]
name = "plan"
[[steps]]
name = "build"
[steps.verifier.env]
WHO = "step"
[[steps]]
name = "ship"
"""
FINAL = {"[agent]": 'multi_step_reward_strategy = "final"\n[agent]'}


def exists(**paths: str) -> str:
    """A test.sh whose checks are that these paths exist."""
    return CTRF % ", ".join(f'"{name}": os.path.exists("{path}")' for name, path in paths.items())


FILES = {
    "task.toml": TOML,
    "environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN touch kept\n",
    "tests/shared.txt": "of all steps\n",
    "steps/plan/instruction.md": "create alpha.txt\n",
    "steps/plan/tests/test.sh": exists(kept="/app/kept", alpha="/app/alpha.txt"),
    "steps/plan/solution/solve.sh": "touch alpha.txt\n",
    "steps/build/instruction.md": "create beta.txt\n",
    "steps/build/workdir/data.txt": "of the second step\n",
    "steps/build/workdir/setup.sh": 'cp data.txt made; [ "$0" = /app/setup.sh ]\n',
    "steps/build/tests/test.sh": exists(alpha="/app/alpha.txt", beta="/app/beta.txt", made="/app/made"),
    "steps/build/solution/solve.sh": "touch beta.txt\n",
    "steps/ship/instruction.md": "create gamma.txt\n",
    "steps/ship/tests/test.sh": exists(gamma="/app/gamma.txt"),
    "steps/ship/solution/solve.sh": "touch gamma.txt\n",
}


def write_steps(folder, changes=None, toml=None):
    """The task's directory; `changes` are files (None: without it), `toml` replaces lines of task.toml."""
    text = TOML
    for old, new in (toml or {}).items():
        assert text.count(f"{old}\n") == 1
        text = text.replace(f"{old}\n", f"{new}\n")
    for name, content in {**FILES, "task.toml": text, **(changes or {})}.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    return folder


def maker(folder):
    """Writes such tasks into a folder, and loads them."""

    def write(changes=None, toml=None, name="steps-task"):
        return load_task(write_steps(folder / name, changes, toml))

    return write


async def play(sandbox, task, *commands):
    """Each step's command, or None for nothing; returns each step's verdict, or why it couldn't be begun."""
    said = []
    await sandbox.start(task)
    for number, command in enumerate(commands):
        if problem := await begin_step(sandbox, task, number, SETUP_S):
            return [*said, problem]
        if command:
            result = await sandbox.run(command, 20.0)
            assert result.exit_code == 0, result.output
        said.append(await verify(sandbox, task.stages[number]))
    return said


async def check_three_steps(sandbox, task):
    """What holds in every backend: files stay, processes, variables and what a verifier used don't."""
    leave = "touch alpha.txt; cd /tmp; export X=1; sleep 300 & mkdir -p /tests /logs/verifier; echo 1 > /tests/mine"
    look = "[ -z $X ] && [ $PWD = /app ] && [ $(ps -e | grep -c sleep) = 0 ] && touch beta.txt && cat data.txt"
    clean = "! ls /tests/test.sh /tests/shared.txt /logs/verifier/ctrf.json 2>/dev/null && touch gamma.txt"
    plan, build, ship = await play(sandbox, task, leave, look, clean)
    assert plan.checks == {"kept": True, "alpha": True}, plan
    assert build.checks == {"alpha": True, "beta": True, "made": True}, build
    assert ship.solved, ship
    plan, build = await play(sandbox, task, "touch alpha.txt queue.py", "touch beta.txt")
    assert not plan.trusted and not build.trusted and "/app/queue.py" in build.reason
    plan, problem = await play(sandbox, task, "touch alpha.txt; mkdir -p data.txt/x", None)
    assert plan.solved and "its files can't be put in place" in problem, problem
