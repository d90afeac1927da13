"""Context parallelism: which positions of a sequence a rank computes, and how per-token values are gathered again.

With CP ranks every sequence is cut into 2 x CP chunks of equal length. Rank r has chunks r and 2 x CP - 1 - r, so that
under a causal mask, where later tokens attend to more, all ranks have the same work. Megatron's rotary embeddings and
Transformer Engine's attention expect this order.

On CPUs the causal attention is implemented here: each rank has the queries of two chunks of every sequence. Keys and
values are gathered over the ranks; only this rank's share of them is kept for the backward pass, which gathers them
once more and scatters the sums of their gradients. No mask and no matrix of scores is made: a chunk attends to all keys
before it and, causally, to its own, and the two results are merged by the logarithms of their sums of weights, as in
ring attention (Liu, Zaharia and Abbeel 2023, https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def tensor_parallel_share(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's share of a tensor that is split over TP."""
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def context_group() -> dist.ProcessGroup | None:
    """Return the ranks that share sequences with this one; None if each sequence is whole on one rank."""
    group = parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None


def context_shard(lengths: Tensor, group: dist.ProcessGroup) -> ContextShard:
    """Return this rank's shard of rows of sequences with these lengths, each a multiple of 2 x CP."""
    ranks = group.size()
    chunk = torch.arange(2 * ranks, device=lengths.device).repeat(len(lengths))
    owner = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    owner = owner.repeat_interleave((lengths // (2 * ranks)).repeat_interleave(2 * ranks))
    by_rank = owner.argsort(stable=True)
    return ContextShard(by_rank.chunk(ranks)[group.rank()], by_rank.argsort(), group)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, scale: float | None
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks.

    Args:
        query: [tokens, batch, heads, dim]: this rank's share of each sequence, one behind the other.
        key, value: [tokens, batch, groups, their dim], of the same tokens.
        lengths: the tokens that this rank has of each sequence.
        scale: of the scores; None for one by the square root of the dim.

    Returns:
        [tokens, batch, heads, dim of the values].
    """
    dim = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - dim))  # the kernel needs one dim for both
    out: Tensor = _ContextAttention.apply(  # type: ignore[no-untyped-call]
        query, torch.stack([key, value]), lengths, group, scale
    )
    return out[..., :dim]


class _ContextAttention(torch.autograd.Function):
    """Takes keys and values as one tensor [2, tokens, batch, groups, dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, pair: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, scale: float | None
    ) -> Tensor:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        shares = gather_shares(pair, group)
        for rows, whole, parts in _chunks(lengths, group):
            keys, values = _for_heads(_in_order(shares[:, :, whole]), query.shape[2])
            found = [_attend(query[rows], keys[part], values[part], causal, scale) for part, causal in parts]
            total = torch.stack([sum_ for _, sum_ in found]).logsumexp(0)
            merged: Any = sum(part * (sum_ - total).exp()[..., None] for part, sum_ in found)
            out[rows], sums[rows] = merged.to(out.dtype), total
        ctx.save_for_backward(query, pair, out, sums)
        ctx.lengths, ctx.group, ctx.scale = lengths, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, out, sums = ctx.saved_tensors
        shares = gather_shares(pair, ctx.group)
        of_query, of_shares = torch.zeros_like(query), torch.zeros_like(shares, dtype=torch.float32)
        for rows, whole, parts in _chunks(ctx.lengths, ctx.group):
            ordered = _in_order(shares[:, :, whole])
            keys, values = _for_heads(ordered, query.shape[2])
            of_ordered = torch.zeros_like(ordered, dtype=torch.float32)
            for part, causal in parts:
                tensors = gradient[rows], query[rows], keys[part], values[part], out[rows]
                of_rows, *of_pair = _flash_backward(
                    *(_to_kernel(x) for x in tensors), _sums_to_kernel(sums[rows]), 0.0, causal, scale=ctx.scale
                )
                of_query[rows] += _from_kernel(of_rows)
                for found, of_one in zip(of_ordered, of_pair, strict=True):
                    found[part] += _from_kernel(of_one).unflatten(2, (pair.shape[3], -1)).sum(3)
            of_shares[:, :, whole] += _in_shares(of_ordered, ctx.group.size())
        of_own = torch.empty_like(pair, dtype=torch.float32)
        dist.reduce_scatter_tensor(of_own, of_shares.flatten(0, 1), group=ctx.group)
        return of_query, of_own.to(pair.dtype), None, None, None


def _chunks(
    lengths: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[slice, slice, list[tuple[slice, bool]]]]:
    """Yield each chunk of this rank: its rows, those of its sequence's share, and what it attends to.

    The last is a list of parts of the sequence, each with whether it is the chunk's own, which is masked causally.
    """
    start = 0
    for length in lengths:
        size = length // 2
        for half, number in enumerate((group.rank(), 2 * group.size() - 1 - group.rank())):
            rows = slice(start + half * size, start + (half + 1) * size)
            own = slice(number * size, (number + 1) * size)
            before = [(slice(own.start), False)] if number else []
            yield rows, slice(start, start + length), [*before, (own, True)]
        start += length


def _in_order(shares: Tensor) -> Tensor:
    """Return the ranks' shares of a sequence [ranks, 2, tokens, ...] as one sequence, [2, ranks x tokens, ...]."""
    first, last = shares.transpose(0, 1).chunk(2, dim=2)
    return torch.cat([first, last.flip(1)], 1).flatten(1, 2)


def _in_shares(ordered: Tensor, ranks: int) -> Tensor:
    """Undo `_in_order`."""
    first, last = ordered.unflatten(1, (2 * ranks, -1)).chunk(2, dim=1)
    return torch.cat([first, last.flip(1)], 2).transpose(0, 1)


def _for_heads(pair: Tensor, heads: int) -> Tensor:
    """Repeat keys and values for the heads that share them."""
    return pair.repeat_interleave(heads // pair.shape[3], dim=3)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the output in float32, and the logarithm of the sum of each query's weights [tokens, batch, heads]."""
    out, sums = _flash(*(_to_kernel(x) for x in (query, key, value)), 0.0, causal, scale=scale)
    return _from_kernel(out).float(), sums.permute(2, 0, 1)


def _to_kernel(tensor: Tensor) -> Tensor:
    """[tokens, batch, heads, dim] to [batch, heads, tokens, dim]."""
    return tensor.permute(1, 2, 0, 3)


def _from_kernel(tensor: Tensor) -> Tensor:
    return tensor.permute(2, 0, 1, 3)


def _sums_to_kernel(sums: Tensor) -> Tensor:
    """[tokens, batch, heads] to [batch, heads, tokens], in memory as the kernel writes it."""
    return sums.transpose(0, 1).contiguous().transpose(1, 2)
