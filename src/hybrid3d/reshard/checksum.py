"""A checksum of what is in a box: the same at both ends of a transfer, wherever and however the box lies there."""

from __future__ import annotations

import torch

_WORD = 8  # bytes
_BLOCK = 32  # words


def checksum(box: torch.Tensor) -> torch.Tensor:
    """One number (int64, on the box's device) for the bytes of a tensor in row-major order.

    Words are added up in blocks, and blocks with an odd weight each, modulo 2^64. One flipped bit always changes it,
    and so do blocks that change places; words that change places within 256 bytes do not.
    """
    blocks = _blocks_in_place(box)
    if blocks is not None:
        return _weighted(blocks.sum(-1).flatten())
    flat = box.contiguous().view(-1).as_strided((box.numel(),), (1,))
    if flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone()
    whole = flat.numel() * flat.itemsize // (_WORD * _BLOCK) * (_WORD * _BLOCK) // flat.itemsize
    rest = torch.zeros(_WORD * _BLOCK // flat.itemsize, dtype=flat.dtype, device=flat.device)
    rest[: flat.numel() - whole] = flat[whole:]
    return _weighted(
        torch.cat([flat[:whole].view(torch.int64).view(-1, _BLOCK).sum(-1), rest.view(torch.int64).sum(-1, True)])
    )


def _blocks_in_place(box: torch.Tensor) -> torch.Tensor | None:
    """The tensor as [..., blocks, words] where each of its rows is whole blocks; else None."""
    per_word = _WORD // box.itemsize
    if box.dim() == 0 or box.stride(-1) != 1 or box.shape[-1] * box.itemsize % (_WORD * _BLOCK):
        return None
    if any(n % per_word for n in (box.storage_offset(), *box.stride()[:-1])):
        return None
    blocks: torch.Tensor = box.view(torch.int64).unflatten(-1, (-1, _BLOCK))
    return blocks


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * sums.numel(), 2, dtype=torch.int64, device=sums.device)
    return (sums * weights).sum()
