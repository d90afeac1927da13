"""Sequences as rectangular tensors, padded on the right.

Every tensor beside `tokens` is aligned with it: position t speaks of token t. In particular `logprobs[:, t]` is
log p(token t | tokens before t), computed from the logits at t - 1; position 0 has nothing before it and is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Rows = slice | Tensor
"""Some sequences of a batch: a run of them, or their numbers [b]."""


@dataclass(frozen=True, eq=False)  # tensors have no single truth of equality
class Batch:
    """B sequences of a prompt and a response each."""

    tokens: Tensor
    """[B, T] int64; after a sequence's end, the padding token."""
    prompt_lengths: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64, prompt and response."""
    response_mask: Tensor
    """[B, T] float32, 1 at the tokens that were generated (or, for `sft`, answered), 0 at prompts, at what an
    environment wrote and at padding."""

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        loss_mask: Sequence[Sequence[bool]] | None = None,
        pad_id: int,
    ) -> Batch:
        """Pad to the longest sequence. A prompt is 1 token or more.

        Args:
            loss_mask: of each response, which tokens the policy generated; None where it is all of them.
        """
        if not sequences or len(sequences) != len(prompt_lengths):
            raise ValueError(f"a batch of {len(sequences)} sequences and {len(prompt_lengths)} prompt lengths")
        for row, (sequence, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            if not 1 <= prompt <= len(sequence):
                raise ValueError(f"sequence {row} of {len(sequence)} tokens cannot have a prompt of {prompt}")
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
        prompts = torch.tensor(prompt_lengths, dtype=torch.int64)
        width = int(lengths.max())
        padded = [[*sequence, *[pad_id] * (width - len(sequence))] for sequence in sequences]
        position = torch.arange(width)
        mask = (position >= prompts[:, None]) & (position < lengths[:, None])
        if loss_mask is not None:
            counts, responses = [len(row) for row in loss_mask], (lengths - prompts).tolist()
            if counts != responses:
                raise ValueError(f"said of {counts} tokens whose they are, responses have {responses}")
            mask[mask.clone()] = torch.tensor([counts for row in loss_mask for counts in row], dtype=torch.bool)
        return cls(torch.tensor(padded, dtype=torch.int64), prompts, lengths, mask.float())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Batch:
        """Some of the sequences, with unchanged T; they share the batch's memory."""
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def align(self, responses: Sequence[Sequence[float]]) -> Tensor:
        """Values of each sequence's generated tokens, such as vLLM's log-probabilities, put at those tokens: [B, T]."""
        counts = self.response_mask.sum(dim=1).long().tolist()
        if [len(values) for values in responses] != counts:
            raise ValueError(f"values for {[len(values) for values in responses]} tokens, responses have {counts}")
        aligned = torch.zeros_like(self.response_mask)
        aligned[self.response_mask.bool()] = torch.tensor(
            [value for values in responses for value in values], dtype=aligned.dtype, device=aligned.device
        )
        return aligned
