"""Has vLLM return the experts that it chose for each token, on CPU too, and reads them.

vLLM's `enable_return_routed_experts` keeps the choices of each block of the KV cache beside it, so that a request whose
prompt is cached has them, and so does one that is preempted and computed again. Its model runner for CPUs (V1) lacks
the few calls of the connector that does this; here they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import LLM
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid3d.families import Config, family_of
from hybrid3d.generation.engine import NO_CHOICES, ExpertChoices

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput


class RoutedExperts:
    """Reads the choices of experts that an engine returns, of a model with experts whose `config.json` it is given."""

    def __init__(self, llm: LLM, config: Config):
        experts = family_of(config).experts(config)
        assert experts is not None, "checked when the recipe was read"
        self._layers = np.flatnonzero(experts.sparse)
        self._processor: Any = llm.llm_engine.output_processor

    def of_completion(self, output: Any) -> ExpertChoices:
        """Return the choices of a request that has ended, from its `CompletionOutput`; none on other ranks of TP."""
        return self._choices([] if output.routed_experts is None else [output.routed_experts])

    def of_request(self, request_id: str) -> ExpertChoices:
        """Return the choices of a request that has not ended."""
        (internal,) = self._processor.external_req_ids[request_id]
        return self._choices(self._processor.request_states[internal].routed_experts_chunks)

    def _choices(self, chunks: Sequence[Any]) -> ExpertChoices:
        """Return the choices in vLLM's arrays [tokens, layers, k], which have rows for dense layers too."""
        return ExpertChoices.of(np.concatenate(chunks)[:, self._layers]) if chunks else NO_CHOICES


def take_output_of_first_rank(take_output: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `AuxOutputSchedulerConnector.take_output`: other ranks than the first of TP have no output to take."""

    def taken(self: Any, request: Any, output: dict[str, Any] | None) -> Any:
        return None if output is None else take_output(self, request, output)

    return taken


def execute_and_capture(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `CPUModelRunner.execute_model`: keep the choices of the step, as vLLM's V2 model runner does."""

    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    def execute_model(self: Any, scheduler_output: Any, *args: Any) -> Any:
        if not self.vllm_config.aux_output_config.enabled:
            return execute(self, scheduler_output, *args)
        if not hasattr(self, "aux_output_connector"):
            connector = get_aux_output_connector(self.get_model(), self.vllm_config, self.kv_cache_config)
            self.aux_output_connector = connector
        self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute(self, scheduler_output, *args)
        self.pending_aux_output = None
        if self.execute_model_state is not None:  # requests were computed, of which tokens will be sampled
            self.pending_aux_output = self.aux_output_connector.prepare_output(_batch_of(self))
        return output

    return execute_model


def _batch_of(runner: Any) -> SimpleNamespace:
    """Return what vLLM's connector reads of a batch; the runner overwrites its own arrays in the next step."""
    requests = runner.input_batch.num_reqs
    return SimpleNamespace(
        req_ids=runner.input_batch.req_ids,
        query_start_loc_np=runner.query_start_loc.np[: requests + 1].copy(),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:requests].copy(),
    )


def sample_and_return(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `CPUModelRunner.sample_tokens`: return the choices with the tokens."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        pending = getattr(self, "pending_aux_output", None)
        output = sample(self, grammar_output)
        if pending is None:
            return output
        self.pending_aux_output = None
        return _OutputWithExperts(output, pending)

    return sample_tokens


class _OutputWithExperts(AsyncModelRunnerOutput):
    """The output of a step, with the choices of experts."""

    def __init__(self, output: ModelRunnerOutput | AsyncModelRunnerOutput, pending: PendingAuxOutput):
        self._output, self._pending = output, pending

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output() if isinstance(self._output, AsyncModelRunnerOutput) else self._output
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        self._pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = self._pending.process_output()
        return output

    def get_kv_connector_output(self) -> Any:  # vLLM asks for it since 0.33
        whole = isinstance(self._output, AsyncModelRunnerOutput)
        return self._output.get_kv_connector_output() if whole else self._output.kv_connector_output
