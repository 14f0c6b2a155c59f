"""Megatron chunks -> a Hugging Face directory, streamed: a rank holds one parameter at a time besides the model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_t1 import atomic
from megatron_t1.errors import ConfigError, MismatchError
from megatron_t1.model.binding import Bound, bind, expected_tensors, require_same_architecture
from megatron_t1.model.chunks import bare_chunks
from megatron_t1.model.collective import gather_objects, on_first_rank, together
from megatron_t1.model.directories import make_empty, publish_directory
from megatron_t1.model.safetensors_io import CODES, INDEX_FILE, SafetensorsWriter
from megatron_t1.phase import WrittenFile

MAX_FILE_BYTES = 4 << 30
# What a template directory may hold besides weights, and an export takes over.
TEMPLATE_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")


def export_hf(
    chunks: list[Module],
    out_dir: str | Path,
    template_dir: str | Path,
    dtype: str,
    *,
    relative_to: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[WrittenFile]:
    """Write a policy so that vLLM and transformers load it, one tensor for each expert matrix. Collective.

    Owners write their own files; the directory appears under its name when it is complete and replaces an earlier one.

    Args:
        chunks: a policy, as `build_model` returns it.
        out_dir: directory to create.
        template_dir: config.json, tokenizer and generation settings are taken over from here.
        dtype: "float32" or "bfloat16", of the written tensors; the same as the model's gives the same bits.
        relative_to: what the paths of the result are relative to; `out_dir` itself by default.
        max_file_bytes: of tensor data in one file.

    Returns:
        Every file with its size and SHA-256, on every rank.

    Raises:
        ConfigError: unknown dtype, or `out_dir` doesn't lie below `relative_to`.
        MismatchError: the template is of another architecture.
        T1Error: a rank couldn't write.
    """
    chunks = bare_chunks(chunks)
    out, template = Path(out_dir).resolve(), Path(template_dir).resolve()
    base = out if relative_to is None else Path(relative_to).resolve()
    torch_dtype = getattr(torch, dtype, None)
    if torch_dtype not in CODES:
        raise ConfigError(f"unknown dtype {dtype!r}", where="model.dtype", remedy="use float32 or bfloat16")
    if not out.is_relative_to(base):
        raise ConfigError(f"the export lies outside {base}", where=str(out))
    together(lambda: require_same_architecture(chunks, template, "policy"))
    partial = out.with_name(out.name + atomic.TEMPORARY_SUFFIX)
    on_first_rank(lambda: make_empty(partial))
    files = _plan([item for item in bind(chunks)[0] if item.in_first_replica], max_file_bytes, torch_dtype.itemsize)
    weight_files = _name_files(files, chunks[0])
    shards = together(lambda: [_write(partial / name, items, torch_dtype) for name, items in weight_files])
    written = [file for rank_files in shards for file in rank_files if file is not None]
    maps = gather_objects({tensor: name for name, items in weight_files for tensor in _owned(items)})
    settings: list[WrittenFile] = []
    on_first_rank(lambda: settings.extend(_finish(partial, template, torch_dtype, maps, chunks[0])))
    on_first_rank(lambda: publish_directory(partial, out))
    prefix = out.relative_to(base)
    files_of_all = written + [file for rank_files in gather_objects(settings) for file in rank_files]
    return [WrittenFile(str(prefix / file.path), file.size, file.sha256) for file in files_of_all]


def _is_owner(item: Bound) -> bool:
    return dist.get_rank(item.group) == 0


def _owned(items: list[Bound]) -> list[str]:
    return [name for item in items if _is_owner(item) for name in item.source.names]


def _plan(items: list[Bound], max_bytes: int, item_size: int) -> list[list[Bound]]:
    """Cut this rank's parameters into files. All ranks that share parameters cut alike, since the sizes are equal."""
    files: list[list[Bound]] = []
    filled = 0
    for item in items:
        size = sum(torch.Size(shape).numel() for shape in item.source.packing.shapes) * item_size
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


def _name_files(files: list[list[Bound]], chunk: Module) -> list[tuple[str, list[Bound]]]:
    """Number the files over all ranks; checks that the ranks together write every tensor exactly once.

    Files in which this rank owns nothing keep an empty name: it only contributes its parts to them.
    """
    owned = [_owned(items) for items in files]
    of_ranks = gather_objects([names for names in owned if names])
    counts = Counter(name for files_of_rank in of_ranks for names in files_of_rank for name in names)
    expected = expected_tensors(chunk)
    wrong = sorted(name for name in expected | counts.keys() if (name in expected) != (counts[name] == 1))
    if wrong:
        raise MismatchError(
            f"{len(wrong)} tensors would be missing, written twice or unknown: {', '.join(wrong[:5])}",
            where="export",
            remedy="report this layout: the mapping doesn't cover it",
        )
    total = sum(map(len, of_ranks))
    number = sum(map(len, of_ranks[: dist.get_rank()]))
    named = []
    for items, names in zip(files, owned, strict=True):
        number += bool(names)
        named.append((f"model-{number:05d}-of-{total:05d}.safetensors" if names else "", items))
    return named


def _write(path: Path, items: list[Bound], dtype: torch.dtype) -> WrittenFile | None:
    tensors = [
        (name, shape)
        for item in items
        if _is_owner(item)
        for name, shape in zip(item.source.names, item.source.packing.shapes, strict=True)
    ]
    writer = SafetensorsWriter(path, tensors, dtype) if tensors else None
    for item in items:
        shards = _gather(item)
        if shards:
            for name, tensor in zip(item.source.names, item.source.packing.unpack(shards), strict=True):
                writer.write(name, tensor)
    return None if writer is None else writer.close()


def _gather(item: Bound) -> list[Tensor]:
    """The parameter's parts in rank order on the owner, nothing on the others."""
    local, size = item.parameter.detach().contiguous(), dist.get_world_size(item.group)
    if size == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local, group=item.group)
    return parts if _is_owner(item) else []


def _finish(
    partial: Path, template: Path, dtype: torch.dtype, maps: list[dict[str, str]], chunk: Module
) -> list[WrittenFile]:
    """Write the index and take over the settings of the template; returns these files."""
    weight_map = {tensor: file for of_rank in maps for tensor, file in of_rank.items()}
    total = sum((partial / file).stat().st_size for file in set(weight_map.values()))
    atomic.write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    names = {path.name for pattern in TEMPLATE_PATTERNS for path in template.glob(pattern)}
    for name in sorted(names - {INDEX_FILE, "config.json"}):
        shutil.copyfile(template / name, partial / name)
    settings = json.loads((template / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    settings.update({key: name for key in ("dtype", "torch_dtype") if key in settings})
    atomic.write_json(partial / "config.json", settings)
    return [
        WrittenFile(path.name, path.stat().st_size, atomic.sha256_file(path))
        for path in sorted(partial.iterdir())
        if path.suffix != ".safetensors"
    ]
