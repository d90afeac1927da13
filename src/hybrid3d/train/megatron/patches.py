"""Every change that hybrid3d makes to Megatron-Core's code at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.patches import Patch
from hybrid3d.train.megatron import cpu
from hybrid3d.train.megatron.versions import CHOOSES_LATENT_NORMS, MEGATRON


def sizes_as_numbers(to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `token_dispatcher.maybe_move_tensor_to_cpu`: convert also tensors that are on the CPU already."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = to_cpu(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    return to_host


def gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `mappings._gather_along_first_dim`: pad the shares to the longest, and gather these."""

    def gathered(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            found: torch.Tensor = gather(input_, group, output_split_sizes, use_global_buffer)
            return found
        rows = max(output_split_sizes)
        shares = input_.new_empty(group.size(), rows, *input_.shape[1:])
        shares[group.rank(), : len(input_)] = input_
        dist.all_gather(list(shares), shares[group.rank()].clone(), group=group)
        return torch.cat([share[:n] for share, n in zip(shares, output_split_sizes, strict=True)])

    return gathered


def keep_adam_steps(set_states: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `DistributedOptimizer._set_main_param_and_optimizer_states`: leave each parameter's step as it is."""

    def set_states_but_steps(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return set_states_but_steps


def count_tokens(apply_expert_bias: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `TopKRouter._apply_expert_bias`: the mask of padding gets a dimension for the experts."""

    def counted(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        apply_expert_bias(router, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    return counted


def plain_query_linear(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `QKNormConfigResolver._mla_fused_linear_or_default`: queries that are not compressed have no norm."""

    def chosen(resolver: Any, spec: Any, name: str) -> Any:
        return spec if name == "linear_q_proj" else choose(resolver, spec, name)

    return chosen


def _patch(
    target: str,
    reason: str,
    test: str,
    replacement: Callable[[Any], Any] | None = None,
    may_be_undefined: bool = False,
) -> Patch:
    return Patch(f"megatron.core.{target}", MEGATRON, reason, f"tests/{test}", replacement, may_be_undefined)


STREAM = _patch(
    "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
    "It makes a stream, and with it a CUDA context on GPU 0, also where Megatron is only queried (`on_device`).",
    "planning/test_queries_on_cuda.py",
)
RESULTS = _patch(
    "dist_checkpointing.strategies.filesystem_async._results_queue",
    "It is in a manager process next to each rank, which survives when the rank is killed (`CheckpointWriter`).",
    "train/test_checkpoint_writing.py",
)

LATENT_NORM = _patch(
    "transformer.mla_qk_norm_config.QKNormConfigResolver._mla_fused_linear_or_default",
    "It adds a norm of queries that are not compressed (q_lora_rank=None), which no such model has.",
    "train/test_mtp.py",
    plain_query_linear,
)

MODEL = (
    _patch(
        "transformer.moe.router.TopKRouter._apply_expert_bias",
        "The mask of padding lies along the experts: padding counts like tokens (NVIDIA/Megatron-LM#6111).",
        "train/test_megatron.py",
        count_tokens,
    ),
    *((LATENT_NORM,) if CHOOSES_LATENT_NORMS else ()),  # not in the pinned version
)

CHECKPOINT = (
    RESULTS,
    _patch(
        "dist_checkpointing.strategies.filesystem_async._process_memory",
        "It needs psutil, which Megatron-Core does not require, for a number that it only logs.",
        "house/test_gpu_checks.py",
        lambda original: lambda: 0,
    ),
)

ON_CPU = (
    _patch(
        "tensor_parallel.random._set_cuda_rng_state",
        "There is no CUDA random state.",
        "train/test_megatron.py",
        lambda original: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    ),
    _patch(
        "tensor_parallel.random._get_cuda_rng_state",
        "There is no CUDA random state.",
        "train/test_megatron.py",
        lambda original: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    ),
    _patch(
        "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "The sizes of an all-to-all must be numbers; tensors that are on the CPU already are not converted.",
        "whole_runs/test_sparse_train.py",
        sizes_as_numbers,
    ),
    _patch(
        "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "There is one stream; vLLM replaces `torch.cuda.Stream` by its own later.",
        "whole_runs/test_sparse_train.py",
        lambda original: cpu.Stream(),
    ),
    _patch(
        "tensor_parallel.mappings._gather_along_first_dim",
        "Experts get different numbers of tokens, and gloo gathers equal shares only.",
        "whole_runs/test_sparse_train.py",
        gather_uneven,
    ),
)

WITHOUT_TRANSFORMER_ENGINE = (
    _patch(
        "transformer.moe.moe_utils.te_general_gemm",
        "The router compares it with None, and it is not defined without Transformer Engine.",
        "whole_runs/test_sparse_train.py",
        lambda original: original,
        may_be_undefined=True,
    ),
    _patch(
        "transformer.multi_latent_attention.HAVE_TE",
        "Where it is set, `isinstance` of a stand-in for a Transformer Engine class raises TypeError.",
        "train/test_megatron.py",
        lambda original: False,
    ),
    _patch(
        "transformer.multi_latent_attention.TELinear",
        "Of all linears it allows only this class, which compresses keys and queries, to be whole on every TP rank.",
        "train/test_megatron.py",
        lambda original: cpu.DuplicatedLinear,
    ),
)

WITH_TORCH_ADAM = (
    _patch(
        "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "Adam of torch counts steps in a tensor per parameter, which Megatron saves and loads apart, then misses.",
        "train/test_megatron.py",
        keep_adam_steps,
    ),
)

ALL = (*MODEL, *CHECKPOINT, *ON_CPU, *WITHOUT_TRANSFORMER_ENGINE, STREAM, *WITH_TORCH_ADAM)
