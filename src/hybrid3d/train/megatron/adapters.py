"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) beside Megatron's linear layers.

Each linear layer of the checkpoint has its own pair of matrices, as in PEFT, also where Megatron computes several of
them at once (queries, keys and values; gate and up): which rows and columns of which canonical tensor a rank's weight
consists of is read from the weights that Megatron declares.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear, TERowParallelLinear
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear, pad

from hybrid3d.config import Lora
from hybrid3d.families import UnsupportedModel, adapter_names, is_adapted, is_expert
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece, Shape, View, contiguous_stride, pieces_by_name
from hybrid3d.train.megatron.cpu import DuplicatedLinear
from hybrid3d.train.megatron.runtime import USE_TE
from hybrid3d.train.megatron.source import ADAPTERS, MegatronWeights
from hybrid3d.train.megatron.stepping import place_of

# Linear layers whose weight TP shards by rows, by columns, and not at all
_BY_ROWS: tuple[type[torch.nn.Module], ...] = (ColumnParallelLinear,)
_BY_COLUMNS: tuple[type[torch.nn.Module], ...] = (RowParallelLinear,)
_WHOLE: type[torch.nn.Module] = DuplicatedLinear
if USE_TE:
    _BY_ROWS, _BY_COLUMNS, _WHOLE = (*_BY_ROWS, TEColumnParallelLinear), (*_BY_COLUMNS, TERowParallelLinear), TELinear


@dataclass(frozen=True)
class Factor:
    """One of the two matrices of an adapter on this rank.

    Attributes:
        name, shape: of the whole matrix in PEFT's files.
        box: the part of it that this rank has.
        is_sharded: whether the TP ranks have parts of it, and not all the same.
    """

    name: str
    shape: Shape
    box: Box
    is_sharded: bool

    def initial(self, seed: int) -> torch.Tensor:
        """Return this rank's part of the initial values, which depend on the name and the seed, not on the layout.

        As in PEFT, A is uniform as torch.nn.Linear's weight (Kaiming with a = sqrt(5)), and B is 0.
        """
        if self.name.endswith(".lora_B.weight"):
            return torch.zeros(self.box.size)
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(self.name.encode()) ^ seed)
        whole = torch.empty(self.shape).uniform_(-1, 1, generator=generator) / math.sqrt(self.shape[1])
        return whole[tuple(slice(a, b) for a, b in zip(self.box.start, self.box.stop, strict=True))]


class LinearAdapter(torch.nn.Module):
    """The adapters of one of Megatron's linear layers; called with the layer's input, it returns what to add.

    A layer that is sharded by rows of its weight has A whole on every TP rank, and B sharded; one that is sharded by
    columns has A sharded, and B whole.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        names: Sequence[str],
        pieces: Sequence[Piece],
        lora: Lora,
        seed: int,
        shapes: Mapping[str, Shape],
    ):
        """
        Args:
            names: the canonical tensors with adapters of which Megatron's whole weight consists.
            pieces: those parts of them that this rank has.
            shapes: the full shape of each canonical tensor.
        """
        super().__init__()
        self.is_expert = is_expert(names[0])
        self.splits_rows, self.splits_columns = isinstance(layer, _BY_ROWS), isinstance(layer, _BY_COLUMNS)
        self._scale, self._rank = lora.alpha / lora.rank, lora.rank
        tp = 1 if self.is_expert else parallel_state.get_tensor_model_parallel_world_size()
        self._communicates = tp > 1 and (self.splits_rows or self.splits_columns)
        self._splits_sequence = tp > 1 and _splits_sequence(layer)
        weight, of_name = layer.weight, pieces_by_name(pieces)
        assert isinstance(weight, torch.Tensor)
        columns = _slice_of(of_name[pieces[0].name], dim=1)
        self.named_factors: list[tuple[Factor, torch.nn.Parameter]] = []  # of `a` and `b`
        self.a, self.b = torch.nn.ParameterList(), torch.nn.ParameterList()
        self._used: list[int] = []  # which of the names have rows on this rank
        local: list[torch.Tensor] = []
        for number, name in enumerate(names):
            name_a, name_b = adapter_names(name)
            out, width = shapes[name]
            box = Box((0, columns.start), (lora.rank, columns.stop - columns.start))
            self._add(self.a, Factor(name_a, (lora.rank, width), box, self.splits_columns), seed, weight)
            if name in of_name:
                rows = _slice_of(of_name[name], dim=0)
                box = Box((rows.start, 0), (rows.stop - rows.start, lora.rank))
                self._add(self.b, Factor(name_b, (out, lora.rank), box, self.splits_rows), seed, weight)
                self._used.append(number)
                local.append(_local_rows(of_name[name], rows, weight.shape[1]))
        # Row i of the layer's output is row order[i] of those of the adapters, one after another; -1 where it has none
        order, at = torch.full((weight.shape[0],), -1), torch.cat(local)
        order[at] = torch.arange(len(at))
        is_same = bool((order == torch.arange(len(order))).all())
        self._is_partial = bool((order < 0).any())
        self.order: torch.Tensor | None
        self.register_buffer("order", None if is_same else order.to(weight.device), persistent=False)

    def _add(self, matrices: torch.nn.ParameterList, factor: Factor, seed: int, weight: torch.Tensor) -> None:
        for start, size, full in zip(factor.box.start, factor.box.size, factor.shape, strict=True):
            if start % size or full % size:
                raise UnsupportedModel(
                    f"{factor.name}: this rank has {size} of {full} from {start} on, and in checkpoints all parts must "
                    "be equal: lower train.tp to a divisor of the model's key-value heads"
                )
        values = torch.empty(factor.box.size, device="meta") if weight.is_meta else factor.initial(seed)
        parameter: Any = torch.nn.Parameter(values.to(device=weight.device, dtype=weight.dtype, copy=True))
        # Experts have no copies within a TP group, whose ranks have other experts
        parameter.tensor_model_parallel = factor.is_sharded or self.is_expert
        # Computed from this rank's part of each sequence, so that the gradients of the parts must be summed
        parameter.sequence_parallel = self._splits_sequence and not factor.is_sharded
        if self.is_expert:
            parameter.allreduce = False
        matrices.append(parameter)
        self.named_factors.append((factor, parameter))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = linear(hidden, torch.cat([*self.a])) * self._scale
        if self._communicates and self.splits_rows:
            if self._splits_sequence:
                inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
            else:
                inner = copy_to_tensor_model_parallel_region(inner)
        elif self._communicates:
            if self._splits_sequence:
                inner = reduce_scatter_to_sequence_parallel_region(inner)
            else:
                inner = reduce_from_tensor_model_parallel_region(inner)
        each = inner.split(self._rank, dim=-1)
        outer = torch.cat([linear(each[number], b) for number, b in zip(self._used, self.b, strict=True)], -1)
        if self.order is None:
            return outer
        if self._is_partial:
            outer = pad(outer, (0, 1))  # index -1 selects the 0 at the end
        return outer[..., self.order]

    @torch.no_grad()
    def added(self) -> torch.Tensor:
        """Return what the adapters amount to as a part of the layer's weight on this rank, in float32."""
        pairs = [(self.a[number].float(), b.float()) for number, b in zip(self._used, self.b, strict=True)]
        rows = torch.cat([b @ a for a, b in pairs]) * self._scale
        if self.order is None:
            return rows
        return (pad(rows, (0, 0, 0, 1)) if self._is_partial else rows)[self.order]


class Adapters(torch.nn.Module):
    """The adapters of a stage, beside its layers, which have hooks that add what these compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = torch.nn.ModuleList()  # of `LinearAdapter`
        self._weights: list[Any] = []  # of the layers; a list, so that they stay parameters of these
        self.enabled = True
        self._kept: list[torch.Tensor] | None = None

    def attach(self, layer: torch.nn.Module, adapter: LinearAdapter) -> None:
        """Add an adapter's output to that of a linear layer."""
        self.layers.append(adapter)
        self._weights.append(layer.weight)

        def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
            return (output[0] + adapter(inputs[0]), *output[1:]) if self.enabled else output

        layer.register_forward_hook(add)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to the weights of their layers, of which a copy stays in the memory of the CPU."""
        if self._kept is None:
            self._kept = [weight.detach().to("cpu", copy=True) for weight in self._weights]
        for weight, adapter in zip(self._weights, self.layers, strict=True):
            weight.copy_(weight.float() + adapter.added())

    @torch.no_grad()
    def unmerge(self) -> None:
        """Undo `merge`, bit for bit, by the copies, which stay; without them no merge has begun."""
        if self._kept is not None:
            for weight, kept in zip(self._weights, self._kept, strict=True):
                weight.copy_(kept)

    def named_factors(self) -> Iterator[tuple[Factor, torch.nn.Parameter]]:
        for adapter in self.layers:
            yield from adapter.named_factors

    def sharded_state_dict(self, prefix: str = "", *unused: Any, **settings: Any) -> dict[str, ShardedTensor]:
        """Return the matrices as Megatron's checkpoints name and shard them: by their names in PEFT's files."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        found = {}
        for adapter in self.layers:
            if adapter.is_expert:
                replica = parallel_state.get_expert_data_parallel_rank()
            else:
                replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            for factor, parameter in adapter.named_factors:
                dims = enumerate(zip(factor.box.start, factor.box.size, factor.shape, strict=True))
                splits = [(dim, start // size, full // size) for dim, (start, size, full) in dims if size < full]
                tp = 0 if factor.is_sharded or adapter.is_expert else parallel_state.get_tensor_model_parallel_rank()
                found[prefix + names[id(parameter)]] = ShardedTensor.from_rank_offsets(
                    factor.name, parameter, *splits, replica_id=(0, tp, replica)
                )
        return found


def add_adapters(
    stages: Sequence[GPTModel], weights: MegatronWeights, shapes: Mapping[str, Shape], lora: Lora, seed: int
) -> None:
    """Add adapters to the linear layers of a model that `lora` selects, and freeze all other parameters.

    The seed is that of their initial values, which are the same in every layout; `shapes`: of all canonical tensors.
    """
    named = {place_of(tensor): name for name, tensor in weights.tensors.items()}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in weights.pieces:
        if is_adapted(piece.name, len(piece.box.size), lora.target_modules):
            pieces[piece.view.tensor].append(piece)
    linear: tuple[type[torch.nn.Module], ...] = (*_BY_ROWS, *_BY_COLUMNS, _WHOLE)
    for stage in stages:
        stage.requires_grad_(False)
        adapters = Adapters()
        for module in stage.decoder.modules():
            if isinstance(module, linear):
                assert isinstance(module.weight, torch.Tensor)
                local = named.get(place_of(module.weight), "")
                names = sorted(
                    name for name in weights.parts.get(local, ()) if is_adapted(name, 2, lora.target_modules)
                )
                if names and not pieces[local]:  # with fewer key-value heads than TP ranks
                    raise UnsupportedModel(
                        f"{local}: this rank has no rows of {', '.join(names)}: lower train.tp, or add layers beside "
                        "them to lora.target_modules"
                    )
                if names:
                    adapters.attach(module, LinearAdapter(module, names, pieces[local], lora, seed, shapes))
        if not adapters.layers:
            raise UnsupportedModel(
                "this rank's layers have none of lora.target_modules, so that it would have nothing to train: add "
                "layers that each pipeline stage has"
            )
        stage.add_module(ADAPTERS, adapters)
        if stage.pre_process:  # else recomputed layers whose input needs no gradient would compute none at all
            stage.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def adapter_weights(stages: Sequence[GPTModel]) -> MegatronWeights:
    """Return a rank's adapters as pieces of the matrices in PEFT's files."""
    tensors: dict[str, torch.Tensor] = {}
    pieces = []
    for stage in stages:
        for factor, parameter in getattr(stage, ADAPTERS).named_factors():
            tensors[factor.name] = parameter
            view = View(factor.name, 0, contiguous_stride(factor.box.size))
            pieces.append(Piece(factor.name, factor.box, view, str(parameter.dtype).removeprefix("torch.")))
    return MegatronWeights(tensors, tuple(pieces), ())


def _slice_of(pieces: Sequence[Piece], dim: int) -> slice:
    """Return the rows or columns of a canonical tensor from the first to the last that pieces of it have."""
    return slice(min(p.box.start[dim] for p in pieces), max(p.box.stop[dim] for p in pieces))


def _local_rows(pieces: Sequence[Piece], rows: slice, columns: int) -> torch.Tensor:
    """Return for each of these rows of a canonical tensor the row of the local weight that it is."""
    local = torch.full((rows.stop - rows.start,), -1)
    for piece in pieces:
        first, start = piece.box.start[0] - rows.start, piece.view.offset // columns
        local[first : first + piece.box.size[0]] = torch.arange(start, start + piece.box.size[0])
    if bool((local < 0).any()):
        raise UnsupportedModel(f"{pieces[0].name}: the rows on this rank are not contiguous, which adapters need")
    return local


def _splits_sequence(layer: Any) -> bool:
    """Return whether the sequence is split over TP before a layer, or after one that shards columns."""
    is_sharded = isinstance(layer, (*_BY_ROWS, *_BY_COLUMNS))
    return bool((layer if is_sharded else layer.weight).sequence_parallel)
