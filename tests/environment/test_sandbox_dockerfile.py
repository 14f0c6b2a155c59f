"""Dockerfiles: what is understood, who runs it, and RUN lines that ask a package index."""

import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import EnvConfig
from megatron_t1.environment.image import RunCommand
from megatron_t1.environment.packages import PackagesMissing, satisfied
from megatron_t1.environment.sandbox.base import Inventory
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.rollout.pool import require_buildable

HAVE = Inventory(
    {"python3": "3.11.2-1", "python3-pip": "23.0.1+dfsg-1", "awk": ""}, {"pytest": "8.4.1", "typing-extensions": "4.12"}
)


@pytest.fixture
def built(tmp_path, in_sandbox):
    """Output of a command in a sandbox that was built from a Dockerfile."""

    def run(text, command="true", **limits):
        (tmp_path / "environment").mkdir()
        (tmp_path / "environment" / "Dockerfile").write_text(text)

        async def body(sandbox):
            await sandbox.start(Task("t", "", tmp_path))
            return (await sandbox.run(command, 60)).output

        return in_sandbox(body, **limits)

    return run


def test_arguments_and_bases(image):
    found = image(
        "ARG TAG=12\nFROM --platform=linux/amd64 debian:${TAG}-slim AS one\nARG A=x\nARG TAG\nARG TARGETARCH\n"
        "ENV B=$A/$TAG\nRUN true\nENV A=env\nRUN true\n"
    )
    first, second = [step for step in found.steps if isinstance(step, RunCommand)]
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    assert found.base == "debian:12-slim"
    assert first.env == {"A": "x", "TAG": "12", "TARGETARCH": arch, "B": "x/12"}  # the default from before FROM
    assert second.env["A"] == "env"  # an ENV wins over an ARG of its name
    assert found.env == {"B": "x/12", "A": "env"}  # arguments end with the build


def test_shell_and_user(image):
    found = image('FROM a\nUSER 7:8\nRUN one\nSHELL ["/bin/bash", "-ec"]\nUSER root\nRUN two\nRUN ["three", "x y"]\n')
    steps = [(step.words, step.user, step.shell_form) for step in found.steps]
    assert steps == [
        (("/bin/sh", "-c", "one"), "7:8", True),
        (("/bin/bash", "-ec", "two"), "root", True),
        (("three", "x y"), "root", False),
    ]
    assert found.user == "root"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("SHELL /bin/bash", "is not a JSON list"),
        ("USER a b", "is not a user"),
        ("ARG 1=2", "is not NAME"),
        ("RUN <<EOF", "here-documents"),
        ("FROM b", "more than one build stage"),
        ("COPY [1] /x", "is not a JSON list"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK is not supported"),
        ("ADD a.tar.gz /", "only local plain files"),
    ],
)
def test_refused_by_name_and_line(image, line, problem):
    with pytest.raises(T1Error, match="line 2: .*") as caught:
        image(f"FROM a\n{line}\n")
    assert problem in caught.value.problem


def test_an_ignore_file_is_not_ignored(image, tmp_path):
    (tmp_path / "a").write_text("")
    (tmp_path / ".dockerignore").write_text("# nothing\n\n")
    assert image("FROM a\nCOPY a /\n").steps
    (tmp_path / ".dockerignore").write_text("secret\n")
    with pytest.raises(T1Error, match="dockerignore"):
        image("FROM a\nCOPY a /\n")


def test_run_as_a_user_with_arguments_and_a_shell(built):
    output = built(
        "FROM a\nARG GREETING=hello\nRUN echo 'agent:x:1000:1000::/home/agent:/bin/bash' >> /etc/passwd;"
        " echo 'crew:x:77:' >> /etc/group\nRUN echo $GREETING $0 > /root.txt\n"
        "USER agent:crew\nWORKDIR /srv/x\nRUN id -u > me; id -g >> me; echo $HOME >> me\n"
        'SHELL ["/bin/bash", "-c"]\nRUN [[ a == a ]] && echo $0 $BASH_VERSION > bash\n',
        "cat /root.txt me; cut -d' ' -f1 bash; id -un; pwd; echo $HOME ${GREETING-unset}",
    )
    assert output == "hello /bin/sh\n1000\n77\n/home/agent\n/bin/bash\nagent\n/srv/x\n/home/agent unset\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("USER nobody-here\nRUN true", "there is no such user"),
        ("RUN echo words >&2; exit 3", "exit status 3: words"),
        ("RUN apt-get update && apt-get install -y no-such-package-x", "RUN 'apt-get install -y no-such-package-x'"),
        ("RUN pip install no-such-package-x==1", "the base has no no-such-package-x==1"),
        ("RUN touch /usr/x", "Read-only file system"),
        ("WORKDIR /usr/x", "lies in the read-only system"),
    ],
)
def test_a_build_that_fails_says_where(built, text, problem):
    with pytest.raises(SandboxLost) as caught:
        built(f"FROM a\n{text}\n")
    assert problem in caught.value.problem
    assert "task t" in caught.value.where or "Dockerfile" in caught.value.where


def test_refusals_are_known_before_anything_starts(tmp_path):
    tasks = []
    for name, line in (("a", "true"), ("b", "apt-get install -y no-such-x"), ("c", "pip install no-such-y")):
        (tmp_path / name / "environment").mkdir(parents=True)
        (tmp_path / name / "environment" / "Dockerfile").write_text(f"FROM a\nRUN {line}\n")
        tasks.append(Task(name, "", tmp_path / name))
    require_buildable(tasks[:1], EnvConfig())
    with pytest.raises(T1Error, match="2 tasks can't be built here") as caught:
        require_buildable(tasks, EnvConfig())
    assert "b: RUN 'apt-get install -y no-such-x': the base has no no-such-x" in caught.value.problem
    assert "c: RUN 'pip install no-such-y'" in caught.value.problem


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("apt-get update", ":"),
        ("apt-get update && apt-get install -y python3-pip && touch x", ": && : && touch x"),
        ("apt-get install -y --no-install-recommends -t stable python3=3.11* awk", ":"),
        ("DEBIAN_FRONTEND=noninteractive apt-get -qq update >/dev/null 2>&1 || true", ": || true"),
        ("if ! /usr/bin/apt-get update; then exit 1; fi", "if ! :; then exit 1; fi"),
        ("(apt update; echo 'a; apt-get install x')", "(:; echo 'a; apt-get install x')"),
        ("pip3 install --no-cache-dir --break-system-packages pytest==8.4.1 'typing_extensions>=4,<5'", ":"),
        ("python3 -m pip install -i https://host/simple pytest", ":"),
        ("pip install -r requirements.txt", "pip install -r requirements.txt"),
        (
            "pip install ./package && pip install --target x numpy",
            "pip install ./package && pip install --target x numpy",
        ),
        ("echo apt-get install x & echo b", "echo apt-get install x & echo b"),
        ("cat <<E\napt-get install x\nE", "cat <<E\napt-get install x\nE"),
        ("apt-cache search x", "apt-cache search x"),
        ("echo 'unfinished", "echo 'unfinished"),
    ],
)
def test_what_the_base_has_is_left_out(line, left):
    assert satisfied(line, HAVE) == left


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("touch a && apt-get install -y python3 curl=7 git && touch b", "curl=7, git"),
        ("apt-get install python3=3.9*", "python3=3.9*"),
        ("pip install pytest==8.4.2", "pytest==8.4.2"),
        ("true || (pip install -U pandas)", "pandas"),
        ("pip install pytest@https://host/x.whl", "pytest@https://host/x.whl"),
    ],
)
def test_what_it_lacks_is_refused_with_the_command(line, missing):
    with pytest.raises(PackagesMissing, match="the base has no") as caught:
        satisfied(line, HAVE)
    assert str(caught.value).endswith(f"the base has no {missing}")


@given(st.text(alphabet="ab '\"\\;&|()<>$\n#`", max_size=40))
def test_lines_without_package_commands_stay(line):
    assert satisfied(line, HAVE) == line
