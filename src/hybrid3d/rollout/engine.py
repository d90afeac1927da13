"""Runs vLLM as the rollout engine within a training rank: generation, sleep mode and weight updates."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from hybrid3d.config import Recipe
from hybrid3d.families import Config, family_of

# vLLM reads these at import. The engine runs within the rank's process and downloads nothing.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState

from hybrid3d.generation.engine import (
    NO_CHOICES,
    Completion,
    ExpertChoices,
    GenerationRequest,
    StaleWeights,
    join_completions,
)
from hybrid3d.patches import apply, set_existing
from hybrid3d.reshard.file_index import read_shapes
from hybrid3d.reshard.fp8 import BLOCK
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.rollout import patches
from hybrid3d.rollout.adapters import ADAPTER, VllmAdapterSink, adapter_settings, manager_of, register_adapter
from hybrid3d.rollout.router_replay import RoutedExperts
from hybrid3d.rollout.sink import SinkOwner, VllmSink, names_of
from hybrid3d.rollout.truncation import LOGPROBS, kept_probability

T = TypeVar("T")

ASKED = "dummy_"  # begins the type of an empty config, by which vLLM first asks whether another type is to be set

apply(patches.EVERYWHERE)
if current_platform.is_cpu():
    apply(patches.ON_CPU)

EngineMemory = Literal["weights", "kv_cache"]
"""The memory that vLLM frees and reallocates apart."""

KINDS_OF_MEMORY: tuple[EngineMemory, ...] = get_args(EngineMemory)


def engine_settings(recipe: Recipe, layers: int | None = None) -> dict[str, Any]:
    """Return the vLLM arguments that tell how a recipe's model, or one with so many layers, is built and sharded."""
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    quantization = None if rollout.quantization is None else quantization_config(_config_of(recipe))
    return dict(
        model=str(Path(recipe.model.path).resolve()),
        skip_tokenizer_init=not rollout.stop,  # only stop texts need it
        load_format="dummy",
        dtype=recipe.model.dtype,
        tensor_parallel_size=rollout.tp,
        data_parallel_size=rollout.dp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=rollout.expert_parallel,
        max_model_len=rollout.max_model_len,
        hf_overrides=functools.partial(_override, layers=layers, quantization=quantization),
        enforce_eager=current_platform.is_cpu(),
        # On CPU this op assumes 2-D input. Latent attention passes another shape and would be rotated wrongly.
        compilation_config={"custom_ops": ["-rotary_embedding"]} if current_platform.is_cpu() else {},
        attention_backend=_attention_backend(recipe),
        # On CPU vLLM 0.32 fails on a sampled request of which only a part of the prompt is computed in a step: it sets
        # the offset of the request's generator, which CPU generators do not have.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
    )


def quantization_config(config: Config) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint that has what a sync sends of a model with this config."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *family_of(config).routers(config)],
    }


def _attention_backend(recipe: Recipe) -> str | None:
    """Return the attention backend to use; None lets vLLM select it.

    For latent attention on a CPU with AMX, vLLM selects kernels without float32, and frees the weights that they pack.
    """
    if not current_platform.is_cpu():
        return None
    config = _config_of(recipe)
    return None if family_of(config).latents(config) is None else "CPU_MLA"


def _shapes_of(recipe: Recipe) -> dict[str, Shape]:
    config = _config_of(recipe)
    return family_of(config).without_mtp(read_shapes(recipe.model.path), config)


def _config_of(recipe: Recipe) -> Config:
    found: Config = json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))
    return found


def _override(config: Any, layers: int | None, quantization: dict[str, Any] | None) -> Any:
    """Set the quantization of what a sync sends in vLLM's config, whatever the checkpoint's is, and the layers."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if quantization is not None:
        config.quantization_config = quantization
    if layers is not None and not config.model_type.startswith(ASKED):
        set_existing(patches.VLLM, config, num_hidden_layers=layers)
    return config


class RolloutEngine(SinkOwner):
    """One rank's vLLM, which implements `Engine`. All ranks of a replica call each method with the same arguments.

    Attributes:
        rank_in_replica: this rank's number in its replica.
        discards_weights: whether sleeping frees the weights, so that each sync must send all of them.
        weight_version: version of the engine's weights; None before the first sync and while a sync is incomplete.
        generated: passes of the model until now, and how many tokens they generated.
    """

    def __init__(self, recipe: Recipe, rank: int, run_id: str, slots: Sequence[int]):
        """Start vLLM with dummy weights, which the first sync replaces.

        Args:
            run_id: a name unique among the runs on this machine, for vLLM's shared memory.
            slots: the slot of each rank of the default process group in the rollout layout.
        """
        rollout = recipe.rollout
        assert rollout is not None, "checked when the recipe was read"
        self.replica, self.rank_in_replica = divmod(slots[rank], rollout.tp)
        self.replicas = len(slots) // rollout.tp
        self.leads, self.steps_together = self.rank_in_replica == 0, rollout.dp > 1
        self.generated = (0, 0)
        self._submitted: dict[int, list[Completion]] = {}  # what each request has generated so far
        # Parts of requests cost Python for each token: vLLM is asked for them only where answers may be interrupted
        self._output_kind = RequestOutputKind.DELTA if recipe.async_.partial else RequestOutputKind.FINAL_ONLY
        self._caches_prefixes = not recipe.async_.keeps_cache  # a new answer must not use what older weights computed
        self._asleep: set[EngineMemory] = set()
        self._sleeps = (  # where ranks also train; sleep mode frees GPU memory only
            rollout.sleep and not recipe.is_split and not current_platform.is_cpu()
        )
        self.discards_weights = self._sleeps and not recipe.keeps_rollout_weights
        if recipe.keeps_rollout_weights:
            patches.keep_weights_while_asleep()
        if current_platform.is_cpu():
            torch.compiler.set_stance("force_eager")  # vLLM compiles small functions all the same, for seconds a rank
            patches.name_shared_memory(run_id)
            if not rollout.pack_weights:
                patches.keep_weights_unpacked()
        lora = recipe.lora if recipe.syncs_adapters else None
        returns_experts = recipe.train.router_replay == "rollout"
        with (
            patches.external_rank(slots[rank], rollout),
            patches.groups_over_slots(slots),
            patches.noting_requantization() as noted,
        ):
            self._llm = LLM(
                **engine_settings(recipe),
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                kv_cache_memory_bytes=int(rollout.kv_cache_gib * 2**30) if current_platform.is_cpu() else None,
                enable_sleep_mode=self._sleeps,
                enable_prefix_caching=None if self._caches_prefixes else False,
                logprobs_mode="processed_logprobs",  # after temperature; with `rollout/truncation.py` of all tokens
                disable_log_stats=True,
                enable_return_routed_experts=returns_experts,
                seed=recipe.run.seed,
                **({} if lora is None else adapter_settings(lora, _shapes_of(recipe))),
            )
        self._requantized = names_of(noted, self.model_runner.get_model())
        self._lora, self._lora_request = lora, None if lora is None else ADAPTER
        if lora is not None:
            register_adapter(manager_of(self.model_runner), lora)
        self._experts = RoutedExperts(self._llm, _config_of(recipe)) if returns_experts else None

    def sink(self) -> VllmSink:
        """Return the sink that receives this rank's weights."""
        runner = self.model_runner
        return VllmSink(runner.get_model(), runner.vllm_config, self._requantized, self)

    def adapter_sink(self) -> VllmAdapterSink:
        """Return the sink that receives this rank's adapters."""
        assert self._lora is not None, "called for a recipe that syncs adapters"
        return VllmAdapterSink(manager_of(self.model_runner), self._lora, self)

    @property
    def llm(self) -> LLM:
        """vLLM itself, for what only an inspection needs."""
        return self._llm

    @property
    def model_runner(self) -> Any:
        """The part of vLLM that has the model of this rank."""
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def submit(self, requests: Mapping[int, GenerationRequest], version: int) -> None:
        self._check_version(version)
        for number, request in requests.items():
            params = _sampling_params(request)
            params.output_kind = self._output_kind
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            self._llm.llm_engine.add_request(str(number), prompt, params, lora_request=self._lora_request)
            self._submitted[number] = []

    def step(self) -> dict[int, Completion]:
        return self._step() if self._llm.llm_engine.has_unfinished_requests() else {}

    def drain(self) -> dict[int, Completion]:
        ended: dict[int, Completion] = {}
        while self._llm.llm_engine.has_unfinished_requests():
            ended |= self._step()
        return ended

    def _step(self) -> dict[int, Completion]:
        version = self._check_version()
        rng = torch.get_rng_state()
        outputs = self._llm.llm_engine.step()
        torch.set_rng_state(rng)  # vLLM's sampling must not advance the trainer's random state
        passes, tokens = self.generated
        self.generated = (passes + 1, tokens + sum(len(output.outputs[0].token_ids) for output in outputs))
        ended = {}
        for output in outputs:
            number = int(output.request_id)
            self._submitted[number].append(self._completion(output.outputs[0], version))
            if output.finished:
                parts = self._submitted.pop(number)
                ended[number] = join_completions(parts, version, parts[-1].experts)
        return ended

    def _completion(self, output: Any, version: int) -> Completion:
        steps = [] if output.logprobs is None else [*zip(output.logprobs, output.token_ids, strict=True)]
        kept = [kept_probability(step, token) for step, token in steps]
        is_sampled = output.logprobs is not None  # greedy answers are not trained
        return Completion(
            tokens=tuple(output.token_ids),
            logprobs=tuple(step[token].logprob for step, token in steps),
            weight_version=version,
            stopped=isinstance(output.stop_reason, str),
            truncated=output.finish_reason == "length",
            kept=tuple(k for k in kept if k is not None),
            experts=self._experts.of_completion(output) if is_sampled and self._experts is not None else NO_CHOICES,
        )

    def _experts_of(self, number: int) -> ExpertChoices:
        return NO_CHOICES if self._experts is None else self._experts.of_request(str(number))

    def interrupt(self) -> dict[int, Completion]:
        """End all requests; without `async.partial` vLLM tells the tokens of whole answers only, and there are none."""
        engine, version = self._llm.llm_engine, self._check_version()
        found = {
            number: join_completions(parts, version, self._experts_of(number))
            for number, parts in self._submitted.items()
        }
        for number in self._submitted:  # one by one: vLLM ends several in an order that differs between TP ranks
            engine.abort_request([str(number)])
        self._submitted = {}
        while engine.has_unfinished_requests():  # of engines that share experts with this one
            engine.step()
        core = engine.engine_core.engine_core
        while core.batch_queue:  # a batch that was scheduled ahead must not run while weights are synced
            engine.step()
        return found

    def pause(self) -> tuple[dict[int, Completion], dict[int, Completion]]:
        ended: dict[int, Completion] = {}
        core = self._llm.llm_engine.engine_core.engine_core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:  # a batch that was scheduled ahead must not run while weights are synced
            ended |= self._step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        version = self._check_version()
        paused = {number: join_completions(parts, version, NO_CHOICES) for number, parts in self._submitted.items()}
        self._submitted = {number: [] for number in paused}
        return ended, paused

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._llm.llm_engine.abort_request([str(number)])
            del self._submitted[number]

    def broadcast(self, value: T | None) -> T:
        return cast(T, get_tp_group().broadcast_object(value))

    def _check_version(self, version: int = 0) -> int:
        if self.weight_version is None:
            raise StaleWeights("vLLM's weights are incomplete: no sync has finished since the last change")
        if self.weight_version < version:
            raise StaleWeights(f"vLLM's weights have version {self.weight_version}, and {version} is required")
        return self.weight_version

    @property
    def end_tokens(self) -> Sequence[int]:
        """The end-of-sequence tokens in the checkpoint's generation config, at which vLLM always stops."""
        eos = self._llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def reset_cache(self) -> None:
        """Drop the prefix cache, which was computed with older weights; with paused requests there is none.

        Raises:
            RuntimeError: vLLM still has running requests.
        """
        if self._submitted and not self._caches_prefixes:
            return
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache because requests are still running")

    def close(self) -> None:
        """Shut vLLM down. This destroys torch's default process group: no rank may use it afterwards.

        vLLM must not be asleep then: its allocator would free blocks that are not mapped, with an error for each.
        """
        for memory in KINDS_OF_MEMORY:
            self.wake(memory)
        self._llm.llm_engine.engine_core.shutdown()

    def sleep(self) -> None:
        """Free the memory of the KV cache for training, and of weights that are not kept; a sync must follow.

        vLLM then takes both for asleep, even if weights are kept, and generates only once both are woken.
        """
        self.weight_version = None
        if self._sleeps:  # level 2 discards weights; level 1 saves those on the host that sleep: of kept ones, none
            self._llm.sleep(level=2 if self.discards_weights else 1)
            self._asleep = set(KINDS_OF_MEMORY)

    def wake(self, memory: EngineMemory) -> None:
        """Reallocate freed memory: that of the weights before a sync, that of the KV cache before generating."""
        if memory in self._asleep:
            torch.cuda.empty_cache()  # return memory cached by torch's allocator, so that vLLM can use it
            if not self._llm.wake_up(tags=[memory]) and self._asleep == {memory}:
                raise RuntimeError(f"vLLM still sleeps, although its {' and '.join(KINDS_OF_MEMORY)} were woken")
            self._asleep.remove(memory)

    def asleep_bytes(self) -> int:
        """Return the bytes of GPU memory that vLLM has freed until it wakes; torch counts them as allocated still."""
        if not self._asleep:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator  # loads a library that builds for CPUs lack

        blocks = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(block.handle[1] for block in blocks if block.is_asleep)


def _sampling_params(request: GenerationRequest) -> SamplingParams:
    sampling, is_greedy = request.sampling, request.seed is None
    return SamplingParams(
        temperature=0.0 if is_greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_tokens),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        logprobs=None if is_greedy else LOGPROBS if sampling.truncates else 0,
        detokenize=bool(sampling.stop),
    )
