"""vLLM as the rollout engine of a training rank: generates, sleeps, and takes new weights."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from hybrid3d.config import Recipe, Rollout

# vLLM reads these at import. One process a rank, no engine process of its own, nothing fetched from outside.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybrid3d.generation.engine import Completion, StaleWeights
from hybrid3d.reshard.layout import Shape
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


@contextlib.contextmanager
def external_rank(slot: int, rollout: Rollout) -> Iterator[None]:
    """Have vLLM take the slot for its rank: it derives from RANK which shard it compiles and caches graphs for.

    Its data-parallel rank it derives as if its engine were alone in the world.
    """
    rank = slot if rollout.dp == 1 else slot % (rollout.tp * rollout.dp)
    with mock.patch.dict(os.environ, RANK=str(rank)):
        yield


@contextlib.contextmanager
def _placed(slots: Sequence[int]) -> Iterator[None]:
    """Have vLLM build its groups over slots: it takes ranks for them, in their order.

    torch numbers a group's members in the order of ranks unless it is told to keep the order given, which is vLLM's.
    """
    make_group, new_group = parallel_state.init_model_parallel_group, dist.new_group
    rank_in = {slot: rank for rank, slot in enumerate(slots)}

    def over_slots(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return make_group([[rank_in[slot] for slot in group] for group in group_ranks], *args, **kwargs)

    with (
        mock.patch.object(parallel_state, "init_model_parallel_group", over_slots),
        mock.patch.object(dist, "new_group", functools.partial(new_group, sort_ranks=False)),
    ):
        yield


class RolloutEngine:
    """One rank's vLLM. Ranks of a replica call everything together, with the same arguments.

    Attributes:
        replica: which replica of the model this rank belongs to.
        replicas: how many there are.
        leads: whether this rank speaks for its replica.
        updates: how many updates the weights have behind them; None where they are no one's yet, or a sync has
            not come to its end.
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
        self.updates: int | None = None
        self._temperature = rollout.temperature
        self._max_new_tokens = rollout.max_new_tokens
        self._sleeps = rollout.sleep and not current_platform.is_cpu()  # on a CPU there is nothing to gain
        if current_platform.is_cpu():
            _name_shared_memory(ident)
        with external_rank(slots[rank], rollout), _placed(slots):
            self._llm = LLM(
                **engine_settings(recipe),
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                kv_cache_memory_bytes=int(rollout.kv_cache_gib * 2**30) if current_platform.is_cpu() else None,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature included
                disable_log_stats=True,
                seed=recipe.run.seed,
            )

    def adopt(self, recipe: Recipe) -> None:
        """Draw at the temperature of this recipe."""
        assert recipe.rollout is not None, "checked when the recipe was read"
        self._temperature = recipe.rollout.temperature

    def weights(self, shapes: Mapping[str, Shape]) -> RolloutWeights:
        """What this rank wants of the canonical tensors of these shapes, and the sink that takes it."""
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        return RolloutWeights(runner.model, runner.vllm_config, shapes)

    def require(self, weights: int) -> int:
        """The number of the weights that the engine has, which must be this at least.

        Raises:
            StaleWeights: they are older, or not whole.
        """
        if self.updates is None:
            raise StaleWeights("vLLM's weights are not whole: no sync has come to its end since they were last touched")
        if self.updates < weights:
            raise StaleWeights(f"vLLM's weights have {self.updates} updates behind them, {weights} are required")
        return self.updates

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        end_token: int,
        stops: Sequence[int] = (),
        longest: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Draw one answer for each prompt (token ids) with its own seed, so that a run repeats.

        Args:
            seeds: None for greedy answers, of which nothing is drawn.
            stops: tokens that end an answer too.
            longest: tokens that each answer may have; None for the recipe's.
        """
        greedy = seeds is None
        params = [
            SamplingParams(
                temperature=0.0 if greedy else self._temperature,
                seed=None if greedy else seeds[i],
                max_tokens=longest[i] if longest else self._max_new_tokens,
                stop_token_ids=[end_token, *stops],
                logprobs=None if greedy else 0,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        return [_completion(output.outputs[0]) for output in self._run(prompts, params)]

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
        self.updates = None
        if self._sleeps:
            self._llm.sleep(level=2)  # the weights are not kept: the next sync brings all of them

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take memory back: that of the weights before a sync, that of the KV cache before generating."""
        if self._sleeps:
            torch.cuda.empty_cache()  # what training has freed, torch keeps from others
            self._llm.wake_up(tags=[what])

    def _run(self, prompts: Sequence[Sequence[int]], params: list[SamplingParams]) -> list:
        self.require(0)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        rng = torch.get_rng_state()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        torch.set_rng_state(rng)  # the training side's random stream does not depend on what vLLM drew
        return outputs


def _name_shared_memory(ident: str) -> None:
    """Have vLLM's CPU workers name their shared memory after this run.

    They take the last part of their init method, which is the same for every run under an external launcher: two
    runs would share segments, and stale ones of a run that died would stop the next.
    """
    init = ExecutorWithExternalLauncher._distributed_args

    def named(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        method, rank, local_rank = init(self)
        return f"{method}:{ident}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = named


def _completion(output) -> Completion:
    steps = () if output.logprobs is None else zip(output.logprobs, output.token_ids, strict=True)
    logprobs = tuple(step[token].logprob for step, token in steps)
    return Completion(tuple(output.token_ids), logprobs)
