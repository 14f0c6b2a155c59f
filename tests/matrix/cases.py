"""Every combination of parallel layout, batch and model that replay is tried in, and small selections that cover them.

A selection of strength t holds, for every t factors, every combination of their values that occurs in a case that can
run at all (a covering array): strength 1 shows every value, 2 every pair. So no pair of features is left untried
because nobody thought of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np

from megatron_t1.config.families import core_problems
from megatron_t1.config.layout_rules import layout_problems
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from tests.hybrid_model import HYBRID
from tests.tiny_model import ARCHITECTURE

DENSE_LAYERS = {"moe": 0, "dense_first_1": 1, "dense_first_2": 2, "mtp": 0}
ARCHITECTURES = {"hybrid": replace(HYBRID, linear_num_key_heads=4, linear_num_value_heads=8)}  # others: ARCHITECTURE

FACTORS: dict[str, tuple[Any, ...]] = {
    "world": (1, 2, 4),
    "tensor": (1, 2),  # 2: with sequence parallelism, which Megatron's MoE training requires
    "expert": (1, 2, 4),
    "expert_tensor": (1, 2),
    "pipeline": (1, 2),
    "virtual_pipeline": (1, 2),
    "context": (1, 2),
    "dispatcher": ("alltoall", "allgather"),
    "recompute": ("none", "full", "block", "moe"),
    "batch": ("packed", "padded"),
    "micro_batches": (1, 4),
    "model": tuple(DENSE_LAYERS),
    "roles": ("policy", "value", "three"),  # three: actor, critic and reference in one process
    "scored": (False, True),  # a log-prob pass before training
}
PARALLEL = ("world", "tensor", "expert", "expert_tensor", "pipeline", "virtual_pipeline", "context", "dispatcher")


@dataclass(frozen=True)
class Case:
    """One way to compute the same loss; fields as in FACTORS."""

    world: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    dispatcher: str = "alltoall"
    recompute: str = "none"
    batch: str = "packed"
    micro_batches: int = 4
    model: str = "moe"
    roles: str = "policy"
    scored: bool = False

    @property
    def layout(self) -> LayoutConfig:
        sizes = {name: getattr(self, name) for name in PARALLEL if name != "world"}
        recompute = "full" if self.recompute == "block" else self.recompute
        return LayoutConfig(processes=self.world, recompute=recompute, **sizes)

    @property
    def architecture(self) -> ArchitectureConfig:
        return ARCHITECTURES.get(self.model, ARCHITECTURE)

    @property
    def data_parallel(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return ("value", "policy") if self.roles == "three" else (self.roles,)

    @property
    def name(self) -> str:
        """Short and unique, e.g. "tp2 ep2 pp2 | packed x4 | full | dense_first_1 | policy"."""
        sizes = {"dp": self.data_parallel} | {
            short: getattr(self, long)
            for short, long in (
                ("tp", "tensor"),
                ("pp", "pipeline"),
                ("vpp", "virtual_pipeline"),
                ("cp", "context"),
                ("ep", "expert"),
                ("etp", "expert_tensor"),
            )
        }
        parallel = " ".join(f"{short}{size}" for short, size in sizes.items() if size > 1) or "1 process"
        parts = [parallel + (" allgather" if self.dispatcher == "allgather" else "")]
        parts += [f"{self.batch} x{self.micro_batches}"]
        parts += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        parts += [] if self.model == "moe" else [self.model]
        return " | ".join([*parts, self.roles + (" scored" if self.scored else "")])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# The combinations that public reports are about; part of every selection.
REPORTED = (
    Case(world=2, pipeline=2, virtual_pipeline=2, model="dense_first_1", recompute="full"),  # verl#5452 NeMo-RL#2740
    Case(world=2, pipeline=2, virtual_pipeline=2, model="dense_first_2", scored=True),  # verl#5452 Megatron-LM#2693
    Case(world=2, pipeline=2, recompute="moe", scored=True),  # AReaL#1166 slime#951
    Case(world=2, pipeline=2, recompute="full", batch="padded", model="mtp"),  # Megatron-LM#7404
    Case(roles="three", recompute="full"),  # miles#2226
)

# The hybrid model has a list of its own: older cores lack it or parts of it.
_TWO, _FOUR = {"world": 2, "model": "hybrid"}, {"world": 4, "model": "hybrid"}
HYBRID_FEW = (
    Case(**_TWO, expert=2),
    Case(**_TWO, pipeline=2, recompute="full"),
)
HYBRID_ALL = (
    *HYBRID_FEW,
    Case(model="hybrid", batch="padded"),
    Case(model="hybrid", recompute="full", micro_batches=1),
    Case(model="hybrid", roles="value", recompute="moe"),
    Case(**_TWO),
    Case(**_TWO, expert=2, dispatcher="allgather"),
    Case(**_TWO, expert=2, batch="padded", scored=True),
    Case(**_TWO, expert=2, roles="three", recompute="moe"),
    Case(**_TWO, pipeline=2),
    Case(**_TWO, pipeline=2, virtual_pipeline=2),
    Case(**_TWO, pipeline=2, virtual_pipeline=2, recompute="full"),
    Case(**_TWO, context=2),
    Case(**_TWO, context=2, batch="padded"),
    Case(**_TWO, context=2, expert=2, recompute="full"),
    Case(**_TWO, tensor=2, expert_tensor=2),
    Case(**_TWO, tensor=2, expert=2),
    Case(**_TWO, tensor=2, expert=2, batch="padded", roles="value"),
    Case(**_FOUR, tensor=2, context=2, expert=2),
    Case(**_FOUR, pipeline=2, context=2, expert=2, recompute="full"),
    Case(**_FOUR, tensor=2, pipeline=2, virtual_pipeline=2, expert=2),
)


def problem(case: Case) -> str:
    """Why a case can't be run on any core; empty when it can."""
    wrong = layout_problems(case.layout, case.architecture, processes=case.world, backend="cpu")
    if wrong:
        return "; ".join(wrong)
    if case.virtual_pipeline > 1 and case.micro_batches % case.pipeline:
        return "interleaved stages take micro-batches in rounds of the pipeline's size"
    if case.model == "mtp" and case.roles != "policy":
        return "a value model has no multi-token prediction"
    if case.model == "mtp" and (case.batch == "packed" or case.context > 1):
        return (
            "Megatron's own multi-token prediction differs there: cores up to 0.15 refuse packed batches, later ones "
            "can't recompute them, and its loss under context parallelism isn't that of one process"
        )
    return ""


def core_defect(case: Case, version: str) -> str:
    """Why a case can't be run on megatron-core `version`; empty when it can."""
    if case.model == "hybrid":
        return "; ".join(core_problems(case.architecture, case.layout, version))
    if case.model != "mtp":
        return ""
    if version.startswith(("0.14.", "0.15.")) and case.recompute == "block":
        return "megatron-core 0.14 and 0.15 miss an import where they recompute multi-token prediction block by block"
    if version.startswith("0.18.") and case.recompute in ("full", "block"):
        return "megatron-core 0.18 gives its recomputation of multi-token prediction an argument that it doesn't take"
    return ""


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case that can run."""
    rest = [name for name in FACTORS if name not in PARALLEL]
    cases = []
    for sizes in product(*(FACTORS[name] for name in PARALLEL)):
        parallel = dict(zip(PARALLEL, sizes, strict=True))
        if layout_problems(Case(**parallel).layout, ARCHITECTURE, processes=parallel["world"], backend="cpu"):
            continue
        for values in product(*(FACTORS[name] for name in rest)):
            case = Case(**parallel, **dict(zip(rest, values, strict=True)))
            if not problem(case):
                cases.append(case)
    return tuple(cases)


@cache
def selection(strength: int) -> tuple[Case, ...]:
    """REPORTED, and cases that together show every combination of `strength` factors' values (greedy, repeatable)."""
    cases = all_cases()
    names = [field.name for field in fields(Case)]
    levels = np.array([[FACTORS[name].index(getattr(case, name)) for name in names] for case in cases])
    sizes = [len(FACTORS[name]) for name in names]
    codes, first = [], 0
    for columns in combinations(range(len(names)), strength):
        code = np.ravel_multi_index(levels[:, columns].T, [sizes[column] for column in columns])
        codes.append(first + code)
        first += int(np.prod([sizes[column] for column in columns]))
    code = np.stack(codes, axis=1)  # [cases, combinations of factors]
    open_codes = np.zeros(first, bool)
    open_codes[code] = True
    chosen = [cases.index(case) for case in REPORTED]
    open_codes[code[chosen]] = False
    while open_codes.any():
        best = int(open_codes[code].sum(axis=1).argmax())
        chosen.append(best)
        open_codes[code[best]] = False
    return tuple(cases[index] for index in chosen)
