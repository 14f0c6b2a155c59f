#!/usr/bin/env python
"""Run the replay tests on several releases of megatron-core and print a table: `make test-matrix`.

Each release is unpacked into a directory of its own, which comes first on PYTHONPATH; everything else is the
environment that runs this script. Releases before 0.16 get the router's seam from `t1 patch`. The tests fail if any
process imports another megatron-core than the one asked for.

Exit status: 0 all green, 1 a test failed, 3 a release can't be had.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
NEEDS_TRITON = (0, 18)  # imported at the top of a module there, on CPU too
HAS_SEAM = (0, 16)
TRITON = "triton==3.9.0"
UNAVAILABLE = 3


def main() -> int:
    options = _parser().parse_args()
    unknown = [version for version in options.versions if version not in VERSIONS]
    if unknown:
        raise SystemExit(f"unknown versions {unknown}; known: {', '.join(VERSIONS)}")
    results = []
    with tempfile.TemporaryDirectory(prefix="t1-matrix-") as scratch:
        for version in options.versions:
            try:
                paths = prepare(version, options.cache, Path(scratch))
            except subprocess.CalledProcessError as error:
                print(f"megatron-core {version} can't be had: {error.stderr.strip()[-800:]}", file=sys.stderr)
                return UNAVAILABLE
            results.append(run(version, paths, options))
            print(results[-1].line, flush=True)
    if options.reuse:
        others = [version for version in VERSIONS if version not in options.versions]
        results += [
            read(version, _report(version, options)) for version in others if _report(version, options).is_file()
        ]
        results.sort(key=lambda result: VERSIONS.index(result.version))
    print("\n" + summary(results))
    if options.write_docs:
        write_docs(options.write_docs, results, " ".join(options.tests))
    return 0 if all(result.green for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="*", default=list(VERSIONS), metavar="X.Y.Z")
    parser.add_argument("--strength", type=int, default=2, help="of the layouts' selection (tests/matrix/cases.py)")
    parser.add_argument("--reuse", action="store_true", help="show the other releases as their last run left them")
    parser.add_argument("--tests", nargs="+", default=["tests/routing"], metavar="PATH")
    parser.add_argument(
        "--write-docs", type=document, metavar="FILE", help="where to put the table of layouts x versions"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where unpacked releases are kept")
    return parser


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-t1" / "matrix"


# -- environments ---------------------------------------------------------------------------------------------------


def prepare(version: str, cache: Path, scratch: Path) -> list[Path]:
    """Directories for PYTHONPATH, the one with megatron/core first. Raises CalledProcessError without a network."""
    core = install(f"megatron-core=={version}", cache)
    if release(version) < HAS_SEAM:
        patched = scratch / f"megatron-core-{version}"  # a copy: the cached one stays what the index has
        shutil.copytree(core, patched)
        command = [sys.executable, "-m", "megatron_t1.cli", "patch", "apply"]
        _quiet([*command, "--checkout", str(patched), "--only", "router_replay"])
        core = patched
    lacks_triton = release(version) >= NEEDS_TRITON and importlib.util.find_spec("triton") is None
    return [core] + ([install(TRITON, cache)] if lacks_triton else [])


def install(requirement: str, cache: Path) -> Path:
    """A directory with one package and nothing it depends on; complete or absent."""
    target = cache / requirement.replace("==", "-")
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
        try:
            _quiet([*pip, "--no-deps", "--ignore-requires-python", "--target", str(unfinished), requirement])
            try:
                unfinished.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another run was faster
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _quiet(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


# -- one run --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    version: str
    seconds: float = 0.0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)  # name -> "loss / gradient", or why not

    @property
    def green(self) -> bool:
        return self.passed > 0 and not self.failed

    @property
    def line(self) -> str:
        verdict = "passed" if self.green else "FAILED"
        counts = f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return f"megatron-core {self.version:<7} {verdict}  {counts}  {self.seconds:.0f} s"


def python_path(paths: list[Path]) -> str:
    """PYTHONPATH with some directories before those of this process."""
    return os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH")]))


def run(version: str, paths: list[Path], options: argparse.Namespace) -> Result:
    """The tests on one release. A crash of pytest itself is a failure without a report."""
    report = _report(version, options)
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(paths),
        "T1_TEST_MEGATRON": f"{version}@{paths[0].resolve()}",
        "T1_LAYOUT_STRENGTH": str(options.strength),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", *options.tests, "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if finished.returncode not in (0, 1) or not report.is_file():
        result = Result(version, failed=[f"pytest ended with {finished.returncode}"])
    else:
        result = read(version, report)
    if not result.green:
        print(finished.stdout[-6000:] + finished.stderr[-2000:], file=sys.stderr)
    return result


def _report(version: str, options: argparse.Namespace) -> Path:
    """Where the outcome of one release's last run of these tests lies."""
    directory = options.cache / "reports"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{version}-{'+'.join(Path(path).stem for path in options.tests)}.xml"


def read(version: str, report: Path) -> Result:
    """What pytest's report says."""
    result, tree = Result(version), ElementTree.parse(report)
    result.seconds = sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))
    for case in tree.iter("testcase"):
        name = case.get("name", "")
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        if skipped is not None:
            result.skipped.append(f"{name}: {skipped.get('message')}")
        elif failed:
            result.failed.append(name)
        else:
            result.passed += 1
        values = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if "layout" in values:
            difference = f"{float(values['loss']):.0e} / {float(values['gradient']):.0e}" if "loss" in values else ""
            reason = "skipped" if skipped is not None else "FAILED" if failed else ""
            result.layouts[values["layout"]] = reason or difference
    return result


# -- tables ---------------------------------------------------------------------------------------------------------


def summary(results: list[Result]) -> str:
    lines = [result.line for result in results]
    for result in results:
        lines += [f"  {result.version} failed: {name}" for name in result.failed]
    reasons = sorted({f"  {result.version} skipped: {why}" for result in results for why in result.skipped})
    return "\n".join(lines + reasons)


BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def document(name: str) -> Path:
    """The file of an option that is written at the end; looked at in the beginning."""
    path = Path(name)
    text = path.read_text() if path.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise argparse.ArgumentTypeError(f"{path} must hold {BEGIN} and {END} once each")
    return path


def write_docs(path: Path, results: list[Result], tests: str) -> None:
    """Put the table of layouts x versions between the file's markers."""
    text = path.read_text()
    header = ["layout", *(result.version for result in results)]
    names = dict.fromkeys(name for result in results for name in result.layouts)
    rows = [[name.replace("|", ","), *(result.layouts.get(name, "") for result in results)] for name in names]
    rows.append([f"all of {tests}", *(f"{result.passed} passed, {len(result.failed)} failed" for result in results)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
