"""Megatron chunks -> a Hugging Face directory, streamed: a rank holds one parameter at a time besides the model.

The directory has the template's conventions (prefix of the names, experts in one tensor or in many), its settings, and
what training doesn't touch, bit for bit, so that it loads wherever the template does.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_t1 import atomic
from megatron_t1.errors import ConfigError, MismatchError
from megatron_t1.model.binding import bind, expected_tensors, require_same_architecture
from megatron_t1.model.chunks import bare_chunks
from megatron_t1.model.collective import gather_objects, on_first_rank, together
from megatron_t1.model.config_json import CONFIG_FILE, read_config
from megatron_t1.model.directories import make_empty, publish_directory
from megatron_t1.model.export_jobs import Job, carry_jobs, parameter_jobs
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import HEAD_TENSOR, CheckpointNames, names_in
from megatron_t1.model.safetensors_io import (
    TRAINED_CODES,
    SafetensorsDirectory,
    SafetensorsWriter,
    TensorHeader,
)
from megatron_t1.model.stored import NESTED_CONFIG
from megatron_t1.model.weight_files import INDEX_FILE, SINGLE_FILE, has_index
from megatron_t1.paths import TEMPLATE_PATTERNS
from megatron_t1.phase import WrittenFile
from megatron_t1.regular import open_regular

MAX_FILE_BYTES = 4 << 30
MIN_CARRIED_BYTES = 256 << 20  # of tensors carried over by one rank, while there are so many


def export_hf(
    chunks: list[Module],
    out_dir: str | Path,
    template_dir: str | Path,
    dtype: str,
    *,
    relative_to: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[WrittenFile]:
    """Write a policy so that vLLM and transformers load it like the template. Collective.

    Owners write their own files; the directory appears under its name when it is complete and replaces an earlier one.

    Args:
        chunks: a policy, as `build_model` returns it.
        out_dir: directory to create.
        template_dir: the checkpoint the training started from. config.json, tokenizer and generation settings, names,
            and the tensors that training doesn't touch come from here. Without weights in it, names are a text model's.
        dtype: "float32" or "bfloat16", of the written tensors; the same as the model's gives the same bits. Tensors of
            the delta net that are published in fp32 keep the template's type.
        relative_to: what the paths of the result are relative to; `out_dir` itself by default.
        max_file_bytes: of tensor data in one file.

    Returns:
        Every file with its size and SHA-256, on every rank.

    Raises:
        ConfigError: unknown dtype, or `out_dir` doesn't lie below `relative_to`, is the template's own, or holds
            something else than an export.
        MismatchError: the template is of another architecture, or has tensors that would be lost.
        IncompleteError: the template's weights are damaged.
        T1Error: a rank couldn't write.
    """
    chunks = bare_chunks(chunks)
    out, template_path = Path(out_dir).resolve(), Path(template_dir).resolve()
    base = out if relative_to is None else Path(relative_to).resolve()
    torch_dtype = getattr(torch, dtype, None)
    if torch_dtype not in TRAINED_CODES:
        raise ConfigError(f"unknown dtype {dtype!r}", where="model.dtype", remedy="use float32 or bfloat16")
    if not out.is_relative_to(base):
        raise ConfigError(f"the export lies outside {base}", where=str(out))
    require_other_directory(out, template_path)
    together(lambda: _require_replaceable(out))
    together(lambda: require_same_architecture(chunks, template_path, "policy"))
    with ExitStack() as stack:
        jobs: list[Job] = []
        (expected, *_) = together(lambda: _prepare(chunks, template_path, torch_dtype, stack, jobs))
        partial = out.with_name(out.name + atomic.TEMPORARY_SUFFIX)
        on_first_rank(lambda: make_empty(partial))
        files = _name_files(_cut_files(jobs, max_file_bytes), expected)
        written = together(lambda: _write(partial, jobs, files))
    headers = gather_objects([(file, tensor.name, tensor.bytes) for file, tensors in files for tensor in tensors])
    settings: list[WrittenFile] = []
    on_first_rank(lambda: settings.extend(_finish(partial, template_path, torch_dtype, headers)))
    on_first_rank(lambda: publish_directory(partial, out))
    prefix = out.relative_to(base)
    files_of_all = [file for of_rank in (*written, *gather_objects(settings)) for file in of_rank]
    return [WrittenFile(str(prefix / file.path), file.size, file.sha256) for file in files_of_all]


def require_other_directory(out: Path, template: Path) -> None:
    """Raise ConfigError where an export to `out` would replace its template; cheap, so also before a training."""
    if out.resolve() in (template.resolve(), *template.resolve().parents):
        raise ConfigError(
            "the export would replace the checkpoint that it takes names, settings and untrained tensors from",
            where=str(out),
            remedy="export to another directory (another run.dir)",
        )


def _require_replaceable(out: Path) -> None:
    """Raise ConfigError where something lies that is no earlier export: a directory of many models, say."""
    if os.path.lexists(out) and not (out.is_dir() and (has_index(out) or not any(out.iterdir()))):
        raise ConfigError(
            f"the export would replace what lies there, and that is no export: it has no {INDEX_FILE}",
            where=str(out),
            remedy="name a directory of its own, for example one below it",
        )


def _prepare(
    chunks: list[Module], directory: Path, dtype: torch.dtype, stack: ExitStack, jobs: list[Job]
) -> set[str] | None:
    """Fill in this rank's jobs; the first rank says which tensors all ranks together must write."""
    template = _Template.open(directory, chunks[0], stack)
    jobs.extend(template.jobs(chunks, dtype))
    return template.expected if dist.get_rank() == 0 else None


@dataclass
class _Template:
    """What the checkpoint that training started from says of an export."""

    names: CheckpointNames
    expected: set[str]  # tensors of the export
    carried: list[str]  # of these, the ones to copy
    weights: SafetensorsDirectory | None
    mapping: WeightMapping

    @classmethod
    def open(cls, directory: Path, chunk: Module, stack: ExitStack) -> _Template:
        """Raise MismatchError when the template has tensors that neither the model nor a copy would give."""
        if not has_index(directory) and not (directory / SINGLE_FILE).exists():
            names = CheckpointNames()
            return cls(names, expected_tensors(chunk, names), [], None, WeightMapping(chunk.architecture, names))
        weights = stack.enter_context(SafetensorsDirectory(directory))
        names = names_in(weights.files)
        mapping = WeightMapping(chunk.architecture, names)
        carried = [name for name in weights.files if mapping.is_carried(name)]
        expected = expected_tensors(chunk, names).union(carried)
        if lost := sorted(weights.files.keys() - expected - {HEAD_TENSOR}):
            raise MismatchError(
                f"{len(lost)} tensors of the template would be lost: {', '.join(lost[:5])}",
                where=str(directory),
                remedy="give the checkpoint that the training started from",
            )
        return cls(names, expected, carried, weights, mapping)

    def jobs(self, chunks: list[Module], dtype: torch.dtype) -> list[Job]:
        bound, _ = bind(chunks, self.names)
        types = {}
        for name in {name for item in bound for name in item.source.names if self.mapping.keeps_storage_type(name)}:
            stored = self.weights is not None and name in self.weights.files
            types[name] = self.weights.header(name).dtype if stored else torch.float32
        carried = [] if self.weights is None else carry_jobs(self.weights, self.carried, MIN_CARRIED_BYTES)
        return [*parameter_jobs(bound, types, dtype), *carried]


def _cut_files(jobs: list[Job], max_bytes: int) -> list[list[TensorHeader]]:
    """The tensors this rank writes, in order, cut into files; the tensors of a job stay together."""
    files: list[list[TensorHeader]] = []
    filled = 0
    for job in jobs:
        if not job.is_owner:
            continue
        size = sum(tensor.bytes for tensor in job.tensors)
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].extend(job.tensors)
        filled += size
    return files


def _name_files(files: list[list[TensorHeader]], expected: set[str]) -> list[tuple[str, list[TensorHeader]]]:
    """Number the files over all ranks; checks that the ranks together write every tensor exactly once."""
    of_ranks = gather_objects([[tensor.name for tensor in tensors] for tensors in files])
    counts = Counter(name for files_of_rank in of_ranks for names in files_of_rank for name in names)
    wrong = sorted(name for name in expected | counts.keys() if (name in expected) != (counts[name] == 1))
    if wrong:
        raise MismatchError(
            f"{len(wrong)} tensors would be missing, written twice or unknown: {', '.join(wrong[:5])}",
            where="export",
            remedy="report this layout: the mapping doesn't cover it",
        )
    total = sum(map(len, of_ranks))
    before = sum(map(len, of_ranks[: dist.get_rank()]))
    return [
        (f"model-{before + number:05d}-of-{total:05d}.safetensors", tensors)
        for number, tensors in enumerate(files, start=1)
    ]


def _write(directory: Path, jobs: list[Job], files: list[tuple[str, list[TensorHeader]]]) -> list[WrittenFile]:
    """Run all jobs, those of other owners too. A rank that can't write goes on handing its parts to the others."""
    written: list[WrittenFile] = []
    waiting, failure, writer = list(files), None, None
    for job in jobs:
        for name, block in job.blocks():
            if failure is not None:
                continue
            try:
                writer = writer or SafetensorsWriter(directory / waiting[0][0], waiting.pop(0)[1])
                writer.write(name, block)
                if writer.is_complete:
                    written.append(writer.close())
                    writer = None
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return written


def _finish(
    partial: Path, template: Path, dtype: torch.dtype, headers: list[list[tuple[str, str, int]]]
) -> list[WrittenFile]:
    """Write the index and take over the settings of the template; returns these files."""
    tensors = [entry for of_rank in headers for entry in of_rank]
    total = sum(size for _, _, size in tensors)
    weight_map = {name: file for file, name, _ in tensors}
    atomic.write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    names = {path.name for pattern in TEMPLATE_PATTERNS for path in template.glob(pattern)}
    for name in sorted(name for name in names - {CONFIG_FILE} if not name.endswith(".index.json")):
        with open_regular(template / name) as source, open(partial / name, "wb") as target:
            shutil.copyfileobj(source, target)
    settings = read_config(template / CONFIG_FILE)
    _set_type(settings, str(dtype).removeprefix("torch."))
    atomic.write_json(partial / CONFIG_FILE, settings)
    return [
        WrittenFile(path.name, path.stat().st_size, atomic.sha256_file(path))
        for path in sorted(partial.iterdir())
        if path.suffix != ".safetensors"
    ]


def _set_type(settings: dict[str, Any], dtype: str) -> None:
    """State the type of the weights wherever the template states one for the language model."""
    for part in (settings, settings.get(NESTED_CONFIG)):
        if isinstance(part, dict):
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
