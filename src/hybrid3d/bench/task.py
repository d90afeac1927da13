"""Runs the benchmark on one rank: checks each method once between real engines, then times them in turns."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.bench.gathered_delta import GatheredDelta
from hybrid3d.bench.gathering import GatherBaseline, Peers
from hybrid3d.bench.packed_broadcast import PackedBroadcast
from hybrid3d.bench.trainer_gather import TrainerGather
from hybrid3d.bench.values import SyntheticChanges, SyntheticWeights, fill, wrong
from hybrid3d.bench.wire import Wire, bytes_by_peer
from hybrid3d.config import Recipe
from hybrid3d.config.interval import is_due
from hybrid3d.distributed import RoleGroups, wait_for_all
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.delta.executor import DeltaExecutor
from hybrid3d.reshard.ends import NOTHING_TRACKED, NoSink, NoSource, PlainSource, WeightSink, WeightSource
from hybrid3d.reshard.move.device import device, synchronize
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.plan.classes import Signature, canonical_shapes, layer_of
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import weight_sync
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.runtime import gather_groups
from hybrid3d.train.megatron.source import MegatronWeights, megatron_weights

ProgressCallback = Callable[[str], None]
CHECKED = ("hybrid3d", "gather", "packed_broadcast", "trainer_gather", "delta", "gathered_delta")
T = TypeVar("T")


class CheckedSink:
    """A sink for vLLM's memory without opening and finalizing layers, which are timed separately.

    If expected weights are set, it compares each layer with them as soon as the layer is written.
    """

    def __init__(self, sink: WeightSink, dtypes: Mapping[str, str]):
        self._sink = sink
        self._dtypes = dtypes
        self.expected: SyntheticWeights | None = None
        self.wrong: list[str] = []
        self.write = sink.write

    def open(self, layer: int | None) -> None: ...

    def close(self, layer: int | None) -> None:
        if self.expected is not None:
            pieces = [piece for piece in self._sink.demand.pieces if layer_of(piece.name) == layer]
            self.wrong += wrong(pieces, self._sink, self.expected, self._dtypes)
        self._sink.skip(layer)


class Bench:
    """The engines of a rank, and the methods that transfer weights from Megatron to vLLM.

    The methods that gather are left out where other ranks generate than train.

    Every rank calls every method together.

    Args:
        changed: the fraction of all elements that syncs of changed elements send; None leaves these syncs out.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: RoleGroups,
        slots: Sequence[int],
        changed: float | None,
        on_progress: ProgressCallback,
    ):
        self._groups = groups
        self._group = group = groups.everyone
        self._per_node = recipe.machine.gpus_per_node
        on_progress("building both engines")
        config, roles = read_config(recipe.model.path), recipe.role_ranks
        self._trained: MegatronWeights | None = None
        if group.rank() in roles["train"]:
            model = build_model(config, recipe.train, getattr(torch, recipe.model.dtype))
            self._trained = megatron_weights(model, config)
        self._engine: RolloutEngine | None = None
        sink: WeightSink = NoSink()
        if group.rank() in roles["generation"]:
            self._engine = RolloutEngine(recipe, groups.own.rank(), distributed.run_id(), slots)
            sink = self._engine.sink()
        on_progress("planning")
        self._weights = SyntheticWeights(0, 1, changed or 0.0)
        self._changes: SyntheticChanges | None = None
        if changed is not None and self._trained is not None:
            self._changes = SyntheticChanges.create(self._weights, self._trained.holdings, self._trained.tensors)
        source: WeightSource = NoSource()
        if self._trained is not None:
            source = PlainSource(
                self._trained.tensors, self._trained.holdings, changes=self._changes or NOTHING_TRACKED
            )
        transport_group = groups.weights if recipe.is_split else None
        self._sync = sync = weight_sync(recipe, group, source, sink, transport_group=transport_group)
        self._wanted = sync.sink
        if changed is not None:  # the first sync finds out which tensors can be sent sparsely
            self._fill(self._weights)
            sync.run(0)
            if not sync.sparse:
                raise RuntimeError("vLLM keeps no tensor as it is loaded: no sync can send changed elements alone")
            self._wanted.begin()  # its extra memory must be allocated when the methods are set up
        signatures = {r: signature for those, signature in sync.holders for r in those}
        self._sink = CheckedSink(self._wanted, _dtypes(signatures.values()))
        self._hybrid = Executor(sync.plan, sync.source, self._sink, sync.transport, device())
        self._wire = Wire(*bytes_by_peer(sync.plan), sync.plan.local_bytes, sync.transport, device())
        self.methods: dict[str, Callable[[], object]] = {
            "hybrid3d": lambda: self._add("hybrid3d", self._whole(self._hybrid.run).seconds),
            "verified": lambda: self._whole(lambda: self._hybrid.run(verify=True)),
            "wire": self._wire.run,
            "finalize": lambda: self._whole(self._finalize),
            "sync": lambda: self._run_sync("sync", dense=True),
        }
        self._verifies = is_due(recipe.sync.verify, 0)
        if changed is not None:
            self._prepare_deltas()
        if not recipe.is_split:
            self._prepare_gathering([signatures[r] for r in sorted(signatures)], recipe.sync.bucket_bytes)
        self.phases: dict[str, dict[str, float]] = {
            name: defaultdict(float) for name in ("hybrid3d", "delta", "sync", "delta_sync") if name in self.methods
        }

    def _prepare_deltas(self) -> None:
        """Add the methods that send changed elements."""
        sync = self._sync
        self._bits = {} if self._changes is None else self._changes.bits
        self._delta = DeltaExecutor(sync.plan, sync.sparse, sync.source, self._sink, sync.transport, device())
        self.methods |= {
            "delta": lambda: self._add("delta", self._whole(lambda: self._delta.run_delta(self._bits)).seconds),
            "delta_sync": lambda: self._run_sync("delta_sync", dense=False),
        }

    def _prepare_gathering(self, signatures: Sequence[Signature], bucket_bytes: int) -> None:
        """Add the methods of other trainers, for ranks that have both engines."""
        assert self._trained is not None, "each rank trains"
        sync, local_bytes = self._sync, self._sync.plan.local_bytes
        peers = Peers.create(signatures, canonical_shapes(signatures), gather_groups(), self._group)
        ends = (self._trained.holdings, sync.source), (self._wanted.demand, self._sink)
        self._gather = GatherBaseline(peers, *ends, bucket_bytes, sync.transport, device())
        self._gather_wire = Wire(*self._gather.bytes_by_peer(), local_bytes, sync.transport, device())
        self.methods |= {"gather": lambda: self._whole(self._gather.run), "gather_wire": self._gather_wire.run}
        self._broadcast = PackedBroadcast(peers, sync.plan, *ends, sync.transport, device())
        self._from_trainer = TrainerGather(
            *(peers, sync.plan, *ends, bucket_bytes, self._per_node, sync.transport, self._group, device())
        )
        self.methods |= {
            "packed_broadcast": lambda: self._whole(self._broadcast.run),
            "trainer_gather": lambda: self._whole(self._from_trainer.run),
        }
        if self._changes is not None:
            self._gathered = GatheredDelta(peers, sync.sparse, self._bits, *ends, sync.transport, device())
            self.methods["gathered_delta"] = lambda: self._whole(self._gathered.run)

    def _fill(self, weights: SyntheticWeights) -> None:
        """Give what this rank trains these values."""
        if self._trained is not None:
            fill(self._trained.holdings, self._sync.source, weights)

    def _run_sync(self, method: str, dense: bool) -> None:
        if dense:
            self._sync.require_dense()
        report = self._sync.run(0, self._verifies)
        assert bool(report.dense_reason) == dense, report.dense_reason
        self._add(method, report.phases)

    def _whole(self, run: Callable[[], T]) -> T:
        """Run a method, and check that it has written and closed every layer."""
        self._wanted.begin()
        done = run()
        self._wanted.end()
        return done

    def _add(self, method: str, phases: Mapping[str, float]) -> None:
        for phase, seconds in phases.items():
            self.phases[method][phase] += seconds

    def wrong(self, method: str, number: int) -> list[str]:
        """Run a method, and return the tensors of this rank that differ in any bit from the expected values.

        A method that sends changed elements runs after a dense sync of the weights before the change.
        """
        expected = SyntheticWeights(number)
        if method in ("delta", "gathered_delta"):
            self._fill(expected)
            self.methods["hybrid3d"]()
            expected = SyntheticWeights(number, number + 1, self._weights.fraction)
        self._fill(expected)
        self._sink.expected, self._sink.wrong = expected, []
        self.methods[method]()
        self._sink.expected = None
        return self._sink.wrong

    def seconds(self, method: str) -> float:
        """Run a method once, and return the seconds of the slowest rank."""
        if "delta_sync" in self.methods and method in ("sync", "delta_sync"):
            before = dict(self.phases[method])
            self.methods[method]()  # they free each other's staging memory
            self.phases[method] = defaultdict(float, before)
        synchronize()
        dist.barrier(self._group)
        start = time.perf_counter()
        self.methods[method]()
        synchronize()
        return float(max(distributed.gather_objects(time.perf_counter() - start, self._group)))

    def _finalize(self) -> None:
        """Run vLLM's processing after loading, without transferring anything."""
        for layer in self._sync.plan.layers:
            self._wanted.open(layer)
            self._wanted.close(layer)

    def numbers(self) -> dict[str, int]:
        """Return sums over ranks, or maxima for keys that start with `max_`; equal on every rank."""
        sync, plan = self._sync, self._sync.plan
        done = self._whole(self._hybrid.run)
        found = {
            "wanted_bytes": sum(piece.nbytes for piece in self._wanted.demand.pieces),
            "held_bytes": 0 if self._trained is None else sum(p.nbytes for p in self._trained.holdings.pieces),
            "local_bytes": plan.local_bytes,
            "received_bytes": done.received_bytes,
            "lower_bound_bytes": sync.lower_bound,
            "network_bytes": done.network_bytes,
            "network_bound_bytes": sync.network_bound,
            "wire_bytes": self._wire.run(),
            "max_received_bytes": done.received_bytes,
            "max_sent_bytes": plan.sent_bytes,
            "max_staging_bytes": done.staging_bytes,
            "max_lent_bytes": done.lent_bytes,
            "max_finalize_bytes": self._wanted.finalize_bytes,
            "operations": self._hybrid.operations,
            "wire_operations": self._wire.operations,
        }
        if "gather" in self.methods:
            found |= {
                "gather_bytes": self._gather_wire.run(),
                "max_gather_buffer_bytes": self._gather.nbytes,
                "gather_operations": self._gather.operations,
            }
            for name, method in (("packed_broadcast", self._broadcast), ("trainer_gather", self._from_trainer)):
                found[f"{name}_bytes"] = self._whole(method.run)
                found[f"max_{name}_buffer_bytes"], found[f"{name}_operations"] = method.nbytes, method.operations
        if "delta" in self.methods:
            found |= self._delta_numbers()
        every = distributed.gather_objects(found, self._group)
        return {key: (max if key.startswith("max_") else sum)(one[key] for one in every) for key in found}

    def _delta_numbers(self) -> dict[str, Any]:
        done = self._whole(lambda: self._delta.run_delta(self._bits))
        pieces = [piece for piece in self._wanted.demand.pieces if piece.name in self._sync.sparse]
        found = {
            "delta_bytes": done.received_bytes,
            "delta_bound_bytes": done.bound_bytes,
            "delta_network_bytes": done.network_bytes,
            "sparse_bytes": sum(piece.nbytes for piece in pieces),
            "max_delta_staging_bytes": done.staging_bytes + done.lent_bytes,
            "max_bitmap_bytes": sum(bits.nbytes for bits in self._bits.values()) + done.scratch_bytes,
            "delta_operations": self._delta.operations,
        }
        if "gathered_delta" in self.methods:
            found |= {
                "gathered_delta_bytes": self._whole(self._gathered.run),
                "max_gathered_delta_buffer_bytes": self._gathered.nbytes,
                "gathered_delta_operations": self._gathered.operations,
            }
        return found

    def close(self) -> None:
        """Shut vLLM down."""
        dist.barrier(self._group)
        rank, ranks = self._group.rank(), self._group.size()
        if self._engine is not None:
            self._engine.close()  # destroys the groups
        wait_for_all(self._groups.store, rank, ranks)


def measure(
    recipe: Recipe,
    repeats: int,
    groups: RoleGroups,
    slots: Sequence[int],
    changed: float | None,
    on_progress: ProgressCallback,
) -> dict[str, Any]:
    """Return each method's seconds, bytes, operations and memory, and whether it was bit-exact; equal on every rank.

    Args:
        changed: as for `Bench`.
    """
    bench, group = Bench(recipe, groups, slots, changed, on_progress), groups.everyone
    exact = {}
    checked = [name for name in CHECKED if name in bench.methods]
    for number, name in enumerate(checked):
        on_progress(f"checking every bit of {name}")
        by_rank = distributed.gather_objects(bench.wrong(name, 2 * number), group)
        exact[name] = sorted({tensor for wrong in by_rank for tensor in wrong})
    taken: dict[str, list[float]] = {name: [] for name in bench.methods}
    for turn in range(repeats + 1):  # the first is a warmup
        on_progress(f"run {turn} of {repeats}" if turn else "warming up")
        for name, seconds in taken.items():
            seconds.append(bench.seconds(name))
        if not turn:
            bench.phases = {method: defaultdict(float) for method in bench.phases}
    phases = distributed.gather_objects(bench.phases, group)
    numbers = bench.numbers()
    bench.close()
    return {
        **numbers,
        "bit_exact": {name: not wrong for name, wrong in exact.items()},
        "wrong": {name: wrong[:20] for name, wrong in exact.items()},
        "seconds": {name: statistics.median(seconds[1:]) for name, seconds in taken.items()},
        "phases": {method: _means([of_rank[method] for of_rank in phases], repeats) for method in bench.phases},
        "spread": {name: [min(seconds[1:]), max(seconds[1:])] for name, seconds in taken.items()},
    }


def _means(of_ranks: Sequence[Mapping[str, float]], repeats: int) -> dict[str, float]:
    """Return the seconds of each phase, as means over ranks and runs."""
    return {phase: sum(one[phase] for one in of_ranks) / len(of_ranks) / repeats for phase in of_ranks[0]}


def _dtypes(signatures: Iterable[Signature]) -> dict[str, str]:
    """Return the dtype in which each tensor is held, by name."""
    found: dict[str, str] = {}
    for signature in signatures:
        for boxes, names in signature.items():
            found |= dict.fromkeys(names, boxes[0][1])
    return found
