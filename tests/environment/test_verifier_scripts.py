"""What the text of a task's test scripts tells about where a verifier looks: variables, directories, sourced files."""

import time

import pytest

from megatron_t1.environment.scripts import MAX_SCRIPT_BYTES, read_scripts, without_comments

RELATIVE = {f"{base}/{place}" for base in ("/app", "/srv") for place in (".venv/bin", "v/sbin")}
PLACE = {"PATH": "/usr/bin:/bin", "HOME": "/root", "SET": "/srv/set"}


def read(script, env=PLACE, **others):
    files = {"test.sh": (script.encode(), 0o755)} | {name: (text.encode(), 0o644) for name, text in others.items()}
    return read_scripts(files, env, "/app")


@pytest.mark.parametrize(
    ("script", "directories", "lost"),
    [
        ("cd /srv/x && ls", {"/srv/x"}, False),
        ('D=/srv/x\ncd "$D"', {"/srv/x"}, False),
        ('D="/srv/x"; cd -- "${D}/sub"', {"/srv/x/sub"}, False),
        ("cd ${D:-/srv/x}", {"/srv/x"}, False),
        ("env --chdir=/srv/x python3 -m x; env --chdir /srv/y z", {"/srv/x", "/srv/y"}, False),
        ("cd $SET; cd sub", {"/srv/set", "/srv/set/sub", "/app/sub"}, False),
        ("A=/a\nB=$A/b\nA=/c\ncd $B", {"/a/b", "/c/b"}, False),
        ("for d in /a '/b'; do cd $d; done", {"/a", "/b"}, False),
        ("bash -c 'cd /srv/x && pytest'", {"/srv/x"}, False),
        ("(cd ~/x; git -C /srv/r log)", {"/root/x", "/srv/r"}, False),
        ('cd "$(dirname "$0")"', {"/tests"}, False),
        ('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\ncd $HERE', {"/tests"}, False),
        ("cd $(mktemp -d); cd $(pwd); cd -; cd", {"/tests", "/app"}, False),
        ("# cd /a\necho 'x # y'; cd /b # cd /c", {"/b"}, False),
        ('cd "$UNKNOWN"', set(), True),
        ("read D; cd $D", set(), True),
        ('D=/a; read -r D; cd "$D"', {"/a"}, True),
        ("cd $(git rev-parse --show-toplevel)", set(), True),
        ("cd /srv/*", set(), True),
    ],
)
def test_directories(script, directories, lost):
    found = read(script)
    assert (found.directories, found.lost) == (directories, lost)


@pytest.mark.parametrize(
    ("script", "sourced", "searched", "called"),
    [
        ("source $HOME/.local/bin/env", {"/root/.local/bin/env"}, set(), {"/root/.local/bin"}),
        (". /opt/v/bin/activate", {"/opt/v/bin/activate"}, set(), {"/opt/v/bin"}),
        ("if true; then . ./env.sh; fi", {"/app/env.sh"}, set(), set()),
        ('export PATH="/opt/v/bin:$PATH"', set(), {"/opt/v/bin", "/usr/bin", "/bin"}, set()),
        ("V=/opt/v\n$V/bin/python -m pytest", set(), set(), {"/opt/v/bin"}),
        ("/opt/v/bin/pytest /tests", set(), set(), {"/opt/v/bin"}),
        (
            ".venv/bin/pytest; cd /srv; ./v/sbin/x",
            set(),
            set(),
            RELATIVE,
        ),
        ("PATH=:$PATH", set(), {"/app", "/usr/bin", "/bin"}, set()),
        ("echo done. The end", set(), set(), set()),
    ],
)
def test_what_is_sourced_searched_and_called(script, sourced, searched, called):
    found = read(script)
    assert (found.sourced, found.searched, found.called) == (sourced, searched, called)


@pytest.mark.parametrize(
    ("script", "collected"),
    [
        ("pytest /tests/test_outputs.py -rA", set()),
        ("pytest --ctrf /logs/verifier/ctrf.json $TEST_DIR/test_outputs.py -rA", {"/app"}),
        ("TEST_DIR=/tests\npytest $TEST_DIR/test_outputs.py -k 'a and b' > /logs/out", set()),
        ("uvx -p 3.13 -w pytest==8.4.1 -w x pytest --ctrf /logs/c.json /tests/test_outputs.py -rA", set()),
        ('cd "$(dirname "$0")"\npytest -rA', set()),
        ("cd /tests && python3 -m pytest test_a.py::test_b", set()),
        ("pytest", {"/app"}),
        ("pip install pytest && pytest -q", {"/app"}),
        ("cd /srv/x\npytest tests/test_a.py::test_b", {"/srv/x/tests/test_a.py"}),
        ("pytest /tests/test_outputs.py /app/tests", {"/app/tests"}),
        ("pytest --rootdir=/app /tests", {"/app"}),
        ("(cd /tests && ls); pytest -q", {"/app"}),
        ("cd /tests; ls; cd -; pytest -q", {"/app"}),
        ("pushd /tests && ls && popd && pytest -q", {"/app"}),
        ("make -C /tests x; pytest -q", {"/app"}),
        ("cd /srv; (cd /x; pytest -q)", {"/x"}),
        ("f() { cd /tests; }\ncase $1 in a) cd /tests; pytest -q ;; esac", set()),
        ("uvx -w pytest pytest /tests/test_a.py", set()),
        ("pytest -c /app/x.ini /tests", {"/app/x.ini"}),
        ("pip install pytest; echo pytest; pytest --version; which pytest", set()),
    ],
)
def test_what_pytest_looks_at_beside_the_tests(script, collected):
    assert read(script).collected == collected


def test_shells_that_read_their_startup_files():
    for script in ("bash -lc 'x'", "bash -l", "sh --login -c x", "bash -e -i x", "su - user -c x", "sudo x"):
        assert read(script).login, script
    for script in ("bash -c 'x -l'", "bash -euo pipefail x", "bash /tests/install.sh", "echo sudo"):
        assert not read(script).login, script


def test_the_usual_script_of_terminal_benchmarks():
    found = read("""#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then echo "Error: no working directory"; exit 1; fi
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
""")
    assert (found.lost, found.login, found.collected, found.directories) == (False, False, set(), set())
    assert found.sourced == {"/root/.local/bin/env"}


def test_only_shell_scripts_are_read_as_such():
    other = {
        "run": "#!/usr/bin/env python3\nimport pytest\n",
        "notes.md": "cd $X; pytest\n",
        "in": "#!/bin/sh\ncd /a\n",
    }
    found = read("true", **other)
    assert (found.directories, found.lost, found.collected) == ({"/a"}, False, set())
    assert "import pytest" in found.text
    assert read("#" * (MAX_SCRIPT_BYTES + 1)).lost


def test_a_sign_in_quotes_begins_no_comment():
    script = "echo \"a # b\" 'c # d' ${#x} $# e#f # comment\n#!/bin/bash\n"
    assert without_comments(script).split("\n")[0].rstrip() == "echo \"a # b\" 'c # d' ${#x} $# e#f"


@pytest.mark.parametrize(
    "piece",
    ["cd a;", 'cd "$(', '"$(a', "A=1 ", "for a in ", "pytest ", ". a\n", "PATH=a:b:c\n", "${A:-", "${A[", "cd '", "/a"],
)
def test_hostile_text_takes_no_time(piece):
    began = time.process_time()
    read(piece * ((MAX_SCRIPT_BYTES >> 3) // len(piece)))
    read("A=x\n" + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60)) + "cd $A59\n")
    assert time.process_time() - began < 3.0
