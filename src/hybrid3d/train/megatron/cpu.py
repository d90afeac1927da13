"""The CPU backend: lets Megatron-Core run where there is no CUDA. With CUDA only `cuda_means(META)` is used, to query.

Megatron-Core writes `device="cuda"`, asks for CUDA streams and keeps CUDA random states. On a CPU `cuda_means(CPU)`
redirects tensor placement, and `install()` replaces the functions of `torch.cuda` that Megatron calls.

Where there is no Transformer Engine, layers of plain PyTorch have the constructors of Megatron's.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from hybrid3d.patches import set_existing
from hybrid3d.train.megatron.context import context_attention
from hybrid3d.train.megatron.versions import set_in_megatron

CPU, META = torch.device("cpu"), torch.device("meta")


def _is_cuda(device: object) -> bool:
    if isinstance(device, int):  # the number of a GPU
        return not isinstance(device, bool)
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


OF_TENSORS_THAT_EXIST = {torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type}  # which name CUDA without a keyword


class cuda_means(TorchFunctionMode):
    """Context in which tensors requested on CUDA are created, or stay, on another device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in OF_TENSORS_THAT_EXIST:  # most of the many calls of a small model's step
            return func(*args)
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = self._device
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The mixed-precision optimizers group parameters by this type name and support only CUDA's.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class Stream:
    """Stands in for a CUDA stream or event on a CPU, where everything runs in order."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Stream:
        return Stream()


# The functions of `torch.cuda` that Megatron calls, and where
TORCH_CUDA = {
    "current_device": lambda: CPU,  # parallel layers, rotary embedding, optimizer
    "synchronize": lambda device=None: None,  # timers
    "current_stream": lambda device=None: Stream(),  # gradient buffers of DDP
    "default_stream": lambda device=None: Stream(),
    "Stream": Stream,  # DDP, dist_checkpointing
    "Event": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "get_rng_state": lambda device=None: torch.get_rng_state(),  # tensor_parallel.random
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}


def current_device_is(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make another device the current one, where Megatron makes tensors that are not parameters (YaRN's tables)."""
    return mock.patch.object(torch.cuda, "current_device", return_value=device)


def install() -> None:
    """Replace the functions of `torch.cuda` that Megatron-Core calls; call it once before importing Megatron."""
    torch.compiler.set_stance("force_eager")  # each rank would compile for seconds what takes microseconds
    set_existing(f"torch=={torch.__version__}", torch.cuda, **TORCH_CUDA)


def use_torch_layers(spec: TransformerBlockSubmodules) -> None:
    """Replace the norms and attention of Megatron's layer specs by plain PyTorch's, without Transformer Engine."""
    set_in_megatron(spec, layer_norm=TorchRMSNorm)
    for layer in spec.layer_specs:
        set_in_megatron(layer.submodules, input_layernorm=TorchRMSNorm, pre_mlp_layernorm=TorchRMSNorm)
        attention = layer.submodules.self_attention.submodules
        set_in_megatron(attention, core_attention=TorchAttention)
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, norm, IdentityOp) is not IdentityOp:
                setattr(attention, norm, TorchRMSNorm)
        if isinstance(attention, multi_latent_attention.MLASelfAttentionSubmodules):
            set_in_megatron(attention, linear_q_down_proj=DuplicatedLinear, linear_kv_down_proj=DuplicatedLinear)


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMS norm with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer that is replicated on every TP rank, like Transformer Engine's for compressed keys and queries.

    Megatron's own layer specs shard them, and lose the other ranks' part of the rotated keys' gradient.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, **unused: Any):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden), None


class TorchAttention(MegatronModule):
    """Causal attention on `scaled_dot_product_attention`.

    Megatron's local attention needs a materialized mask, cannot have fewer query groups than TP ranks, and needs values
    with the head dim of the keys.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self._context = pg_collection.cp if config.context_parallel_size > 1 and pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend, [sequence, batch, heads or groups, head_dim] each; return [sequence, batch, heads * head_dim].

        Packed sequences have no batch dim. Each sequence is then one call, which on CPU is twice as fast as one call
        on padded sequences, and six times as fast as one with a block mask.
        """
        if self._context is not None:
            return self._attend_over_ranks(query, key, value, packed_seq_params, self._context)
        if packed_seq_params is None:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        sequences = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True)
        out = [self._attend(*(x[None] for x in qkv)).squeeze(0) for qkv in sequences]
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)

    def _attend_over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packing: PackedSeqParams | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attend with context parallelism: tensors are this rank's share of each sequence."""
        if packing is None:
            return context_attention(query, key, value, [len(query)], group, self.softmax_scale).flatten(2)
        lengths = (packing.cu_seqlens_q.diff() // group.size()).tolist()
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return context_attention(query, key, value, lengths, group, self.softmax_scale).squeeze(1).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[batch, heads or groups, sequence, head_dim]."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
