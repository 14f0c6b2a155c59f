"""What a dry run found on each rank, and whether the ranks make the model, the batch and the plan. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_t1.planner.bytes import RankBytes

GIB = 2**30
SHOWN = 4  # names in a message


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank; `data` without context parallelism, `expert_data` among the holders of equal experts."""

    rank: int
    pipeline: int
    tensor: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True)
class PassFindings:
    """One micro-batch forward and backward through this rank's chunks."""

    tokens: int  # positions of the micro-batch over all context ranks
    without_gradient: list[str]  # parameters that the backward pass didn't reach
    seconds: float


@dataclass(frozen=True)
class BatchFindings:
    """What of the sample batch this rank would compute. A token's number is its place in the whole batch.

    Attributes:
        tokens: numbers of the real tokens in this rank's micro-batches.
        predicted: numbers of the loss tokens whose loss it computes; empty but on the last stage.
        routed: numbers of the tokens whose routes its routers read, for each of `layers`.
        layers: columns of the routes that belong to this rank's routers.
        misplaced: routers' rows that don't hold the routes of the token that stands there.
    """

    tokens: list[int]
    predicted: list[int]
    routed: list[int]
    layers: list[int]
    misplaced: int


@dataclass(frozen=True)
class RankFindings:
    """Everything about one rank.

    Attributes:
        converted: elements of Hugging Face tensors that this rank answers for in a conversion.
        stored: checkpoint entry -> (elements whose main replica this rank writes, elements of the whole entry).
        passed: None for ranks whose stage another rank ran.
        batch: None where roles don't read a batch.
        seconds: of each part.
    """

    place: Place
    bytes: RankBytes
    converted: dict[str, int]
    stored: dict[str, list[int]]
    passed: PassFindings | None = None
    batch: BatchFindings | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankFindings:
        parts = {"place": Place, "bytes": RankBytes, "passed": PassFindings, "batch": BatchFindings}
        made = {name: None if values[name] is None else made(**values[name]) for name, made in parts.items()}
        return cls(**{**values, **made})


@dataclass(frozen=True)
class LayoutFindings:
    """All ranks of one layout with one role's model.

    Args:
        core: version of megatron-core.
        tensors: Hugging Face tensor -> elements, of the whole model.
        head: parameters without such a tensor: a value model's scalar head.
        tokens, loss_tokens: of the sample batch.
        layers: routers of the whole model.
        planned_parameters: of the whole model, by the planner.
        planned: what the planner says of every rank.
        passes: whether a micro-batch was to run forward and backward.
        visited: ranks built for this role; the others are those of another role whose stages are the same.
    """

    name: str
    role: str
    core: str
    ranks: Sequence[RankFindings]
    processes: int
    tensors: dict[str, int]
    head: int
    tokens: int
    loss_tokens: int
    layers: int
    planned_parameters: int
    planned: Sequence[RankBytes]
    passes: bool = True
    visited: int = 0

    @property
    def parameters(self) -> int:
        """Elements that the ranks hold between them, each counted once."""
        return self.head + sum(count for found in self.ranks for count in found.converted.values())

    def problems(self) -> list[str]:
        """What doesn't hold, one line each; empty when the dry run came out right."""
        checks = (self._ranks, self._converted, self._stored, self._planned, self._passes, self._batch)
        return [f"{self.name} {self.role}: {problem}" for check in checks for problem in check()]

    def _ranks(self) -> Iterator[str]:
        seen = Counter(found.place.rank for found in self.ranks)
        if seen != Counter(range(self.processes)):
            yield f"{len(seen)} of {self.processes} ranks were visited"

    def _converted(self) -> Iterator[str]:
        found = _sums(found.converted for found in self.ranks)
        yield from _uneven("Hugging Face tensors", found, self.tensors)

    def _stored(self) -> Iterator[str]:
        whole = {key: sizes[1] for found in self.ranks for key, sizes in found.stored.items()}
        own = _sums({key: sizes[0] for key, sizes in found.stored.items()} for found in self.ranks)
        yield from _uneven("checkpoint entries", own, whole)

    def _planned(self) -> Iterator[str]:
        if self.parameters != self.planned_parameters:
            yield f"the ranks hold {self.parameters:,} parameters, the plan says {self.planned_parameters:,}"
        planned = {each.rank: each for each in self.planned}
        wrong = [found for found in self.ranks if planned.get(found.place.rank) != found.bytes]
        if wrong:
            first = wrong[0]
            yield (
                f"{len(wrong)} ranks differ from the plan, rank {first.place.rank} first: found {first.bytes}, "
                f"planned {planned.get(first.place.rank)}"
            )

    def _passes(self) -> Iterator[str]:
        last = max(found.place.pipeline for found in self.ranks)
        stages = {found.place.pipeline for found in self.ranks} if self.role == "policy" else {last}
        without = stages - {found.place.pipeline for found in self.ranks if found.passed is not None}
        if self.passes and without:
            yield f"no rank of stages {sorted(without)} ran forward and backward"
        for found in self.ranks:
            if found.passed is not None and found.passed.without_gradient:
                names = found.passed.without_gradient
                yield f"rank {found.place.rank}: no gradient for {len(names)} parameters: {', '.join(names[:SHOWN])}"

    def _batch(self) -> Iterator[str]:
        reading = [found for found in self.ranks if found.batch is not None]
        if not reading:
            return
        tokens, cells = defaultdict(Counter), Counter()
        predicted = defaultdict(Counter)
        for found in reading:
            batch = found.batch
            tokens[found.place.pipeline, found.place.tensor].update(batch.tokens)
            if batch.predicted:
                predicted[found.place.tensor].update(batch.predicted)
            cells.update(token * self.layers + layer for token in batch.routed for layer in batch.layers)
            if batch.misplaced:
                yield f"rank {found.place.rank}: {batch.misplaced} rows of routes lie beside their token"
        whole = Counter(range(self.tokens))
        for (pipeline, tensor), seen in tokens.items():
            if seen != whole:
                yield f"stage {pipeline}, tensor rank {tensor}: {_off(seen, whole)} tokens aren't there exactly once"
        for tensor, seen in predicted.items():
            if len(seen) != self.loss_tokens or set(seen.values()) != {1}:
                yield f"tensor rank {tensor}: {len(seen)} of {self.loss_tokens} loss tokens have a loss, or some twice"
        if self.loss_tokens and not predicted:
            yield "no rank computes a loss"
        if cells and (missing := _off(cells, Counter(range(self.tokens * self.layers)))):
            yield f"routes: {missing} of {self.tokens * self.layers} (token, layer) pairs aren't there exactly once"

    def table(self) -> list[list[str]]:
        """Rows of stages and kinds of ranks: parameters in millions, bytes in GiB of the fullest rank."""
        kinds: dict[tuple[int, int, int], list[RankBytes]] = defaultdict(list)
        for found in self.ranks:
            kinds[found.place.pipeline, found.bytes.dense_parameters, found.bytes.expert_parameters].append(found.bytes)
        rows = []
        for (stage, dense, expert), held in sorted(kinds.items()):
            largest = max(held, key=lambda each: each.static_bytes)
            sizes = (largest.weight_bytes, largest.gradient_bytes, largest.optimizer_bytes, largest.static_bytes)
            rows.append(
                [str(stage), str(len(held)), f"{dense / 1e6:.2f}", f"{expert / 1e6:.2f}"]
                + [f"{size / GIB:.2f}" for size in sizes]
            )
        return rows


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _uneven(what: str, found: dict[str, int], whole: dict[str, int]) -> Iterator[str]:
    """A line when not every tensor is there exactly once."""
    wrong = sorted(name for name in found.keys() | whole.keys() if found.get(name, 0) != whole.get(name, 0))
    if wrong:
        shown = ", ".join(f"{name} ({found.get(name, 0)} of {whole.get(name, 0)})" for name in wrong[:SHOWN])
        yield f"{len(wrong)} {what} aren't covered exactly once: {shown}"


def _off(seen: Counter[int], whole: Counter[int]) -> int:
    """Keys whose counts differ."""
    return sum(seen[key] != whole[key] for key in seen.keys() | whole.keys())
