"""Divides a data-parallel rank's batch into micro batches by rows or by tokens, equally many on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybrid3d.config import Train
from hybrid3d.rl.balance import balanced_shares, split_within_budget
from hybrid3d.rl.batch import Batch
from hybrid3d.train.micro_batches import MicroBatch, in_one_row, in_rows, rounded_up


def micro_batches(
    batch: Batch,
    train: Train,
    multiple: int,
    group: dist.ProcessGroup,
    context: dist.ProcessGroup | None = None,
) -> list[MicroBatch]:
    """Divide a batch into micro batches by `train.micro_batch_size` or `train.max_tokens_per_micro_batch`.

    Args:
        batch: on the device of the model.
        multiple: divisor of a rank's part of every micro batch's padded length; the TP size with sequence parallelism.
        group: the data-parallel ranks, which all get the same number of micro batches.
        context: the ranks that share each sequence; None if one rank has it.
    """
    chunks = 1 if context is None else 2 * context.size()

    def rounded(tokens: int) -> int:
        return -(-tokens // (chunks * multiple)) * (chunks * multiple)

    if not train.packed and train.max_tokens_per_micro_batch is None:
        width, size = rounded(batch.tokens.shape[1]), train.micro_batch_size
        return [in_rows(batch, slice(start, start + size), width, context) for start in range(0, len(batch), size)]
    taken = rounded_up(batch.lengths, chunks)
    parts = _by_length(batch, taken.tolist(), train, group)
    if train.packed:  # all have one size, because pipeline stages exchange tensors of one shape
        size = rounded(max(int(taken[rows].sum()) for rows in parts))
        return [in_one_row(batch, rows, size, context) for rows in parts]
    return [in_rows(batch, rows, rounded(int(batch.lengths[rows].max())), context) for rows in parts]


def _by_length(batch: Batch, lengths: list[int], train: Train, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the rows of each micro batch, with about equal numbers of tokens, or filled up to the token budget.

    Args:
        lengths: the tokens that each sequence takes.
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
