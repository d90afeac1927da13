"""The policy: a language model whose log-probabilities are those of the distribution that vLLM samples.

Its entropy is that of a distribution over a vocabulary that is sharded over tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from hybrid3d.config import Recipe
from hybrid3d.families import Config, family_of
from hybrid3d.reshard.ends import WeightSource
from hybrid3d.reshard.file_index import ADAPTER_FILE, read_shapes
from hybrid3d.reshard.files import load_files
from hybrid3d.reshard.move.device import ON_CUDA
from hybrid3d.reshard.sources import Only
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.losses import masked_sum
from hybrid3d.rl.objective import TokenLoss, TokenScores
from hybrid3d.train.megatron.adapters import adapter_weights, add_adapters
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.mtp import MtpLayers
from hybrid3d.train.megatron.router_replay import RouterReplay
from hybrid3d.train.megatron.runtime import on_device
from hybrid3d.train.megatron.source import ADAPTERS, megatron_weights
from hybrid3d.train.micro_batches import MicroBatch
from hybrid3d.train.trained_model import BucketHook, StepReport


def vocab_parallel_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropies [...], in nats, of logits [..., vocabulary / TP]; -inf is outside of the distribution."""
    entropies: torch.Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return entropies


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = (logits - largest).clamp(min=torch.finfo(logits.dtype).min)  # finite, so that 0 times it is 0
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        log_sum, entropy = sums[0].log(), sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(shifted, log_sum, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """With p = softmax(z), dH / dz_i = -p_i (log p_i + H)."""
        shifted, log_sum, entropy = ctx.saved_tensors
        log_p = shifted - log_sum[..., None]
        of_logits: torch.Tensor = -gradient[..., None] * log_p.exp() * (log_p + entropy[..., None])
        return of_logits


class Policy(MegatronModel):
    """A language model in the train layout; `train_step` calls the loss with `TokenScores`."""

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        rank: int,
        path: str | None = None,
        trainable: bool = True,
        with_mtp: bool | None = None,
    ):
        """Build it with the weights of the checkpoint `path`; by default the recipe's model, with its adapters.

        `with_mtp`: build its layers for multi-token prediction; None builds them where the recipe trains them.
        """
        lora = recipe.lora if path is None else None
        dtype = getattr(torch, recipe.model.dtype)
        trains_mtp = trainable and recipe.train.mtp_loss_coef > 0
        with_mtp = trains_mtp if with_mtp is None else with_mtp
        stages = build_model(config, recipe.train, dtype, adapted=lora is not None, with_mtp=with_mtp)
        self._mtp = MtpLayers(stages) if trains_mtp else None
        if lora is not None:
            shapes = read_shapes(recipe.model.path)
            with on_device():
                add_adapters(stages, megatron_weights(stages, config), shapes, lora, recipe.run.seed)
                if lora.path is not None:  # before the optimizer copies the weights
                    begun = adapter_weights(stages)
                    load_files(lora.path, begun.demand, begun.tensors, rank, ADAPTER_FILE)
        optimizer = recipe.optimizer if trainable else None
        apart = self._mtp.parameters if self._mtp is not None else None
        path = path or recipe.model.path
        super().__init__(config, stages, recipe, rank, path=path, optimizer=optimizer, separately_clipped=apart)
        if lora is not None:
            self.adapters = adapter_weights(stages)
        experts, replays = family_of(config).experts(config), recipe.train.router_replay
        self.has_experts = experts is not None
        if trainable and experts is not None and replays != "none":
            self.router_replay = RouterReplay(stages, experts, records=replays == "old")

    def source(self) -> WeightSource:
        """Return the source of this rank's weights without those of layers for multi-token prediction."""
        family = family_of(self.config)
        return Only(self.own_source(), lambda name: not family.is_mtp(name, self.config))

    def _tracks_changes(self, recipe: Recipe) -> bool:
        if recipe.compares_changes:
            return False
        awake = replace(recipe.rollout, sleep=False) if recipe.rollout is not None else None
        return (recipe if ON_CUDA else replace(recipe, rollout=awake)).can_sync_changes  # no sleep on CPU

    def _steps_of(self, recipe: Recipe) -> int:
        return recipe.run.steps - recipe.critic.warmup_steps

    def logprobs(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        return self._read(batch, lambda output, micro: self._per_token(output, micro, recipe).logprobs, recipe)

    def logprobs_and_entropies(self, batch: Batch, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor] | None:
        def read(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            scores = self._per_token(output, micro, recipe)
            return torch.stack([scores.logprobs, scores.entropy()], -1)

        found = self._read(batch, read, recipe)
        return None if found is None else (found[..., 0], found[..., 1])

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Implements `PolicyModel.as_base`; routers then choose experts themselves."""
        replay, self.router_replay = self.router_replay, None
        for stage in self.stages:
            getattr(stage, ADAPTERS).enabled = False
        try:
            yield
        finally:
            for stage in self.stages:
                getattr(stage, ADAPTERS).enabled = True
            self.router_replay = replay

    @contextmanager
    def merged(self) -> Iterator[None]:
        if self.adapters is None:
            yield
            return
        self.onload("parameters")
        try:
            for stage in self.stages:
                getattr(stage, ADAPTERS).merge()
            yield
        finally:
            for stage in self.stages:
                getattr(stage, ADAPTERS).unmerge()

    def train_step(
        self,
        batch: Batch,
        token_loss: TokenLoss | None,
        recipe: Recipe,
        bucket_hook: BucketHook | None = None,
        accepts_grad_norm: Callable[[float], bool] = math.isfinite,
    ) -> StepReport:
        if self._mtp is not None:
            self.onload("parameters")
        with self._mtp.in_step() if self._mtp is not None else nullcontext():
            return super().train_step(batch, token_loss, recipe, bucket_hook, accepts_grad_norm)

    def _loss(
        self, batch: Batch, token_loss: TokenLoss | None, recipe: Recipe, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, tokens, report = super()._loss(batch, token_loss, recipe, micro, output)
        if self._mtp is None:
            return total, tokens, report
        further = self._mtp_loss(self._mtp, micro, batch.response_mask[micro.rows], recipe)
        return total + recipe.train.mtp_loss_coef * further, tokens, {**report, "mtp_loss": further.detach()}

    def _mtp_loss(self, layers: MtpLayers, micro: MicroBatch, mask: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Return the cross entropy of multi-token prediction, summed over answers' tokens; a mean over the layers."""
        losses = []
        for ahead, logits in layers.logits(micro):
            scaled = self._scaled(logits[:, :-ahead], _temperature(recipe))
            entropy = vocab_parallel_cross_entropy(scaled, micro.tokens[:, ahead:].contiguous())
            losses.append(masked_sum(micro.aligned(entropy, ahead), mask))
        return torch.stack(losses).mean()

    def _per_token(self, output: torch.Tensor, micro: MicroBatch, recipe: Recipe) -> TokenScores:
        """Return the tokens' log-probabilities and entropies by logits [.., .., vocabulary / TP]; 0 at position 0."""
        # A new copy each time, because the cross entropy works in place
        scaled = partial(self._scaled, micro.before(output), _temperature(recipe))
        return TokenScores(
            micro.aligned(-vocab_parallel_cross_entropy(scaled(), micro.after)),
            lambda: micro.aligned(vocab_parallel_entropy(scaled())),
        )

    def _scaled(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return a copy for the distribution that is sampled from: at its temperature, without vocabulary padding."""
        scaled = logits.float() / temperature
        first = parallel_state.get_tensor_model_parallel_rank() * scaled.shape[-1]
        padding = torch.arange(first, first + scaled.shape[-1], device=scaled.device) >= self.config["vocab_size"]
        return scaled.masked_fill(padding, float("-inf"))


def _temperature(recipe: Recipe) -> float:
    """Return the temperature at which answers are sampled; 1 where none are."""
    return recipe.rollout.temperature if recipe.rollout is not None and recipe.algorithm.generates else 1.0
