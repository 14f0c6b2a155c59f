"""Routers with replay against their own top-k and against Megatron-Core's own RouterReplay: time and memory.

    python benchmarks/replay.py [--tokens N] [--experts N] [--top-k N] [--hidden N] [--layers N ...] [--repeats N]
                                [--cpu]

Forward and backward of the routers alone (gating, choice, probabilities), in one process, all ways after one another in
every repetition and in turning order, so that they share the machine's moods; medians, and medians of the ratios within
a repetition; on the CPU in seconds of its own, which other processes don't lengthen. Memory is the sum of live storages
at its highest, in one pass with its backward. On a machine with a CUDA device it runs there, unless --cpu is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' stack of routers and meters

from megatron_t1.config.schema import LayoutConfig
from megatron_t1.model.backend import select_backend
from megatron_t1.model.parallel import destroy_parallel, initialize_parallel
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.slot import MicroBatchRoutes, route_dtype
from tests.routing.stack import HostReads, PeakBytes, RouterStack, router_config

CORE = "core's own replay"
TARGETS = {"replay": (CORE, 1.0), "replay, checked": ("native top-k", 1.15)}
NOISE = 0.02  # medians of two runs differ by this much


def random_routes(tokens: int, layers: int, experts: int, top_k: int) -> torch.Tensor:
    """[T, L, K] distinct experts, in the compact type; a layer at a time, as all scores at once would not fit."""
    random = np.random.default_rng(0)
    rows = np.stack(
        [random.random((tokens, experts), np.float32).argpartition(top_k, axis=1)[:, :top_k] for _ in range(layers)],
        axis=1,
    )
    return torch.from_numpy(rows.astype(np.int32)).to(route_dtype(experts))


class Ways:
    """The same model, its routers asked in several ways; each way is a forward that returns one tensor.

    Args:
        model: what a RoutingReplay takes, with a `forward` that calls every router of `routers` once, in order.
        routes: [T, L, K] experts to replay, in the compact type, on the model's device.
    """

    def __init__(
        self, model: torch.nn.Module, routers: list, routes: torch.Tensor, forward: Callable[[], torch.Tensor]
    ):
        self.model, self.routers, self.routes, self.forward = model, routers, routes, forward
        self.mask = torch.arange(len(routes), device=routes.device) % 10 > 0
        self.on_device = routes.is_cuda
        self._close: Callable[[], None] = lambda: None

    @classmethod
    def of_stack(cls, options: argparse.Namespace, layers: int, device: torch.device) -> Ways:
        """Routers alone, after one another."""
        stack = RouterStack(router_config(layers, options.experts, options.top_k, options.hidden)).to(device)
        hidden = torch.randn(options.tokens, 1, options.hidden, device=device, requires_grad=True)
        routes = random_routes(options.tokens, layers, options.experts, options.top_k).to(device)
        return cls(stack, list(stack.routers), routes, lambda: stack(hidden))

    def native(self) -> Callable[[], torch.Tensor]:
        self._close()
        return self.forward

    def core(self) -> Callable[[], torch.Tensor]:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        self._close()
        for column, router in enumerate(self.routers):
            router.router_replay = replay = RouterReplay()
            replay.set_target_indices(self.routes[:, column].long())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        RouterReplay.clear_global_router_replay_instances()

        def close() -> None:
            for router in self.routers:
                router.router_replay = None

        self._close = close
        return self.forward

    def ours(self, *, check: bool, masked: bool = False) -> Callable[[], torch.Tensor]:
        self._close()
        replay = RoutingReplay(self.model, options=ReplayOptions(check=check))
        self._close = replay.close
        mask = self.mask if masked else None
        # A slot is made for each micro-batch, so its check belongs to the time.
        return lambda: replay.run(self.model, MicroBatchRoutes(self.routes, mask), self.forward)

    def all(self) -> dict[str, Callable[[], Callable[[], torch.Tensor]]]:
        ways: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {"native top-k": self.native}
        try:
            from megatron.core.transformer.moe import router_replay  # noqa: F401
        except ImportError:
            pass
        else:
            ways[CORE] = self.core
        ways["replay"] = lambda: self.ours(check=False)
        ways["replay, checked"] = lambda: self.ours(check=True)
        ways["replay, checked, 10% native"] = lambda: self.ours(check=True, masked=True)
        return ways


def seconds(ways: Ways, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Way -> (forward, forward and backward) seconds of each repetition; one more before them warms up."""
    on_device = ways.on_device
    wait = torch.cuda.synchronize if on_device else lambda: None
    clock = time.perf_counter if on_device else time.process_time
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways.all()}
    for repeat in range(repeats + 1):
        names = list(found)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            forward = ways.all()[name]()
            wait()
            start = clock()
            output = forward()
            wait()
            middle = clock()
            output.sum().backward()
            wait()
            end = clock()
            del output
            ways.model.zero_grad()
            if repeat:
                found[name].append((middle - start, end - start))
    return found


def peak_and_reads(ways: Ways) -> dict[str, tuple[int, int]]:
    """Way -> (highest bytes alive, waits of the host for the device) in one forward and backward."""
    found = {}
    for name, make in ways.all().items():
        forward = make()
        with PeakBytes() as memory, HostReads() as reads:
            forward().sum().backward()
        ways.model.zero_grad()
        found[name] = (memory.peak, reads.counts.total())
    return found


def median_ratio(times: list[tuple[float, float]], base: list[tuple[float, float]], part: int) -> float:
    return statistics.median(own[part] / other[part] for own, other in zip(times, base, strict=True))


def report(console: Console, options: argparse.Namespace, layers: int, device: torch.device) -> None:
    ways = Ways.of_stack(options, layers, device)
    timed, measured = seconds(ways, options.repeats), peak_and_reads(ways)
    native = timed["native top-k"]
    table = Table(
        title=f"{layers} layers, {options.tokens} tokens, {options.experts} experts, top-{options.top_k}, "
        f"hidden {options.hidden}, {device}, median of {options.repeats}"
    )
    for heading in ("router", "forward ms", "x native", "with backward ms", "x native", "x core", "MiB above", "waits"):
        table.add_column(heading, justify="left" if heading == "router" else "right")
    for name, times in timed.items():
        table.add_row(
            name,
            *(
                text
                for part in (0, 1)
                for text in (
                    f"{1e3 * statistics.median(pair[part] for pair in times):.1f}",
                    f"{median_ratio(times, native, part):.2f}",
                )
            ),
            f"{median_ratio(times, timed[CORE], 1):.2f}" if CORE in timed else "-",
            f"{(measured[name][0] - measured['native top-k'][0]) / 2**20:.2f}",
            str(measured[name][1]),
        )
    console.print(table)
    one_layer = options.tokens * options.top_k * 8 / 2**20
    console.print(f"one layer's indices: {one_layer:.2f} MiB; compact routes: {ways.routes.nbytes / 2**20:.2f} MiB")
    for name, (base, bound) in TARGETS.items():
        if base in timed:
            ratio = median_ratio(timed[name], timed[base], 1)
            verdict = "met" if ratio <= bound + NOISE else "MISSED"
            console.print(f"{name}: {ratio:.3f} x {base}, target {bound:g}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 48])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    backend = select_backend("cpu" if options.cpu or not torch.cuda.is_available() else "cuda_torch")
    backend.prepare()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    for layers in options.layers:
        report(Console(width=150), options, layers, backend.device)
    destroy_parallel()


if __name__ == "__main__":
    main()
