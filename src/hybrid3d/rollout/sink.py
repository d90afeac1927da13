"""The sink of a sync: the demand of a vLLM rank, and where in its live model the weights are written.

Two units of the model are open at a time: one is finalized while the next one is written (`rollout/finalize.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter

from hybrid3d.reshard.fp8 import kind_of
from hybrid3d.reshard.move.memory import DeviceBuffer, align_up
from hybrid3d.reshard.plan.classes import layer_of, natural_sort_key
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Fill, Piece, Shape
from hybrid3d.rollout.finalize import (
    OpenUnit,
    allocate_on_meta,
    padding_of,
    swap_back,
    swap_in_loader_layout,
    tensors_of,
    units_of,
    unwrapped_layers,
)
from hybrid3d.rollout.loader_trace import Destination, UnsupportedLoader, record_demand

# Parameters that no loader writes: latent attention derives them from `kv_b_proj` after loading.
DERIVED_PARAMETERS = ("W_UV", "W_UK_T")
MAX_OPEN_UNITS = 2


class SinkOwner:
    """The engine whose weights a sink receives; this one stands for that of a model which only receives weights.

    The version of the weights is None while they are incomplete; they may be freed between syncs.
    """

    weight_version: int | None = None
    discards_weights = False

    def reset_cache(self) -> None:
        """Drop what was computed with older weights."""


class EngineSink:
    """The part of a sink (`reshard.ends.WeightSink`) that concerns the engine which has the weights."""

    def __init__(self, owner: SinkOwner | None):
        self._owner = owner or SinkOwner()

    @property
    def version(self) -> int | None:
        return self._owner.weight_version

    @property
    def keeps_weights(self) -> bool:
        return not self._owner.discards_weights

    def begin(self) -> None:
        self._owner.weight_version = None

    def commit(self, version: int) -> None:
        """Let the engine generate with the weights. RuntimeError: requests answered in part by older ones still run."""
        self._owner.reset_cache()
        self._owner.weight_version = version


class VllmSink(EngineSink):
    """The demand of one vLLM rank, and the sink (`reshard.ends.WeightSink`) that receives it.

    Attributes:
        demand: the pieces that the rank needs, ordered by layer; known once `demand_for` has been called.
        finalize_bytes: memory that open units take in addition to the live tensors.
    """

    demand: Demand

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        requantized: frozenset[str] = frozenset(),
        owner: SinkOwner | None = None,
    ):
        """Receive the weights of a model, for the engine that has it, if there is one.

        Args:
            requantized: the local names of weights in FP8 that arrive as vLLM would quantize them anew, with scales
                that are powers of two, so that it need not.
        """
        super().__init__(owner)
        self._model, self._vllm_config, self._requantized = model, vllm_config, requantized
        self._device = vllm_config.device_config.device
        self._units = units_of(model)
        self._layer_of = {name: layer for layer, unit in self._units.items() for name in unit.names()}
        self._buffers = [DeviceBuffer(0, self._device)] * MAX_OPEN_UNITS
        self._open_units: dict[int | None, OpenUnit] = {}
        self._opened: set[int | None] = set()  # units between `open` and `close`
        self._pending: set[int | None] = set()

    def demand_for(self, shapes: Mapping[str, Shape]) -> Demand:
        with unwrapped_layers(self._model):
            live = swap_in_loader_layout(self._model, allocate_on_meta())
            try:
                destinations = [
                    Destination(name, tensor, padding_of(module, key, tensor))
                    for name, module, key, tensor in tensors_of(self._model)
                    if key not in DERIVED_PARAMETERS and not isinstance(tensor, KVCacheScaleParameter)
                ]
                with set_current_vllm_config(self._vllm_config):
                    dtype = self._vllm_config.model_config.dtype
                    demand = record_demand(self._model, shapes, dtype, destinations)
            finally:
                swap_back(live)
        for piece in demand.pieces:
            if layer_of(piece.name) != self._layer_of[piece.view.tensor]:
                raise UnsupportedLoader(
                    f"vLLM's loader writes {piece.name} into {piece.view.tensor}, which is in another layer"
                )
        self.demand = replace(demand, pieces=tuple(sorted(demand.pieces, key=_piece_order)))
        return self.demand

    @property
    def max_finalize_bytes(self) -> int:
        """Upper bound of `finalize_bytes`: the size of the largest unit, times the number of open units."""
        tensors: dict[str, int] = defaultdict(int)
        dtypes = {piece.view.tensor: piece.dtype for piece in self.demand.pieces}
        for piece in self.demand.pieces:
            tensors[piece.view.tensor] += piece.nbytes
        # A vocabulary shard may be padding only: it is filled, and no piece has its dtype.
        default_itemsize = self._vllm_config.model_config.dtype.itemsize
        for fill in self.demand.fills:
            dtype = dtypes.get(fill.view.tensor)
            tensors[fill.view.tensor] += math.prod(fill.size) * (default_itemsize if dtype is None else ITEMSIZE[dtype])
        units: dict[int | None, int] = defaultdict(int)
        for name, nbytes in tensors.items():
            units[self._layer_of[name]] += align_up(nbytes)
        return MAX_OPEN_UNITS * max(units.values())

    @property
    def finalize_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def prepare(self, order: Sequence[int | None]) -> None:
        """Assign memory to the tensors of every unit. This is called before the first sync, and for each new plan.

        The layers will be opened in this order; None stands for the modules outside of layers.
        """
        self._open_units, self._buffers = {}, []  # free their memory first
        fills: dict[int | None, list[Fill]] = defaultdict(list)
        for fill in self.demand.fills:
            fills[self._layer_of[fill.view.tensor]].append(fill)
        open_units = {layer: OpenUnit(self._units[layer], fills[layer], self._requantized) for layer in order}
        sizes = [[open_units[layer].extra_bytes for layer in order[i::MAX_OPEN_UNITS]] for i in range(MAX_OPEN_UNITS)]
        self._buffers = [DeviceBuffer(max(unit_sizes, default=0), self._device) for unit_sizes in sizes]
        for i, layer in enumerate(order):
            open_units[layer].place(self._buffers[i % MAX_OPEN_UNITS])
        self._open_units = open_units

    @property
    def rounded_scales(self) -> set[str]:
        """The kinds of tensors that vLLM would quantize anew unless their scales are powers of two."""
        return {kind_of(piece.name) for piece in self.demand.pieces if piece.view.tensor in self._requantized}

    def kept_tensors(self) -> set[str]:
        """Return the local names of tensors that a sync writes in live memory and that finalizing does not move."""
        return {name for unit in self._open_units.values() for name in unit.kept_tensors()}

    def begin(self) -> None:
        """Begin a sync of all units; live tensors stay in place until their unit is opened."""
        super().begin()
        for buffer in self._buffers:
            buffer.allocate()
        self._pending = set(self._open_units)

    def write(self, piece: Piece) -> torch.Tensor:
        return self._open_units[self._layer_of[piece.view.tensor]].view(piece.view, piece.box.size)

    def open(self, layer: int | None) -> None:
        self._open_units[layer].open()
        self._opened.add(layer)

    def close(self, layer: int | None) -> None:
        self._open_units[layer].finalize(self._vllm_config)
        self._opened.remove(layer)
        self._pending.remove(layer)

    def abandon(self) -> None:
        """Put the live tensors back where a sync was interrupted, so that another sink can write new weights."""
        for layer in self._opened:
            self._open_units[layer].abandon()
        self._opened.clear()

    def skip(self, layer: int | None) -> None:
        """Count a layer as done without `open` and `close`: its data stays as written, and vLLM does not process it."""
        self._pending.remove(layer)

    def end(self) -> None:
        """End the sync and free the extra memory.

        Raises:
            RuntimeError: some units were not finalized; the model is not usable until a sync succeeds.
        """
        for buffer in self._buffers:
            buffer.release()
        if self._pending:
            raise RuntimeError(
                f"the sync ended with {len(self._pending)} of {len(self._open_units)} units not finalized"
            )


def names_of(weights: Iterable[torch.Tensor], model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that have these weights' memory.

    Raises:
        RuntimeError: some weights are in other memory, so that a sync would not know what vLLM does with them.
    """
    addresses = {weight.data_ptr() for weight in weights}
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.data_ptr() in addresses}
    if missing := len(addresses) - len({parameter.data_ptr() for parameter in found.values()}):
        raise RuntimeError(
            f"vLLM quantized {len(addresses)} weights anew, and {missing} are no parameters of its model"
        )
    return frozenset(found)


def _piece_order(piece: Piece) -> tuple[float, list[tuple[int, str]]]:
    """Sort key of pieces: by layer, tensors outside of layers last, independent of the order in the checkpoint."""
    layer = layer_of(piece.name)
    return math.inf if layer is None else layer, natural_sort_key(piece.name)
