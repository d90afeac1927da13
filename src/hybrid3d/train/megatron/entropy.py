"""The entropy of a distribution over a vocabulary that is sharded over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def vocab_parallel_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropies [...], in nats, of logits [..., vocabulary / TP]; -inf is outside of the distribution."""
    entropies: torch.Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return entropies


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = (logits - largest).clamp(min=torch.finfo(logits.dtype).min)  # finite, so that 0 times it is 0
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        log_sum, entropy = sums[0].log(), sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(shifted, log_sum, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """With p = softmax(z), dH / dz_i = -p_i (log p_i + H)."""
        shifted, log_sum, entropy = ctx.saved_tensors
        log_p = shifted - log_sum[..., None]
        of_logits: torch.Tensor = -gradient[..., None] * log_p.exp() * (log_p + entropy[..., None])
        return of_logits
