"""GAE, log-probs and packing: time, error and memory, side by side with peers' functions in one run.

    T1_PEERS=DIR python benchmarks/ppo.py [gae logprobs packing] [--repeats 5] [--markdown FILE]

DIR holds checkouts of slime, miles, verl and nemo-rl (benchmarks/ppo_peers.py); what isn't there is skipped by name.
Implementations take turns in each round, so that a busy machine slows all of them; times are medians over the rounds
of processor seconds of one thread. Memory is what a pass takes at its peak above the inputs, gradients included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ppo_peers as peers
import torch

from megatron_t1.config.compose import compose
from megatron_t1.ppo.gae import generalized_advantages
from megatron_t1.ppo.logprobs import token_logprobs
from megatron_t1.trajectory.packing import SequenceCost, plan_packing

OURS = "megatron-t1"
TRAJECTORIES, TOKENS, TURN = 32, 131_072, 200  # 200 sampled tokens, 200 of tool output, and so on
HIDDEN, LOSS_TOKENS, CHUNK = 128, 2048, 512
CAPACITY = 131_072


@dataclass
class Row:
    case: str
    name: str
    seconds: float
    note: str
    best_peer: float = float("nan")

    def cells(self) -> list[str]:
        ratio = f"{self.seconds / self.best_peer:.2f}" if self.best_peer == self.best_peer else "-"
        return [self.case, self.name, f"{self.seconds * 1e3:,.1f}", ratio, self.note]


def interleaved(
    calls: dict[str, Callable[[], object]], repeats: int, once: frozenset[str] = frozenset()
) -> tuple[dict[str, float], dict[str, object]]:
    """Median processor seconds and last result of each; those in `once` are called in the first round only."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    results = {}
    for round_number in range(repeats + 1):  # the first round warms up, unless it is the only one
        for name, call in calls.items():
            if round_number and name in once:
                continue
            start = time.process_time()
            results[name] = call()
            spent[name].append(time.process_time() - start)
    return {name: statistics.median(times[1:] or times) for name, times in spent.items()}, results


def against_peers(rows: list[Row]) -> list[Row]:
    others = [row.seconds for row in rows if not row.name.startswith(OURS)]
    for row in rows:
        row.best_peer = min(others, default=float("nan"))
    return rows


# -- GAE ---------------------------------------------------------------------------------------------------------------


def gae_rows(repeats: int) -> Iterator[Row]:
    values = torch.randn(TRAJECTORIES, TOKENS, generator=torch.Generator().manual_seed(0)) * 0.5
    mask = (torch.arange(TOKENS) % (2 * TURN) < TURN).expand(TRAJECTORIES, TOKENS).contiguous()
    weights, rewards = mask.float(), [5.0] * TRAJECTORIES
    compressed, lengths, terminal = values[mask], mask.sum(dim=1), torch.tensor(rewards)
    for gamma, lambda_ in ((1.0, 0.95), (1.0, 1.0)):
        exact = walk(compressed.double().view(TRAJECTORIES, -1).numpy(), gamma, lambda_)
        options = {"gamma": gamma, "lambda_": lambda_}

        def ours(options=options) -> torch.Tensor:
            return generalized_advantages(compressed, lengths, terminal, **options)

        def with_selection(options=options) -> torch.Tensor:
            selected = torch.from_numpy(values.numpy()[mask.numpy()])
            return generalized_advantages(selected, lengths, terminal, **options)

        calls: dict[str, Callable[[], torch.Tensor]] = {
            f"{OURS}, as the trainer has them": ours, f"{OURS}, selected from [B, T]": with_selection
        }  # fmt: skip
        once = set()
        for name, (function, is_loop) in peers.masked_gae().items():
            if is_loop and lambda_ == 1.0:
                continue
            calls[name] = lambda function=function, g=gamma, la=lambda_: function(values, weights, rewards, g, la)
            once |= {name} if is_loop else set()
        seconds, results = interleaved(calls, repeats, frozenset(once))
        rows = []
        for name, found in results.items():
            found = found if found.ndim == 1 else found[mask]
            note = f"max error {np.abs(found.double().numpy() - exact.ravel()).max():.1e}"
            note += ", a Python loop over tokens" if name in once else ""
            rows.append(Row(f"GAE 32 x 131,072, half masked, lambda {lambda_}", name, seconds[name], note))
        yield from against_peers(rows)


def walk(values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """float64 [B, K]: the recursion itself, with a reward of 5 on the last token."""
    result, after, value_after = np.empty_like(values), np.zeros(len(values)), np.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        reward = 5.0 if t == values.shape[1] - 1 else 0.0
        result[:, t] = after = reward + gamma * value_after - values[:, t] + gamma * lambda_ * after
        value_after = values[:, t]
    return result


# -- log-probs ---------------------------------------------------------------------------------------------------------


def logprob_functions() -> dict[str, Callable]:
    return {
        OURS: lambda hidden, weight, targets, chunk: token_logprobs(hidden, weight, targets, chunk=chunk),
        **peers.chunked_logprobs(),
    }


def logprob_inputs(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(LOSS_TOKENS, HIDDEN, generator=random).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN, generator=random) * 0.1).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (LOSS_TOKENS,), generator=random)


def forward_backward(function: Callable, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
    logprobs, entropy = (result.squeeze(-1) for result in function(hidden, weight, targets, CHUNK))
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    hidden.grad = weight.grad = None
    return logprobs.detach()


def logprob_rows(repeats: int) -> Iterator[Row]:
    for vocabulary in (32_768, 248_320):
        inputs = logprob_inputs(vocabulary)
        hidden, weight, targets = inputs
        some = torch.arange(0, LOSS_TOKENS, LOSS_TOKENS // 64)
        with torch.no_grad():
            logits = hidden[some].double() @ weight.double().t()
            exact = logits.log_softmax(dim=1).gather(1, targets[some, None]).squeeze(1)
            del logits
        functions = logprob_functions()
        calls = {name: lambda f=function, i=inputs: forward_backward(f, *i) for name, function in functions.items()}
        seconds, results = interleaved(calls, repeats if vocabulary < 100_000 else min(repeats, 2))
        rows = []
        for name, found in results.items():
            error = float((found[some].double() - exact).abs().max())
            note = f"max error {error:.1e}, peak {peak_of(calls[name]):,.0f} MB"
            rows.append(Row(f"log-prob + entropy, T=2,048, V={vocabulary:,}", name, seconds[name], note))
        yield from against_peers(rows)


def peak_of(call: Callable[[], object]) -> float:
    """MB above what is held already that a forward and backward pass takes, gradients included (Linux)."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / 1024


# -- packing -----------------------------------------------------------------------------------------------------------


def packing_rows(repeats: int) -> Iterator[Row]:
    cost = SequenceCost.of_architecture(compose(["model=qwen3_5_122b_a10b"]).model.architecture)
    for count in (1402, 8192):
        drawn = np.random.default_rng(0).lognormal(9.5, 0.85, count)
        lengths = np.clip(drawn, 200, CAPACITY).astype(int).tolist()
        least = -(-sum(lengths) // CAPACITY)
        for ranks in (1, 2, 8):

            def ours(lengths, ranks, capacity):
                plan = plan_packing(lengths, data_parallel=ranks, capacity=capacity, cost=cost)
                return [[list(batch.sequences) for batch in batches] for batches in plan.ranks]

            functions = {OURS: ours, **peers.packers()}
            calls = {
                name: lambda f=function, le=lengths, r=ranks: f(le, r, CAPACITY) for name, function in functions.items()
            }
            slow = frozenset(name for name in calls if "Karmarkar-Karp" in name)  # seconds, of which once is enough
            seconds, results = interleaved(calls, repeats, slow)
            rows = []
            for name, plan in results.items():
                note = describe(plan, lengths, cost)
                case = f"packing {count:,} sequences (at least {least} bins), DP {ranks}"
                rows.append(Row(case, name, seconds[name], note))
            yield from against_peers(rows)


def describe(plan: list[list[list[int]]], lengths: list[int], cost: SequenceCost) -> str:
    """Bins, slot imbalance (each slot as slow as its slowest rank, over perfect balance) and broken capacities."""
    sizes, prices = np.array(lengths), cost.of(np.array(lengths))
    load = np.array([[prices[batch].sum() for batch in batches] for batches in plan])
    bins = [batch for batches in plan for batch in batches]
    over = sum(sizes[batch].sum() > CAPACITY for batch in bins)
    imbalance = load.max(axis=0).sum() / load.mean(axis=0).sum()
    broken = f", {over} over capacity" if over else ""
    return f"{len(bins)} bins, slot imbalance {imbalance:.4f}{broken}"


PARTS = {"gae": gae_rows, "logprobs": logprob_rows, "packing": packing_rows}
HEADER = ["case", "implementation", "ms", "of the best peer", "result"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    torch.set_num_threads(1)
    lines = [HEADER, ["---"] * len(HEADER)]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    print("\n".join(text), flush=True)
    for part in options.parts:
        for row in PARTS[part](options.repeats):
            text.append(f"| {' | '.join(row.cells())} |")
            print(text[-1], flush=True)
    if missing := peers.absent():
        text.append(f"\nSkipped, no checkout in T1_PEERS: {', '.join(missing)}.")
        print(text[-1])
    if options.markdown:
        options.markdown.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
