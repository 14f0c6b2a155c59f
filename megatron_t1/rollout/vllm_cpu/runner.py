"""The CPU worker and model runner that drive vLLM's routed-experts connector. Imported by vLLM, by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_t1.rollout.engine.observed import router_line


@dataclass(frozen=True)
class _StepBatch:
    """What the connector reads of the second runner's InputBatch: the step's requests and their token ranges."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray  # int32 [requests + 1], first row of each request in the step
    num_computed_tokens_np: np.ndarray  # int32 [requests], tokens computed before the step


class RoutesCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner, with the calls that its second runner makes to the connector around each step."""

    aux_output_connector = None

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False, **options):
        super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
        if not is_profiling and self.vllm_config.aux_output_config.enabled:
            self.aux_output_connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
            gates = {
                gate.out_dtype or gate.weight.dtype for gate in self.model.modules() if isinstance(gate, GateLinear)
            }
            for dtype in gates:
                print(router_line(str(dtype).removeprefix("torch.")), flush=True)

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if self.aux_output_connector is not None:
            self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output):
        pending = None
        if self.aux_output_connector is not None and self.execute_model_state is not None:
            requests = self.input_batch.num_reqs
            # Copies: sampling changes these buffers before the connector reads them.
            pending = self.aux_output_connector.prepare_output(
                _StepBatch(
                    req_ids=list(self.input_batch.req_ids),
                    query_start_loc_np=self.query_start_loc.np[: requests + 1].copy(),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:requests].copy(),
                )
            )
        output = super().sample_tokens(grammar_output)
        if pending is not None:
            if not isinstance(output, ModelRunnerOutput) or output.req_ids != pending.request_ids:
                raise RuntimeError("the sampled requests are not the ones whose experts were recorded")
            sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class RoutesCPUWorker(CPUWorker):
    def init_device(self):
        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = RoutesCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original
