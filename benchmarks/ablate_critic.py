"""What the critic's warm-up and the actor's lambda are worth: the tiny loop in four variants and three seeds.

    python benchmarks/ablate_critic.py [--work DIR] [--seeds 0 1 2] [--only VARIANT ...] [--write FILE] [key=value ...]

Variants of a seed share everything up to PPO: the start model and its SFT (those of `make learn` where they are there),
its evaluation, and 512 episodes of 256 tasks that are trained on by nobody else, on which the critic is warmed up
(`t1 train critic`). Then PPO runs with the same tasks and seed in every variant:

    adaptive      warm critic, the actor's lambda 1 - 1 / (alpha x sampled tokens), alpha 1: the reference
    lambda-0.95   warm critic, the actor's lambda 0.95
    lambda-1.0    warm critic, the actor's lambda 1
    cold          no warm-up: the critic begins as the mean return; after as many policy updates as the others
    cold, same episodes    the same run after as many sampled episodes as the others, warm-up included

The critic's own lambda is 1 in all of them: its targets are returns that were seen, however little it knows yet (VAPO
keeps the two apart for that reason, arXiv 2504.05118). Each part is skipped when it is finished; kill it at any time
and start it again. Further arguments are overrides of every command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from driving import markdown, run, t1, write_between
from learning import gain_cells, pooled

from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import read_metrics, series
from megatron_t1.report.statistics import compare_evaluations, read_evaluation

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
WARM_UP_TASKS, WARM_UP_EPOCHS, HELD_OUT = 256, 8, 64
ITERATIONS = 4
SAME_EPISODES = 2  # iterations that sample as many episodes as the warm-up
ADAPTIVE = "train.gae.length_adaptive_alpha=1.0"
VARIANTS = {  # name -> (is the critic warm, options)
    "adaptive": (True, [ADAPTIVE]),
    "lambda-0.95": (True, ["train.gae.lambda_actor=0.95"]),
    "lambda-1.0": (True, ["train.gae.lambda_actor=1.0"]),
    "cold": (False, [ADAPTIVE]),
}
HEADER = (
    "variant", "seed", "checks after SFT", "after PPO", "gain [95%]", "explained variance, first rollout",
    "later half", "minutes",
)  # fmt: skip


class Seed:
    """The runs of one seed, in WORK/runs/ablate-critic/seed-N; what is finished is not repeated."""

    def __init__(self, work: Path, seed: int, iterations: int, overrides: list[str]):
        self.work, self.seed, self.iterations, self.overrides = work, seed, iterations, overrides
        self.root = work / "runs" / "ablate-critic" / f"seed-{seed}"
        self.model = work / "runs" / f"learn-sft-{seed}" / "model"
        self.warm_up_tasks = work / "tasks" / "ablate-critic"

    def t1(self, *words: str, tasks: Path | None = None) -> None:
        learn = self.work / "tasks" / "learn"
        print(f"seed {self.seed}: t1 {' '.join(words)}", flush=True)
        t1(
            *words, "experiment=learn", f"run.seed={self.seed}", f"model.path={self.model}",
            f"env.tasks={tasks or learn / 'train'}", f"eval.tasks={learn / 'held_out'}", *self.overrides,
            log=self.root / "log.txt",
        )  # fmt: skip

    def prepare(self) -> None:
        """Start model, its evaluation, episodes to warm the critic up on, the warm critic."""
        if not self.model.is_dir():
            command = ["env", f"WORK={self.work}", str(SCRIPTS / "learn_start.sh"), sys.prefix, str(self.seed)]
            run(command, self.root / "log.txt", "scripts/learn_start.sh")
        if not (self.warm_up_tasks / "train").is_dir():
            t1(
                "tasks", "generate", "experiment=learn", "run.seed=1", f"generate.out={self.warm_up_tasks}",
                f"generate.train={WARM_UP_TASKS}", "generate.held_out=8", log=self.root / "log.txt",
            )  # fmt: skip
        if not self._evaluation("before", 0).is_dir():
            self.t1("eval", f"run.dir={self.root / 'before'}")
        played, critic = self.root / "played", self.root / "critic"
        if not (RunPaths.of(played).phase(0, "rollout") / "result.json").is_file():
            self.t1(
                "rollout", f"run.dir={played}", "iteration=0", "rollout.samples_per_task=2",
                f"rollout.tasks_per_iteration={WARM_UP_TASKS}", tasks=self.warm_up_tasks / "train",
            )  # fmt: skip
        if not (RunPaths.of(critic).phase(0, "warmup") / "result.json").is_file():
            self.t1(
                "train", "critic", f"run.dir={critic}", f"train.critic.rollouts=[{played}]",
                f"train.critic.warmup_epochs={WARM_UP_EPOCHS}", f"train.critic.warmup_holdout={HELD_OUT}",
            )  # fmt: skip

    def train(self, variant: str) -> None:
        warm, options = VARIANTS[variant]
        for iterations in self.lengths(variant):
            if self._evaluation(variant, iterations).is_dir():
                continue
            start = [f"train.critic.start={self.root / 'critic' / 'critic'}"] if warm else []
            self.t1(
                "run", f"run.dir={self.root / variant}", "loop.warmup_iterations=0", f"loop.iterations={iterations}",
                "loop.evaluate_first=false", "train.replay.measure_gap=false", *start, *options,
            )  # fmt: skip

    def lengths(self, variant: str) -> list[int]:
        """Policy updates after which the variant is evaluated."""
        warm, _ = VARIANTS[variant]
        return [self.iterations] if warm else [self.iterations, self.iterations + SAME_EPISODES]

    def _evaluation(self, name: str, policy: int) -> Path:
        """Of a policy; a directory only when it is finished."""
        directory = RunPaths.of(self.root / name).evaluation(policy)
        return directory if (directory / "summary.json").is_file() else directory / "unfinished"

    def is_finished(self, variant: str) -> bool:
        return all(self._evaluation(variant, length).is_dir() for length in self.lengths(variant))

    def evaluations(self, variant: str, length: int):
        """Of the start and of the policy after `length` updates."""
        return read_evaluation(self._evaluation("before", 0)), read_evaluation(self._evaluation(variant, length))

    def explained(self, variant: str, length: int) -> tuple[float, float]:
        """Explained variance of rollouts before the critic learnt from them: of the first; mean of the later half."""
        values = series(read_metrics(self.root / variant), "critic", "critic/explained_variance")
        own = [values[iteration] for iteration in range(length)]
        return own[0], float(np.mean(own[length // 2 :]))

    def minutes(self, variant: str, length: int) -> float:
        """Wall time of the PPO run up to the evaluation of that policy, which is left out."""
        steps = Manifest.read(RunPaths.of(self.root / variant).manifest).finished
        launches = {
            step.launch: step.seconds for step in steps if step.iteration < length and step.phase != "evaluation"
        }
        return sum(launches.values()) / 60


def rows_of(seeds: list[Seed], variant: str) -> list[list[str]]:
    """A row for each seed that is finished, and one for all of them."""
    done = [seed for seed in seeds if seed.is_finished(variant)]
    rows = []
    for length in done[0].lengths(variant) if done else []:
        name = variant if length == done[0].iterations else f"{variant}, same episodes"
        pairs = [seed.evaluations(variant, length) for seed in done]
        explained = np.array([seed.explained(variant, length) for seed in done])
        minutes = np.array([seed.minutes(variant, length) for seed in done])
        for index, seed in enumerate(done):
            rows.append([name, str(seed.seed), *_cells(*pairs[index], *explained[index], minutes[index])])
        if len(done) > 1:
            both = [pooled([pair[side] for pair in pairs]) for side in (0, 1)]
            rows.append([f"**{name}**", "all", *_cells(*both, *explained.mean(0), minutes.mean())])
    return rows


def _cells(before: dict, after: dict, first: float, later: float, minutes: float) -> list[str]:
    gain = gain_cells(compare_evaluations(before, after))[:3]
    return [*gain, f"{first:.3f}", f"{later:.3f}", f"{minutes:.1f}"]


def against_reference(seeds: list[Seed]) -> list[list[str]]:
    """How many checks each other variant passes more than the reference, over all finished seeds."""
    rows = []
    for variant in VARIANTS:
        done = [seed for seed in seeds if seed.is_finished(variant) and seed.is_finished("adaptive")]
        if variant == "adaptive" or not done:
            continue
        for length in done[0].lengths(variant):
            reference = pooled([seed.evaluations("adaptive", seed.iterations)[1] for seed in done])
            other = pooled([seed.evaluations(variant, length)[1] for seed in done])
            name = variant if length == done[0].iterations else f"{variant}, same episodes"
            rows.append([name, *gain_cells(compare_evaluations(reference, other))[1:3]])
    return rows


def warm_up_rows(seeds: list[Seed]) -> list[list[str]]:
    """Of each seed's warm-up: held-out explained variance and what it took."""
    rows = []
    for seed in seeds:
        directory = RunPaths.of(seed.root / "critic").phase(0, "warmup")
        if not (directory / "result.json").is_file():
            continue
        result = PhaseResult.read(directory)
        held_out = [result.metrics[f"critic/held_out_explained_variance{name}"] for name in ("", "_task_mean")]
        best, steps = result.metrics["critic/warmup_best_epoch"], result.metrics["critic/optimizer_steps"]
        cells = [*(f"{value:.3f}" for value in held_out), f"{best:.2f}", f"{steps:.0f}"]
        rows.append([str(seed.seed), *cells, f"{result.timings_s['total'] / 60:.1f}"])
    return rows


def report(seeds: list[Seed]) -> str:
    rows = [row for variant in VARIANTS for row in rows_of(seeds, variant)]
    warm_up = ("seed", "held-out explained variance", "of task means", "best epoch", "optimizer steps", "minutes")
    return "\n\n".join([
        markdown(HEADER, rows),
        "Checks after PPO against the reference, `adaptive`:",
        markdown(("variant", "checks", "difference [95%]"), against_reference(seeds)),
        "The warm-up:",
        markdown(warm_up, warm_up_rows(seeds)),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(), help="where runs, models and tasks lie")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="policy updates of a run")
    parser.add_argument("--write", type=Path, help="document with the marks <!-- critic ablation: begin/end -->")
    parser.add_argument("--table", action="store_true", help="of what is finished; start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    if any("=" not in word for word in options.overrides):
        parser.error(f"not an override: {' '.join(options.overrides)}")
    work = options.work.resolve()
    seeds = [Seed(work, seed, options.iterations, options.overrides) for seed in options.seeds]
    for seed in seeds if not options.table else ():
        seed.prepare()
        for variant in options.only:
            seed.train(variant)
    text = report(seeds)
    print(f"\n{text}")
    if options.write:
        write_between(options.write, "critic ablation", text)


if __name__ == "__main__":
    main()
