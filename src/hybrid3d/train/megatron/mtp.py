"""The layers for multi-token prediction of a policy (DeepSeek-V3, arXiv 2412.19437, section 2.2) in its training steps.

They predict tokens further ahead from the policy's hidden states, with its embedding and its head. All three are
constants here, so that the loss of these layers has gradients of their own weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from hybrid3d.train.megatron.context import tensor_parallel_share
from hybrid3d.train.megatron.versions import MTP_DECODER_LAYER, MTP_RECOMPUTATION
from hybrid3d.train.micro_batches import MicroBatch


class MtpLayers:
    """Computes what the layers of a model predict. Every rank of the model constructs it, and enters `in_step`."""

    def __init__(self, stages: Sequence[GPTModel]):
        """Take this rank's virtual pipeline stages, of which only the model's last one has these layers, as `mtp`."""
        self._first, self._last = stages[0], stages[-1]
        self._splits_sequences = stages[0].config.sequence_parallel
        self._embedding: torch.Tensor | None = None
        self._computed: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if not hasattr(self._last, "mtp"):
            return
        self._last.decoder.register_forward_hook(self._keep, with_kwargs=True)
        for layer in self._last.mtp.layers:
            getattr(layer, MTP_DECODER_LAYER).register_forward_pre_hook(_with_padding_mask, with_kwargs=True)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters of the layers."""
        return [*self._last.mtp.parameters()] if hasattr(self._last, "mtp") else []

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Have a copy of the embedding as it is now; every rank enters it for the micro batches of an update."""
        starts = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        ends = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if starts:
            self._embedding = self._first.embedding.word_embeddings.weight.detach()
        elif ends:
            self._embedding = torch.empty_like(self._last.output_layer.weight)
        if starts != ends:
            assert self._embedding is not None, "this rank has it or gets it"
            dist.broadcast(self._embedding, group=parallel_state.get_embedding_group(), group_src=0)
        try:
            yield
        finally:
            self._embedding = None

    def logits(self, micro: MicroBatch) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield how many tokens ahead each layer predicts, and its logits [b, T', vocabulary / TP] for a micro batch.

        The micro batch is the one that the model's last stage has just computed.
        """
        assert self._computed is not None, "the last stage has computed the micro batch, with gradients"
        (hidden, rotary), self._computed = self._computed, None
        stage, weight = self._last, self._last.output_layer.weight.detach()
        states = stage.mtp(
            input_ids=micro.tokens,
            position_ids=micro.positions,
            hidden_states=hidden.requires_grad_(),  # with full recomputation, outputs need gradients where inputs do
            attention_mask=tensor_parallel_share(micro.padded, 1) if self._splits_sequences else micro.padded,
            rotary_pos_emb=rotary,
            packed_seq_params=micro.packing,
            embedding=self._embed,
        )
        _, *further = states.chunk(1 + len(stage.mtp.layers))
        for number, state in enumerate(further):
            logits, _ = stage.output_layer(state, weight=weight)
            yield number + 2, logits.transpose(0, 1).contiguous()

    def _keep(self, decoder: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], hidden: torch.Tensor) -> None:
        """Keep the hidden states after the model's last norm, as [T', b, hidden]; a forward hook."""
        if torch.is_grad_enabled():
            self._computed = hidden.detach(), kwargs["rotary_pos_emb"]

    def _embed(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [b, T'] as [T', b, hidden], under sequence parallelism this rank's share.

        Megatron's embedding returns the same; it would compute gradients, and exists on the first stage only.
        """
        assert self._embedding is not None, "called within a step"
        tokens = input_ids - parallel_state.get_tensor_model_parallel_rank() * len(self._embedding)
        inside = (tokens >= 0) & (tokens < len(self._embedding))
        rows = self._embedding[tokens.where(inside, 0)] * inside[..., None]
        rows = reduce_from_tensor_model_parallel_region(rows).transpose(0, 1).contiguous()
        share: torch.Tensor = scatter_to_sequence_parallel_region(rows) if self._splits_sequences else rows
        return share


class _PackedMtpLayer(MultiTokenPredictionLayer):
    """The layer of Megatron-Core up to 0.17, which with full recomputation also takes packed sequences."""

    def _checkpointed_forward(self, forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep what is not a tensor apart from the arguments, all of which autograd would save."""
        apart = {name: kwargs.pop(name) for name in ("packed_seq_params", "sequence_len_offset")}
        return super()._checkpointed_forward(partial(forward_func, **apart), *args, **kwargs)


class _UnmaskedMtpLayer(MultiTokenPredictionLayer):
    """The layer of Megatron-Core 0.18, whose full recomputation is given a mask of padding that it does not take."""

    def _checkpointed_forward(self, *args: Any, padding_mask: torch.Tensor | None, **kwargs: Any) -> Any:
        assert padding_mask is None, "`_with_padding_mask` gives it to the decoder layer"
        return super()._checkpointed_forward(*args, **kwargs)


MTP_LAYER: type[MultiTokenPredictionLayer] = MultiTokenPredictionLayer
if "forward_func" in MTP_RECOMPUTATION:
    MTP_LAYER = _PackedMtpLayer
elif "padding_mask" not in MTP_RECOMPUTATION:
    MTP_LAYER = _UnmaskedMtpLayer


def _with_padding_mask(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a decoder layer the mask of padding, by which its router counts tokens.

    Megatron's layers for multi-token prediction hand on an attention mask only, which causal attention does not need.
    """
    return args, {**kwargs, "attention_mask": None, "padding_mask": kwargs["attention_mask"]}
