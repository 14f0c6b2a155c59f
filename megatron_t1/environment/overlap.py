"""How much of a benchmark is in a training set? Shared n-grams and near-duplicates of instruction, files and tests.

For each part of a task (instruction, environment/, tests/) a document of words is made. Two measures are exact counts
over an inverted index, not estimates:

    containment  share of the n-grams (8 words) of a benchmark task that some task of the training set has: copied text
    similarity   Jaccard index of the sets of 3-grams of two tasks, |A and B| / |A or B|: near-duplicates, also those
                 with other names and numbers in them; of parts of at least 10 words, since fewer are alike by chance

An n-gram that more than a tenth of the benchmark's tasks have is their common scaffold (a test runner, the same
Dockerfile) and says nothing about a pair: it is left out, and the share left out is told. Two equal instructions are a
near-duplicate in every case.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1.environment.loading import find_tasks, load_task
from megatron_t1.environment.task import Files, Task

PARTS = ("instruction", "files", "tests")
NGRAM, SHINGLE = 8, 3
NEAR_DUPLICATE = 0.5  # similarity from which a pair counts as one
SCAFFOLD_SHARE, SCAFFOLD_LEAST = 0.1, 4  # of the benchmark's tasks: an n-gram in more than both is scaffold
LEAST_WORDS = 10  # of a part, for its similarity to mean something
LEAST_FILE_BYTES = 64  # of a file, for being the same to mean something
KEPT_PAIRS = 20  # of each benchmark task
MAX_FILE_BYTES = 1 << 20  # of a longer file the head counts
_WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True)
class Pair:
    """Attributes:
    containment, similarity: by part, of those parts that both tasks have.
    """

    train: str
    benchmark: str
    containment: Mapping[str, float]
    similarity: Mapping[str, float]

    @property
    def worst(self) -> float:
        return max([*self.containment.values(), *self.similarity.values()], default=0.0)

    @property
    def near_duplicate(self) -> bool:
        return max(self.similarity.values(), default=0.0) >= NEAR_DUPLICATE


@dataclass(frozen=True)
class PartOverlap:
    """Of one part over all tasks of the benchmark.

    Attributes:
        ngrams: of the benchmark's tasks, each counted once a task.
        shared: those that some task of the training set has.
        touched: tasks of the benchmark with a shared one.
        scaffold: share of its n-grams that were left out as scaffold.
    """

    ngrams: int
    shared: int
    touched: int
    scaffold: float

    @property
    def share(self) -> float:
        return self.shared / self.ngrams if self.ngrams else 0.0


@dataclass(frozen=True)
class Overlap:
    """Attributes:
    duplicated: tasks of the benchmark with a near-duplicate in the training set.
    same_files: files of both sets with the same bytes, as (training task, benchmark task, name), without scaffold.
    pairs: of each benchmark task those that share most with it, the worst first.
    """

    train: int
    benchmark: int
    parts: Mapping[str, PartOverlap]
    duplicated: tuple[str, ...]
    same_files: tuple[tuple[str, str, str], ...]
    pairs: tuple[Pair, ...] = field(default=())

    @property
    def share(self) -> float:
        """Share of the benchmark's tasks with a near-duplicate: 0 is disjoint."""
        return len(self.duplicated) / self.benchmark if self.benchmark else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "train_tasks": self.train,
            "benchmark_tasks": self.benchmark,
            "near_duplicate_share": self.share,
            "near_duplicates": list(self.duplicated),
            "parts": {name: {**part.__dict__, "share": part.share} for name, part in self.parts.items()},
            "same_files": [list(found) for found in self.same_files],
            "pairs": [
                {**pair.__dict__, "containment": dict(pair.containment), "similarity": dict(pair.similarity)}
                for pair in self.pairs
            ],
        }


@dataclass(frozen=True)
class Document:
    """The words of one task's parts, and the digests of its files."""

    name: str
    words: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]  # SHA-256 -> name in the task


def load_documents(tasks: str | Path) -> list[Document]:
    """One document for each task of a directory or list; tasks that can't be played here count as well.

    Raises:
        T1Error: there is no task, or one of them is broken.
    """
    return [document(load_task(folder.path, engine_builds=True)) for folder in find_tasks(tasks)]


def document(task: Task) -> Document:
    texts: dict[str, list[str]] = {part: [] for part in PARTS}
    texts["instruction"] = list(dict.fromkeys([task.instruction, *(stage.instruction for stage in task.stages)]))
    digests: dict[str, str] = {}
    groups = [("files", "", task.environment_files()), ("tests", "", task.test_files())]
    for stage in task.stages if task.steps else ():
        place = f"steps/{stage.step}/"
        groups += [("files", place, stage.workdir_files()), ("tests", place, _new(stage.test_files(), groups))]
    for part, place, files in groups:
        for name, (content, _) in sorted(files.items()):
            if len(content) >= LEAST_FILE_BYTES:
                digests[hashlib.sha256(content).hexdigest()] = f"{place}{part}/{name}"
            if b"\0" not in content[:8192]:
                texts[part].append(content[:MAX_FILE_BYTES].decode("utf-8", errors="replace"))
    return Document(task.name, {part: _words("\n".join(found)) for part, found in texts.items()}, digests)


def _new(tests: Files, groups: Sequence[tuple[str, str, Files]]) -> Files:
    """Of a step's tests those that are not the whole task's, which come with every step."""
    shared = next(files for part, _, files in groups if part == "tests")
    return {name: entry for name, entry in tests.items() if shared.get(name) != entry}


def measure(train: Sequence[Document], benchmark: Sequence[Document], *, ngram: int = NGRAM) -> Overlap:
    """Overlap of every task in `benchmark` with every one in `train`."""
    copied = {part: _Grams.of(train, benchmark, part, ngram) for part in PARTS}
    alike = {part: _Grams.of(train, benchmark, part, SHINGLE) for part in PARTS}
    equal: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for a, own in enumerate(train):
        equal[tuple(own.words["instruction"])].append(a)
    pairs: list[Pair] = []
    duplicated: list[str] = []
    for b, other in enumerate(benchmark):
        containment: dict[int, dict[str, float]] = defaultdict(dict)
        similarity: dict[int, dict[str, float]] = defaultdict(dict)
        for part in PARTS:
            for a, count in copied[part].hits(b).items():
                containment[a][part] = count / len(copied[part].theirs[b])
            if len(other.words[part]) >= LEAST_WORDS:
                for a, count in alike[part].hits(b).items():
                    if len(train[a].words[part]) >= LEAST_WORDS:
                        union = len(alike[part].theirs[b]) + alike[part].sizes[a] - count
                        similarity[a][part] = count / union
        if other.words["instruction"]:
            for a in equal[tuple(other.words["instruction"])]:
                similarity[a]["instruction"] = 1.0
        found = [
            Pair(train[a].name, other.name, containment.get(a, {}), similarity.get(a, {}))
            for a in {*containment, *similarity}
        ]
        found.sort(key=lambda pair: (-pair.worst, pair.train))
        if any(pair.near_duplicate for pair in found):
            duplicated.append(other.name)
        pairs += found[:KEPT_PAIRS]
    pairs.sort(key=lambda pair: (-pair.worst, pair.benchmark, pair.train))
    parts = {part: grams.overlap() for part, grams in copied.items()}
    same = _same_files(train, benchmark)
    return Overlap(len(train), len(benchmark), parts, tuple(sorted(duplicated)), tuple(same), tuple(pairs))


@dataclass(frozen=True)
class _Grams:
    """The n-grams of one part, without scaffold.

    Attributes:
        theirs: of each benchmark task.
        sizes: how many each training task has.
        index: n-gram -> the training tasks that have it, of those that some benchmark task has.
        scaffold: share of the benchmark's that were left out.
    """

    theirs: list[set[int]]
    sizes: list[int]
    index: Mapping[int, list[int]]
    scaffold: float

    @classmethod
    def of(cls, train: Sequence[Document], benchmark: Sequence[Document], part: str, size: int) -> _Grams:
        theirs = [_ngrams(document.words[part], size) for document in benchmark]
        often = Counter(gram for grams in theirs for gram in grams)
        left_out = {gram for gram, count in often.items() if count > _bound(benchmark)}
        sizes: list[int] = []
        index: dict[int, list[int]] = {gram: [] for gram in often if gram not in left_out}
        for a, document in enumerate(train):
            grams = _ngrams(document.words[part], size) - left_out
            sizes.append(len(grams))
            for gram in grams & index.keys():
                index[gram].append(a)
        kept = [grams - left_out for grams in theirs]
        before = sum(map(len, theirs))
        return cls(kept, sizes, index, 1 - sum(map(len, kept)) / before if before else 0.0)

    def hits(self, b: int) -> Counter[int]:
        """Training task -> n-grams that it shares with benchmark task `b`."""
        return Counter(a for gram in self.theirs[b] for a in self.index[gram])

    def overlap(self) -> PartOverlap:
        shared = [sum(bool(self.index[gram]) for gram in grams) for grams in self.theirs]
        return PartOverlap(sum(map(len, self.theirs)), sum(shared), sum(map(bool, shared)), self.scaffold)


def _bound(benchmark: Sequence[Document]) -> float:
    return max(SCAFFOLD_LEAST, SCAFFOLD_SHARE * len(benchmark))


def _ngrams(words: Sequence[str], size: int) -> set[int]:
    """As numbers of 8 bytes: a set of tuples would be many times larger."""
    return {_number(words[start : start + size]) for start in range(len(words) - size + 1)}


def _number(words: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(errors="replace"), digest_size=8).digest(), "big")


def _same_files(train: Sequence[Document], benchmark: Sequence[Document]) -> list[tuple[str, str, str]]:
    owners: dict[str, list[str]] = defaultdict(list)
    for own in train:
        for digest in own.digests:
            owners[digest].append(own.name)
    often = Counter(digest for other in benchmark for digest in other.digests)
    return sorted(
        (owner, other.name, name)
        for other in benchmark
        for digest, name in other.digests.items()
        if often[digest] <= _bound(benchmark)
        for owner in owners.get(digest, ())
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
