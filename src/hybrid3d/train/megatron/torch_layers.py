"""Layers of plain PyTorch with the constructors of Megatron's, used where there is no Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hybrid3d.train.megatron.context_attention import context_attention
from hybrid3d.train.megatron.versions import set_in_megatron


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
