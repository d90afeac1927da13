"""vLLM's tensors in Megatron's memory, where both engines hold the same elements: never copied again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid3d.reshard.move.transport import as_bytes
from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.reshard.plan.planner import Transfer
from hybrid3d.reshard.sharing import find_storage_aliases

if TYPE_CHECKING:  # a sync is between a source and a sink, so that ranks without vLLM can have one
    from hybrid3d.rollout.sink import RolloutWeights

KeyedTransfers = Sequence[tuple[int, Transfer]]


class SharedStorage:
    """The tensors of this rank's engine that alias the trainer's memory; none until `share`.

    Attributes:
        buckets: by layer, the optimizer bucket after which all shared tensors of the layer have their new values.
    """

    def __init__(self) -> None:
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.buckets: dict[int | None, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(live.nbytes for live, _ in self._shared)

    def check(self) -> None:
        """Raise RuntimeError where vLLM has moved a shared tensor to other memory."""
        for live, alias in self._shared:
            if live.data_ptr() != alias.data_ptr():
                raise RuntimeError("vLLM has moved weights that lie in Megatron's memory: leave sync.share_storage out")

    def share(
        self,
        transfers: KeyedTransfers,
        rank: int,
        trained: Mapping[str, torch.Tensor],
        sink: RolloutWeights,
        bucket_of: Mapping[str, int],
    ) -> KeyedTransfers:
        """Alias the tensors that are bit for bit equal in both engines; return the transfers that are still needed.

        Call it after a sync, which shows what vLLM makes of each tensor.

        Args:
            transfers: this rank's transfers, with their keys.
            trained: the trainer's local tensors.
            bucket_of: by canonical tensor, the optimizer bucket in which this rank updates it; -1 for none.
        """
        live = sink.in_place_tensors()
        arriving = [t for _, t in transfers if t.dst == rank]
        sizes = {name: tensor.numel() for name, tensor in live.items()}
        shared = set()
        for name, sharing in find_storage_aliases(arriving, sink.demand, sizes).items():
            tensor, base = live[name], trained[sharing.source].detach()
            alias = base.as_strided(tensor.shape, tensor.stride(), base.storage_offset() + sharing.offset)
            if as_bytes(alias.contiguous()).equal(as_bytes(tensor.detach().contiguous())):
                tensor.data = alias
                self._shared.append((tensor, alias))
                shared.add(name)
        for t in arriving:
            if t.target is not None and t.target.view.tensor in shared:
                layer = layer_of(t.name)
                self.buckets[layer] = max(bucket_of[t.name], self.buckets.get(layer, -1))
        return [(key, t) for key, t in transfers if t.target is None or t.target.view.tensor not in shared]
