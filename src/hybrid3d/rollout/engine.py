"""vLLM as the rollout engine of a training rank: generates, sleeps, and takes new weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hybrid3d.config import Recipe

# vLLM reads these at import. One process a rank, no engine process of its own, nothing fetched from outside.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from hybrid3d.generation.engine import Completion, GenerationRequest, StaleWeights
from hybrid3d.reshard.layout import Shape
from hybrid3d.rollout.patches import external_rank, groups_over_slots, name_shared_memory
from hybrid3d.rollout.weights import RolloutWeights


def engine_settings(recipe: Recipe, layers: int | None = None) -> dict[str, Any]:
    """What decides how vLLM builds and shards a recipe's model, for an engine that runs and for one that is asked.

    Args:
        layers: for one that is asked about the first layers only.
    """
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    return dict(
        model=str(Path(recipe.model.path).resolve()),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=recipe.model.dtype,
        tensor_parallel_size=rollout.tp,
        data_parallel_size=rollout.dp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=rollout.expert_parallel,
        max_model_len=rollout.max_model_len,
        hf_overrides=functools.partial(_override, layers=layers),
        # Captured graphs would go on reading the memory in which shared tensors were before.
        enforce_eager=current_platform.is_cpu() or recipe.sync.share_storage,
        # On CPU this op assumes 2-D input, which latent attention does not give it: it would rotate wrongly.
        compilation_config={"custom_ops": ["-rotary_embedding"]} if current_platform.is_cpu() else {},
    )


def _override(config: Any, layers: int | None) -> Any:
    """Plain layers for a checkpoint in FP8, whose weights come dequantized; so many layers, where that is said."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if layers is not None:
        config.num_hidden_layers = layers
    return config


class RolloutEngine:
    """One rank's vLLM. Ranks of a replica call everything together, with the same arguments.

    Attributes:
        replica: which replica of the model this rank belongs to.
        replicas: how many there are.
        leads: whether this rank speaks for its replica.
        weight_version: of the engine's weights; None before the first sync, and while one has not finished.
    """

    def __init__(self, recipe: Recipe, rank: int, ident: str, slots: Sequence[int]):
        """Start vLLM with dummy weights: the first sync brings the real ones.

        Args:
            slots: every rank's place in the rollout layout, counted over all engines.
            ident: a name that no other run on this machine has, for vLLM's shared memory.
        """
        rollout = recipe.rollout
        assert rollout is not None, "checked when the recipe was read"
        self.replica, within = divmod(slots[rank], rollout.tp)
        self.replicas = recipe.world_size // rollout.tp
        self.leads = within == 0
        self.weight_version: int | None = None
        self._asleep: set[str] = set()
        self._sleeps = rollout.sleep and not current_platform.is_cpu()  # on a CPU there is nothing to gain
        if current_platform.is_cpu():
            name_shared_memory(ident)
        with external_rank(slots[rank], rollout), groups_over_slots(slots):
            self._llm = LLM(
                **engine_settings(recipe),
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                kv_cache_memory_bytes=int(rollout.kv_cache_gib * 2**30) if current_platform.is_cpu() else None,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature included
                disable_log_stats=True,
                seed=recipe.run.seed,
            )

    def weights(self, shapes: Mapping[str, Shape]) -> RolloutWeights:
        """What this rank wants of the canonical tensors of these shapes, and the sink that takes it."""
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        return RolloutWeights(runner.model, runner.vllm_config, shapes)

    def generate(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        """Return one completion for each request, by weights of this version or a later one.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
        """
        if self.weight_version is None:
            raise StaleWeights("vLLM's weights are incomplete: no sync has finished since they were last changed")
        if self.weight_version < version:
            raise StaleWeights(f"vLLM's weights have version {self.weight_version}, and {version} is required")
        params = [
            SamplingParams(
                temperature=0.0 if request.seed is None else request.temperature,
                seed=request.seed,
                max_tokens=request.max_new_tokens,
                stop_token_ids=list(request.stop_tokens),
                logprobs=None if request.seed is None else 0,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        rng = torch.get_rng_state()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        torch.set_rng_state(rng)  # the training side's random stream does not depend on what vLLM sampled
        return [_completion(output.outputs[0], self.weight_version) for output in outputs]

    @property
    def end_tokens(self) -> Sequence[int]:
        """Those of the checkpoint's generation config, at which vLLM ends an answer unasked."""
        found = self._llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    def reset_cache(self) -> None:
        """Forget what was computed with older weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running")

    def close(self) -> None:
        """Shut vLLM down; it takes torch's default process group with it, so every rank must be done with that."""
        self._llm.llm_engine.engine_core.shutdown()

    def sleep(self) -> None:
        """Give the memory of weights and KV cache to the other engine."""
        self.weight_version = None
        if self._sleeps:
            self._llm.sleep(level=2)  # the weights are not kept: the next sync brings all of them
            self._asleep = {"weights", "kv_cache"}

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take memory back, if it sleeps: of the weights before a sync, of the KV cache before generating."""
        if what in self._asleep:
            self._asleep.remove(what)
            torch.cuda.empty_cache()  # what training has freed, torch keeps from others
            self._llm.wake_up(tags=[what])


def _completion(output: Any, version: int) -> Completion:
    steps = () if output.logprobs is None else zip(output.logprobs, output.token_ids, strict=True)
    logprobs = tuple(step[token].logprob for step, token in steps)
    return Completion(tuple(output.token_ids), logprobs, version)
