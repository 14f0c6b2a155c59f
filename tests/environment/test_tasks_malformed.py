"""Hundreds of broken tasks, each ended by an error that names file and field: none by a traceback, none by a wait."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_t1.environment.loading import load_task
from megatron_t1.environment.toml_text import toml_document
from megatron_t1.errors import T1Error

TEXT = (3, -1.5, True, [], ["a"], {}, {"a": 1}, "nul\0")
SECONDS = ("long", "", 0, -1, float("nan"), float("inf"), True, [], {}, 1e300, 10**400)
COUNT = ("2", -1, 1.5, True, [], {}, float("nan"), 1 << 60)
AMOUNT = ("2", -0.5, True, [], {}, float("nan"), float("inf"))
TEXTS = ("a", 1, True, {}, [1], ["a", None or 2], [["a"]])
VARIABLES = (1, "A=1", True, [], ["A=1"], {"A": 1}, {"A": ["x"]}, {"A B": "x"}, {"": "x"}, {"A": "nul\0"})
TABLE = (1, "x", True, [], [{}], 1.5)
USER = (-1, 1.5, True, [], {}, "nul\0")
MODE = ("open", "", 1, True, [], {})
FIELDS = {
    "schema_version": ("", "one", "1.x", "2.0", "99", 1, 1.4, True, [], {}, "1." + "1" * 50),
    "version": ("", "x", "3.1", 1, 1.0, False, [], {}),
    "source": TEXT,
    "artifacts": (1, "x", {}, [1], [{}], [{"source": 1}], [{"source": "/a", "destination": 3}], ["../x"],
                  [{"source": "/a", "destination": "/b"}], [{"source": "a", "destination": "../b"}],
                  [{"source": "a", "exclude": "x"}]),
    "multi_step_reward_strategy": ("best", 1, True, []),
    "task": TABLE,
    "task.name": (*TEXT, "", "noslash", "a/b/c", "/x", "x/", "a/..b", "a b/c", ".a/b"),
    "task.version": TEXT,
    "task.description": TEXT,
    "task.authors": (1, "me", {}, ["me"], [{}], [{"name": 1}], [{"name": "a", "email": 2}]),
    "task.keywords": TEXTS,
    "metadata": TABLE,
    "metadata.baseline": ("1", 1.5, -2, True, [], {}),
    "agent": TABLE,
    "agent.timeout_sec": SECONDS,
    "agent.user": USER,
    "agent.network_mode": MODE,
    "agent.allowed_hosts": (*TEXTS, ["example.com"]),
    "verifier": TABLE,
    "verifier.timeout_sec": SECONDS,
    "verifier.env": VARIABLES,
    "verifier.user": USER,
    "verifier.environment_mode": ("own", 1, True, []),
    "verifier.environment": TABLE,
    "verifier.environment.cpus": AMOUNT,
    "verifier.environment.env": VARIABLES,
    "verifier.collect": (1, "x", {}, ["x"], [{}], [{"command": 1}], [{"command": "x", "timeout_sec": 0}]),
    "environment": TABLE,
    "environment.build_timeout_sec": SECONDS,
    "environment.docker_image": TEXT,
    "environment.os": ("plan9", 1, True, []),
    "environment.cpus": AMOUNT,
    "environment.memory_mb": COUNT,
    "environment.storage_mb": COUNT,
    "environment.gpus": COUNT,
    "environment.gpu_types": TEXTS,
    "environment.tpu": (*TABLE, {}, {"type": "v6e"}, {"type": "v6e", "topology": "2by2"}),
    "environment.mcp_servers": (1, {}, ["x"], [{}], [{"name": "a", "transport": "pigeon"}], [{"name": "a"}],
                                [{"name": "a", "transport": "stdio"}], [{"name": "a", "url": "u", "headers": [1]}]),
    "environment.env": VARIABLES,
    "environment.healthcheck": (*TABLE, {}, {"command": 1}, {"command": "x", "retries": -1}),
    "environment.workdir": (1, True, [], "app", "./app", "/a\0"),
    "environment.network_mode": MODE,
    "environment.allow_internet": ("yes", 1, [], {}),
    "environment.memory": ("2", "2T", "G", 2, True, [], "-1G"),
    "environment.storage": ("lots", 10, False, []),
    "solution": TABLE,
    "solution.env": VARIABLES,
    "steps": (1, "a", {}, ["a"], [{}], [{"name": 1}], [{"name": ""}], [{"name": "../x"}], [{"name": "a/b"}],
              [{"name": "x."}], [{"name": "a", "min_reward": "x"}], [{"name": "a"}, {"name": "A"}], [{"name": "gone"}],
              [{"name": "a" * 300}]),
}  # fmt: skip
MALFORMED = [(name, value) for name, values in FIELDS.items() for value in values]


@pytest.fixture
def folder(tmp_path):
    return sound_task(tmp_path / "one")


def sound_task(path):
    for name, text in {
        "task.toml": "", "instruction.md": "do it\n", "environment/Dockerfile": "FROM a\nWORKDIR /app\n",
        "tests/test.sh": "true\n", "solution/solve.sh": "true\n",
    }.items():  # fmt: skip
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def document(name, value):
    *parents, leaf = name.split(".")
    table = {leaf: value}
    for parent in reversed(parents):
        table = {parent: table}
    return toml_document(table)


def test_there_are_enough():
    assert len(MALFORMED) >= 300


def test_every_malformed_field_is_named(folder):
    for name, value in MALFORMED:
        (folder / "task.toml").write_text(document(name, value))
        with pytest.raises(T1Error) as caught:
            load_task(folder)
        text = caught.value.problem
        assert "task.toml: " + name.partition(".")[0] in text or "steps/gone" in text, (name, value, text)
        assert name in text or name in ("steps",), (name, value, text)
        assert caught.value.where == str(folder) and len(text) < 700, (name, value, text)


def test_two_fields_that_contradict_each_other(folder):
    cases = {
        'memory = "2G"\nmemory_mb = 1000': "environment.memory: '2G' contradicts memory_mb = 1000",
        'storage = "1G"\nstorage_mb = 1': "environment.storage",
        'network_mode = "public"\nallowed_hosts = ["a"]': "environment.allowed_hosts: needs network_mode",
    }
    for text, problem in cases.items():
        (folder / "task.toml").write_text(f"[environment]\n{text}\n")
        with pytest.raises(T1Error, match=problem):
            load_task(folder)
    (folder / "task.toml").write_text('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n')
    with pytest.raises(T1Error, match="verifier.environment: contradicts"):
        load_task(folder)


FILE_PROBLEMS = [
    ("task.toml", b"\xff\xfe", "not UTF-8"),
    ("task.toml", b"a = [" * 5000, "task.toml"),
    ("task.toml", b"a = " + b"[" * 100_000, "task.toml"),
    ("task.toml", b"x = 1\x00", "task.toml"),
    ("task.toml", b"[a]\n[a]\n", "task.toml"),
    ("task.toml", b"#" * (5 << 20), "larger than"),
    ("instruction.md", b"\xe9t\xe9", "instruction.md: not UTF-8"),
    ("instruction.md", b"", "instruction.md: empty"),
    ("instruction.md", b"<!-- a canary GUID x -->\n\n", "instruction.md: empty"),
    ("instruction.md", b"a\x00b", "instruction.md: holds a NUL"),
    ("instruction.md", b"x" * (5 << 20), "instruction.md: larger than"),
    ("tests/test.sh", b" \n\t\n", "tests/test.sh: empty"),
    ("environment/Dockerfile", b"\xff\xff", "environment/Dockerfile"),
    ("environment/Dockerfile", b'FROM a\nCOPY ["a\n', "environment/Dockerfile"),
    ("environment/Dockerfile", b"FROM a\nENV 'A=1\n", "environment/Dockerfile"),
    ("environment/Dockerfile", b"FROM a\nCOPY ../../x /\n", "environment/Dockerfile"),
    ("environment/Dockerfile", b"FROM a\nNONSENSE x\n", "NONSENSE"),
]


@pytest.mark.parametrize(("name", "content", "problem"), FILE_PROBLEMS)
def test_broken_files(folder, name, content, problem):
    (folder / name).write_bytes(content)
    with pytest.raises(T1Error) as caught:
        load_task(folder)
    assert problem in caught.value.problem


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "loop", "outside"])
def test_what_is_no_file_of_the_task(folder, tmp_path, name, kind):
    (tmp_path / "elsewhere").write_text((folder / name).read_text())
    path = folder / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # reading it would wait for ever
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "outside":
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(T1Error) as caught:
        load_task(folder)
    assert name in caught.value.problem or path.name in caught.value.problem


@pytest.mark.parametrize("name", ["tests", "solution", "steps"])
def test_links_that_leave_the_task(folder, tmp_path, name):
    (tmp_path / "secret").write_text("x")
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "link").symlink_to("../../secret")
    with pytest.raises(T1Error, match=f"{name}/link: links out of the task"):
        load_task(folder)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({part for name in FIELDS for part in name.split(".")}))
quick = settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))


@quick
@given(document=st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=4), max_size=5))
def test_any_document_loads_or_is_refused(tmp_path, document):
    folder = sound_task(tmp_path / "one")
    (folder / "task.toml").write_text(toml_document(document), encoding="utf-8")
    try:
        assert load_task(folder).instruction in ("do it", "")
    except T1Error as error:
        assert "task.toml" in error.problem or "steps" in error.problem


@quick
@given(content=st.binary(max_size=60), name=st.sampled_from(["task.toml", "instruction.md", "environment/Dockerfile"]))
def test_any_bytes_load_or_are_refused(tmp_path, content, name):
    folder = sound_task(tmp_path / "one")
    (folder / name).write_bytes(content)
    try:
        load_task(folder)
    except T1Error as error:
        assert name in error.problem
