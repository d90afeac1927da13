"""Every change that hybrid3d makes to vLLM's code at run time: most for a while, in context managers."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybrid3d.config import Rollout
from hybrid3d.patches import Patch

VLLM = "vllm==0.32.0"


@contextlib.contextmanager
def external_rank(slot: int, rollout: Rollout) -> Iterator[None]:
    """Have vLLM take the slot for its rank: it derives from RANK which shard it compiles and caches graphs for.

    It derives its data-parallel rank as if its engine were alone in the world.
    """
    rank = slot if rollout.dp == 1 else slot % (rollout.tp * rollout.dp)
    with mock.patch.dict(os.environ, RANK=str(rank)):
        yield


@contextlib.contextmanager
def groups_over_slots(slots: Sequence[int]) -> Iterator[None]:
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


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group

    def group_without_queue(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    make_map = ExpertMapManager.__init__

    def map_on_cpu(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):  # loaders read from it which experts are theirs
            make_map(*args, **kwargs)

    hook = sys.excepthook  # torch puts another in front of it for each group
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with (
        mock.patch.object(dist, "new_group", lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})),
        mock.patch.object(parallel_state, "init_model_parallel_group", group_without_queue),
        mock.patch.object(ExpertMapManager, "__init__", map_on_cpu),
        mock.patch.object(parallel_state, "in_the_same_node_as", return_value=[True] * world),
    ):
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook


def name_shared_memory(run_id: str) -> None:
    """Have vLLM's CPU workers name their shared memory after this run."""
    init = ExecutorWithExternalLauncher._distributed_args

    def named(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        method, rank, local_rank = init(self)
        return f"{method}:{run_id}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = named


ALL = (
    Patch(
        "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher._distributed_args",
        VLLM,
        "CPU workers name shared memory by the end of their init method, which is equal for all runs under an external "
        "launcher: two runs would share segments, and those of a run that died would stop the next "
        "(`name_shared_memory`).",
        "tests/test_leftovers.py",
    ),
    Patch(
        "vllm.distributed.parallel_state.init_model_parallel_group",
        VLLM,
        "Groups are made of ranks in their order, not of a placement's slots (`groups_over_slots`); for a rank that is "
        "only queried they would start message queues (`as_rank`).",
        "tests/test_sync.py",
    ),
    Patch(
        "vllm.distributed.parallel_state.in_the_same_node_as",
        VLLM,
        "It communicates, which a rank that is only queried cannot (`as_rank`).",
        "tests/test_planning.py",
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.expert_map_manager.ExpertMapManager.__init__",
        VLLM,
        "On meta the map of experts has no values, and loaders read from it which experts they have (`as_rank`).",
        "tests/test_planning.py",
    ),
    Patch(
        "torch.distributed.new_group",
        "torch==2.13.0",
        "It numbers a group's members in the order of ranks, not in vLLM's (`groups_over_slots`); for a rank that is "
        "only queried the backend is `fake` (`as_rank`).",
        "tests/test_sync.py",
    ),
)
