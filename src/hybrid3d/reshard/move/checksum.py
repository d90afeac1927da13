"""A checksum of the contents of a box that does not depend on the strides or the address of the box in memory."""

from __future__ import annotations

import torch

_WORD = 8  # bytes
_BLOCK = 32  # words


def checksum(box: torch.Tensor) -> torch.Tensor:
    """Return a checksum (int64 scalar on the box's device) of the bytes of a tensor in row-major order.

    Words are summed within blocks, and the block sums with an odd weight each, modulo 2^64. Any single flipped bit
    changes the checksum, and so does swapping two blocks; swapping two words within 256 bytes does not.
    """
    blocks = _blocks_in_place(box)
    if blocks is not None:
        return _weighted_sum(blocks.sum(-1).flatten())
    flat = box.contiguous().view(-1).as_strided((box.numel(),), (1,))
    if flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone()
    full_blocks = flat.numel() * flat.itemsize // (_WORD * _BLOCK) * (_WORD * _BLOCK) // flat.itemsize
    tail = torch.zeros(_WORD * _BLOCK // flat.itemsize, dtype=flat.dtype, device=flat.device)
    tail[: flat.numel() - full_blocks] = flat[full_blocks:]
    return _weighted_sum(
        torch.cat([flat[:full_blocks].view(torch.int64).view(-1, _BLOCK).sum(-1), tail.view(torch.int64).sum(-1, True)])
    )


def _blocks_in_place(box: torch.Tensor) -> torch.Tensor | None:
    """Return a view of shape [..., blocks, words] if each row is a multiple of the block size, else None."""
    per_word = _WORD // box.itemsize
    if box.dim() == 0 or box.stride(-1) != 1 or box.shape[-1] * box.itemsize % (_WORD * _BLOCK):
        return None
    if any(n % per_word for n in (box.storage_offset(), *box.stride()[:-1])):
        return None
    blocks: torch.Tensor = box.view(torch.int64).unflatten(-1, (-1, _BLOCK))
    return blocks


def _weighted_sum(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * sums.numel(), 2, dtype=torch.int64, device=sums.device)
    return (sums * weights).sum()
