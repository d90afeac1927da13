"""Context parallelism: which positions of a sequence a rank computes, and how per-token values are gathered again.

With CP ranks every sequence is cut into 2 x CP chunks of equal length. Rank r has chunks r and 2 x CP - 1 - r, so that
under a causal mask, where later tokens attend to more, all ranks have the same work. Megatron's rotary embeddings and
Transformer Engine's attention expect this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ContextShard:
    """This rank's positions of rows of N tokens.

    Attributes:
        own: [N / CP], the positions that this rank computes, in order.
        order: [N], where each position is in the ranks' shares, one behind the other.
        group: the ranks that share the rows.
    """

    own: Tensor
    order: Tensor
    group: dist.ProcessGroup

    def of(self, rows: Tensor) -> Tensor:
        """Return this rank's share of [b, N, ...], [b, N / CP, ...]."""
        return rows.index_select(1, self.own)

    def gather(self, share: Tensor) -> Tensor:
        """Return the whole rows of a tensor of which each rank has its share [b, N / CP, ...].

        The gradient of the rows must be the same on all ranks of the group: each takes that of its share.
        """
        whole: Tensor = _Gather.apply(share, self)  # type: ignore[no-untyped-call]
        return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, context: ContextShard) -> Tensor:
        ctx.context = context
        shares = gather_shares(share, context.group)
        return shares.transpose(0, 1).flatten(1, 2).index_select(1, context.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.context.of(gradient), None


def gather_shares(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor of every rank of a group, [ranks, ...]."""
    shares = share.new_empty(group.size(), *share.shape)
    sent = torch.uint8 if share.dtype is torch.int16 else share.dtype  # NCCL has no 16-bit integers
    dist.all_gather_into_tensor(shares.flatten().view(sent), share.flatten().view(sent), group=group)
    return shares


def context_group() -> dist.ProcessGroup | None:
    """Return the ranks that share sequences with this one; None if each sequence is whole on one rank."""
    group = parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None


def context_shard(lengths: Tensor, group: dist.ProcessGroup) -> ContextShard:
    """Return this rank's shard of rows that consist of sequences.

    Args:
        lengths: of the sequences of a row, each a multiple of 2 x CP.
    """
    ranks = group.size()
    chunk = torch.arange(2 * ranks, device=lengths.device).repeat(len(lengths))
    owner = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    owner = owner.repeat_interleave((lengths // (2 * ranks)).repeat_interleave(2 * ranks))
    by_rank = owner.argsort(stable=True)
    return ContextShard(by_rank.chunk(ranks)[group.rank()], by_rank.argsort(), group)
