"""The policy that is trained: Megatron's schedules, DDP and distributed optimizer around one model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model

from hybrid3d.config import Optimizer, Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.files import load_files
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.losses import masked_sum
from hybrid3d.rl.objective import PolicyLoss, Scored
from hybrid3d.train.entropy import vocab_parallel_entropy
from hybrid3d.train.model import build_model
from hybrid3d.train.runtime import device, on_device
from hybrid3d.train.stepping import Ready, SteppedInParts, in_buckets
from hybrid3d.train.weights import MegatronWeights, megatron_weights

DDP = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "check_for_nan_in_grad": True}


@dataclass(frozen=True)
class StepReport:
    """What one training step did. The sums are over this rank's tokens, and empty where it has no output layer."""

    sums: dict[str, float]
    grad_norm: float
    lr: float


class Policy:
    """A model in the train layout. Every rank of the layout calls every method together.

    Attributes:
        weights: this rank's weights as pieces of canonical tensors.
        counts: whether this rank's sums count: one rank of each data-parallel replica has the output and speaks.
    """

    def __init__(self, config: Config, recipe: Recipe, rank: int, trainable: bool = True):
        self.config = config
        self._layout = recipe.train
        samples = recipe.rollout is not None and recipe.algorithm.generates
        self._temperature = recipe.rollout.temperature if samples else 1.0
        dtype = getattr(torch, recipe.model.dtype)
        self.stages = build_model(config, recipe.train, dtype)
        self._modules: list[torch.nn.Module] = [
            Float16Module(stage.config, stage) if dtype is torch.bfloat16 else stage for stage in self.stages
        ]
        with on_device():
            if trainable:
                self._modules = [*in_buckets(self._modules, **DDP)]
            self.weights: MegatronWeights = megatron_weights(self.stages, config)
            load_files(recipe.model.path, self.weights.demand, self.weights.tensors, rank)
            if trainable:
                self.optimizer = get_megatron_optimizer(_optimizer_config(recipe), self._modules)
                self.scheduler = _scheduler(self.optimizer, recipe.optimizer, recipe.run.steps)
                self._stepping = SteppedInParts(self.optimizer, self._modules)
                self._connect()
        self.has_output = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.counts = self.has_output and parallel_state.get_tensor_model_parallel_rank() == 0

    @property
    def data_parallel_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    def logprobs(self, batch: Batch) -> torch.Tensor | None:
        """Log-probability of every token given those before it, [B, T]; None on ranks without the output layer."""
        found: dict[int, torch.Tensor] = {}

        def keep(scored: Scored, rows: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found[rows.start] = scored.logprobs
            return scored.logprobs, {}

        with torch.no_grad():
            self._run(batch, keep, forward_only=True)
        return torch.cat([found[start] for start in sorted(found)]) if found else None

    @property
    def parts(self) -> Mapping[str, int]:
        """By local tensor, the part of the model in which it is updated; what is not in it, no optimizer updates."""
        part_of = self._stepping.part_of
        found = {name: part_of[t.data_ptr()] for name, t in self.weights.tensors.items() if t.data_ptr() in part_of}
        if len(set(found.values())) < len(self._stepping):
            raise RuntimeError("a part of the optimizer's parameters is not among the weights that Megatron declares")
        return found

    def train_step(
        self, batch: Batch, token_loss: PolicyLoss, ready: Ready | None = None, ends_step: bool = True
    ) -> StepReport:
        """One optimizer step on the mean loss over every response token of every data-parallel rank's batch.

        Args:
            ready: told of each part of the model as soon as it has its new values.
            ends_step: of the run; schedules are of those, however many updates one has.
        """
        for module in self._modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(batch, token_loss, forward_only=False)
        with on_device():
            updated, grad_norm = self._stepping.step(ready or (lambda part, last: None))
        if not updated or grad_norm is None or not math.isfinite(grad_norm):
            raise RuntimeError(f"the gradient is not finite (norm {grad_norm}): no checkpoint is written of this step")
        lr = float(self.optimizer.param_groups[0]["lr"])
        if ends_step:
            self.scheduler.step(increment=1)
        sums: dict[str, float] = {}
        for report in reports:
            for key, value in report.items():
                sums[key] = sums.get(key, 0.0) + float(value)
        return StepReport(sums, float(grad_norm), lr)

    def _run(self, batch: Batch, token_loss: PolicyLoss, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        """Drive the pipeline schedule over the micro batches; per micro batch what `token_loss` reports."""
        size = self._layout.micro_batch_size
        batch = batch.to(device())
        rows = [slice(start, start + size) for start in range(0, len(batch), size)]
        tokens = batch.tokens
        if self.stages[0].config.sequence_parallel:  # a sequence is split over TP; what is added is cut off again
            tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % self._layout.tp))
        positions = torch.arange(tokens.shape[1], device=device()).expand(size, -1)
        padded = torch.arange(tokens.shape[1], device=device()) >= batch.lengths[:, None]

        def forward_step(micro_batches: Iterator[slice], stage: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            part = next(micro_batches)
            output = stage(tokens[part], positions, None, padding_mask=self._padding(stage, padded[part]))
            return output, partial(self._loss, batch, part, token_loss)

        with on_device():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(rows) for _ in self._modules] if len(self._modules) > 1 else iter(rows),
                model=self._modules,
                num_microbatches=len(rows),
                seq_length=tokens.shape[1],
                micro_batch_size=size,
                forward_only=forward_only,
            )

    def _padding(self, stage: torch.nn.Module, padded: torch.Tensor) -> torch.Tensor | None:
        """[b, T] padding as a stage takes it: only experts that are balanced by counting need to know.

        Where a sequence is split over TP, Megatron splits the mask too, on the first stage alone.
        """
        config = self.stages[0].config
        if not config.moe_router_enable_expert_bias:
            return None
        if config.sequence_parallel and not get_attr_wrapped_model(stage, "pre_process"):
            rank = parallel_state.get_tensor_model_parallel_rank()
            return padded.chunk(self._layout.tp, dim=1)[rank].contiguous()
        return padded

    def _loss(
        self, batch: Batch, rows: slice, token_loss: PolicyLoss, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Sum of the loss over a micro batch's tokens and their number: Megatron divides by the global number."""
        losses, report = token_loss(self._scored(logits, batch.tokens[rows]), rows)
        mask = batch.response_mask[rows]
        total = masked_sum(losses, mask)
        return total, mask.sum().int(), {"loss": total.detach(), **report}

    def _scored(self, logits: torch.Tensor, tokens: torch.Tensor) -> Scored:
        """What [b, T or more, vocabulary / TP] logits say of [b, T] tokens; 0 at position 0.

        Of the distribution that is sampled from: the temperature is applied, padding of the vocabulary is not in it.
        """
        scaled = logits[:, : tokens.shape[1] - 1].float() / self._temperature
        first = parallel_state.get_tensor_model_parallel_rank() * scaled.shape[-1]
        padding = torch.arange(first, first + scaled.shape[-1], device=scaled.device) >= self.config["vocab_size"]
        scaled = scaled.masked_fill(padding, float("-inf"))
        negative = vocab_parallel_cross_entropy(scaled, tokens[:, 1:].contiguous())
        return Scored(
            torch.nn.functional.pad(-negative, (1, 0)),
            lambda: torch.nn.functional.pad(vocab_parallel_entropy(scaled), (1, 0)),
        )

    def _connect(self) -> None:
        """Tell the schedules what closes a step: reduction over ranks, and the scale of the loss."""
        for stage in self.stages:
            stage.config.finalize_model_grads_func = finalize_model_grads
            stage.config.grad_scale_func = self.optimizer.scale_loss
        no_sync = [module.no_sync for module in self._modules]
        self.stages[0].config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def _optimizer_config(recipe: Recipe) -> OptimizerConfig:
    settings = recipe.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=recipe.model.dtype == "bfloat16",
        params_dtype=getattr(torch, recipe.model.dtype),
        use_distributed_optimizer=True,
    )


def _scheduler(optimizer: Any, settings: Optimizer, steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (settings.warmup_steps + 1),  # the first update counts too
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
