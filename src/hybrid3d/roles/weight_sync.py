"""Train -> rollout: the plan that all ranks agree on, made once, and its execution, every step."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.reshard.classes import signature_of
from hybrid3d.reshard.coverage import check_arrivals, check_same_tensors, lower_bound
from hybrid3d.reshard.executor import Executor, Report, Tensors
from hybrid3d.reshard.planner import LocalPieces, Routes
from hybrid3d.reshard.ready import ready_after
from hybrid3d.reshard.sharing import sharable
from hybrid3d.reshard.stamp import layer_of
from hybrid3d.reshard.transport import as_bytes, make_transport
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.train.runtime import SideStream, device, synchronize
from hybrid3d.train.weights import MegatronWeights, canonical_shapes


@dataclass(frozen=True)
class SyncReport:
    """One sync on this rank. Bytes are measured by the transport and by what was allocated, not read off the plan.

    Attributes:
        seconds: from its beginning to its end.
        exposed_seconds: those of them in which nothing else was done.
        shared_bytes: of vLLM's tensors that lie in Megatron's memory.
        corrupted: tensors that, on some rank, had not landed as they were sent and were moved once more.
        phases: seconds by phase of the execution.
    """

    seconds: float
    exposed_seconds: float
    received_bytes: int
    lower_bound_bytes: int
    staging_bytes: int
    finalize_bytes: int
    shared_bytes: int
    corrupted: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)


class CorruptSync(RuntimeError):
    """Weights do not land as they are sent: memory or a link of this machine is broken."""


class WeightSync:
    """Brings a rank's share of the rollout layout up to date with the train layout.

    One for an engine: under `sync.share_storage` the engine's tensors lie in what was trained, whoever writes them.

    Attributes:
        plan: what this rank sends, receives and copies.
        holders: what each group of ranks holds.
        source, sink: the trained weights, and vLLM's.
        lower_bound: the fewest bytes that this rank must receive.
        under_way: the number of the weights of a sync that has begun and not ended.

    `parts` says, by local tensor, in which part of the model it is updated: needed by `advance`.

    Raises (when made):
        PlanError: vLLM wants a tensor that Megatron does not hold, or twice the same.
        UnsupportedLoader: vLLM's loader of this model cannot be replayed on shards.
    """

    def __init__(
        self,
        recipe: Recipe,
        trained: MegatronWeights,
        engine: RolloutEngine,
        rank: int,
        parts: Mapping[str, int] | None = None,
    ):
        held = trained.holdings
        self.holders = holders = distributed.gather_unique(signature_of(held))
        self._engine = engine
        self._verify = recipe.sync.verify
        self.sink = engine.weights(canonical_shapes([side for _, side in holders]))
        wanted = self.sink.demand
        readers = distributed.gather_unique(signature_of(wanted))
        check_same_tensors(holders, readers)
        self._routes = Routes(holders, readers, recipe.sync.bucket_bytes, recipe.machine.gpus_per_node)
        self._rank_transfers = self._routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
        self._bucket_boundaries = self._routes.ends([self._rank_transfers], distributed.all_reduce_min)
        self.lower_bound = lower_bound({rank: held}, {rank: wanted})[rank]
        self.transport = make_transport(device(), dist.new_group(list(range(recipe.world_size))))
        self._trained = trained.tensors
        self.source = Tensors(trained.tensors)
        self._of_name = {piece.name: (parts or {}).get(piece.view.tensor, -1) for piece in held.pieces}
        self._to_share = recipe.sync.share_storage
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._shared_parts: dict[int | None, int] = {}  # by layer: the part in which the last of them is updated
        self._rank = rank
        self._bind()
        check_arrivals(self.plan, wanted)
        self._stream = SideStream()
        self.in_progress: int | None = None
        self._told = False

    def adopt(self, recipe: Recipe) -> None:
        """Verify as this recipe says, from the next sync that begins."""
        self._verify = recipe.sync.verify

    def _bind(self) -> None:
        """Every rank calls this together."""
        self.plan = self._routes.plan(self._rank, self._rank_transfers, self._bucket_boundaries)
        self.sink.prepare(self.plan.layers)
        self._executes = False
        self._ready = ready_after(
            self.plan, self._of_name, len(self._bucket_boundaries), distributed.all_reduce_max, self._shared_parts
        )

    def run(self, number: int) -> SyncReport:
        """Move the weights as they are now; every rank calls this together.

        Until it returns, the engine refuses to generate. Where a check finds that something has not landed as it was
        sent, everything is moved once more, and checked.

        Args:
            number: of these weights: how many updates they have behind them.

        Raises:
            CorruptSync: the second time it was no better.
        """
        self.begin(number)
        return self.finish()

    def begin(self, number: int) -> None:
        """In place of `run`: the weights are about to be updated, a part after another.

        Every rank then calls `advance` with each of its parts, and `finish`.
        """
        self.in_progress, self._began, self._exposed = number, time.perf_counter(), 0.0
        self._received, self._hidden = self.transport.received_bytes, 0
        self._engine.updates = None
        if not self._executes:  # before the first sync what is trained may be out of its memory
            self._executor = Executor(self.plan, self.source, self.sink, self.transport, device())
            self._executes = True
        self._verifying = is_verified(self._verify, number)
        for live, lies in self._shared:
            if live.data_ptr() != lies.data_ptr():
                raise RuntimeError("vLLM has moved weights that lie in Megatron's memory: leave sync.share_storage out")
        with self._beside():
            self.sink.begin()
            self._executor.begin(self._verifying)

    def advance(self, part: int, last: bool) -> None:
        """This rank's parts up to this one have their new values; the others come to theirs without waiting for it.

        Args:
            last: it was the last of this rank, of which others may have more: they wait for all that it has to send.
        """
        self._hidden = self.transport.received_bytes - self._received
        with self._beside():
            self._executor.advance(len(self._ready) if last else bisect_right(self._ready, part))

    def _tell_hidden(self, received: int) -> None:
        """To this rank's log, once."""
        early = f"{self._hidden} of {received} received bytes"
        print(f"overlapped sync: {early} were on their way before the last weights were updated", flush=True)
        self._told = True

    def finish(self) -> SyncReport:
        """Move what is left, and see that it has landed, as `run` says.

        Raises:
            CorruptSync: it has not, twice.
        """
        with self._beside():
            done = self._executor.finish()
            self.sink.end()
            corrupted = _of_all_ranks(done.wrong) if self._verifying else ()
            if corrupted:
                done = self._once_more(corrupted)
            self._engine.reset_cache()
            synchronize()
        if self._to_share:  # from the first sync on, which shows what vLLM makes of each tensor
            self._share()
        if self._hidden and not self._told:
            self._tell_hidden(done.received_bytes)
        self._engine.updates, self.in_progress = self.in_progress, None
        return SyncReport(
            seconds=time.perf_counter() - self._began,
            exposed_seconds=self._exposed,
            received_bytes=done.received_bytes,
            lower_bound_bytes=self.lower_bound,
            staging_bytes=done.staging_bytes,
            finalize_bytes=self.sink.finalize_bytes,
            shared_bytes=sum(live.nbytes for live, _ in self._shared),
            corrupted=corrupted,
            phases=done.seconds,
        )

    def _share(self) -> None:
        """Lay vLLM's tensors into Megatron's memory, where they are the same bit for bit, and copy them no more."""
        live = self.sink.in_place()
        arriving = [t for _, t in self._rank_transfers if t.dst == self._rank]
        sizes = {name: tensor.numel() for name, tensor in live.items()}
        shared = set()
        for name, sharing in sharable(arriving, self.sink.demand, sizes).items():
            tensor, base = live[name], self._trained[sharing.source].detach()
            lies = base.as_strided(tensor.shape, tensor.stride(), base.storage_offset() + sharing.offset)
            if as_bytes(lies.contiguous()).equal(as_bytes(tensor.detach().contiguous())):
                tensor.data = lies
                self._shared.append((tensor, lies))
                shared.add(name)
        for t in arriving:
            if t.target is not None and t.target.view.tensor in shared:
                layer = layer_of(t.name)
                self._shared_parts[layer] = max(self._of_name[t.name], self._shared_parts.get(layer, -1))
        self._rank_transfers = [
            (k, t) for k, t in self._rank_transfers if t.target is None or t.target.view.tensor not in shared
        ]
        self._to_share = False
        self._bind()

    def _once_more(self, corrupted: Sequence[str]) -> Report:
        print(f"{len(corrupted)} tensors have not landed as sent: {_some(corrupted)}; once more", flush=True)
        self.sink.begin()
        done = self._executor.run(verify=True)
        self.sink.end()
        still = _of_all_ranks(done.wrong)
        if still:
            raise CorruptSync(f"{len(still)} tensors have not landed as they were sent, twice: {_some(still)}")
        return done

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is done here nothing else is done during, but on a GPU."""
        start = time.perf_counter()
        with self._stream.behind():
            yield
        self._exposed += time.perf_counter() - start


def is_verified(setting: str, number: int) -> bool:
    """Whether the sync of weights with so many updates is verified: `always`, `every-N` or `never`."""
    if setting.startswith("every-"):
        return number % int(setting.removeprefix("every-")) == 0
    return setting == "always"


def _of_all_ranks(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(sorted({name for of_rank in distributed.gather(names) for name in of_rank or ()}))


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
