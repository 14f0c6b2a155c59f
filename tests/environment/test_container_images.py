"""What container backends decide without an engine: the mapped Dockerfile, tampering, archives, command lines."""

import asyncio
import io
import os
import stat
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.environment.containers import archive
from megatron_t1.environment.containers.engine import Engine, _is_abandoned, driver_identity, plain_limits
from megatron_t1.environment.containers.image import StandIn, TaskImage, bases_of, mapped_dockerfile
from megatron_t1.environment.containers.tampering import ImageFacts, describe, parse_diff, suspicious
from megatron_t1.environment.sandbox.base import Inventory
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.errors import T1Error

STAGED = """# a comment
FROM --platform=linux/amd64 ghcr.io/lab/ubuntu:24 AS build
RUN apt-get update && \\
    apt-get install -y python3-pip && \\
    ln -s a b
FROM build AS second
FROM scratch
FROM debian:12
RUN pip install pytest==8.4.1
RUN pip install torch
WORKDIR /a
ENV X=1
WORKDIR /b
COPY --from=build x y
WORKDIR /c
"""
HAVE = StandIn("local/base:1", Inventory({"python3-pip": "23"}, {"pytest": "8.4.1"}))


def test_every_base_is_found_and_no_stage_taken_for_one():
    assert bases_of(STAGED) == ["ghcr.io/lab/ubuntu:24", "debian:12"]


def test_from_is_mapped_and_satisfied_package_commands_left_out():
    lines = mapped_dockerfile(STAGED, {"ghcr.io/lab/ubuntu:24": HAVE, "debian:12": HAVE}).splitlines()
    assert "FROM --platform=linux/amd64 local/base:1 AS build" in lines and "FROM build AS second" in lines
    assert "FROM local/base:1" in lines and "FROM scratch" in lines
    assert [line.split("ln")[0].replace(" ", "") for line in lines if "ln -s" in line] == ["RUN:&&:&&"]
    assert (
        not any("pytest" in line for line in lines) and "RUN pip install torch" in lines
    )  # the build may have a network
    assert mapped_dockerfile("FROM a\nRUN apt-get update\n", {"a": StandIn("b")}) == "FROM b\nRUN apt-get update\n"


def test_podman_is_made_to_keep_every_workdir():
    mapped = mapped_dockerfile(STAGED, {}, make_workdirs=True)
    assert "WORKDIR /a\nENV X=1\nRUN :\nWORKDIR /b\nCOPY --from=build x y\nWORKDIR /c\n" in mapped
    assert "RUN :" not in mapped_dockerfile(STAGED, {})


FACTS = ImageFacts(
    path=("/usr/local/bin", "/usr/bin", "/opt/venv/bin", "/app/.venv/bin"),
    programs=frozenset({"python3", "bash", "pytest", "grep"}),
    python=(
        "/usr/lib/python3.11",
        "/usr/local/lib/python3.11/dist-packages",
        "/app/.venv/lib/python3.11/site-packages",
    ),
    modules=frozenset({"json", "pytest", "_pytest"}),
)


@pytest.mark.parametrize(
    "line",
    [
        "C /usr/bin/python3", "D /usr/bin/grep", "C /bin", "D /lib64", "C /usr/lib/x86_64-linux-gnu/libc.so.6",
        "A /usr/local/bin/python3", "C /opt/venv/bin/pytest", "A /opt/venv/bin/bash", "A /etc/ld.so.preload",
        "C /etc/ld.so.cache", "A /etc/ld.so.conf.d/x.conf", "C /etc/python3.11/sitecustomize.py",
        "A /usr/local/lib/python3.11/dist-packages/sitecustomize.py", "A /usr/local/lib/python3.11/dist-packages/x.pth",
        "A /usr/local/lib/python3.11/dist-packages/json.py", "A /usr/local/lib/python3.11/dist-packages/pytest",
        "A /usr/local/lib/python3.11/dist-packages/evil-1.dist-info/entry_points.txt",
        "C /usr/lib/python3.11/json/decoder.py",
    ],
)  # fmt: skip
def test_what_the_verifier_runs_on_is_named(line):
    found = suspicious(parse_diff(line), FACTS, "/app")
    assert found == [tuple(line.split(" ", 1))] and line[2:] in describe(found)


@pytest.mark.parametrize(
    "line",
    [
        "A /usr/local/bin/mytool", "A /usr/share/x", "C /usr/share/doc/bash/README", "C /etc/passwd", "A /opt/new/file",
        "A /usr/lib/python3.11/__pycache__/json.cpython-311.pyc", "C /app/.venv/bin/pytest", "A /app/python3",
        "A /app/.venv/lib/python3.11/site-packages/x.pth", "A /usr/local/lib/python3.11/dist-packages/mine/__init__.py",
        "A /root/.bashrc", "C /tmp", "D /app/a.txt", "A /usr/local/lib/libmine.so",
    ],
)  # fmt: skip
def test_what_an_agent_may_change_is_no_tampering(line):
    assert suspicious(parse_diff(line), FACTS, "/app") == []


def test_a_diff_leaves_out_directories_whose_content_is_listed():
    text = "C /usr\nC /usr/bin\nA /usr/bin/x y\nC /opt\nD /etc/issue\nC /etc\nnoise\n"
    assert parse_diff(text) == [("A", "/usr/bin/x y"), ("C", "/opt"), ("D", "/etc/issue")]


def test_facts_of_an_image_are_read_from_its_own_words():
    facts = ImageFacts.parse(
        b"path /usr/bin\0program ls\0program [\0python /p\0module json\0module json\0odd\0\0path /usr/bin\0"
    )
    assert facts == ImageFacts(("/usr/bin",), frozenset({"ls", "["}), ("/p",), frozenset({"json"}))


names = st.from_regex(r"/[a-z]{1,8}(/[a-z .]{1,8}[a-z]){0,3}", fullmatch=True)


@given(st.dictionaries(names, st.tuples(st.binary(max_size=300), st.integers(0, 0o777)), max_size=5))
def test_packed_files_come_out_as_they_were(files):
    with tarfile.open(fileobj=io.BytesIO(archive.pack(files))) as packed:
        found = {f"/{m.name}": (packed.extractfile(m).read(), m.mode) for m in packed}
        assert found == files and all((m.uid, m.gid) == (0, 0) for m in packed.getmembers())


def _archive(*entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, content, kind in entries:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_results_are_read_from_the_directory_alone():
    data = _archive(
        ("verifier", b"", tarfile.DIRTYPE), ("verifier/reward.txt", b"1", tarfile.REGTYPE),
        ("verifier/deep/ctrf.json", b"{}", tarfile.REGTYPE), ("verifier/reward.json", b"", tarfile.SYMTYPE),
        ("verifier/pytest.xml", b"x" * 50, tarfile.REGTYPE),
    )  # fmt: skip
    files, problems = archive.regular_files(data, ("reward.txt", "ctrf.json", "reward.json", "pytest.xml"), 20)
    assert files == {"reward.txt": b"1"}
    assert problems == {"reward.json": "is a symbolic link", "pytest.xml": "is larger than 20 bytes"}
    with pytest.raises(ValueError, match="can't be read"):
        archive.regular_files(b"x" * 600, ("reward.txt",), 20)


def test_an_archive_that_holds_nothing_says_that_the_file_is_missing():
    async def first(data):
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        return await archive.first_member(stream, 10)

    member, content = asyncio.run(first(_archive(("x", b"abc", tarfile.REGTYPE))))
    assert (member.name, content) == ("x", b"abc")
    with pytest.raises(ValueError, match="missing"):
        asyncio.run(first(b""))


def _program(tmp_path, name, body):
    path = tmp_path / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_engine_is_asked_in_words_and_never_hangs(tmp_path):
    podman = Engine(_program(tmp_path, "podman", 'printf "%s|" "$@"; cat; echo complaint >&2; exit 3'), "runsc")
    docker = Engine(_program(tmp_path, "docker", "sleep 100 & wait"), "runsc")

    async def main():
        done = await podman.call("run", "a b", "$(c)", stdin=b"fed")
        assert (done.exit_code, done.text, done.stderr) == (3, "--runtime|runsc|run|a b|$(c)|fed", "complaint")
        with pytest.raises(SandboxLost, match="can't do this: complaint"):
            await podman.check("x", doing="do this")
        assert docker.run_options() == ["--runtime", "runsc"] and podman.run_options() == []
        assert (await docker.call("x", timeout_s=0.3)).exit_code is None
        flood = await Engine("/bin/cat").call("/dev/zero", limit=1000)
        assert (flood.exit_code, len(flood.stdout)) == (None, 1000)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_missing_engine_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(T1Error, match="podman and docker not found"):
        Engine()


def test_only_what_a_dead_driver_left_is_abandoned():
    boot, namespace, pid, started = driver_identity(os.getpid()).split(":")
    assert not _is_abandoned(f"{boot}:{namespace}:{pid}:{started}")
    assert _is_abandoned(f"{boot}:{namespace}:{pid}:{int(started) - 1}")  # the id is another process's now
    assert _is_abandoned(f"{boot}:{namespace}:{1 << 22}:5") and _is_abandoned(f"other-boot:{namespace}:{pid}:{started}")
    assert not _is_abandoned(f"{boot}:{int(namespace) + 1}:{1 << 22}:5")  # another container's processes can't be seen
    assert not _is_abandoned("") and not _is_abandoned("odd")


def test_no_limit_is_above_what_the_driver_may_give():
    import resource

    words = plain_limits({"fsize": 1 << 20})
    assert "fsize=1048576:1048576" in words and "core=0:0" in words
    value = int(next(word for word in words if word.startswith("nofile=")).split(":")[1])
    assert value <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] or resource.getrlimit(resource.RLIMIT_NOFILE)[1] == -1


def test_here_documents_are_no_instructions():
    document = (
        "RUN cat > /x <<EOF && cat <<-'TWO'\n# kept\nFROM a\n\nWORKDIR /a\nRUN pip install pytest\nlast \\\nEOF\n"
        "WORKDIR /b\n\tTWO\n"
    )
    text = (
        f"FROM a\nWORKDIR /w\n{document}RUN pip install pytest && ls\nCOPY <<X /y\nRUN pip install pytest\nX\nENV A=1\n"
    )
    mapped = mapped_dockerfile(text, {"a": HAVE}, make_workdirs=True)
    assert mapped == text.replace("FROM a", "FROM local/base:1", 1).replace("pip install pytest && ls", ": && ls")
    assert bases_of("FROM a\nRUN <<E\nFROM b\nE\n") == ["a"]


def test_the_link_that_an_images_directory_is():
    image = TaskImage("i", "/app", {}, "", ImageFacts.parse(b"workdir /srv/real\0"))
    paths = {"/app": "/srv/real", "/app/x": "/srv/real/x", "/apps": "/apps", "/": "/"}
    assert {path: image.real(path) for path in paths} == paths
    assert TaskImage("i", "/app", {}, "", ImageFacts(workdir="/")).real("/app") == "/"
    assert TaskImage("i", "/", {}, "", ImageFacts(workdir="/")).real("/x") == "/x"
