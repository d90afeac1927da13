"""Micro batches as the model takes them: sequences in rows of one width, or packed one behind the other in one row."""

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
        rows: of the batch, b of them.
        tokens, positions: [b, T'].
        padded: [b, T'], true where there is no token.
        lengths: [b].
        width: T of the batch, which `aligned` comes back to.
        packing: where sequences begin and end within a row; None where a row is one.
    """

    rows: Rows
    tokens: torch.Tensor
    positions: torch.Tensor
    padded: torch.Tensor
    lengths: torch.Tensor
    width: int
    packing: PackedSeqParams | None = None

    def before(self, output: torch.Tensor) -> torch.Tensor:
        """Of the model's output [b, T', ...] what speaks of a next token, [b, T' - 1, ...]."""
        return output[:, :-1]

    @property
    def after(self) -> torch.Tensor:
        """[b, T' - 1], the tokens that `before` speaks of."""
        return self.tokens[:, 1:].contiguous()

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        """What was computed of `before`, at the tokens that it speaks of: [b, T], 0 at position 0."""
        return pad(values, (1, self.width - 1 - values.shape[1]))

    def last(self, output: torch.Tensor) -> torch.Tensor:
        """Of the model's output [b, T', ...] that of each sequence's last token, [b, ...]."""
        return output[torch.arange(len(self.lengths), device=output.device), self.lengths - 1]


class PackedMicroBatch(MicroBatch):
    """b sequences of a batch one behind the other, and padding as one more: `tokens`, `positions`, `padded` are [1, N].

    What is aligned is 0 at padding too.
    """

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        at = torch.arange(self.width, device=values.device)
        spoken_of = (at >= 1) & (at < self.lengths[:, None])
        # Between two sequences the last token of one speaks of the first of the next: of what it does not know.
        within = (self.positions[0, 1:] > 0) & ~self.padded[0, 1:]
        return values.new_zeros(spoken_of.shape).masked_scatter(spoken_of, values[0, within])

    def last(self, output: torch.Tensor) -> torch.Tensor:
        return output[0, self.lengths.cumsum(0) - 1]


def in_rows(batch: Batch, rows: Rows, width: int) -> MicroBatch:
    """Rows of a batch, padded to `width` or cut to it."""
    lengths, positions = batch.lengths[rows], torch.arange(width, device=batch.tokens.device)
    tokens = pad(batch.tokens[rows], (0, width - batch.tokens.shape[1]))
    padded = positions >= lengths[:, None]
    return MicroBatch(rows, tokens, positions.expand_as(tokens), padded, lengths, batch.tokens.shape[1])


def in_one_row(batch: Batch, rows: Rows, size: int) -> PackedMicroBatch:
    """Sequences of a batch without their padding, `size` tokens together: what lacks is padded at the end."""
    lengths, width = batch.lengths[rows], batch.tokens.shape[1]
    at = torch.arange(width, device=lengths.device)
    real = at < lengths[:, None]
    lacking = size - int(lengths.sum())
    tokens = pad(batch.tokens[rows][real], (0, lacking))
    positions = torch.cat([at.expand_as(real)[real], torch.arange(lacking, device=lengths.device)])
    padded = torch.arange(size, device=lengths.device) >= size - lacking
    sizes: Sequence[int] = [*lengths.tolist(), *([lacking] if lacking else [])]
    ends = pad(torch.tensor(sizes, device=lengths.device).cumsum(0), (1, 0)).int()
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes)
    )
    return PackedMicroBatch(rows, tokens[None], positions[None], padded[None], lengths, width, packing)
