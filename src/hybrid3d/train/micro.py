"""Micro batches as inputs of the model: rows padded to one width, or sequences packed into one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import pad

from hybrid3d.rl.batch import Batch, Rows


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """b sequences of a batch, padded on the right to one width T'.

    Attributes:
        rows: the rows of the batch that the micro batch consists of.
        tokens, positions: [b, T'].
        padded: [b, T'], true at padding.
        lengths: [b], in tokens.
        width: T of the batch, the width that `aligned` returns.
        packing: the boundaries of the sequences in a packed row; None if each row is one sequence.
        experts: [b, T', layers, k], as in the batch.
    """

    rows: Rows
    tokens: torch.Tensor
    positions: torch.Tensor
    padded: torch.Tensor
    lengths: torch.Tensor
    width: int
    packing: PackedSeqParams | None = None
    experts: torch.Tensor | None = None

    def before(self, output: torch.Tensor) -> torch.Tensor:
        """Return the positions of the model's output [b, T', ...] that predict a token, [b, T' - 1, ...]."""
        return output[:, :-1]

    @property
    def after(self) -> torch.Tensor:
        """The tokens that the positions of `before` predict, [b, T' - 1]."""
        return self.tokens[:, 1:].contiguous()

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        """Align values of `before` with the tokens that they predict: [b, T], 0 at position 0."""
        return pad(values, (1, self.width - 1 - values.shape[1]))

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the tokens [b, T', ...] as the batch has them, [b, T, ...], -1 at padding."""
        found = values.new_full((len(values), self.width, *values.shape[2:]), -1)
        width = min(self.width, values.shape[1])
        found[:, :width] = values[:, :width].masked_fill(_like(self.padded[:, :width], values), -1)
        return found

    def last(self, output: torch.Tensor) -> torch.Tensor:
        """Return the model's output [b, T', ...] at each sequence's last token, [b, ...]."""
        return output[torch.arange(len(self.lengths), device=output.device), self.lengths - 1]


class PackedMicroBatch(MicroBatch):
    """b sequences of a batch, concatenated in one row, with padding as the last sequence.

    `tokens`, `positions` and `padded` are [1, N]. Aligned values are 0 at padding too.
    """

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        at = torch.arange(self.width, device=values.device)
        predicted = (at >= 1) & (at < self.lengths[:, None])
        # The last token of a sequence does not predict the first one of the next sequence.
        within = (self.positions[0, 1:] > 0) & ~self.padded[0, 1:]
        return values.new_zeros(predicted.shape).masked_scatter(predicted, values[0, within])

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        real = torch.arange(self.width, device=values.device) < self.lengths[:, None]
        found = values.new_full((*real.shape, *values.shape[2:]), -1)
        found[real] = values[0, ~self.padded[0]]
        return found

    def last(self, output: torch.Tensor) -> torch.Tensor:
        return output[0, self.lengths.cumsum(0) - 1]


def in_rows(batch: Batch, rows: Rows, width: int) -> MicroBatch:
    """Return rows of a batch, padded or cut to `width`."""
    lengths, positions = batch.lengths[rows], torch.arange(width, device=batch.tokens.device)
    tokens = pad(batch.tokens[rows], (0, width - batch.tokens.shape[1]))
    padded = positions >= lengths[:, None]
    experts = batch.experts
    if experts is not None:
        experts = pad(experts[rows], (0, 0, 0, 0, 0, width - batch.tokens.shape[1]), value=-1)
    return MicroBatch(
        rows, tokens, positions.expand_as(tokens), padded, lengths, batch.tokens.shape[1], experts=experts
    )


def in_one_row(batch: Batch, rows: Rows, size: int) -> PackedMicroBatch:
    """Pack sequences of a batch, without their padding, into one row of `size` tokens, padded at the end."""
    lengths, width = batch.lengths[rows], batch.tokens.shape[1]
    at = torch.arange(width, device=lengths.device)
    real = at < lengths[:, None]
    padding = size - int(lengths.sum())
    tokens = pad(batch.tokens[rows][real], (0, padding))
    positions = torch.cat([at.expand_as(real)[real], torch.arange(padding, device=lengths.device)])
    padded = torch.arange(size, device=lengths.device) >= size - padding
    sizes: Sequence[int] = [*lengths.tolist(), *([padding] if padding else [])]
    ends = pad(torch.tensor(sizes, device=lengths.device).cumsum(0), (1, 0)).int()
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes)
    )
    experts = batch.experts
    if experts is not None:
        experts = pad(experts[rows][real], (0, 0, 0, 0, 0, padding), value=-1)[None]
    return PackedMicroBatch(rows, tokens[None], positions[None], padded[None], lengths, width, packing, experts)


def _like(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a mask [b, T] with dims of size 1 for the further dims of values [b, T, ...]."""
    return mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))
