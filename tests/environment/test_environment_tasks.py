"""Loading: every problem of a task is named by file and field; writing and loading give the same task back."""

import stat

import pytest

from megatron_t1.environment.image import CopyFiles, MakeDirectory, RunCommand, load_image
from megatron_t1.environment.loading import load_task, load_tasks, write_task
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error


@pytest.fixture
def folder(tmp_path):
    """A sound task directory."""
    path = tmp_path / "tasks" / "one"
    for name, text in {
        "task.toml": "[metadata]\nbaseline = 1\n[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 9.5\n"
        'env = {A = "1"}\n',
        "instruction.md": "do it\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files/ /app/\n",
        "environment/files/sub/x.sh": "echo x\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "tests/data/expected": "x\n",
        "solution/solve.sh": "true\n",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "environment/files/sub/x.sh").chmod(0o750)
    return path


def test_load(folder):
    task = load_task(folder)
    assert (task.name, task.instruction, task.baseline) == ("one", "do it", 1)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.verifier_env) == (30.0, 9.5, {"A": "1"})
    assert task.image.workdir == "/app"
    assert task.image.steps[1].files == {"/app/sub/x.sh": (b"echo x\n", 0o750)}
    assert sorted(task.test_files()) == ["data/expected", "test.sh"]
    assert [task.tests_dir.name, task.solution_dir.name, task.environment_dir.name] == [
        "tests",
        "solution",
        "environment",
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("task.toml", None, "task.toml: missing"),
        ("task.toml", "a = = 1", "task.toml: Invalid value"),
        ("task.toml", "metadata = 3", "task.toml: metadata: 3 is not a table"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'", "agent.timeout_sec: 'long' is not a positive number"),
        ("task.toml", "[verifier]\ntimeout_sec = -1", "verifier.timeout_sec: -1 is not"),
        ("task.toml", "[verifier]\ntimeout_sec = nan", "verifier.timeout_sec: nan is not"),
        ("task.toml", "[verifier]\ntimeout_sec = true", "verifier.timeout_sec: True is not"),
        ("task.toml", "[metadata]\nbaseline = 1.5", "metadata.baseline: 1.5 is not a number of checks"),
        ("task.toml", "[environment]\nworkdir = 'app'", "workdir: 'app' is not an absolute path"),
        ("task.toml", "[environment]\nenv = {A = 1}", "environment.env: {'A': 1} is not a table of texts"),
        ("instruction.md", None, "instruction.md: missing"),
        ("instruction.md", " \n", "instruction.md: empty"),
        ("tests/test.sh", None, "tests/test.sh: missing"),
        ("tests/test.sh", "", "tests/test.sh: empty"),
        ("environment/Dockerfile", None, "environment/Dockerfile: missing"),
        ("environment/Dockerfile", "FROM a\nONBUILD RUN x\nVOLUME /x", "line 2: ONBUILD is not supported; line 3"),
        ("environment/Dockerfile", "FROM a\nCOPY nothing /app/", "nothing does not exist"),
        ("environment/Dockerfile", "FROM a\nCOPY ../instruction.md /app/", "outside environment/"),
        ("environment/Dockerfile", "FROM a\nCOPY --from=b x /app/", "option --from is not supported"),
        ("environment/Dockerfile", "FROM a\nFROM b", "more than one build stage"),
        ("environment/Dockerfile", "FROM a\nADD https://host/x /app/", "only local plain files"),
        ("environment/Dockerfile", "FROM a\nRUN --mount=type=cache true", "option --mount=type=cache"),
    ],
)
def test_problems_are_named(folder, name, content, problem):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(T1Error) as caught:
        load_task(folder)
    assert problem in caught.value.problem
    assert str(folder) in caught.value.where


def test_all_problems_of_all_tasks_at_once(folder):
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 0\n[verifier]\ntimeout_sec = 'x'")
    (folder / "tests/test.sh").unlink()
    second = folder.with_name("two")
    second.mkdir()
    (second / "instruction.md").write_text("x")
    with pytest.raises(T1Error) as caught:
        load_tasks(folder.parent)
    for part in (
        "2 of 2 tasks",
        "agent.timeout_sec",
        "verifier.timeout_sec",
        "test.sh: missing",
        "two: task.toml: missing",
    ):
        assert part in caught.value.problem


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(T1Error, match="no such task directory"):
        load_tasks(tmp_path / "nothing")
    with pytest.raises(T1Error, match="no task"):
        load_tasks(tmp_path)


def test_write_and_load_agree(tmp_path):
    content = TaskContent(
        files={"a b.txt": (b"\x00\xff", 0o600), "d/e.txt": (b"e", 0o755)},
        directories=("empty", "deep/empty"),
        tests={"test.sh": (b"true\n", 0o755)},
        solution={"solve.sh": (b"true\n", 0o755)},
    )
    task = Task(
        "t", 'say "hi"', content=content, env={"A": 'x "y" z'}, baseline=2, workdir="/job",
        agent_timeout_s=5.0, verifier_timeout_s=6.0,
        metadata={"difficulty": "easy", "n": 3, "list": ["a", "b"], "ok": True},
    )  # fmt: skip
    write_task(task, tmp_path / "t")
    loaded = load_task(tmp_path / "t")
    assert (loaded.instruction, loaded.baseline, loaded.image.env) == (task.instruction, 2, task.env)
    assert (loaded.agent_timeout_s, loaded.verifier_timeout_s) == (5.0, 6.0)
    assert loaded.metadata == {**task.metadata, "baseline": 2}
    assert (loaded.test_files(), loaded.solution_files()) == (content.tests, content.solution)
    made = {step.path for step in loaded.image.steps if isinstance(step, MakeDirectory)}
    assert made == {"/job", "/job/empty", "/job/deep/empty"}
    assert _copied(loaded) == _copied(task)


def test_dockerfile_steps(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.txt").write_text("1")
    (tmp_path / "data" / "link").symlink_to("/etc/passwd")
    (tmp_path / "Dockerfile").write_text(
        '# comment\nFROM a\nENV A=1 B="two words"\nENV OLD form of it\nWORKDIR /srv\nWORKDIR $A/x\n'
        "COPY --chmod=700 data/*.txt ./\nCOPY data /d/\nADD data/one.txt other.txt\n"
        'RUN echo a && \\\n    echo b\nRUN ["touch", "x y"]\nCMD ["bash"]\n'
    )
    image = load_image(tmp_path, where="task t")
    assert (image.workdir, image.env) == ("/srv/1/x", {"A": "1", "B": "two words", "OLD": "form of it"})
    copies = [step for step in image.steps if isinstance(step, CopyFiles)]
    assert copies[0].files == {"/srv/1/x/one.txt": (b"1", 0o700)}
    assert copies[1].files.keys() == {"/d/one.txt"} and copies[1].links == {"/d/link": "/etc/passwd"}
    assert copies[2].files.keys() == {"/srv/1/x/other.txt"}
    runs = [step.words for step in image.steps if isinstance(step, RunCommand)]
    assert runs == [("/bin/sh", "-c", "echo a &&     echo b"), ("touch", "x y")]


def test_dockerfile_is_followed_in_the_sandbox(in_sandbox, folder):
    (folder / "environment" / "Dockerfile").write_text(
        "FROM a\nENV GREETING=hello\nWORKDIR /app\n"
        "RUN ln -s /etc escape && mkdir -p /opt/x && echo $GREETING > /opt/x/y\n"
        "COPY files/sub/x.sh escape/copied.sh\nRUN cat /etc/copied.sh >> /opt/x/y\n"
    )
    task = load_task(folder)

    async def body(sandbox):
        await sandbox.start(task)
        result = await sandbox.run("cat /opt/x/y; pwd; echo $GREETING; stat -c %a /etc/copied.sh", 10)
        return result, await verify(sandbox, task)

    result, verdict = in_sandbox(body)
    assert result.output == "hello\necho x\n/app\nhello\n750\n"
    assert verdict.solved and verdict.baseline == 1


def test_failing_run_line_is_named(in_sandbox, folder):
    (folder / "environment" / "Dockerfile").write_text("FROM a\nRUN echo broken && false\n")

    async def body(sandbox):
        with pytest.raises(T1Error, match="exit status 1: broken") as caught:
            await sandbox.start(load_task(folder))
        assert "task one" in caught.value.where

    in_sandbox(body)


def test_start_again_really_resets(in_sandbox, make_task):
    first = make_task({"a.txt": "1\n"}, directories=("d",))
    second = make_task({"b.txt": "2\n"})

    async def listing(sandbox):
        command = (
            "find / -xdev -not -path '/usr/*' -printf '%p %m %l\\n' | sort; cat /etc/hosts /etc/passwd; env | sort; pwd"
        )
        return (await sandbox.run(command, 10)).output

    async def body(sandbox):
        await sandbox.start(second)
        fresh = await listing(sandbox)
        await sandbox.start(first)
        await sandbox.run(
            "export X=1; cd /tmp; umask 0; sleep 300 & rm -rf /home /etc/hosts /app/a.txt; echo x >> /etc/passwd;"
            " chmod 700 / /etc /tmp; touch /tmp/x /etc/x /x /root/.bashrc; mkdir -p /var/tmp/a/b; ln -s /tmp /home;"
            " rm /bin; ln -s /tmp /bin; mkdir -p /srv/deep; cd /srv/deep; for i in $(seq 30); do mkdir a; cd a; done;"
            " rmdir /opt; touch /opt; mkdir /lib32 /extra; mkdir /srv/shut; touch /srv/shut/x; chmod 000 /srv/shut",
            20,
        )
        await sandbox.start(second)
        return fresh, await listing(sandbox)

    fresh, after = in_sandbox(body)
    assert "/app/b.txt" in fresh and "/app/a.txt" not in fresh
    assert after == fresh


@pytest.mark.slow
def test_very_deep_tree_is_removed(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        command = "import os\nfor _ in range(1200):\n os.mkdir('d'*20)\n os.chdir('d'*20)"
        result = await sandbox.run(f'python3 -I -c "{command}"', 30)
        await sandbox.start(make_task())
        return result, await sandbox.run("ls -A", 10)

    made, after = in_sandbox(body)
    assert made.exit_code == 0
    assert after.output == ""


def _copied(task):
    found = {}
    for step in task.image.steps:
        if isinstance(step, CopyFiles):
            found.update({path: (content, stat.S_IMODE(mode)) for path, (content, mode) in step.files.items()})
    return found
