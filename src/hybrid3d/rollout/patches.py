"""Every patch that hybrid3d applies to vLLM's code at run time, most of them temporarily in context managers."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybrid3d.config import Rollout
from hybrid3d.patches import TORCH_RANGE, Patch
from hybrid3d.rollout import cpu_kernels, router_replay, truncation

VLLM = "vllm>=0.31,<0.34"  # with what is replaced here

DISTRIBUTED_ARGS = Patch(
    "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher._distributed_args",
    VLLM,
    "CPU workers name shared memory by the suffix of their init method, which is the same for all runs under an "
    "external launcher: two runs would share segments, and segments left by a crashed run would make the next one "
    "fail (`name_shared_memory`).",
    "tests/launch/test_leftovers.py",
)
MAKE_GROUP = Patch(
    "vllm.distributed.parallel_state.init_model_parallel_group",
    VLLM,
    "It builds groups from ranks instead of the placement's slots (`groups_over_slots`); for a rank that is only "
    "queried it would start message queues (`as_rank`).",
    "tests/sync/test_sync.py",
)
IN_SAME_NODE = Patch(
    "vllm.distributed.parallel_state.in_the_same_node_as",
    VLLM,
    "It communicates, which a rank that is only queried cannot do (`as_rank`).",
    "tests/planning/test_planning.py",
)
EXPERT_MAP = Patch(
    "vllm.model_executor.layers.fused_moe.expert_map_manager.ExpertMapManager.__init__",
    VLLM,
    "On meta the expert map has no values, but loaders read from it which experts are local (`as_rank`).",
    "tests/planning/test_planning.py",
)
POOL_CONTEXT = Patch(
    "vllm.v1.worker.gpu_worker.Worker._maybe_get_memory_pool_context",
    VLLM,
    "It has the weights freed while vLLM sleeps; with `rollout.keep_weights` they stay, as a sync of changed "
    "elements needs them (`keep_weights_while_asleep`).",
    "tests/rollout/test_engine.py",
)
PACK_LINEAR = Patch(
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
    VLLM,
    "It packs weights for its kernels; with `rollout.pack_weights: false` a sync writes them in place "
    "(`keep_weights_unpacked`).",
    "tests/sync/test_delta_sync.py",
)
PACK_EXPERTS = Patch(
    "vllm.model_executor.layers.fused_moe.oracle.unquantized.backend_to_kernel_cls",
    VLLM,
    "The same of experts.",
    "tests/sync/test_delta_sync.py",
)
REQUANTIZE = Patch(
    "vllm.model_executor.layers.quantization.utils.fp8_utils.requant_weight_ue8m0_inplace",
    VLLM,
    "It quantizes weights in FP8 a second time where kernels need scales that are powers of two. At the start it "
    "is noted which (`noting_requantization`), so that a sync sends such scales and it has nothing to do "
    "(`without_requantization`).",
    "tests/rollout/test_fp8_scales.py",
)
NEW_GROUP = Patch(
    "torch.distributed.new_group",
    TORCH_RANGE,
    "It sorts a group's members by rank, but vLLM numbers them in the order given (`groups_over_slots`); for a "
    "rank that is only queried the backend is `fake` (`as_rank`).",
    "tests/sync/test_sync.py",
)


def external_rank(slot: int, rollout: Rollout) -> contextlib.AbstractContextManager[Any]:
    """Set RANK to the slot: vLLM derives from it which shard it compiles and caches graphs for.

    With data parallelism it is the rank within the engine: vLLM computes its data-parallel rank for a world of one
    engine.
    """
    rank = slot if rollout.dp == 1 else slot % (rollout.tp * rollout.dp)
    return mock.patch.dict(os.environ, RANK=str(rank))


@contextlib.contextmanager
def groups_over_slots(slots: Sequence[int]) -> Iterator[None]:
    """Make vLLM build its process groups from slots instead of ranks.

    vLLM numbers a group's members in the order given; torch sorts them by rank unless `sort_ranks` is False, which
    torch 2.11 does not have. Where the slot of each rank is the rank, nothing is to be done.
    """
    if all(slot == rank for rank, slot in enumerate(slots)):
        yield
        return
    make_group, new_group = MAKE_GROUP.original(), NEW_GROUP.original()
    rank_by_slot = {slot: rank for rank, slot in enumerate(slots)}

    def make_group_of_slots(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return make_group([[rank_by_slot[slot] for slot in group] for group in group_ranks], *args, **kwargs)

    with (
        MAKE_GROUP.replaced(make_group_of_slots),
        NEW_GROUP.replaced(functools.partial(new_group, sort_ranks=False)),
    ):
        yield


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Let vLLM build its groups as one rank of a world that does not exist, over torch's `fake` process group."""
    new_group, make_group, make_map = NEW_GROUP.original(), MAKE_GROUP.original(), EXPERT_MAP.original()

    def group_without_queue(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    def map_on_cpu(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):  # loaders read the values, which a map on meta does not have
            make_map(*args, **kwargs)

    hook = sys.excepthook  # torch replaces it for each group
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with (
        NEW_GROUP.replaced(lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})),
        MAKE_GROUP.replaced(group_without_queue),
        EXPERT_MAP.replaced(map_on_cpu),
        IN_SAME_NODE.replaced(lambda *unused, **more: [True] * world),
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
    """Make vLLM's CPU workers use shared memory that is named after this run."""
    original = DISTRIBUTED_ARGS.original()

    def distributed_args(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        method, rank, local_rank = original(self)
        return f"{method}:{run_id}", rank, local_rank

    DISTRIBUTED_ARGS.replace(distributed_args)


def register_graph_buffers(self: CustomAllreduce) -> None:
    """Replace `CustomAllreduce.register_graph_buffers`: exchange a captured graph's addresses in any order of ranks.

    vLLM's own method keeps this rank's addresses under its rank in the group, and receives the others' from the group's
    ranks in ascending order of their global ranks. In a group of other order, which placement makes where that saves
    bytes, entries are missing or belong to another rank. The kernel wants entry i from rank i of the group
    (`register_graph_buffers` in vLLM's csrc/custom_all_reduce.cuh), as `create_shared_buffer` gives it for the buffers
    outside of graphs.
    """
    own = custom_all_reduce.ops.get_graph_buffer_ipc_meta(self._ptr)
    gathered = []
    for rank in range(self.group.size()):
        addresses = [own if rank == self.rank else None]
        dist.broadcast_object_list(addresses, group=self.group, group_src=rank, device=torch.device("cpu"))
        gathered.append(addresses[0])
    handles, offsets = zip(*gathered, strict=True)
    custom_all_reduce.ops.register_graph_buffers(self._ptr, list(handles), list(offsets))


def abort_one_by_one(abort: Callable[[Any, list[str]], None]) -> Callable[[Any, list[str]], None]:
    """Return an `InprocClient.abort_requests` that ends requests in the order given."""

    def abort_requests(self: Any, request_ids: list[str]) -> None:
        for request_id in request_ids:
            abort(self, [request_id])

    return abort_requests


def keep_weights_unpacked() -> None:
    """Make vLLM's CPU build compute linear layers and experts with torch, from weights that stay as they are loaded."""
    PACK_LINEAR.replace(cpu_kernels.use_torch)
    PACK_EXPERTS.replace(lambda backend: [cpu_kernels.PlainExperts])


def keep_weights_while_asleep() -> None:
    """Make vLLM allocate weights outside of the memory that it frees while it sleeps."""
    pool_context = POOL_CONTEXT.original()

    def without_weights(self: Any, tag: str) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = pool_context(self, tag)
        return contextlib.nullcontext() if tag == "weights" else context

    POOL_CONTEXT.replace(without_weights)


@contextlib.contextmanager
def noting_requantization() -> Iterator[list[torch.Tensor]]:
    """Collect the weights that vLLM, while it loads a model, quantizes anew with scales that are powers of two.

    Its DeepGEMM kernels take no other scales on some devices. vLLM selects them by the device, the libraries there are,
    its environment variables and the shape of each layer; what it does with weights says what it has selected.
    """
    requantize, found = REQUANTIZE.original(), list[torch.Tensor]()

    def note(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(weight.detach())
        requantize(weight, *args, **kwargs)

    with REQUANTIZE.replaced(note):
        yield found


@contextlib.contextmanager
def without_requantization(addresses: Container[int]) -> Iterator[None]:
    """Let vLLM take the weights at these addresses as they are: quantizing them anew would change no bit of them.

    vLLM does it matrix by matrix, and so for each expert, with some eight kernels each.
    """
    requantize = REQUANTIZE.original()

    def requantize_others(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if weight.data_ptr() not in addresses:
            requantize(weight, *args, **kwargs)

    with REQUANTIZE.replaced(requantize_others):
        yield


EVERYWHERE = (
    Patch(
        "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce.register_graph_buffers",
        VLLM,
        "It mixes up ranks of a group that is not in ascending order of global ranks, and capturing CUDA graphs fails.",
        "tests/planning/test_graph_capture.py",
        lambda original: register_graph_buffers,
    ),
    Patch(
        "vllm.v1.sample.sampler.Sampler.forward",
        VLLM,
        "Its log-probabilities are those after `top_p`, `top_k` and `min_p`; training has those of the whole "
        "distribution (`rollout/truncation.py`).",
        "tests/rollout/test_sampling.py",
        truncation.first_runner,
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.sampler.Sampler.__call__",
        VLLM,
        "The same in the model runner of GPUs.",
        "tests/rollout/test_sampling.py",
        truncation.second_runner,
    ),
    Patch(
        "vllm.v1.engine.core_client.InprocClient.abort_requests",
        VLLM,
        "It ends requests that a stop text has ended in the order of a set, which differs between the ranks of a TP "
        "group, so that their prefix caches would drop different blocks (`abort_one_by_one`).",
        "tests/rollout/test_sampling.py",
        abort_one_by_one,
    ),
    DISTRIBUTED_ARGS,
    MAKE_GROUP,
    IN_SAME_NODE,
    EXPERT_MAP,
    POOL_CONTEXT,
    PACK_LINEAR,
    PACK_EXPERTS,
    REQUANTIZE,
    Patch(
        "vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector.take_output",
        VLLM,
        "Under an external launcher each rank of TP has a scheduler, but only the first has the experts of tokens; the "
        "others stop with an assertion.",
        "tests/train/test_router_replay.py",
        router_replay.take_output_of_first_rank,
    ),
    NEW_GROUP,
)

ON_CPU = (
    Patch(
        "vllm.model_executor.kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS",
        VLLM,
        "Its kernels of FP8 weights with block scales need AMX; on other CPUs no model with such weights can be built, "
        "not even one that is only queried.",
        "tests/rollout/test_fp8_rollout.py",
        cpu_kernels.with_dequantizing_linear,
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.oracle.fp8.backend_to_kernel_cls",
        VLLM,
        "The same of experts.",
        "tests/rollout/test_fp8_rollout.py",
        cpu_kernels.with_dequantizing_experts,
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe.prepare_fp8_moe_layer_for_cpu",
        VLLM,
        "It packs FP8 experts for kernels that need AMX.",
        "tests/rollout/test_fp8_rollout.py",
        cpu_kernels.pack_for_kernels,
    ),
    Patch(
        "vllm.config.vllm.VllmConfig._verify_aux_output_compatibility",
        VLLM,
        "It refuses to return the experts of tokens with the V1 model runner, the only one on CPUs without Triton.",
        "tests/train/test_router_replay.py",
        lambda check: lambda self: None,
    ),
    Patch(
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner.execute_model",
        VLLM,
        "The V1 model runner does not keep the experts of tokens.",
        "tests/train/test_router_replay.py",
        router_replay.execute_and_capture,
    ),
    Patch(
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens",
        VLLM,
        "The V1 model runner does not return the experts of tokens.",
        "tests/train/test_router_replay.py",
        router_replay.sample_and_return,
    ),
)

ALL = (*EVERYWHERE, *ON_CPU)
