"""The passes of `t1 gap`: a sample of a rollout under one setting after another.

The sample's tokens are scored by the passes that the actor phase makes, in the run's layout, once for each setting of
the job. One model stands in memory at a time; weights are exchanged in place, and a model is built anew only for
another type of parameters.

Reads  DIRECTORY/job.json (what is scored), DIRECTORY/retokenised.safetensors (where there is any), the run's rollout.
Writes DIRECTORY/sidecar-*.safetensors (float32 [N] of each record for each setting) and DIRECTORY/outcome.json.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_t1 import atomic
from megatron_t1.attribution.job import OUTCOME_FILE, Job
from megatron_t1.attribution.measures import LEAST_SHARE, Measure, Step, lowering, measure, paired_sums, raising
from megatron_t1.attribution.retokenised import Retokenised
from megatron_t1.attribution.settings import (
    BASELINE,
    COARSE,
    FINE,
    FITTED,
    TEMPERATURE,
    TOGETHER_MORE,
    TRIED,
    Alternative,
    Kept,
    Setting,
    temperatures,
    together,
)
from megatron_t1.model.convert import load_hf
from megatron_t1.training.batch import fill_fields
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.gap import route_shares
from megatron_t1.training.passes import read_logprobs
from megatron_t1.training.samples import Sample, load_rollouts
from megatron_t1.training.scoring import share
from megatron_t1.trajectory.sidecar import write_sidecar

ROUNDED = {"bfloat16": torch.bfloat16}


def rescore(context: Context, directory: Path) -> None:
    """Score what `directory` asks for, and write the numbers there. Collective."""
    began = time.perf_counter()
    job = Job.read(directory)
    samples = load_rollouts(
        context.paths.rollouts(context.iteration), context.config, context.contract_facts(), only=job.trajectories
    ).samples
    scorer = Scorer(context, samples, job.retokenised(directory))
    baseline = job.baseline.setting
    scorer.run([job.baseline, *job.alternatives])
    scorer.fit_temperature(baseline, FITTED, TEMPERATURE)
    steps = scorer.in_turn(baseline, job.kept)
    raised = scorer.chosen(raising)
    if len(raised) > 1:
        scorer.run([together(TOGETHER_MORE, "all that raise it, together", raised, baseline, job.kept)])
    if context.is_writer:
        arrays = {sample.key: {name: sample.fields[name] for name in scorer.done} for sample in samples}
        write_sidecar(directory, 0, arrays)
        outcome = {
            "alternatives": [alternative.to_json() for alternative in scorer.done.values()],
            "routes": scorer.routes,
            "steps": [asdict(step) for step in steps],
            "seconds": time.perf_counter() - began,
        }
        atomic.write_json(directory / OUTCOME_FILE, outcome)


@dataclass
class Scorer:
    """Scores settings and keeps what they gave: `fields[name]` of every sample on every rank, NaN for tokens that a
    re-rendered stream doesn't have.

    Attributes:
        done: what was scored, by name.
        routes: name -> shares of choices in which the routers of that setting differ from the recorded ones.
    """

    context: Context
    samples: list[Sample]
    retokenised: dict[str, Retokenised]
    done: dict[str, Alternative] = field(default_factory=dict)
    routes: dict[str, dict[str, float]] = field(default_factory=dict)
    _engine: Engine | None = None
    _loaded: tuple[str, int] | None = None
    _routes_of: dict[tuple, dict[str, float]] = field(default_factory=dict)

    def run(self, alternatives: Sequence[Alternative]) -> None:
        """Score settings; those that differ in what is read from the hidden states only share one pass."""
        groups: dict[tuple, list[Alternative]] = {}
        for alternative in sorted(alternatives, key=lambda item: item.setting.dtype != self._dtype):
            groups.setdefault(_pass_of(alternative.setting), []).append(alternative)
        for group in groups.values():
            self._pass(group)

    @property
    def _dtype(self) -> str:
        return self._engine.config.model.dtype if self._engine is not None else self.context.config.model.dtype

    def _pass(self, group: list[Alternative]) -> None:
        setting = group[0].setting
        engine = self._prepared(setting)
        streams = [self._stream(sample, setting) for sample in self.samples]
        scored = [stream.sample for stream in streams if stream.sample.loss_mask.any()]
        groups = self.context.groups(scored) if scored else []
        if scored:
            batches = engine.micro_batches(groups, replay=setting.replay)
            results = engine.score(batches, _reader(engine, group))
            for alternative in group:
                fill_fields(batches, results, alternative.name, field=alternative.name)
                share(self.context, scored, groups, alternative.name)
        for alternative in group:
            for sample, stream in zip(self.samples, streams, strict=True):
                sample.fields[alternative.name] = stream.expanded(alternative.name)
            self.done[alternative.name] = alternative
        if not setting.retokenised and all(sample.routes is not None for sample in self.samples):
            routers = (setting.dtype, setting.router, setting.weights, setting.version)
            if routers not in self._routes_of:
                self._routes_of[routers] = route_shares(self.context, engine, groups)
            self.routes |= {alternative.name: self._routes_of[routers] for alternative in group}
        for alternative in group:
            if not alternative.name.endswith(TRIED):
                self.context.say(f"scored: {alternative.label}")

    def _stream(self, sample: Sample, setting: Setting) -> _Stream:
        again = self.retokenised.get(sample.key) if setting.retokenised else None
        return _Stream.again(sample, again, self._longest) if again is not None else _Stream.same(sample)

    @property
    def _longest(self) -> int:
        config = self.context.config
        return min(config.train.capacity, config.model.architecture.max_position_embeddings)

    def _prepared(self, setting: Setting) -> Engine:
        """A model with the setting's type, weights and router."""
        if self._engine is None or self._dtype != setting.dtype:
            self._engine = self._loaded = None
            gc.collect()  # before the next one is built
            config = self.context.config
            config = replace(config, model=replace(config.model, dtype=setting.dtype))
            self._engine = Engine(config, self.context.backend, "policy", None, replay=setting.replay)
        engine = self._engine
        if self._loaded != (setting.weights, setting.version):
            paths = self.context.paths
            if setting.weights == "checkpoint":
                engine.load_weights(paths.checkpoint("actor", setting.version))
            else:
                load_hf(engine.chunks, paths.hf(setting.version, self.context.start_model), role="policy")
            self._loaded = setting.weights, setting.version
        engine.route_in(setting.router)
        return engine

    # -- decisions: rank 0 makes them, so that all ranks go on with the same passes --------------------------------

    def measure(self, name: str, *, against: str = BASELINE) -> Measure:
        trainer, before, sampler = (
            [sample.fields[field] for sample in self.samples] for field in (name, against, "sampler_logprobs")
        )
        return measure(paired_sums(trainer, before, sampler))

    def measures(self) -> dict[str, Measure]:
        """Of everything scored so far, against the baseline."""
        return {name: self.measure(name) for name in self.done if name != BASELINE}

    def fit_temperature(self, setting: Setting, name: str, component: str) -> Alternative:
        """Of many temperatures other than the setting's own, the one under which its gap is smallest."""
        tried = temperatures(setting, setting.temperature, COARSE)
        self.run(tried)
        fine = temperatures(setting, self._best(tried).setting.temperature, FINE)
        self.run(fine)
        best = self._best([*tried, *fine])
        label = f"temperature {best.setting.temperature:.4g}, the best of many"
        fitted = Alternative(name, component, label, best.setting)
        self.done[name] = fitted
        if best.name in self.routes:
            self.routes[name] = self.routes[best.name]
        for sample in self.samples:
            sample.fields[name] = sample.fields[best.name]
        for other in {alternative.name for alternative in (*tried, *fine)}:
            self._drop(other)
        return fitted

    def in_turn(self, baseline: Setting, kept: Kept) -> list[Step]:
        """Add up what lowers the gap, the largest part first; what lowers it no more by then is left out."""
        current, steps = self.done[BASELINE], []
        for alone in self.chosen(lowering):
            best = self._best_on(current, alone.component, baseline, kept) if steps else alone

            def judge(name: str = best.name, before: str = current.name) -> tuple[bool, float]:
                found = self.measure(name, against=before)
                return found.lowers_by(LEAST_SHARE * self.measure(BASELINE).gap), found.change

            lowers, change = _from_first_rank(judge)
            if lowers:
                current = best
                steps.append(Step(alone.component, best.name, change))
            elif steps:
                self._drop(best.name)
        return steps

    def _best_on(self, current: Alternative, component: str, baseline: Setting, kept: Kept) -> Alternative:
        """The best setting of a component on top of what is changed already; it need not be the best one alone."""
        single = [alternative for alternative in self.done.values() if alternative.component == component]
        tried = [
            together(f"with_{other.name}", f"with {other.label}", [current, other], baseline, kept)
            for other in single
            if other.name != FITTED
        ]
        self.run(tried)
        if component == TEMPERATURE:
            tried.append(self.fit_temperature(current.setting, f"with_{FITTED}", ""))
        best = self._best(tried)
        for other in tried:
            if other.name != best.name:
                self._drop(other.name)
        return best

    def _best(self, alternatives: Sequence[Alternative]) -> Alternative:
        """The one with the smallest gap."""
        names = [alternative.name for alternative in alternatives]
        return self.done[_from_first_rank(lambda: min(names, key=lambda name: self.measure(name).gap))]

    def _drop(self, name: str) -> None:
        self.routes.pop(name, None)
        del self.done[name]
        for sample in self.samples:
            del sample.fields[name]

    def chosen(self, choose: Any) -> list[Alternative]:
        """What `lowering` or `raising` picks of the settings that differ in one component."""
        single = {name: a.component for name, a in self.done.items() if a.component}

        def pick() -> list[str]:
            found = {name: m for name, m in self.measures().items() if name in single}
            return list(choose(single, found).values())

        return [self.done[name] for name in _from_first_rank(pick)]


@dataclass(frozen=True)
class _Stream:
    """What is scored in a sample's place, and which of the sample's loss tokens its loss tokens are."""

    sample: Sample
    ordinals: np.ndarray  # int64 [n], of N
    count: int  # N

    @classmethod
    def same(cls, sample: Sample) -> _Stream:
        return cls(replace(sample, fields={}), np.arange(sample.loss_tokens), sample.loss_tokens)

    @classmethod
    def again(cls, sample: Sample, stream: Retokenised, longest: int) -> _Stream:
        """The re-rendered stream, with the routes of the tokens that it shares; without loss where it is too long."""
        positions = stream.counterparts(len(sample.ids))[sample.loss_mask]
        ordinals = np.flatnonzero(positions > 0) if len(stream.ids) <= longest else np.zeros(0, np.int64)
        mask = np.zeros(len(stream.ids), bool)
        mask[positions[ordinals]] = True
        known = stream.source >= 0
        source = np.where(known, stream.source, 0)
        changed = replace(
            sample,
            ids=stream.ids,
            loss_mask=mask,
            routes=None if sample.routes is None else sample.routes[source],
            routed=sample.routed[source] & known,
            fields={},
        )
        return cls(changed, ordinals, sample.loss_tokens)

    def expanded(self, name: str) -> np.ndarray:
        """float32 [N], NaN for tokens without a counterpart."""
        full = np.full(self.count, np.nan, np.float32)
        if len(self.ordinals):
            full[self.ordinals] = self.sample.fields[name]
        return full


def _pass_of(setting: Setting) -> tuple:
    """What settings must have in common to be read from one forward pass."""
    return setting.dtype, setting.weights, setting.version, setting.router, setting.replay, setting.retokenised


def _reader(engine: Engine, group: Sequence[Alternative]) -> Any:
    """Reads the log-probs of all settings of a pass from its hidden states."""

    def read(hidden: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        return {
            alternative.name: read_logprobs(
                engine.chunks[-1],
                hidden,
                batch,
                temperature=alternative.setting.temperature,
                projected_at_once=engine.config.train.logprob_chunk,
                wide=alternative.setting.head == "float32",
                rounded=ROUNDED.get(alternative.setting.head),
            )["logprobs"]
            for alternative in group
        }

    return read


def _from_first_rank(decide: Any) -> Any:
    box = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]
