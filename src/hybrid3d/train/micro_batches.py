"""Micro batches as inputs of the model: rows padded to one width, or sequences packed into one row.

A data-parallel rank's batch is divided by rows or by tokens, into as many micro batches on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import pad

from hybrid3d.config import Train
from hybrid3d.rl.balance import balanced_shares, split_within_budget
from hybrid3d.rl.batch import Batch, Rows
from hybrid3d.train.megatron.context import ContextShard, context_shard

Tokens = TypeVar("Tokens", int, torch.Tensor)


def rounded_up(tokens: Tokens, multiple: int) -> Tokens:
    """Return numbers of tokens, rounded up to multiples."""
    return -(-tokens // multiple) * multiple


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """b sequences of a batch, padded on the right to one width T'.

    With context parallelism the model's inputs and its output are this rank's share of the positions, [b, T' / CP].

    Attributes:
        rows: the rows of the batch that the micro batch consists of.
        tokens, positions: [b, T'].
        padded: [b, T'], true at padding.
        lengths: [b], in tokens.
        width: T of the batch, the width that `aligned` returns.
        packing: the boundaries of the sequences in a packed row; None if each row is one sequence.
        experts: [b, T', layers, k], as in the batch.
        context: this rank's share of the positions; None if it has all of them.
    """

    rows: Rows
    tokens: torch.Tensor
    positions: torch.Tensor
    padded: torch.Tensor
    lengths: torch.Tensor
    width: int
    packing: PackedSeqParams | None = None
    experts: torch.Tensor | None = None
    context: ContextShard | None = None

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the model's input has of [b, T', ...]: with context parallelism this rank's positions."""
        return rows if self.context is None else self.context.of(rows)

    def whole(self, share: torch.Tensor) -> torch.Tensor:
        """Undo `share`: every rank of a context-parallel group gets [b, T', ...]."""
        return share if self.context is None else self.context.gather(share)

    def before(self, output: torch.Tensor) -> torch.Tensor:
        """Return the positions of the model's output [b, T', ...] that predict a token, [b, T' - 1, ...].

        With context parallelism they are all of this rank's positions, of which one rank's last predicts nothing.
        """
        return output[:, :-1] if self.context is None else output

    @property
    def after(self) -> torch.Tensor:
        """The tokens that the positions of `before` predict, [b, T' - 1]."""
        if self.context is None:
            return self.tokens[:, 1:].contiguous()
        return self.context.of(self.tokens.roll(-1, dims=1))

    def aligned(self, values: torch.Tensor, ahead: int = 1) -> torch.Tensor:
        """Align values of `before` with the tokens that they predict: [b, T], 0 at position 0.

        Args:
            ahead: how many tokens after its position each value predicts; above 1, `values` are [b, T' - ahead], and
                each rank has whole sequences.
        """
        return self._aligned(values if self.context is None else self.context.gather(values)[:, :-1], ahead)

    def _aligned(self, values: torch.Tensor, ahead: int) -> torch.Tensor:
        return pad(values, (ahead, self.width - ahead - values.shape[1]))

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of `tokens` as the batch has them, [b, T, ...], -1 at padding."""
        found = values.new_full((len(values), self.width, *values.shape[2:]), -1)
        width = min(self.width, values.shape[1])
        padded = self.padded[:, :width].reshape(len(values), width, *[1] * (values.dim() - 2))
        found[:, :width] = values[:, :width].masked_fill(padded, -1)  # a mask as an index would wait for the GPU
        return found

    def last(self, output: torch.Tensor) -> torch.Tensor:
        """Return the model's output [b, T', ...] at each sequence's last token, [b, ...]."""
        return self._last(self.whole(output))

    def _last(self, output: torch.Tensor) -> torch.Tensor:
        return output[torch.arange(len(self.lengths), device=output.device), self.lengths - 1]


class PackedMicroBatch(MicroBatch):
    """b sequences of a batch, concatenated in one row, with padding as the last sequence.

    With context parallelism each sequence is padded too, to a multiple of the chunks that it is divided into.

    `tokens`, `positions` and `padded` are [1, N]. Aligned values are 0 at padding too.
    """

    def _aligned(self, values: torch.Tensor, ahead: int) -> torch.Tensor:
        at = torch.arange(self.width, device=values.device)
        predicted = (at >= ahead) & (at < self.lengths[:, None])
        # The last token of a sequence does not predict the first one of the next sequence.
        within = (self.positions[0, ahead:] >= ahead) & ~self.padded[0, ahead:]
        return values.new_zeros(predicted.shape).masked_scatter(predicted, values[0, within])

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        real = torch.arange(self.width, device=values.device) < self.lengths[:, None]
        found = values.new_full((*real.shape, *values.shape[2:]), -1)
        found[real] = values[0, ~self.padded[0]]
        return found

    def _last(self, output: torch.Tensor) -> torch.Tensor:
        assert self.packing is not None, "sequences are packed"
        return output[0, self.packing.cu_seqlens_q[: len(self.lengths)] + self.lengths - 1]


def in_rows(batch: Batch, rows: Rows, width: int, group: dist.ProcessGroup | None = None) -> MicroBatch:
    """Return rows of a batch, padded or cut to `width`.

    Args:
        group: the ranks that share each sequence; None if one rank has it. `width` is a multiple of 2 x their number.
    """
    lengths, positions = batch.lengths[rows], torch.arange(width, device=batch.tokens.device)
    tokens = pad(batch.tokens[rows], (0, width - batch.tokens.shape[1]))
    padded = positions >= lengths[:, None]
    experts = batch.experts
    if experts is not None:
        experts = pad(experts[rows], (0, 0, 0, 0, 0, width - batch.tokens.shape[1]), value=-1)
    context = None if group is None else context_shard(torch.tensor([width], device=tokens.device), group)
    positions = positions.expand_as(tokens)
    return MicroBatch(rows, tokens, positions, padded, lengths, batch.tokens.shape[1], experts=experts, context=context)


def in_one_row(batch: Batch, rows: Rows, size: int, group: dist.ProcessGroup | None = None) -> PackedMicroBatch:
    """Pack sequences of a batch, without their padding, into one row of `size` tokens, padded at the end.

    Args:
        group: the ranks that share each sequence, which is then padded to a multiple of 2 x their number, as `size` is;
            None if one rank has it.
    """
    lengths, width = batch.lengths[rows], batch.tokens.shape[1]
    taken = lengths if group is None else rounded_up(lengths, 2 * group.size())
    more = max(0, int(taken.max()) - width)
    at = torch.arange(width + more, device=lengths.device)
    kept = at < taken[:, None]
    padding = size - int(taken.sum())
    tokens = pad(pad(batch.tokens[rows], (0, more))[kept], (0, padding))
    positions = torch.cat([at.expand_as(kept)[kept], torch.arange(padding, device=lengths.device)])
    padded = pad((at >= lengths[:, None])[kept], (0, padding), value=True)
    sizes: list[int] = [*taken.tolist(), *([padding] if padding else [])]
    of_sequences = torch.tensor(sizes, device=lengths.device)
    ends = pad(of_sequences.cumsum(0), (1, 0)).int()
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes)
    )
    if group is not None:  # Transformer Engine's ring asks for them; to attention, padding is the end of its sequence
        packing.cu_seqlens_q_padded = packing.cu_seqlens_kv_padded = ends
    experts = batch.experts
    if experts is not None:
        experts = pad(experts[rows], (0, 0, 0, 0, 0, more), value=-1)[kept]
        experts = pad(experts, (0, 0, 0, 0, 0, padding), value=-1)[None]
    context = None if group is None else context_shard(of_sequences, group)
    return PackedMicroBatch(
        rows, tokens[None], positions[None], padded[None], lengths, width, packing, experts, context
    )


def micro_batches(
    batch: Batch,
    train: Train,
    multiple: int,
    group: dist.ProcessGroup,
    context: dist.ProcessGroup | None,
) -> list[MicroBatch]:
    """Divide a batch into micro batches by `train.micro_batch_size` or `train.max_tokens_per_micro_batch`.

    Args:
        batch: on the device of the model.
        multiple: divisor of a rank's part of every micro batch's padded length; the TP size with sequence parallelism.
        group: the data-parallel ranks, which all get the same number of micro batches.
        context: the ranks that share each sequence; None if one rank has it.
    """
    chunks = 1 if context is None else 2 * context.size()
    multiple *= chunks
    if not train.packed and train.max_tokens_per_micro_batch is None:
        width, size = rounded_up(batch.tokens.shape[1], multiple), train.micro_batch_size
        return [in_rows(batch, slice(start, start + size), width, context) for start in range(0, len(batch), size)]
    taken = rounded_up(batch.lengths, chunks)
    parts = _by_length(batch, taken.tolist(), train, group)
    if train.packed:  # all have one size, because pipeline stages exchange tensors of one shape
        size = rounded_up(max(int(taken[rows].sum()) for rows in parts), multiple)
        return [in_one_row(batch, rows, size, context) for rows in parts]
    widths = [rounded_up(int(batch.lengths[rows].max()), multiple) for rows in parts]
    return [in_rows(batch, rows, width, context) for rows, width in zip(parts, widths, strict=True)]


def _by_length(batch: Batch, lengths: list[int], train: Train, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the rows of each micro batch, with about equal numbers of tokens, or filled up to the token budget.

    A sequence takes as many tokens as `lengths` says.
    """
    budget = train.max_tokens_per_micro_batch
    if budget is None:
        parts = balanced_shares(lengths, len(batch) // train.micro_batch_size)
    else:
        most = torch.tensor(len(split_within_budget(lengths, budget, packed=train.packed)), device=batch.tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        rounds = train.pp if train.vpp > 1 else 1  # the interleaved schedule requires a multiple of the stages
        count = -(-int(most) // rounds) * rounds
        parts = split_within_budget(lengths, budget, packed=train.packed, min_parts=count)
    return [torch.tensor(part, device=batch.tokens.device) for part in parts]
