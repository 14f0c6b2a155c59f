"""Peers' functions for benchmarks/ppo.py, loaded one by one from a folder of checkouts without importing the packages.

The folder, named by T1_PEERS, holds any of: slime, miles, verl, nemo-rl. Nothing of theirs is part of this repository;
what isn't there is skipped by name.
"""

from __future__ import annotations

import ast
import copy
import heapq
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

SOURCES = {
    "miles": "miles/miles/backends/training_utils/loss_hub/math_utils.py",
    "verl GAE": "verl/verl/trainer/ppo/core_algos.py",
    "NeMo-RL GAE": "nemo-rl/nemo_rl/algorithms/advantage_estimator.py",
    "verl fused": "verl/verl/utils/experimental/torch_functional.py",
    "slime": "slime/slime/utils/ppo_utils.py",
    "verl packing": "verl/verl/utils/seqlen_balancing.py",
    "NeMo-RL packing": "nemo-rl/nemo_rl/data/packing/algorithms.py",
}


def source(name: str) -> Path | None:
    """The file a peer's function is loaded from, or None where there is no such checkout."""
    folder = os.environ.get("T1_PEERS", "")
    path = Path(folder) / SOURCES[name]
    return path if folder and path.is_file() else None


def absent() -> list[str]:
    return [name for name in SOURCES if source(name) is None]


def pick(path: Path, names: set[str], **known: Any) -> dict[str, Any]:
    """Compile functions and classes of a file, by name, with `known` as their globals; methods as `Class.method`."""
    scope: dict[str, Any] = dict(known)
    for node in ast.parse(path.read_text()).body:
        members = [(f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, ast.FunctionDef)] \
            if isinstance(node, ast.ClassDef) else []  # fmt: skip
        for name, item in [(getattr(node, "name", ""), node), *members]:
            if name in names:
                item.decorator_list = [] if name == getattr(node, "name", "") else item.decorator_list
                exec(compile(ast.Module([item], []), str(path), "exec"), scope)
                scope[name] = scope[item.name]
    return scope


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# -- GAE: (values [B, T], mask [B, T], reward of each row, gamma, lambda) -> advantages [B, T] -------------------------


def masked_gae() -> dict[str, tuple[Callable[..., torch.Tensor], bool]]:
    """name -> (function, whether it loops over tokens in Python and is run once only)."""
    found: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {}
    if path := source("miles"):
        parallel = SimpleNamespace(cp=SimpleNamespace(size=1))
        names = {"get_advantages_and_returns_batch", "chunked_gae", "vanilla_gae"}
        run = pick(path, names, torch=torch, F=F, get_parallel_state=lambda: parallel)
        batch = run["get_advantages_and_returns_batch"]

        def miles(values, mask, rewards, gamma, lambda_):
            rows, length = values.shape
            nothing = [torch.zeros(length)] * rows
            advantages, _ = batch(
                [length] * rows,
                [length] * rows,
                list(values),
                nothing,
                rewards,
                "thd",
                None,
                list(mask),
                gamma,
                lambda_,
            )
            return torch.stack(advantages)

        found["miles, chunked"] = (miles, False)
    if path := source("NeMo-RL GAE"):
        nemo = pick(path, {"GeneralizedAdvantageEstimator._compute_gae"}, torch=torch)["_compute_gae"]

        def looped(values, mask, rewards, gamma, lambda_):
            return nemo(SimpleNamespace(gae_gamma=gamma), _placed(mask, rewards), values, mask, lambda_)[0]

        found["NeMo-RL, loop"] = (looped, True)
    if path := source("verl GAE"):
        plain = SimpleNamespace(masked_whiten=lambda advantages, mask: advantages)  # the scan alone is compared
        verl = pick(path, {"compute_gae_advantage_return"}, torch=torch, verl_F=plain)["compute_gae_advantage_return"]
        found["verl, loop"] = (
            lambda values, mask, rewards, gamma, lambda_: verl(_placed(mask, rewards), values, mask, gamma, lambda_)[0],
            True,
        )
    return found


def _placed(mask: torch.Tensor, rewards: list[float]) -> torch.Tensor:
    """[B, T] rewards on the last sampled token of each row, where these peers want them."""
    placed = torch.zeros_like(mask)
    for row, reward in enumerate(rewards):
        placed[row, int(mask[row].nonzero()[-1])] = reward
    return placed


# -- log-probs: (hidden [T, H], weight [V, H], targets [T], chunk) -> log-probs and entropies --------------------------


def chunked_logprobs() -> dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    found: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {}
    if path := source("verl fused"):
        fused = module(path, "verl_fused").FusedLinearForPPOFunction
        found["verl, fused linear"] = lambda hidden, weight, targets, chunk: fused.apply(
            hidden, weight, targets, 1.0, chunk
        )
    if path := source("slime"):
        names = {"_maybe_all_reduce", "_get_vocab_parallel_rank_size", "_VocabParallelLogProbEntropy",
                 "_calculate_log_probs_and_entropy_chunk", "calculate_log_probs_and_entropy"}  # fmt: skip
        scope = pick(path, names, torch=torch, dist=dist)
        function = scope["calculate_log_probs_and_entropy"]
        found["slime, chunks of full logits"] = lambda hidden, weight, targets, chunk: function(
            hidden @ weight.t(), targets, None, with_entropy=True, chunk_size=chunk
        )
    return found


# -- packing: (lengths, ranks, capacity) -> micro-batches of each rank, as lists of indices ----------------------------


def packers() -> dict[str, Callable[..., list[list[list[int]]]]]:
    found: dict[str, Callable[..., list[list[list[int]]]]] = {}
    if path := source("NeMo-RL packing"):
        nemo = module(path, "nemo_packing")

        def first_fit_decreasing(lengths, ranks, capacity):
            packer = nemo.get_packer(nemo.PackingAlgorithm.FIRST_FIT_DECREASING, capacity, bin_count_multiple=ranks)
            bins = packer.pack(lengths)
            return [bins[rank::ranks] for rank in range(ranks)]

        found["NeMo-RL, first fit decreasing"] = first_fit_decreasing
    if path := source("verl packing"):
        names = {"calculate_workload", "karmarkar_karp", "get_seqlen_balanced_partitions"}
        scope = pick(path, names, heapq=heapq, copy=copy, chain=chain, torch=torch, np=np, random=random)
        partition, workload = scope["get_seqlen_balanced_partitions"], scope["calculate_workload"]

        def balanced(lengths, ranks, capacity):
            work = workload(torch.tensor(lengths)).tolist()
            shares = partition(work, ranks, False) if ranks > 1 else [list(range(len(lengths)))]
            count = max(-(-sum(lengths[i] for i in share) // capacity) for share in shares)
            plan = []
            for share in shares:
                parts = partition([work[i] for i in share], count, False)
                parts.sort(key=lambda part, share=share: -sum(work[share[i]] for i in part))
                plan.append([[share[i] for i in part] for part in parts])
            return plan

        found["verl, Karmarkar-Karp"] = balanced
    return found
