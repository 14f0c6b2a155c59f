"""Is every tensor of a checkpoint accounted for, once, by the model and by the ranks of a layout? Reads no weights.

With config.json and the index alone (before a download, say) names are compared; with the files also shapes and types.
Works without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from megatron_t1.config.layout_rules import layout_problems
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.errors import IncompleteError
from megatron_t1.model.mapping import Source, WeightMapping
from megatron_t1.model.names import HEAD_TENSOR, CheckpointNames, carried_part, names_in
from megatron_t1.model.packing import Shape, divides
from megatron_t1.model.stored import architecture_from_hf
from megatron_t1.model.weight_files import (
    INDEX_FILE,
    SHOWN,
    TRAINED_TYPES,
    has_index,
    read_entries,
    read_index,
    stored_twice,
)

TRAINED, UNUSED = "language model", "unused (tied embeddings)"


@dataclass
class Part:
    """Tensors of a checkpoint that are treated alike."""

    tensors: int = 0
    numbers: int = 0  # in them; 0 where no shapes are known
    types: Counter[str] = field(default_factory=Counter)  # tensors by type of storage


@dataclass
class Account:
    """What `account_for` found.

    Attributes:
        parts: by what becomes of them: the language model is trained, the others are carried over or not used.
        files: weight files whose headers were read; 0: only names were compared.
        layout: numbers on the ranks of a layout: stage -> (dense, expert) of one rank; empty without a layout.
        problems: one line each; empty when every tensor is accounted for.
    """

    architecture: ArchitectureConfig
    names: CheckpointNames
    parts: dict[str, Part] = field(default_factory=dict)
    files: int = 0
    layout: dict[int, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def account_for(hf_dir: str | Path, layout: LayoutConfig | None = None) -> Account:
    """Compare a checkpoint with the model that its config.json describes, and with what a layout's ranks load.

    Also the ranks of phases that have a layout of their own (layout.critic, layout.export).

    Raises:
        ConfigError: config.json describes a model that isn't supported.
        IncompleteError: config.json or both index and weights are missing or unreadable.
    """
    directory = Path(hf_dir)
    architecture = architecture_from_hf(directory)
    stored, files, problems = _stored(directory)
    names = names_in(stored)
    account = Account(architecture, names, files=files, problems=problems)
    mapping = WeightMapping(architecture, names)
    expected = dict(mapping.tensors())
    if architecture.tie_word_embeddings:
        del expected[HEAD_TENSOR]
    _compare_names(account, mapping, stored, expected)
    for name, (code, shape) in stored.items():
        part = _part_of(mapping, name, expected)
        if not part:
            continue
        entry = account.parts.setdefault(part, Part())
        entry.tensors += 1
        if files:
            entry.numbers += math.prod(shape)
            entry.types[code] += 1
        if files and part == TRAINED:
            _compare(account, name, code, shape, expected[name])
    if layout is not None:
        account.layout, problems = _compare_layout(mapping, layout, expected, "layout")
        for phase in ("critic", "export"):
            if getattr(layout, phase):
                problems += _compare_layout(mapping, layout.of(phase), expected, f"layout.{phase}")[1]
        account.problems += problems
    return account


def _stored(directory: Path) -> tuple[dict[str, tuple[str, Shape]], int, list[str]]:
    """(type and shape of each tensor, both empty where only the index is there; files read; problems)."""
    paths = sorted(directory.glob("*.safetensors"))
    listed: dict[str, str] = {}
    if has_index(directory):
        listed = read_index(directory)
        paths = [path for path in paths if path.name in set(listed.values())]
        if not paths:
            return dict.fromkeys(listed, ("", ())), 0, []
    if not paths:
        raise IncompleteError(
            f"neither {INDEX_FILE} nor weights are there",
            where=str(directory),
            remedy="give a Hugging Face directory; its config.json and index are enough",
        )
    stored: dict[str, tuple[str, Shape]] = {}
    found: dict[str, str] = {}
    problems = [
        f"{name} is listed in the index and missing"
        for name in sorted(set(listed.values()) - {path.name for path in paths})
    ]
    for path in paths:
        try:
            entries = read_entries(path)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        problems += stored_twice(found, path.name, entries)
        stored |= {name: (entry.code, entry.shape) for name, entry in entries.items()}
    if listed:
        readable = set(found.values())
        here = {name for name, file in listed.items() if file in readable}
        differing = sorted(name for name in here | found.keys() if listed.get(name) != found.get(name))
        problems += _some("index and files disagree about", differing)
        stored |= {name: ("", ()) for name in listed if name not in stored}
    return stored, len(paths), problems


def _compare_names(account: Account, mapping: WeightMapping, stored: Iterable[str], expected: Iterable[str]) -> None:
    stored, expected = set(stored), set(expected)
    account.problems += _some("the model lacks in the checkpoint", sorted(expected - stored))
    account.problems += _some(
        "nobody uses", sorted(name for name in stored - expected if not _part_of(mapping, name, expected))
    )


def _part_of(mapping: WeightMapping, name: str, expected: Iterable[str]) -> str:
    if name in expected:
        return TRAINED
    if mapping.is_carried(name):
        return f"{carried_part(name)} (carried over)"
    return UNUSED if name == HEAD_TENSOR else ""


def _compare(account: Account, name: str, code: str, shape: Shape, expected: Shape) -> None:
    if not code:  # of a file that can't be read, which is named already
        return
    if shape != expected:
        account.problems.append(f"{name} has shape {list(shape)}, the architecture says {list(expected)}")
    if code not in TRAINED_TYPES:
        account.problems.append(f"{name} is stored as {code}; training loads {', '.join(TRAINED_TYPES)}")


def _compare_layout(
    mapping: WeightMapping, layout: LayoutConfig, expected: dict[str, Shape], where: str
) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """Visit every model-parallel rank: what all of them load must be every tensor, once.

    Args:
        where: what options of this layout are called in messages.

    Returns:
        (numbers on the ranks, as `Account.layout`; problems).
    """
    architecture, numbers, problems = mapping.architecture, {}, []
    if wrong := layout_problems(layout, architecture, where=where):
        return numbers, wrong
    layers = architecture.num_hidden_layers // (layout.pipeline * layout.virtual_pipeline)
    experts = architecture.num_experts // layout.expert
    shares: dict[str, Fraction] = {}
    for stage in range(layout.pipeline * layout.virtual_pipeline):
        dense = expert = 0
        for expert_rank in range(layout.expert):
            held = (
                range(stage * layers, (stage + 1) * layers),
                range(expert_rank * experts, (expert_rank + 1) * experts),
            )
            for parameter, source in mapping.parameters(*held):
                if source.names == (HEAD_TENSOR,) and HEAD_TENSOR not in expected:
                    continue
                size = layout.expert_tensor if source.is_expert else layout.tensor
                if not divides(source.packing, size):
                    problems.append(f"{where}: {parameter} of stage {stage} can't be cut over {size} ranks")
                if source.is_expert or not expert_rank:
                    _add_shares(shares, source, size)
                if not expert_rank:
                    held_here = math.ceil(sum(map(math.prod, source.packing.shapes)) * source.packing.share(0, size))
                    dense, expert = (dense, expert + held_here) if source.is_expert else (dense + held_here, expert)
        rank = stage % layout.pipeline
        before = numbers.get(rank, (0, 0))
        numbers[rank] = (before[0] + dense, before[1] + expert)
    uneven = sorted(name for name in expected.keys() | shares.keys() if shares.get(name) != (name in expected))
    return numbers, problems + _some(f"the ranks of {where} don't load exactly once", uneven)


def _add_shares(shares: dict[str, Fraction], source: Source, size: int) -> None:
    share = sum(source.packing.share(rank, size) for rank in range(size)) / source.slots
    for name in source.names:
        shares[name] = shares.get(name, Fraction(0)) + share


def _some(what: str, names: list[str]) -> list[str]:
    return [f"{what} {len(names)} tensors: {', '.join(names[:SHOWN])}"] if names else []
