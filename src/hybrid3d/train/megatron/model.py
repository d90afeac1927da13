"""A model in the train layout: Megatron's pipeline schedules, DDP and distributed optimizer around its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model

from hybrid3d.config import FP8_ALIGNMENT, Optimizer, Recipe, Train
from hybrid3d.families import Config, Family
from hybrid3d.reshard.ends import NOTHING_TRACKED, ChangeSource, PlainSource, WeightSource
from hybrid3d.reshard.files import load_files
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.plan.layout import Demand
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.losses import masked_sum
from hybrid3d.rl.objective import TokenLoss
from hybrid3d.train.megatron.context import context_group, tensor_parallel_share
from hybrid3d.train.megatron.router_replay import RouterReplay
from hybrid3d.train.megatron.runtime import on_device
from hybrid3d.train.megatron.source import MegatronWeights, megatron_weights
from hybrid3d.train.megatron.stepping import BucketedOptimizer, in_buckets, place_of
from hybrid3d.train.megatron.versions import set_in_megatron
from hybrid3d.train.micro_batches import MicroBatch, micro_batches
from hybrid3d.train.offload import OffloadableMemory
from hybrid3d.train.trained_model import BucketHook, StepReport

DDP = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "check_for_nan_in_grad": False}


class MegatronModel:
    """A `TrainedModel`, which describes the methods, with weights from a checkpoint.

    A subclass builds the stages with their output layer, and its `_per_token` reads the output for the loss.

    Attributes:
        stages: this rank's part of the model, one module per virtual pipeline stage.
        weights: this rank's weights as pieces of canonical tensors.
        adapters: its adapters as pieces of PEFT's matrices, if the model has some; then only these are trained.
    """

    def __init__(
        self,
        config: Config,
        stages: Sequence[GPTModel],
        recipe: Recipe,
        rank: int,
        *,
        path: str,
        optimizer: Optimizer | None,
        family: Family | None = None,
        fresh: Container[str] = (),
        separately_clipped: Collection[torch.nn.Parameter] | None = None,
    ):
        """
        Args:
            path: the checkpoint from which weights are loaded.
            optimizer: None for a model that is not trained.
            family: the family whose table names the weights; None selects the config's.
            fresh: canonical tensors that keep their initial values.
            separately_clipped: as for `BucketedOptimizer`.
        """
        self.config = config
        self.stages = stages
        self.router_replay: RouterReplay | None = None
        self.adapters: MegatronWeights | None = None
        self._trains = optimizer is not None
        self._memory = OffloadableMemory()
        dtype = getattr(torch, recipe.model.dtype)
        in_half = dtype is torch.bfloat16
        self._modules: list[Any] = [Float16Module(stage.config, stage) if in_half else stage for stage in stages]
        with on_device():
            if optimizer is not None:
                self._modules = [*in_buckets(self._modules, **DDP)]
            self.weights: MegatronWeights = megatron_weights(stages, config, family)
            wanted = Demand(tuple(p for p in self.weights.pieces if p.name not in fresh), self.weights.padding)
            load_files(path, wanted, self.weights.tensors, rank)
            if optimizer is not None:
                self.optimizer = get_megatron_optimizer(_optimizer_config(optimizer, dtype), self._modules)
                self.scheduler = _scheduler(self.optimizer, optimizer, self._steps_of(recipe))
                tracks = self._tracks_changes(recipe)
                named = self.weights.tensors
                self._stepping = BucketedOptimizer(self.optimizer, self._modules, named, tracks, separately_clipped)
                self._connect()
        self.has_output = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._leads_context = parallel_state.get_context_parallel_rank() == 0
        leads = self._leads_context and parallel_state.get_tensor_model_parallel_rank() == 0
        self.is_reporting_rank = self.has_output and leads
        self.data_parallel_rank = int(parallel_state.get_data_parallel_rank())

    def _per_token(self, output: torch.Tensor, micro: MicroBatch, recipe: Recipe) -> Any:
        """Return the argument of `train_step`'s loss: values [b, T], aligned as in `rl/batch.py`."""
        raise NotImplementedError

    @property
    def trained_weights(self) -> MegatronWeights:
        """This rank's weights that updates change: the adapters of a model that has some."""
        return self.weights if self.adapters is None else self.adapters

    @property
    def optimizer_buckets(self) -> Mapping[str, int]:
        """The optimizer bucket of each local tensor, by name; tensors that no optimizer updates are not in it."""
        bucket_of = self._stepping.bucket_of
        places = {name: place_of(tensor) for name, tensor in self.weights.tensors.items()}
        found = {name: bucket_of[place] for name, place in places.items() if place in bucket_of}
        if len(set(found.values())) < len(self._stepping):
            raise RuntimeError("a bucket of the optimizer has no parameter among the weights that Megatron declares")
        return found

    @property
    def changes(self) -> ChangeSource:
        """The elements of the weights that updates have changed."""
        return self._stepping.changes if self._trains and self._stepping.changes.elements else NOTHING_TRACKED

    def own_source(self) -> WeightSource:
        is_updated = self._trains and self.adapters is None
        buckets = self.optimizer_buckets if is_updated else {}
        return PlainSource(self.weights.tensors, self.weights.holdings, buckets, self.changes)

    def trained_source(self) -> WeightSource:
        return PlainSource(self.trained_weights.tensors, self.trained_weights.holdings)

    def spread(self, values: torch.Tensor) -> None:
        groups = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
        for group in groups:  # those who lead their TP group get it first
            dist.broadcast(values, group=group, group_src=0)

    def _tracks_changes(self, recipe: Recipe) -> bool:
        """Return whether a sync may use the changes of this model's weights."""
        return False

    def _optimizer_settings(self, recipe: Recipe) -> Optimizer:
        return recipe.optimizer

    def _steps_of(self, recipe: Recipe) -> int:
        """Return the number of the run's steps that train this model."""
        return recipe.run.steps

    def offload(self, train: Train) -> int:
        return self._memory.offload({kind: partial(self._tensors_of, kind) for kind in train.offloads})

    def onload(self, *kinds: str) -> None:
        self._memory.onload(*kinds)

    def _tensors_of(self, kind: str) -> list[torch.Tensor]:
        """Return the tensors whose storage `train.offload_*` of this kind frees."""
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        if kind == "parameters":
            return parameters
        if not self._trains:
            return []
        if kind == "gradients":
            return [b.grad_data for module in self._modules for b in (*module.buffers, *module.expert_parallel_buffers)]
        of_model = {parameter.untyped_storage()._cdata for parameter in parameters}
        found = [tensor for one in self._optimizers for tensor in _tensors_in(one)]
        # In float32 the optimizer's main weights are the parameters themselves.
        return [tensor for tensor in found if tensor.untyped_storage()._cdata not in of_model]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have parameters: where only experts have adapters, the others have none."""
        return [one.optimizer for one in self.optimizer.chained_optimizers if one.optimizer is not None]

    def train_step(
        self,
        batch: Batch,
        token_loss: TokenLoss | None,
        recipe: Recipe,
        bucket_hook: BucketHook | None = None,
        accepts_grad_norm: Callable[[float], bool] = math.isfinite,
    ) -> StepReport:
        self.onload()
        _set_learning_rate(self.scheduler, self._optimizer_settings(recipe))
        for module in self._modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        biases = [(bias, bias.clone()) for bias in self._expert_biases()]
        close = partial(self._loss, batch.to(device()), token_loss, recipe)
        reports = self._run(batch, close, recipe, forward_only=False)
        with on_device():
            updated, grad_norm = self._stepping.step(bucket_hook or (lambda bucket, last: None), accepts_grad_norm)
        if not updated:
            for bias, before in biases:
                bias.copy_(before)
        lr = float(self.optimizer.param_groups[0]["lr"])
        sums: dict[str, float] = {}
        for report in reports:
            for key, value in report.items():
                sums[key] = sums.get(key, 0.0) + float(value)  # not by `sum`, which rounds otherwise since Python 3.12
        return StepReport(sums, grad_norm, lr, updated)

    def _expert_biases(self) -> list[torch.Tensor]:
        """Return the router biases that balance experts; the gradient reduction updates them, not the optimizer."""
        buffers = [named for stage in self.stages for named in stage.named_buffers()]
        return [buffer for name, buffer in buffers if name.endswith(".expert_bias")]

    def end_step(self) -> None:
        self.scheduler.step(increment=1)

    def _read(
        self, batch: Batch, read: Callable[[torch.Tensor, MicroBatch], torch.Tensor], recipe: Recipe
    ) -> torch.Tensor | None:
        """Return what `read` makes of the last stage's output, [B, ...]; None on ranks without the output layer."""
        found: list[tuple[MicroBatch, torch.Tensor]] = []

        def keep(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found.append((micro, read(output, micro)))
            return output.new_zeros(()), {}  # a new tensor, because Megatron divides it in place

        with torch.no_grad():
            self._run(batch, keep, recipe, forward_only=True)
        if not found:
            return None
        rows = found[0][1]
        whole = rows.new_empty(len(batch), *rows.shape[1:])
        for micro, rows in found:
            whole[micro.rows] = rows
        return whole

    def _loss(
        self, batch: Batch, token_loss: TokenLoss | None, recipe: Recipe, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss summed over a micro batch's tokens, and their number, by which Megatron divides globally.

        Every rank of a context-parallel group returns the same loss, with the gradient of its own positions. Megatron
        adds up the tokens over these ranks too, so that one of them counts.
        """
        assert token_loss is not None, "this rank has the output layer"
        losses, report = token_loss(self._per_token(output, micro, recipe), micro.rows)
        mask = batch.response_mask[micro.rows]
        total = masked_sum(losses, mask)
        tokens = mask.sum().int() if self._leads_context else torch.zeros_like(mask[0, 0], dtype=torch.int32)
        return total, tokens, {"loss": total.detach(), **report}

    def _run(
        self, batch: Batch, close: Callable[..., Any], recipe: Recipe, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """Run the pipeline schedule over the micro batches; `close(micro batch, output)` computes the loss of each."""
        self.onload("parameters")
        multiple = recipe.train.tp if self.stages[0].config.sequence_parallel else 1  # a sequence is split over TP
        if recipe.train.fp8 != "none":
            multiple *= FP8_ALIGNMENT
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        batch = batch.to(device())
        micros = micro_batches(batch, recipe.train, multiple, group, context_group())
        replay = self.router_replay
        if replay is not None:
            replay.begin(batch, forward_only=forward_only, recomputes=recipe.train.recompute == "full")

        def forward_step(of_step: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(of_step)
            padding = self._padding(stage, micro.share(micro.padded))
            tokens, positions = micro.share(micro.tokens), micro.share(micro.positions)
            with replay.micro_batch(self._modules.index(stage), micro) if replay is not None else nullcontext():
                output = stage(tokens, positions, None, packed_seq_params=micro.packing, padding_mask=padding)
            return output, partial(close, micro)

        with on_device():
            found: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(micros) for _ in self._modules] if len(self._modules) > 1 else iter(micros),
                model=self._modules,
                num_microbatches=len(micros),
                seq_length=micros[0].tokens.shape[1],
                micro_batch_size=micros[0].tokens.shape[0],
                forward_only=forward_only,
            )
        return found

    def _padding(self, stage: torch.nn.Module, padded: torch.Tensor) -> torch.Tensor | None:
        """Return the padding mask [b, T] for a stage; None unless experts are balanced by counting tokens.

        Where a sequence is split over TP, Megatron splits the mask too, but only on the first stage.
        """
        config = self.stages[0].config
        if not config.moe_router_enable_expert_bias:
            return None
        if config.sequence_parallel and not get_attr_wrapped_model(stage, "pre_process"):
            return tensor_parallel_share(padded, dim=1)
        return padded

    def _connect(self) -> None:
        """Set the functions that Megatron's schedules call: gradient reduction and the scale of the loss."""
        for stage in self.stages:
            scale = self.optimizer.scale_loss
            set_in_megatron(stage.config, finalize_model_grads_func=finalize_model_grads, grad_scale_func=scale)
        no_sync = [module.no_sync for module in self._modules]
        set_in_megatron(self.stages[0].config, no_sync_func=no_sync if len(no_sync) > 1 else no_sync[0])


def _tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer, and its state of their shapes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.state.get(parameter, {}).values()
            yield from (t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape)


def _optimizer_config(settings: Optimizer, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _set_learning_rate(scheduler: OptimizerParamScheduler, settings: Optimizer) -> None:
    """Continue the schedule from its current step with the settings' learning rate, which may have changed.

    Megatron's checkpoint has the last rate, but not the first: a resumed schedule has that of the run's beginning.
    """
    rates = _first_rate(settings), settings.lr
    if (scheduler.init_lr, scheduler.max_lr) == rates:
        return
    scheduler.init_lr, scheduler.max_lr = rates
    for group in scheduler.optimizer.param_groups:
        group["max_lr"] = settings.lr
    scheduler.step(increment=0)


def _first_rate(settings: Optimizer) -> float:
    """Return the learning rate of the first update, which is above 0."""
    return settings.lr / (settings.warmup_steps + 1)


def _scheduler(optimizer: Any, settings: Optimizer, steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=_first_rate(settings),
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
