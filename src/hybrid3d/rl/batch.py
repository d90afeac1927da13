"""Defines `Batch`: sequences as rectangular tensors, padded on the right.

Every tensor is aligned with `tokens`: position t belongs to token t. In particular `logprobs[:, t]` is
log p(token t | tokens before t), computed from the logits at t - 1; position 0 has nothing before it and is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Rows = slice | Tensor
"""Selects sequences of a batch: a slice, or indices [b]."""


@dataclass(frozen=True, eq=False)  # == of tensors is element-wise
class Batch:
    """Holds B sequences, each a prompt and a response."""

    tokens: Tensor
    """[B, T] int64; after a sequence's end, the padding token."""
    prompt_lengths: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64, prompt and response."""
    response_mask: Tensor
    """[B, T] float32, 1 at generated tokens (for `sft`, at the answer's tokens), 0 at prompts, environment replies and
    padding."""
    experts: Tensor | None = None
    """[B, T, layers, k] int16, the experts that routers are to choose for each token, in the layers that have experts;
    -1 where they choose themselves. None where they all do."""

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[ArrayLike],
        prompt_lengths: Sequence[int],
        *,
        loss_mask: Sequence[ArrayLike] | None = None,
        pad_id: int,
    ) -> Batch:
        """Pad sequences, of which each has a prompt of 1 or more tokens, to the longest of them.

        `loss_mask` says for each response which tokens the policy generated; without it, it generated all of them.

        Raises:
            ValueError: there is no sequence, or the lengths do not agree.
        """
        if not sequences or len(sequences) != len(prompt_lengths):
            raise ValueError(
                f"expected one or more sequences with a prompt length each, got {len(prompt_lengths)} prompt lengths "
                f"for {len(sequences)} sequences"
            )
        rows = [np.asarray(sequence, np.int64) for sequence in sequences]
        for row, (sequence, prompt) in enumerate(zip(rows, prompt_lengths, strict=True)):
            if not 1 <= prompt <= len(sequence):
                raise ValueError(f"sequence {row} of {len(sequence)} tokens cannot have a prompt of {prompt}")
        lengths = torch.tensor([len(sequence) for sequence in rows], dtype=torch.int64)
        prompts = torch.tensor(prompt_lengths, dtype=torch.int64)
        padded = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=pad_id)
        position = torch.arange(padded.shape[1])
        mask = (position >= prompts[:, None]) & (position < lengths[:, None])
        if loss_mask is not None:
            masks = [np.asarray(each, np.bool_) for each in loss_mask]
            counts, responses = [len(each) for each in masks], (lengths - prompts).tolist()
            if counts != responses:
                raise ValueError(f"loss_mask has {counts} tokens per response, the responses have {responses}")
            mask[mask.clone()] = torch.from_numpy(np.concatenate(masks))
        return cls(padded, prompts, lengths, mask.float())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Batch:
        """Return a slice of the sequences, with unchanged T, as views of the batch's memory."""
        return self._apply(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> Batch:
        return self._apply(lambda tensor: tensor.to(device))

    def _apply(self, function: Callable[[Tensor], Tensor]) -> Batch:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: function(tensor) for name, tensor in given.items() if tensor is not None})

    def align(self, responses: Sequence[ArrayLike]) -> Tensor:
        """Place values of the generated tokens, such as vLLM's log-probabilities, at these tokens, [B, T].

        ValueError: a response has another number of values than of generated tokens.
        """
        values = [np.asarray(response, np.float32) for response in responses]
        given, counts = [len(each) for each in values], self.response_mask.sum(dim=1).long().tolist()
        if given != counts:
            raise ValueError(f"got {given} values per response, the responses have {counts} tokens")
        aligned = torch.zeros_like(self.response_mask)
        aligned[self.response_mask.bool()] = torch.from_numpy(np.concatenate(values)).to(aligned.device)
        return aligned
