"""Nothing that the agent leaves on the search paths of the verifier's programs and modules goes unnoticed."""

import os

import pytest

from megatron_t1.environment.containers.tampering import ImageFacts, suspicious
from megatron_t1.environment.planted import exposed
from megatron_t1.environment.sandbox.base import modules_of
from megatron_t1.environment.sandbox.changes import Snapshot
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.interface import Change
from megatron_t1.environment.sandbox.settings import linked_settings
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.environment.verifier import verify

PYTHON = "cd /app\npython3 -m pytest /tests\n"


def found(changes, script=PYTHON, env=(), programs=("pytest", "cat"), modules=("pandas",), **tests):
    content = {"test.sh": (script.encode(), 0o755)} | {name: (text.encode(), 0o644) for name, text in tests.items()}
    task = Task("t", "do", content=TaskContent(tests=content))
    changes = [change if isinstance(change, Change) else Change(change, "added", "file") for change in changes]
    return exposed(task, dict(env)).planted(changes, programs, modules)


@pytest.mark.parametrize(
    "path",
    [
        "/app/json.py",
        "/app/py.so",
        "/app/pandas.py",
        "/app/pytest/__init__.py",
        "/app/pytest/__init__.cpython-311-x86_64-linux-gnu.so",
        "/app/zz-1.0.dist-info/entry_points.txt",
        "/app/zz.egg-info/entry_points.txt",
        Change("/app/pytest", "added", "link"),
        Change("/app/unittest", "added", "closed"),
        Change("/app/unittest", "added"),
        Change("/app/json", "modified", "closed"),
        Change("/app/zz.dist-info", "added", "link"),
        Change("/app", "modified", "link"),
        Change("/app", "modified", "closed"),
    ],
)
def test_what_takes_the_place_of_a_module(path):
    expected = path.path if isinstance(path, Change) else path
    assert found([path]) == [expected]
    assert found([path], script="pytest /tests\n") == []
    assert found([path], script="pytest /tests\n", env={"PYTHONPATH": "/app"}) == [expected]


@pytest.mark.parametrize(
    "path",
    [
        "/app/solution.py",
        "/app/src/json.py",
        "/app/json.txt",
        "/app/jsonl.py",
        "/srv/json.py",
        "/app/code/main.py",
        "/app/test.py",
        "/app/sitecustomize.py",
        "/app/x.dist-info/METADATA",
        Change("/app/json", "added", "directory"),
        Change("/app/json.py", "modified", "file"),
        Change("/app/json.py", "removed"),
        Change("/app", "removed"),
        Change("/app/data", "added", "link"),
    ],
)
def test_an_agents_own_files_are_no_reason(path):
    assert found([path]) == []


@pytest.mark.parametrize(
    "script",
    [
        "cd /app; python3 -mpytest /tests",
        "python3 \\\n  -m pytest /tests",
        "P=python3; $P -m pytest /tests",
        "python3 - <<'E'\nimport json\nE",
        "python3 -c 'import json'",
        "coverage run -m pytest /tests",
        "which python3 && python3 -m pytest",
    ],
)
def test_every_spelling_counts(script):
    assert found(["/app/json.py"], script) == ["/app/json.py"]


def test_scripts_beside_test_sh_and_their_directories_count():
    assert found(["/srv/app/json.py"], "bash /tests/inner.sh", **{"inner.sh": 'cd "/srv/app" && python3 -m pytest'})
    assert found(["/app/json.py"], "# python3\n. /tests/x\n") == []
    assert found(["/app/sub/json.py"], "cd sub && python3 -m pytest /tests")


def test_directories_of_the_path_that_an_agent_may_write_to():
    env = {"PATH": "/opt/venv/bin:/usr/bin:/bin"}
    for path in ("/opt/venv/bin/pytest", "/opt/venv/bin/runner", "/opt/venv/pyvenv.cfg"):
        assert found([path], "runner; pytest /tests", env) == [path]
    assert found(["/opt/venv/lib/python3.11/site-packages/x.pth"], "pytest", env)
    assert found([Change("/opt/venv/lib/python3.11/site-packages/numpy/x.py", "modified", "file")], "pytest", env)
    assert found([Change("/opt/venv", "modified", "link")], "pytest", env)
    assert found(["/opt/venv/bin/mine", "/opt/venv/lib/python3.11/site-packages/mine.py"], "pytest", env) == []
    assert found(["/usr/bin/pytest"], "pytest", env) == []
    own = {"PATH": "/app/bin:/usr/bin"}
    assert found([Change("/app/bin/tool", "modified", "file")], "tool", own) == []
    assert found(["/app/bin/pytest"], "pytest /tests", own) == ["/app/bin/pytest"]


def test_python_path_loads_more():
    assert found(["/lib2/sitecustomize.py", "/lib2/x.pth"], "pytest", {"PYTHONPATH": "/lib2"})


OUTSIDE = "cd /app\npytest tests -rA\n"
COPIED = "cp /tests/check.py /app/\n/app/check.py\n"
UV = "source $HOME/.local/bin/env\nuvx -w pytest pytest /tests/test_a.py\n"


@pytest.mark.parametrize(
    ("script", "change"),
    [
        # the verifier's directory is gone, or can't be told
        ("python3 -c 'import json'", "/json.py"),
        ('D=/srv/x\ncd "$D"\npython3 -m pytest /tests', "/srv/x/json.py"),
        ("cd $(git rev-parse --show-toplevel)\npython3 -m pytest /tests", "/any/where/json.py"),
        # what Python's own library looks for and hasn't got
        (PYTHON, "/app/org/python/core.py"),
        (PYTHON, "/app/setuptools.py"),
        # files that the scripts source, and shells that read their own
        (UV, "/root/.local/bin/env"),
        (UV, "/root/.local/bin/uvx"),
        (UV, "/root/.cache/uv/archive-v0/x/pytest/__init__.py"),
        (". /opt/v/bin/activate; pytest /tests", Change("/opt/v/bin/activate", "modified", "file")),
        ("source ~/.bashrc; pytest /tests", "/root/.bashrc"),
        ("bash -lc 'pytest /tests'", "/etc/profile.d/x.sh"),
        ("bash -lc 'pytest /tests'", "/root/.bash_profile"),
        # programs by their path, or on a PATH that the scripts set
        ("/opt/v/bin/pytest /tests", "/opt/v/bin/pytest"),
        ("V=/opt/v; $V/bin/python -m x", "/opt/v/lib/python3.11/site-packages/x.pth"),
        ("V=/app/.v; $V/bin/python -m x", "/app/.v/lib/python3.11/site-packages/x.pth"),
        ("/app/.v/bin/pytest", Change("/app/.v/lib/python3.11/site-packages/_pytest/main.py", "modified", "file")),
        ('export PATH="/opt/v/bin:$PATH"\npytest /tests', "/opt/v/bin/pytest"),
        ("/opt/v/bin/tool", Change("/opt/v/bin/tool", "modified", "file")),
        ("/opt/v/bin/tool", Change("/opt/v/bin", "added", "link")),
        # pytest looks beyond the tests
        (OUTSIDE, "/app/conftest.py"),
        (OUTSIDE, "/app/tests/unit/conftest.py"),
        (OUTSIDE, Change("/app/pyproject.toml", "modified", "file")),
        (OUTSIDE, "/pytest.ini"),
        (OUTSIDE, "/app/tests/test_mine.py"),
        ("pytest /tests/test_a.py /app", "/tox.ini"),
        ("cp /tests/test_a.py /app\ncd /app; pytest test_a.py", "/app/test_a.py"),
        # a copy of a test that can't be written where it should be
        (COPIED, Change("/app/check.py", "modified", "locked")),
        (COPIED, Change("/app/check.py", "added", "directory")),
        (COPIED, Change("/app/check.py", "modified", "link")),
        ("LD_LIBRARY_PATH=/opt/l prog", "/opt/l/libc.so.6"),
    ],
)
def test_what_else_the_verifier_looks_into(script, change):
    tests = {"test_a.py": "", "check.py": ""}
    assert found([change], script, **tests) == [change if isinstance(change, str) else change.path]


@pytest.mark.parametrize(
    ("script", "change"),
    [
        ("pytest /tests/test_a.py -rA", "/app/conftest.py"),
        ("pytest /tests/test_a.py -rA", Change("/app/pyproject.toml", "modified", "file")),
        ('cd "$(dirname "$0")"; pytest', "/app/conftest.py"),
        ("pytest /tests", "/root/.bashrc"),
        ("/opt/v/bin/tool", "/opt/v/bin/tool"),
        ("export PATH=$PATH:/opt/go/bin; go build", "/opt/go/bin/go"),
        (OUTSIDE, Change("/app/tests/test_old.py", "modified", "file")),
        (OUTSIDE, "/app/src/main.py"),
        (OUTSIDE, "/srv/test_x.py"),
        (COPIED, "/app/check.py"),
        ("LD_LIBRARY_PATH=/app/build prog", "/app/build/libmine.so"),
        ("V=/app/v; $V/bin/python -m x", Change("/app/v/lib/data.txt", "modified", "file")),
        ('cd "$UNKNOWN"; make', "/srv/json.py"),
    ],
)
def test_an_agents_own_work_beside_it_is_no_reason(script, change):
    assert found([change], script, **{"test_a.py": "", "check.py": ""}) == []


def test_known_names_of_checks_make_tests_of_the_agent_harmless():
    tests = {"test.sh": (OUTSIDE.encode(), 0o755)}
    task = Task("t", "do", content=TaskContent(tests=tests), check_names=("tests.test_a::test",))
    changes = [Change("/app/tests/test_mine.py", "added", "file"), Change("/app/conftest.py", "added", "file")]
    assert exposed(task, {}).planted(changes) == ["/app/conftest.py"]


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("BASH_ENV", "/app/e", "/app/e"),
        ("LD_PRELOAD", "/opt/a.so /opt/b.so", "/opt/b.so"),
        ("PERL5LIB", "/app/perl", "/app/perl/strict.pm"),
        ("OPENSSL_CONF", "/srv/o.cnf", "/srv/o.cnf"),
        ("LD_LIBRARY_PATH", "/usr/lib:/srv/lib", "/srv/lib/libz.so.1"),
    ],
)
def test_variables_of_the_image_that_name_code(name, value, path):
    assert found([path], "true", {name: value}) == [path]


def test_a_working_directory_that_is_a_link_in_the_image(in_sandbox, write_harbor_task):
    task = write_harbor_task("FROM x\nRUN mkdir -p /srv/real && ln -s /srv/real /app\nWORKDIR /app\n")
    (task.tests_dir / "test.sh").write_text("python3 -c 'import json' && echo 1 > /logs/verifier/reward.txt\n")

    async def body(sandbox):
        await sandbox.start(task)
        await sandbox.run("echo > json.py", 20)
        return await verify(sandbox, task, 30)

    verdict = in_sandbox(body)
    assert not verdict.trusted and "/srv/real/json.py" in verdict.reason


def test_links_are_followed_inside(tmp_path):
    (tmp_path / "srv/real/bin").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    for link, target in {"app": "/srv/real", "srv/x": "../app/bin", "loop": "loop", "out": "../../../../etc"}.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "srv/real/file").symlink_to("/srv/real/bin/file")
    root = Inside(tmp_path, None, frozenset({"usr"}))
    paths = {"/app/a/b": "/srv/real/a/b", "/srv/x": "/srv/real/bin", "/app/file": "/srv/real/bin/file", "/": "/",
             "/loop/x": "/loop/x", "/out/x": "/etc/x", "/usr/bin/x": "/usr/bin/x", "/no/x": "/no/x"}  # fmt: skip
    assert {path: root.real(path) for path in paths} == paths


def test_a_closed_working_directory_loses_no_sandbox(in_sandbox, make_task):
    """An agent could have its episode played again by closing the directory that the verifier starts in."""

    async def body(sandbox):
        task = make_task(test_sh="test -e /app/x; echo $((! $?)) > /logs/verifier/reward.txt\n")
        await sandbox.start(task)
        await sandbox.run("chmod 0 /app; exit", 20)
        return (await sandbox.run("pwd", 20)).output, await verify(sandbox, task, 30)

    where, verdict = in_sandbox(body)
    assert where == "/\n" and (verdict.trusted, verdict.passed, verdict.total) == (True, 0, 1), verdict.reason


def test_a_locked_file_is_seen(tmp_path):
    (tmp_path / "check.py").write_text("")
    snapshot = Snapshot(Inside(tmp_path, None))
    snapshot.settle()
    (tmp_path / "check.py").chmod(0o444)
    assert [(change.path, change.kind, change.entry) for change in snapshot.changes()] == [
        ("/check.py", "modified", "locked")
    ]


def test_what_installed_packages_would_like_to_import_counts(tmp_path):
    package = tmp_path / "usr/lib/python3/dist-packages/pandas"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "try:\n    # faster\n    import pyarrow as pa\nexcept ImportError:\n    pass\n"
    )
    (package / "doc.py").write_text('"""try:\n\n  from the start"""\nimport numpy\n')
    (package / "tests/x.py").write_text("try:\n    import foo\nexcept ImportError:\n    pass\n")
    assert modules_of(tmp_path) == {"pandas", "pyarrow"}


SCRIPT = "cd /app\npython3 -c 'import json' && r=0 || r=1\necho $r > /logs/verifier/reward.txt\n"


@pytest.fixture
def verdict_of(in_sandbox, make_task):
    def run(command, script=SCRIPT):
        async def body(sandbox):
            task = make_task({"a.txt": "a\n"}, f"#!/bin/bash\n{script}")
            await sandbox.start(task)
            result = await sandbox.run(command, 20)
            return result, await verify(sandbox, task, 30)

        return in_sandbox(body)

    return run


@pytest.mark.parametrize(
    "command",
    [
        "mkdir /opt/e; echo 'raise SystemExit(1)' > /opt/e/__init__.py; ln -s /opt/e json",
        "mkdir /opt/e; echo 'raise SystemExit(1)' > /opt/e/json.py; cd /; mv app app2; ln -s /opt/e app",
        "mkdir x-1.dist-info; echo '[pytest11]' > x-1.dist-info/entry_points.txt",
        r"mkdir $'\xff\e[2J.dist-info'; touch $'\xff\e[2J.dist-info/entry_points.txt'",
        "echo 'raise SystemExit(1)' > /json.py; cd /; rm -rf app",
        "(while [ -e a.txt ]; do :; done; echo 'raise SystemExit(1)' > json.py) & sleep 0.1; rm a.txt; sleep 0.1",
    ],
)
def test_planted_modules_make_the_verdict_untrusted(verdict_of, command):
    _, verdict = verdict_of(command)
    assert not verdict.trusted and "takes the place" in verdict.reason
    assert verdict.reason.isprintable() and verdict.reason.encode()  # it is printed, and stands in files


def test_settings_that_load_code_stay_the_systems(verdict_of):
    """Debian's sitecustomize.py is a link into /etc; openssl.cnf names libraries to load."""
    script = (
        "good=0; python3 -c 'import sys; sys.exit(\"evil\" in sys.modules)' || good=1\n"
        "grep -rqs EVIL /etc/python3* /etc/ssl/openssl.cnf /etc/perl /usr/lib/ssl/openssl.cnf && good=1\n"
        "echo $good > /logs/verifier/reward.txt\n"
    )
    plant = (
        "for v in 3 3.9 3.10 3.11 3.12 3.13 3.14; do mkdir -p /etc/python$v; "
        "echo 'import sys; sys.modules[\"evil\"] = 1 # x' > /etc/python$v/sitecustomize.py; done 2>/dev/null; "
        "mkdir -p /etc/ssl; "
    )
    for how in ("", "mv /etc /e; mkdir /etc; ", "mv /etc /e; mkdir /opt/etc; ln -s /opt/etc /etc; "):
        _, verdict = verdict_of(f"{how}{plant} echo EVIL > /etc/ssl/openssl.cnf; echo EVIL > /etc/perl/x", script)
        assert (verdict.trusted, verdict.passed) == (True, 0), verdict.reason


def test_the_rest_of_etc_is_the_agents(verdict_of):
    result, verdict = verdict_of(
        "mkdir -p /etc/ssl/certs /etc/nginx && echo x > /etc/ssl/certs/x.pem && echo x > /etc/nginx/n.conf",
        "cat /etc/ssl/certs/x.pem /etc/nginx/n.conf && echo 1 > /logs/verifier/reward.txt\n",
    )
    assert result.exit_code == 0 and verdict.solved


def test_an_episode_leaves_nothing_to_the_next_one(in_sandbox, make_task):
    big = "#!/bin/bash\nfor n in 1 2 3 4 5; do head -c 12000000 /dev/zero > /logs/verifier/x$n; done 2>/dev/null\n"
    hide = (
        "setfattr -n user.note -v x /home; touch -d @5 /var /srv; "
        "mv /etc /e; mkdir -p /etc/alternatives; echo secret > /etc/alternatives/s; echo secret > /home/s"
    )

    async def body(sandbox):
        await sandbox.start(make_task(test_sh=big))
        await sandbox.run(hide, 20)
        first = await verify(sandbox, make_task(test_sh=big), 30)
        await sandbox.start(make_task())
        left = await sandbox.run("cat /etc/alternatives/s /home/s; stat -c %Y /var /srv; ls /logs; true", 20)
        return first, left.output, await verify(sandbox, make_task(), 30)

    first, left, second = in_sandbox(body, disk_mb=48)
    assert not first.trusted
    assert "secret\n" not in left and "\n5\n" not in left
    assert second.solved, second.reason


def test_a_directory_that_cant_be_listed_is_named(tmp_path, monkeypatch):
    """A driver that is no root can't look into a directory of mode 311; Python imports from it all the same."""
    for name in ("app", "opt"):
        (tmp_path / name).mkdir()
    snapshot = Snapshot(Inside(tmp_path, None))
    snapshot.settle()
    (tmp_path / "app" / "json").mkdir(mode=0o311)
    (tmp_path / "opt").chmod(0o311)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    entries = {(change.path, change.kind, change.entry) for change in snapshot.changes()}
    (tmp_path / "opt").chmod(0o755)
    assert entries == {("/app/json", "added", "closed"), ("/opt", "modified", "closed")}


def test_links_of_the_system_into_etc_are_protected(tmp_path):
    for link, target in {
        "usr/lib/python3.99/sitecustomize.py": "/etc/python3.99/sitecustomize.py",
        "usr/lib/ssl/openssl.cnf": "/etc/ssl/openssl.cnf",
        "usr/lib/ssl/certs": "/etc/ssl/certs",
        "usr/lib/tool/conf": "../../../etc/tool",
        "usr/share/doc/x": "/etc/doc",
        "usr/lib/plain": "/opt/plain",
    }.items():
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(target)
    found = linked_settings(tmp_path)
    assert found == {"python3.99": True, "ssl/openssl.cnf": False, "tool": False}
    (tmp_path / "etc/tool").mkdir(parents=True)
    assert linked_settings(tmp_path)["tool"] is True


def test_containers_compare_the_same_settings():
    facts = ImageFacts.parse(b"setting /etc/tool/main.conf\0setting /etc/ssl/certs\0")
    paths = [
        "/etc/ssl/openssl.cnf",
        "/etc/python3.12/x",
        "/etc/perl/x.pm",
        "/etc/tool/main.conf",
        "/etc/alternatives/awk",
    ]
    fine = ["/etc/ssl/certs/x.pem", "/etc/nginx.conf", "/etc/tool/other"]
    entries = [("C", path) for path in paths + fine]
    assert [path for _, path in suspicious(entries, facts, "/app")] == paths
