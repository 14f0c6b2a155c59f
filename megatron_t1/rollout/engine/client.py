"""Token ids in; token ids, log-probabilities and routes out: vLLM's /inference/v1/generate."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import numpy as np

from megatron_t1.rollout.engine.completion import Completion, EngineRoutes
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid, EngineRequestFailed
from megatron_t1.rollout.journal import Journal
from megatron_t1.trajectory.exchange import ExchangeSession

GENERATE = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"


class EngineClient:
    """One HTTP session with an engine; use as `async with EngineClient(...) as client`.

    Args:
        url: base address of the engine.
        route_shape: the model's experts; None when the engine records no routes.
        request_timeout_s: of one generation, queueing in the engine included.
        check_alive: awaited after a failed request; raises `EngineLost` when the engine is gone.
        model: name that the engine serves its model under, which every request states: another engine that took the
            port of one that died refuses it. "": not stated.
    """

    def __init__(
        self,
        url: str,
        *,
        route_shape: EngineRoutes | None = None,
        request_timeout_s: float = 600.0,
        check_alive: Callable[[], Awaitable[None]] | None = None,
        model: str = "",
    ):
        self.url = url
        self.model = model
        self.route_shape = route_shape
        self.request_timeout_s = request_timeout_s
        self._check_alive = check_alive
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            base_url=self.url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.request_timeout_s),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self._session.close()
        self._session = None

    async def generate(
        self,
        ids: np.ndarray,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop_ids: Sequence[int],
        seed: int | None = None,
        routes_from: int | None = None,
        exchange: ExchangeSession | None = None,
        journal: Journal | None = None,
        where: str = "",
    ) -> Completion:
        """Sample one turn after `ids`.

        Args:
            ids: int32 [P], the whole stream so far, at least one token.
            max_tokens: most tokens to sample, at least 1.
            stop_ids: generation ends with the first of these, which is part of the result; nothing else ends it.
            seed: None for the engine's own randomness.
            routes_from: first position whose routes are wanted (0 to P); None: none.
            exchange: where request and answer are logged, before anybody else sees them.
            journal: of the episode: an answer that it has to this very request is taken instead of asking again.
            where: names the request in errors (trajectory and turn).

        Raises:
            EngineLost: the engine's process is gone.
            EngineRequestFailed: time-out, abort, or an error answer of a living engine.
            EngineAnswerInvalid: the answer breaks the contract.
        """
        if routes_from is not None and self.route_shape is None:
            raise ValueError("routes were asked of an engine that records none")
        sampling = {
            "n": 1,
            "temperature": float(temperature),
            "top_p": float(top_p),
            "max_tokens": int(max_tokens),
            "logprobs": 0,
            "stop_token_ids": [int(token) for token in stop_ids],
            # The stop ids of the contract are the only ones: not those of the checkpoint's generation_config.json.
            "ignore_eos": True,
            "detokenize": False,
        }
        if seed is not None:
            sampling["seed"] = int(seed)
        if self.route_shape is not None:
            # An engine that records routes always returns some; unwanted ones are kept few.
            sampling["routed_experts_prompt_start"] = len(ids) if routes_from is None else int(routes_from)
        request = {"token_ids": ids.tolist(), "sampling_params": sampling, "stream": False}
        data = json.dumps(request, separators=(",", ":")).encode()
        body, began = None if journal is None else journal.answer(data), time.monotonic()
        new = body is None
        if new:
            body = await self._post(GENERATE, data, where, exchange)
        digest = hashlib.sha256(body).hexdigest()
        completion = Completion.from_response(
            body,
            prompt_length=len(ids),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            routes_from=routes_from,
            route_shape=self.route_shape,
            where=where,
        )
        if new and journal is not None:
            journal.add(data, body, time.monotonic() - began)
        if exchange is not None:
            exchange.add(
                ids,
                sampled=completion.ids,
                logprobs=completion.logprobs,
                response_sha256=digest,
                finish_reason=completion.finish_reason,
                cached_tokens=completion.cached_tokens,
                routes=completion.routes,
                routes_start=completion.routes_start,
                state={
                    "temperature": sampling["temperature"],
                    "top_p": sampling["top_p"],
                    "stop_ids": sampling["stop_token_ids"],
                    "weights": completion.weights,
                },
            )
        return completion

    async def score(self, ids: np.ndarray, *, where: str = "") -> np.ndarray:
        """Log-probability of each token after those before it, at temperature 1: float64 [P], NaN for the first.

        Args:
            ids: int32 [P], at least two tokens.

        Raises:
            as `generate`.
        """
        sampling = {"n": 1, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        request = {"token_ids": ids.tolist(), "sampling_params": sampling, "stream": False}
        body = await self._post(GENERATE, json.dumps(request, separators=(",", ":")).encode(), where)
        try:
            first, *rest = json.loads(body)["prompt_logprobs"]
            scores = [float(row[str(token)]["logprob"]) for row, token in zip(rest, ids[1:].tolist(), strict=True)]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineAnswerInvalid(
                f"the engine's prompt log-probabilities are invalid: {type(error).__name__}: {error}", where=where
            ) from error
        return np.array([np.nan, *scores])

    async def _post(self, path: str, data: bytes, where: str, exchange: ExchangeSession | None = None) -> bytes:
        if self.model:  # here: a journal knows a request whatever engine it went to
            data = b'{"model":%s,%s' % (json.dumps(self.model).encode(), data[1:])
        headers = {"content-type": "application/json"}
        if exchange is not None:  # a router in front of replicas keeps a session where its prefix is cached
            headers[SESSION_HEADER] = exchange.name
        try:
            async with self._session.post(path, data=data, headers=headers) as response:
                body = await response.read()
        except TimeoutError as error:
            await self._raise_if_lost()
            raise EngineRequestFailed(
                f"the engine didn't answer within {self.request_timeout_s:g} s",
                where=where,
                remedy="raise rollout.engine.request_timeout_s or lower rollout.concurrency",
            ) from error
        except aiohttp.ClientError as error:
            await self._raise_if_lost()
            raise EngineRequestFailed(f"the connection to the engine broke: {error}", where=where) from error
        if response.status == 200:
            return body
        problem = f"the engine answered {response.status}: {body[:500].decode(errors='replace')}"
        await self._raise_if_lost()
        if response.status < 500:
            raise EngineAnswerInvalid(problem, where=where, remedy="the request itself was refused; see the log")
        raise EngineRequestFailed(problem, where=where)

    async def _raise_if_lost(self) -> None:
        if self._check_alive is not None:
            await self._check_alive()
