#!/usr/bin/env python
"""`make dryrun`: `t1 dryrun` of the 122B's layouts, on a megatron-core that can cut it, and its output in a document.

Gated delta nets are cut over tensor and context ranks by releases from 0.18 on. One of them is unpacked into a
directory of its own, as `make test-matrix` does, and comes first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from test_matrix import BEGIN, END, ROOT, UNAVAILABLE, default_cache, document, prepare, python_path

CORE = "0.19.2"


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="t1-dryrun-core-") as scratch:
        try:
            paths = prepare(options.core, options.cache, Path(scratch))
        except subprocess.CalledProcessError as error:
            print(f"megatron-core {options.core} can't be had: {error.stderr.strip()[-800:]}", file=sys.stderr)
            return UNAVAILABLE
        command = [sys.executable, "-m", "megatron_t1.cli", "dryrun", f"experiment={options.experiment}"]
        command += [f"layout={','.join(options.layouts)}", *options.arguments]
        environment = {**os.environ, "PYTHONPATH": python_path(paths), "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(finished.stdout, end="")
    if finished.returncode == 0 and options.write:
        write_sections(options.write, finished.stdout)
    return finished.returncode


def layouts() -> list[str]:
    """The shipped layouts of the 122B, by size."""
    names = [path.stem for path in (ROOT / "conf" / "layout").glob("gpus*.yaml") if not path.stem.endswith("30b")]
    return sorted(names, key=lambda name: (int(re.findall(r"\d+", name)[0]), name))


def write_sections(path: Path, printed: str) -> None:
    """Put what was printed between the document's markers; sections of layouts that weren't run stay."""
    before, rest = path.read_text().split(BEGIN)
    old, after = rest.split(END)
    sections = {**_sections(old), **_sections(printed)}
    known = {name: place for place, name in enumerate(layouts())}  # layouts of one's own come last
    kept = sorted(sections, key=lambda title: (known.get(title.split(",")[0], len(known)), title))
    body = "\n\n".join(sections[title] for title in kept)
    path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")
    print(f"wrote {path}")


def _sections(text: str) -> dict[str, str]:
    """Title -> text of each section; what stands before the first is left out."""
    parts = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    return {part.split(":")[0]: "### " + part.strip() for part in parts}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", default=CORE, metavar="X.Y.Z", help="release of megatron-core")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where unpacked releases are kept")
    parser.add_argument("--experiment", default="ppo_122b")
    parser.add_argument("--layouts", nargs="+", default=layouts(), metavar="NAME")
    parser.add_argument("--write", type=document, metavar="FILE", help="the document")
    parser.add_argument("arguments", nargs="*", help="of `t1 dryrun`, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
