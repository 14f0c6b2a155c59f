"""Our agent as a Harbor agent: `harbor run` then evaluates a t1 model, sampled token by token as in training.

    agents:
      - import_path: megatron_t1.harbor.agent:TerminalAgent
        model_name: t1
        kwargs: {url: "http://127.0.0.1:8000", model_dir: /runs/t1/hf/iter_0010, max_turns: 60}

The engine is a running vLLM with its token endpoint. `model_dir` has tokenizer and template; `chat_format` is the
model's (model.chat_format), the other options are those of `env` and `rollout`. The verifier is Harbor's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, override

import numpy as np
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

import megatron_t1
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.harbor.environment import SandboxEnvironment
from megatron_t1.harbor.sandbox import EnvironmentSandbox
from megatron_t1.rollout.agent import Attempt, EpisodeLimits, run_episode
from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.formats import load_format
from megatron_t1.rollout.samplers import EngineSampler
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import Origin, Trajectory

RECORD = "episode.json"  # in Harbor's directory for the agent's logs


class TerminalAgent(BaseAgent):
    """One tool, a persistent bash; token ids in and token ids out.

    Args:
        url: of the engine.
        model_dir: the exported model's directory.
        max_context: tokens of one episode, instruction included.
        command_timeout_s, agent_timeout_s: of a command, of all together; Harbor's own limit of the agent counts too.
        output_limit: characters of a command's output that the model sees.
    """

    def __init__(
        self,
        *args: Any,
        url: str,
        model_dir: str,
        chat_format: str = "chatml_bash",
        max_turns: int = 60,
        max_context: int = 32768,
        max_tokens_per_turn: int = 4096,
        command_timeout_s: float = 120.0,
        agent_timeout_s: float = 86400.0,
        output_limit: int = 10000,
        temperature: float = 1.0,
        top_p: float = 1.0,
        request_timeout_s: float = 600.0,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._url, self._request_timeout_s = url, request_timeout_s
        self._chat_name, self._chat = chat_format, load_format(chat_format, model_dir)
        self._sampling = {"temperature": temperature, "top_p": top_p}
        self._limits = EpisodeLimits(
            max_turns=max_turns,
            max_context=max_context,
            max_tokens_per_turn=max_tokens_per_turn,
            command_timeout_s=command_timeout_s,
            agent_timeout_s=agent_timeout_s,
            verifier_timeout_s=0.0,
            output_limit=output_limit,
        )

    @staticmethod
    @override
    def name() -> str:
        return "megatron-t1"

    @override
    def version(self) -> str:
        return megatron_t1.__version__

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: the agent runs here, the environment needs bash alone."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Play the task in Harbor's environment.

        Raises:
            T1Error: the sandbox or the engine was lost; Harbor then counts an exception, not a failed task.
        """
        played = _Plays(self._contract())
        task = Task("harbor", instruction, agent_timeout_s=self._limits.agent_timeout_s)
        sandbox = _sandbox_of(environment, self._limits.output_limit)
        try:
            async with EngineClient(self._url, request_timeout_s=self._request_timeout_s) as client:
                trajectory = await run_episode(
                    Attempt(task, 0),
                    sandbox,
                    lambda: played.sampler(client),
                    self._chat,
                    self._limits,
                )
        finally:
            await sandbox.stop()
        self._report(trajectory, context)
        if trajectory.header.verdict is not None:  # of an episode that was lost: nobody verifies here
            raise T1Error(trajectory.header.verdict.reason, where="megatron_t1.harbor.agent")

    def _contract(self) -> SamplingContract:
        return SamplingContract(
            **self._sampling,
            logprobs_mode="processed",
            stop_ids=tuple(self._chat.stop_ids),
            tokenizer_sha256="",
            chat_format=self._chat_name,
            engine=self._url,
            engine_dtype="",
            model_dtype="",
            num_experts=0,
            top_k=0,
            num_moe_layers=0,
        )

    def _report(self, trajectory: Trajectory, context: AgentContext) -> None:
        header = trajectory.header
        detail = rollout_detail(trajectory)
        context.n_input_tokens = sum(map(len, detail["prompt_token_ids"]))
        context.n_output_tokens = sum(map(len, detail["completion_token_ids"]))
        context.rollout_details = [detail]
        context.metadata = {"end_reason": str(header.end_reason), **header.counts}
        (Path(self.logs_dir) / RECORD).write_text(
            json.dumps({**context.metadata, "timings_s": header.timings_s}) + "\n"
        )


def rollout_detail(trajectory: Trajectory) -> dict[str, list]:
    """The episode in Harbor's form: for each turn the whole prompt, the sampled ids and their log-probabilities."""
    detail: dict[str, list] = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
    sampled = trajectory.origin == Origin.SAMPLED
    for turn in np.unique(trajectory.turn[sampled]):
        rows = np.flatnonzero(sampled & (trajectory.turn == turn))
        detail["prompt_token_ids"].append(trajectory.ids[: rows[0]].tolist())
        detail["completion_token_ids"].append(trajectory.ids[rows].tolist())
        detail["logprobs"].append(trajectory.logprobs[rows].tolist())
    return detail


class _Plays:
    """Lets an episode be played once: Harbor's environment can't be brought back to its beginning."""

    def __init__(self, contract: SamplingContract):
        self._contract, self._sampler = contract, None

    def sampler(self, client: EngineClient) -> EngineSampler:
        if self._sampler is not None:
            error = self._sampler.error
            raise T1Error(
                f"the episode was lost: {error or 'the environment failed'}",
                where="megatron_t1.harbor.agent",
                remedy="let Harbor retry the trial",
            ) from error
        self._sampler = _Sampler(client, self._contract, name="harbor")
        return self._sampler


class _Sampler(EngineSampler):
    """Remembers its last error."""

    error: T1Error | None = None

    @override
    async def next_turn(self, stream: TokenStream, max_tokens: int) -> np.ndarray:
        try:
            return await super().next_turn(stream, max_tokens)
        except T1Error as error:
            self.error = error
            raise


class _Borrowed:
    """A running sandbox of ours behind the same protocol: it was started by Harbor, and goes on for its verifier."""

    def __init__(self, sandbox: Sandbox):
        self.run = sandbox.run

    async def start(self, task: Task) -> None:
        pass

    async def stop(self) -> None:
        pass


def _sandbox_of(environment: BaseEnvironment, output_limit: int) -> Any:
    if isinstance(environment, SandboxEnvironment):
        return _Borrowed(environment.sandbox)
    return EnvironmentSandbox(environment, output_limit)
