"""Ask vLLM about a run that does not run: any rank of any TP, on meta, in this one process.

vLLM means to talk to its peers while it builds: it makes gloo groups, device communicators and a message
queue, and asks who shares its node. Over torch's `fake` process group there is nobody, so those are answered here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid3d.config import Recipe
from hybrid3d.reshard.layout import Demand, Shape
from hybrid3d.rollout import engine  # noqa: F401 (sets vLLM's environment before vLLM is imported)
from hybrid3d.rollout.weights import RolloutWeights

from vllm.config import set_current_vllm_config  # isort: skip
from vllm.distributed import parallel_state  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.model_loader.utils import initialize_model  # isort: skip
from vllm.utils.torch_utils import set_default_torch_dtype  # isort: skip


@dataclass(frozen=True)
class Asked:
    """What a rank wants, and the bytes of its largest module, which bound what finalization takes."""

    demand: Demand
    finalize_bytes: int


def demand_of_all(recipe: Recipe, shapes: Mapping[str, Shape]) -> dict[int, Asked]:
    """What each rank of the recipe's rollout layout wants; replicas want the same."""
    assert recipe.rollout is not None, "checked when the recipe was read"
    tp = recipe.rollout.tp
    first = [_ask(recipe, shapes, rank, tp) for rank in range(tp)]
    return {rank: first[rank % tp] for rank in range(recipe.world_size)}


def _ask(recipe: Recipe, shapes: Mapping[str, Shape], rank: int, tp: int) -> Asked:
    assert recipe.rollout is not None
    with _as_rank(rank, tp):
        config = EngineArgs(
            model=str(Path(recipe.model.path).resolve()),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=recipe.model.dtype,
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            max_model_len=recipe.rollout.max_model_len,
            enable_expert_parallel=recipe.rollout.expert_parallel,
        ).create_engine_config()
        dtype = config.model_config.dtype
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(tp, rank, "env://", rank, backend="fake")
            parallel_state.initialize_model_parallel(tp, 1, backend="fake")
            with set_default_torch_dtype(dtype), torch.device("meta"):
                model = initialize_model(vllm_config=config)
        weights = RolloutWeights(model, config, shapes)
        return Asked(weights.demand, weights.largest_unit_bytes)


@contextlib.contextmanager
def _as_rank(rank: int, tp: int) -> Iterator[None]:
    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group

    def group_without_queue(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    dist.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
    with (
        mock.patch.object(dist, "new_group", lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})),
        mock.patch.object(parallel_state, "init_model_parallel_group", group_without_queue),
        mock.patch.object(parallel_state, "in_the_same_node_as", return_value=[True] * tp),
    ):
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            if dist.is_initialized():
                dist.destroy_process_group()
