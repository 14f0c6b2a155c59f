"""What is scored again, and how: the setting that training uses, and others that differ from it in one thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import Config
from megatron_t1.paths import RunPaths, number_of, numbered

ROUTING, FORMAT, HEAD, ROUTER = "routing", "format", "head", "router"
TEMPERATURE, WEIGHTS, TOKENS = "temperature", "weights", "tokens"
COMPONENTS = {
    ROUTING: "which experts a token takes: the sampler's, replayed, or the router's own choice",
    FORMAT: "type of parameters and activations",
    HEAD: "type of the vocabulary projection and of the logits",
    ROUTER: "type of the router's logits",
    TEMPERATURE: "what logits are divided by; 1 gives raw log-probs",
    WEIGHTS: "which version of the policy",
    TOKENS: "the sampler's ids, or those of the conversation rendered and encoded again",
}
BASELINE = "as_trained"
TOGETHER_MORE = "together_more"
DTYPES = ("float32", "bfloat16")
NEAR = 0.005  # relative; temperatures nearer than this to the contract's aren't tried
FITTED = "temperature_fitted"
TRIED = "_tried"  # ends the names of temperatures that are scored to find the best one
# Tried as temperatures, as factors of the contract's: first the coarse ones, then fine ones around the best of them.
COARSE = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)
FINE = (0.91, 0.93, 0.95, 0.97, 0.98, 0.99, 1.01, 1.02, 1.03, 1.05, 1.07, 1.09)


@dataclass(frozen=True)
class Setting:
    """Everything that the trainer's log-prob of a sampled token depends on.

    Attributes:
        replay: whether the sampler's experts are replayed.
        dtype: "float32" or "bfloat16", of parameters and activations.
        head: "model" or "float32": as `train.head_dtype`; "bfloat16": the logits are rounded to it, as an engine does
            whose vocabulary projection puts out bfloat16.
        router: "float32" or "model": as `train.router_dtype`.
        weights: "checkpoint" (the actor's, in Megatron's format) or "export" (in Hugging Face's; the start model's).
        version: of the policy.
        retokenised: whether the stream is the re-rendered one.
    """

    replay: bool
    dtype: str
    head: str
    router: str
    temperature: float
    weights: str
    version: int
    retokenised: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def changes(self, baseline: Setting) -> dict[str, Any]:
        """The fields in which this setting differs from `baseline`, with its own values."""
        return {name: value for name, value in asdict(self).items() if value != getattr(baseline, name)}


@dataclass(frozen=True)
class Alternative:
    """A setting with a name, a word for people, and the component in which it differs from the baseline."""

    name: str
    component: str
    label: str
    setting: Setting

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "component": self.component, "label": self.label, "setting": self.setting.to_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Alternative:
        return cls(**{**raw, "setting": Setting(**raw["setting"])})


@dataclass(frozen=True)
class Kept:
    """Versions of the policy that a run still has: exports (and the start model, version 0) and actor checkpoints."""

    exports: frozenset[int]
    checkpoints: frozenset[int]

    @classmethod
    def of(cls, paths: RunPaths, start_model: str) -> Kept:
        exports = {number_of(directory) for directory in numbered(paths.root / "hf")}
        start = {0} if (Path(start_model) / "config.json").is_file() else set()
        checkpoints = {number_of(directory) for directory in numbered(paths.checkpoint("actor", 0).parent)}
        return cls(frozenset(exports | start), frozenset(checkpoints))

    @property
    def versions(self) -> frozenset[int]:
        return self.exports | self.checkpoints

    def kind(self, version: int) -> str:
        """What training would load of a version: its checkpoint where it is there."""
        return "checkpoint" if version in self.checkpoints else "export"


def as_trained(config: Config, policy: int, kept: Kept, *, replay: bool) -> Alternative:
    """The baseline: the pass that the actor phase makes before its update, or (by `replay`) what that would be."""
    train = config.train
    label = "as trained" if replay == train.replay.actor else "as trained, without replay"
    setting = Setting(
        replay=replay,
        dtype=config.model.dtype,
        head=train.head_dtype,
        router=train.router_dtype,
        temperature=config.rollout.temperature,
        weights=kept.kind(policy),
        version=policy,
    )
    return Alternative(BASELINE, "", label, setting)


def alternatives(
    baseline: Setting, kept: Kept, *, has_routes: bool, rerendered: str = ""
) -> tuple[list[Alternative], dict[str, str]]:
    """Settings that differ from the baseline in one component, and why some component can't be measured.

    Args:
        kept: what the run still has of the policy's versions.
        has_routes: whether the rollout recorded experts.
        rerendered: why there are no re-rendered streams; "": there are, and some differ.
    """
    found: list[Alternative] = []
    missing: dict[str, str] = {}

    def add(name: str, component: str, label: str, **changes: Any) -> None:
        found.append(Alternative(name, component, label, replace(baseline, **changes)))

    if not has_routes:
        missing[ROUTING] = "the rollout has no routes"
    elif baseline.replay:
        add("own_routes", ROUTING, "the router's own experts", replay=False)
    else:
        add("replayed_routes", ROUTING, "the sampler's experts, replayed", replay=True)
    _numbers(baseline, kept, add, missing)
    if baseline.temperature != 1.0:
        add("temperature_1", TEMPERATURE, "temperature 1: raw log-probs", temperature=1.0)
    _weights(baseline, kept, add, missing)
    if rerendered:
        missing[TOKENS] = rerendered
    else:
        add("rerendered", TOKENS, "rendered and encoded again", retokenised=True)
    return found, missing


def _numbers(baseline: Setting, kept: Kept, add: Any, missing: dict[str, str]) -> None:
    (other,) = set(DTYPES) - {baseline.dtype}
    if baseline.version in kept.exports:  # a checkpoint has one type, an export is converted as it is read
        add(other, FORMAT, f"{other} throughout", dtype=other, weights="export")
    else:
        missing[FORMAT] = f"the export of policy {baseline.version} is gone"
    add("head_bfloat16", HEAD, "logits rounded to bfloat16", head="bfloat16")
    if baseline.dtype != "float32" and baseline.head != "float32":
        add("head_float32", HEAD, "float32 multiplications", head="float32")
    if baseline.dtype == "float32":
        missing[ROUTER] = "float32 on both sides of the router, whatever train.router_dtype says"
    elif baseline.router == "float32":
        add("router_model", ROUTER, f"router in {baseline.dtype}", router="model")
    else:
        add("router_float32", ROUTER, "router in float32", router="float32")


def _weights(baseline: Setting, kept: Kept, add: Any, missing: dict[str, str]) -> None:
    version = baseline.version
    older = max((other for other in kept.versions if other < version), default=None)
    newer = min((other for other in kept.versions if other > version), default=None)
    for other in (older, newer):
        if other is not None:
            updates = abs(other - version)
            where = f"{updates} update{'s' if updates > 1 else ''} {'older' if other < version else 'newer'}"
            add(f"policy_{other}", WEIGHTS, f"policy {other}, {where}", version=other, weights=kept.kind(other))
    if version in kept.exports and version in kept.checkpoints:
        add("export", WEIGHTS, "the export that was sampled from, not the checkpoint", weights="export")
    if older is None and newer is None:
        missing[WEIGHTS] = "no other version of the policy is kept"


def together(name: str, label: str, chosen: Iterable[Alternative], baseline: Setting, kept: Kept) -> Alternative:
    """Several alternatives at once. A version that has no export can be had in the type of its checkpoint only."""
    changes: dict[str, Any] = {}
    for alternative in chosen:
        changes |= alternative.setting.changes(baseline)
    setting = replace(baseline, **changes)
    if setting.version not in kept.exports:
        setting = replace(setting, weights="checkpoint", dtype=baseline.dtype)
    elif setting.dtype != baseline.dtype:
        setting = replace(setting, weights="export")
    return Alternative(name, "", label, setting)


def temperatures(baseline: Setting, around: float, factors: Iterable[float]) -> list[Alternative]:
    """The baseline at each of `factors` times `around`, but for what is all but its own temperature."""
    own = baseline.temperature
    values = [value for factor in factors if abs((value := round(around * factor, 6)) / own - 1) > NEAR]
    return [
        Alternative(
            f"temperature_{value:g}{TRIED}", TEMPERATURE, f"temperature {value:g}", replace(baseline, temperature=value)
        )
        for value in values
    ]
