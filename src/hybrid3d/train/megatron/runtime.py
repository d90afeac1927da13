"""Sets up Megatron's runtime: device, process groups and random states, or those of a rank that is only queried.

The kernels of training are Transformer Engine's and Apex's on a GPU with them installed, else PyTorch's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import layers

from hybrid3d import installed_version
from hybrid3d.config import Train
from hybrid3d.patches import EXCHANGE_TIMEOUT, WAIT_TIMEOUT, apply
from hybrid3d.reshard.move.device import ON_CUDA, device
from hybrid3d.train.megatron import cpu, patches

if not ON_CUDA:
    cpu.install()

# The CPU backend must be in place first
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

if not ON_CUDA:
    apply(patches.ON_CPU)
logging.getLogger("megatron.core").setLevel(logging.ERROR)


@contextlib.contextmanager
def on_device(meta: bool = False) -> Iterator[None]:
    """Run Megatron's code: tensors for CUDA are made on the CPU where there is none, or for queries on `meta`.

    Queries make no CUDA streams either.
    """
    if meta:
        # A stream makes a context on the current GPU, which before the ranks are bound to theirs is GPU 0 for all of
        # them. The dispatcher would also keep it in its class, for the model that is trained on another GPU later.
        current = patches.STREAM.replaced(cpu.Stream()) if ON_CUDA else cpu.current_device_is(cpu.META)
        with cpu.cuda_means(cpu.META), current:
            yield
    else:
        with contextlib.nullcontext() if ON_CUDA else cpu.cuda_means(cpu.CPU):
            yield


def initialize(layout: Train, seed: int, gloo: bool = True) -> None:
    """Build Megatron's process groups over the default group, and seed its random states.

    Args:
        layout: the train layout; TP x PP x CP x DP must be the world's size.
        seed: from which, with the rank's position in the layout, Megatron derives the rank's random states.
        gloo: also build the gloo groups that the distributed optimizer and checkpoints use.
    """
    timeout = EXCHANGE_TIMEOUT if ON_CUDA else WAIT_TIMEOUT
    with on_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=gloo,
            distributed_timeout_minutes=int(timeout.total_seconds() // 60),
        )
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def use_groups(layout: Train, has_experts: bool) -> None:
    """Do something little in each group in which training communicates, as all ranks of the run do together.

    NCCL takes memory for a group at its first collective, and for two ranks at their first message apart from others:
    this must be before vLLM takes for its cache what is free.
    """
    used = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_embedding_group(check_initialized=False),
        parallel_state.get_intra_distributed_optimizer_instance_group(),
    ]
    if has_experts:
        used += [
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
        ]
    # In the order in which all ranks have made them, so that no two ranks wait for each other in different groups
    for group in parallel_state._global_process_group_list or ():
        is_used = any(group is one for one in used)
        if is_used and isinstance(group, dist.ProcessGroup) and group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device()), group=group)
    if layout.vpp > 1 and layout.pp > 1:
        _exchange_with_neighbours(parallel_state.get_pipeline_model_parallel_group())


def _exchange_with_neighbours(stages: dist.ProcessGroup) -> None:
    """Send to the next stage and receive from the one before, one message at a time, as interleaved schedules do.

    Of two stages Megatron sends in one direction over the default group (`_p2p_ops`).
    """
    rank, size, given = stages.rank(), stages.size(), torch.zeros(1, device=device())
    after, before = (dist.get_global_rank(stages, (rank + step) % size) for step in (1, -1))
    for group in (stages, dist.group.WORLD) if size == 2 else (stages,):
        if rank % 2 == 0:
            dist.send(given, after, group=group)
            dist.recv(given, before, group=group)
        else:
            dist.recv(given, before, group=group)
            dist.send(given, after, group=group)


def shutdown() -> None:
    """Destroy Megatron's groups; the default group stays. Every rank calls this together.

    Megatron only drops its references to most of them, and each gloo group keeps threads that poll.
    """
    groups = dict.fromkeys(parallel_state._global_process_group_list or ())
    parallel_state.destroy_model_parallel()
    for group in groups:
        # A group that is not in the map was destroyed by Megatron, or this rank is not a member of it.
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def as_rank(rank: int, layout: Train, world_size: int) -> Iterator[None]:
    """Act as one rank of a world that does not exist: models can be built on meta, nothing can be sent.

    Raises:
        RuntimeError: this process has a default group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it for each group
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        initialize(layout, seed=1, gloo=False)
        yield
    finally:
        shutdown()
        dist.destroy_process_group()
        sys.excepthook = hook


def groups_by_axis() -> dict[str, dist.ProcessGroup]:
    """Return this rank's group of each axis over which training communicates; `dp` includes context parallelism."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
    }


def gather_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's groups over which weights of all stages, TP ranks and experts can be gathered."""
    return (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


USE_TE = ON_CUDA and HAVE_TE
# Megatron's own linears (the output layer, or all without Transformer Engine) need a kernel of Apex for this; there is
# one setting for them and for those of Transformer Engine.
FUSE_GRADIENTS = ON_CUDA and layers._grad_accum_fusion_available

PACKAGES = {"transformer_engine": "Transformer Engine", "apex": "Apex", "torch": "torch"}


def in_use() -> str:
    """Return one line for the log: the packages of the layers, the optimizer and gradient sums, with versions."""
    device = "" if USE_TE else " (CUDA)" if ON_CUDA else " (CPU)"
    adam = optimizer.Adam  # Megatron's choice among the three
    parts = [
        f"training kernels: {_named('transformer_engine' if USE_TE else 'torch')}{device}",
        f"optimizer: {_named(adam.__module__.partition('.')[0])} {adam.__name__}",
    ]
    if FUSE_GRADIENTS:
        parts.append(f"weight gradients added up by {_named('apex')}")
    return "; ".join(parts)


def _named(package: str) -> str:
    """Return a package's name and, where it is known, its version."""
    return " ".join(filter(None, [PACKAGES[package], installed_version(package)]))


if not USE_TE:
    apply(patches.WITHOUT_TRANSFORMER_ENGINE)
if optimizer.USING_PYTORCH_OPTIMIZER:
    apply(patches.WITH_TORCH_ADAM)
