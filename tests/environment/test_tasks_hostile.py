"""Tasks made to hang, fill or crash whoever reads them: each is named in a refusal, and the others go on."""

import json
import os
import shutil
import time

import pytest

from megatron_t1.cli import main
from megatron_t1.environment import digest, tree
from megatron_t1.environment.image import load_image
from megatron_t1.environment.loading import load_task, load_tasks
from megatron_t1.environment.sandbox.build import find_user
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.root import remove_tree
from megatron_t1.errors import T1Error
from megatron_t1.rollout.schedule import tasks_of_iteration

SPARSE_BYTES = 200 << 30  # takes no room on a disk
BOMB = "bomb: [&a [x, x, x, x, x, x, x, x], " + ", ".join(
    f"&{'abcdefghij'[i + 1]} [{', '.join(['*' + 'abcdefghij'[i]] * 8)}]" for i in range(9)
)


def write_task(folder, *, toml="", dockerfile="FROM a\nWORKDIR /app\n"):
    for name, text in {
        "task.toml": toml, "instruction.md": "do it\n", "environment/Dockerfile": dockerfile, "solution/solve.sh": ":",
        "tests/test.sh": "test -e /app/x; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(SPARSE_BYTES)


def deep(folder, levels=1500):
    """Deeper than Python recurses; paths of 3,000 characters are still ones that Linux opens."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


@pytest.mark.parametrize(
    "toml",
    [
        "[zzz]\n" + ".".join(["a"] * 3000) + " = 1\n",
        "[zzz]\n" + ".".join(["a"] * 20_000) + " = 1\n",
        "[" + " . ".join(['"a"'] * 20_000) + "]\n",
        "a = " + "[" * 200 + "]" * 200,
        "a = " + "{a.b.c.d.e.f.g = " * 20 + "1" + "}" * 20,
    ],
)
def test_tables_in_tables(tmp_path, toml):
    began = time.monotonic()
    with pytest.raises(T1Error, match=r"task\.toml: nested too deeply"):
        load_task(write_task(tmp_path / "t", toml=toml))
    assert time.monotonic() - began < 5


def test_dots_in_a_text_are_no_tables(tmp_path):
    assert load_task(write_task(tmp_path / "t", toml=f'[metadata]\nnote = "{". a" * 500}"\na.b.c.d = 1\n')).metadata


def test_more_variables_than_a_program_takes(tmp_path):
    lines = "\n".join(f'V{number} = "{"x" * 1000}"' for number in range(200))
    toml = f"[environment.env]\n{lines}\n[verifier.env]\nBIG = '{'x' * 140_000}'\n"
    with pytest.raises(T1Error, match=r"verifier\.env: BIG has 140004 bytes"):
        load_task(write_task(tmp_path / "t", toml=toml))


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = write_task(tmp_path / "t", dockerfile="FROM a\nCOPY p /x\n")
    os.mkfifo(folder / "environment/p")
    os.mkfifo(folder / "tests/p")
    with pytest.raises(T1Error, match="line 2: COPY: not a regular file"):
        load_task(folder)
    (folder / "environment/Dockerfile").write_text("FROM a\nCOPY . /x\n")
    assert list(load_task(folder).test_files()) == ["test.sh"]
    os.mkfifo(folder / "environment/.dockerignore")
    with pytest.raises(T1Error, match="not a regular file"):
        load_task(folder)


def test_files_larger_than_the_memory(tmp_path):
    folder = write_task(tmp_path / "t", dockerfile="FROM a\nCOPY big /x\n")
    sparse(folder / "environment/big")
    with pytest.raises(T1Error, match="line 2: COPY: more than 1,073,741,824 bytes"):
        load_task(folder)
    (folder / "environment/big").rename(folder / "tests/big")
    (folder / "environment/Dockerfile").write_text("FROM a\n")
    with pytest.raises(T1Error, match="more than 1,073,741,824 bytes"):
        load_task(folder).test_files()
    with pytest.raises(OSError, match="GiB of files"):
        digest.task_digest(folder)
    (tmp_path / "list").write_text(json.dumps({"path": "t", "sha256": "0" * 64}) + "\n")
    with pytest.raises(T1Error, match="GiB of files"):
        load_tasks(tmp_path / "list")


def test_the_same_files_again_and_again(tmp_path, monkeypatch):
    (tmp_path / "one").write_bytes(bytes(3000))
    (tmp_path / "Dockerfile").write_text("FROM a\n" + "COPY one /x\n" * 4)
    load_image(tmp_path, where="t")
    monkeypatch.setattr(tree.Reader.__init__, "__defaults__", (10_000,))
    with pytest.raises(T1Error, match="line 5: COPY: more than 10,000 bytes"):
        load_image(tmp_path, where="t")


def test_patterns_over_links_that_lead_back(tmp_path):
    for number in range(6):
        (tmp_path / f"l{number}").symlink_to(".")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f1").write_text("1")
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY */f[0-9] /x/\n")
    assert list(load_image(tmp_path, where="t").steps[0].files) == ["/x/f1"]
    for pattern in ("**/" * 30 + "..", "*/" * 40 + "x", "**/" * 30 + "f1", "*/../*"):
        (tmp_path / "Dockerfile").write_text(f"FROM a\nCOPY {pattern} /x/\n")
        with pytest.raises(T1Error, match="line 2: COPY"):
            load_image(tmp_path, where="t")


def test_a_tree_deeper_than_python_recurses(tmp_path):
    folder = write_task(tmp_path / "t")
    try:
        deep(folder / "tests")
        assert list(load_task(folder).test_files()) == ["test.sh"] and digest.task_digest(folder)
    finally:
        remove_tree(folder / "tests")  # pytest's own removal recurses


def test_the_digest_is_of_names_kinds_and_contents(tmp_path):
    folder = write_task(tmp_path / "t")
    seen = {digest.task_digest(folder)}
    for change in (
        lambda: (folder / "tests/test.sh").chmod(0o755),
        lambda: (folder / "tests/more").write_text("x"),
        lambda: (folder / "tests/more").rename(folder / "tests/other"),
        lambda: (folder / "tests/link").symlink_to("other"),
        lambda: os.mkfifo(folder / "tests/pipe"),
    ):
        change()
        seen.add(digest.task_digest(folder))
    assert len(seen) == 6
    (folder / "tests/__pycache__").mkdir()
    (folder / "tests/__pycache__/x").write_text("x")
    assert digest.task_digest(folder) in seen


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (BOMB + "]\n", "aliases stand for too much"),
        ("bomb: &a [*a]\n", "an alias stands for what it is a part of"),
        ("bomb: !!set {a, b}\n", "can't be converted"),
        ("bomb: !!binary aGVsbG8=\n", "can't be converted"),
    ],
)
def test_aliases_of_aliases_leave_nothing_half_written(tmp_path, capsys, extra, problem):
    folder = tmp_path / "old" / "t"
    folder.mkdir(parents=True)
    (folder / "task.yaml").write_text(f"instruction: do it\n{extra}")
    (folder / "Dockerfile").write_text("FROM a\n")
    (folder / "run-tests.sh").write_text("exit 0\n")
    (folder / "docker-compose.yaml").write_text("services: {client: {build: .}}\n")
    assert main(["tasks", "convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    (folder / "task.yaml").write_text("instruction: &a do it\nextra: [*a, *a]\n")
    assert main(["tasks", "convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t"]


class Root:
    """What `find_user` sees of a private root: two files."""

    def __init__(self, passwd, group=""):
        self.files, self._texts = self, {"/etc/passwd": passwd, "/etc/group": group}

    def read(self, path, limit):
        return self._texts[path].encode()[:limit]


@pytest.mark.parametrize(
    ("passwd", "user"),
    [
        ("evil:x:abc:def::/h:/bin/sh", "evil"),
        ("evil:x:1:²::/h:/bin/sh", "evil"),
        ("evil:x:99999999999999:1::/h:/bin/sh", "evil"),
        ("evil:x:1:1::relative:/bin/sh", "evil"),
        ("evil:x:1:1::/h\0x:/bin/sh", "evil"),
        (f"evil:x:1:1::/{'h' * 10_000}:/bin/sh", "evil"),
        ("", "²"),
        ("", "1:²"),
        ("", "4294967295"),
        ("", "1:99999999999999999999"),
    ],
)
def test_a_damaged_user_database(passwd, user):
    with pytest.raises(SandboxLost, match="USER"):
        find_user(Root(passwd), user)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight):
    with pytest.raises(T1Error, match="not a positive number"):
        tasks_of_iteration([(["a"], 1.0), (["b"], weight)], seed=1, iteration=0, count=4)


def test_large_weights_are_shares_too():
    chosen = tasks_of_iteration([(["a"], 1e308), (["b"], 1e308)], seed=1, iteration=0, count=100)
    assert 45 <= chosen.count("a") <= 55


def test_preflight_looks_at_the_options(capsys):
    assert main(["tasks", "preflight", "env.sandbox.memory_mb=-1"]) == 2
    assert "memory_mb=-1" in capsys.readouterr().err
    assert main(["tasks", "preflight", "env.sandbox._target_=megatron_t1.no.Such"]) != 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_one_hostile_task_does_not_end_the_check(tmp_path, capsys):
    tasks = tmp_path / "tasks"
    for name in ("a_good", "z_good"):
        write_task(tasks / name)
        (tasks / name / "solution/solve.sh").write_text("touch /app/x\n")
    write_task(tasks / "chmod", dockerfile="FROM a\nCOPY --chmod=7777777777777 Dockerfile /y\n")
    write_task(tasks / "nested", toml="[zzz]\n" + ".".join(["a"] * 3000) + "=1\n")
    os.mkfifo(write_task(tasks / "pipe", dockerfile="FROM a\nCOPY p /x\n") / "environment/p")
    sparse(write_task(tasks / "sparse") / "tests/big")
    write_task(tasks / "user", dockerfile="FROM a\nRUN echo evil:x:a:b::/h:/bin/sh > /etc/passwd\nUSER evil\nRUN :\n")
    write_task(tasks / "most", dockerfile="FROM a\nWORKDIR /app\nENV V=" + "x" * 1000 + "\n"
               + "\n".join(f"ENV V{number}=$V" for number in range(990)) + "\nRUN test ${#V989} = 1000\n")  # fmt: skip
    words = ["tasks", "check", str(tasks), "--out", str(tmp_path / "out"), "--repeats", "1", "--workers", "2"]
    assert main(words) == 1
    lines = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert {line["name"]: line["status"] for line in lines} == {
        "a_good": "proven", "chmod": "broken", "most": "unsolved", "nested": "broken", "pipe": "broken",
        "sparse": "broken", "user": "unbuildable", "z_good": "proven",
    }  # fmt: skip
    (tasks / "sparse/tests/big").unlink()
    assert main(words) == 1
    assert "sparse: unsolved" in capsys.readouterr().out
