"""Our agent as a Harbor agent: `harbor run` then evaluates a t1 model, sampled token by token as in training.

    agents:
      - import_path: megatron_t1.harbor.agent:TerminalAgent
        model_name: t1
        kwargs: {url: "http://127.0.0.1:8000", model_dir: /runs/t1/hf/iter_0010, max_turns: 60}

The engine is a running vLLM with its token endpoint. `model_dir` has tokenizer and template; `chat_format` is the
model's (model.chat_format), the other options are those of `env` and `rollout`. The verifier is Harbor's own.

Of a task of several steps Harbor asks for one after another: each begins a new conversation, and with
`resume_trajectory: true` of the agent, the conversation before goes on, token by token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, override

import numpy as np
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

import megatron_t1
from megatron_t1.environment.task import Task
from megatron_t1.harbor.sandbox import EnvironmentSandbox
from megatron_t1.rollout.agent import Attempt, Episode
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.formats import load_format
from megatron_t1.rollout.samplers import EngineSampler
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import EndReason, Origin, Trajectory

# In Harbor's directory for the agent's logs; with the number of the step in a conversation that goes on, since Harbor
# brings back what lay there before a step.
RECORD, NEXT_RECORD = "episode.json", "episode_{}.json"


class TerminalAgent(BaseAgent):
    """One tool, a persistent bash; token ids in and token ids out.

    Args:
        url: of the engine.
        model_dir: the exported model's directory.
        max_turns, max_context: of one conversation; tokens with the instruction.
        command_timeout_s, agent_timeout_s: of a command, of all together; Harbor's own limit of the agent counts too.
        output_limit: characters of a command's output that the model sees.
    """

    capabilities = AgentCapabilities(resume=True)

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
        self._episode: Episode | None = None
        self._steps = 0  # of the conversation
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
        """Play the task, or one step of it, in Harbor's environment.

        Raises:
            T1Error: the sandbox or the engine was lost, or the conversation can't go on; Harbor then counts an
                exception, not a failed task.
        """
        self._episode, self._steps = None, 0
        await self._play(instruction, environment, context)

    @override
    async def resume(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """The next step, as a message of the user in the conversation of the one before. Raises as `run`."""
        await self._play(instruction, environment, context)

    async def _play(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        task = Task("harbor", instruction, agent_timeout_s=self._limits.agent_timeout_s)
        # A shell of its own also in an environment of ours: what it defines there is nothing to Harbor's verifier.
        sandbox = EnvironmentSandbox(environment, self._limits.output_limit)
        try:
            async with EngineClient(self._url, request_timeout_s=self._request_timeout_s) as client:
                sampler, episode = EngineSampler(client, self._contract(), name="harbor"), self._episode
                if episode is None:
                    attempt = Attempt(task, 0)
                    self._episode = episode = Episode(attempt, sandbox, sampler, self._chat, self._limits, None)
                    first = 0
                    await episode.play(None)
                else:
                    first, episode.sandbox, episode.sampler = episode.stream.turns, sandbox, sampler
                    await self._go_on(episode, task)
        finally:
            await sandbox.stop()
        self._report(episode.finish(None), first, context)

    async def _go_on(self, episode: Episode, task: Task) -> None:
        if episode.stream.turns >= self._limits.max_turns:
            episode.end_reason = EndReason.TURN_LIMIT
        elif not episode.instruct(task.instruction):
            episode.end_reason = EndReason.TOKEN_LIMIT
        else:
            await episode.sandbox.start(task)
            episode.end_reason = await episode.turns(task, self._limits.agent_timeout_s)

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

    def _report(self, trajectory: Trajectory, first: int, context: AgentContext) -> None:
        """Tell Harbor of the turns from `first` on; counts and times are of the whole conversation."""
        header = trajectory.header
        detail = rollout_detail(trajectory, first)
        context.n_input_tokens = sum(map(len, detail["prompt_token_ids"]))
        context.n_output_tokens = sum(map(len, detail["completion_token_ids"]))
        context.rollout_details = [detail]
        context.metadata = {"end_reason": str(header.end_reason), **header.counts}
        self._steps += 1
        name = RECORD if self._steps == 1 else NEXT_RECORD.format(self._steps)
        (Path(self.logs_dir) / name).write_text(json.dumps({**context.metadata, "timings_s": header.timings_s}) + "\n")


def rollout_detail(trajectory: Trajectory, first: int = 0) -> dict[str, list]:
    """The episode in Harbor's form: for each turn, from `first` on, the whole prompt, the sampled ids and their
    log-probabilities."""
    detail: dict[str, list] = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
    sampled = (trajectory.origin == Origin.SAMPLED) & (trajectory.turn >= first)
    for turn in np.unique(trajectory.turn[sampled]):
        rows = np.flatnonzero(sampled & (trajectory.turn == turn))
        detail["prompt_token_ids"].append(trajectory.ids[: rows[0]].tolist())
        detail["completion_token_ids"].append(trajectory.ids[rows].tolist())
        detail["logprobs"].append(trajectory.logprobs[rows].tolist())
    return detail
