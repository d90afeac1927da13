"""Runs the benchmark on one rank: checks each method once between real engines, then times them in turns."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from hybrid3d import distributed, launch_environment
from hybrid3d.bench.baselines import GatherBaseline, Peers, Wire, bytes_by_peer
from hybrid3d.bench.values import SyntheticChanges, SyntheticWeights, fill, wrong
from hybrid3d.config import Recipe
from hybrid3d.config.schema import is_due
from hybrid3d.distributed import RoleGroups
from hybrid3d.inputs.models import read_config
from hybrid3d.ledger import wait_for_all
from hybrid3d.reshard.delta.executor import DeltaExecutor
from hybrid3d.reshard.ends import NOTHING_TRACKED, NoSink, NoSource, PlainSource, Sink, Source, WeightSink, WeightSource
from hybrid3d.reshard.move.device import device, synchronize
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.plan.classes import Signature, canonical_shapes, layer_of
from hybrid3d.reshard.plan.layout import Demand, Holdings
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import weight_sync
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.runtime import gather_groups
from hybrid3d.train.megatron.source import MegatronWeights, megatron_weights

T = TypeVar("T")


class Method(Protocol):
    """Another way to bring all weights from Megatron to vLLM, which the sync is compared with."""

    nbytes: int  # of its buffers

    @property
    def operations(self) -> int:
        """The sends, receives and copies of a run."""
        ...

    def run(self) -> int:
        """Run once, and return the received bytes."""
        ...


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

    Every rank calls every method together.

    Args:
        changed: the fraction of all elements that syncs of changed elements send; None leaves these syncs out.

    Attributes:
        group: all ranks.
        changes: which elements of what this rank trains differ, if syncs of changed elements are measured.
        sync: that of a run between these engines.
        ends: the other ranks, what this rank holds and what it wants, for the methods that are compared with the sync;
            None where other ranks generate than train, because nothing is compared there.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: RoleGroups,
        slots: Sequence[int],
        changed: float | None,
        on_progress: Callable[[str], None],
    ):
        self._groups = groups
        self.group = group = groups.everyone
        self._on_progress = on_progress
        on_progress("building both engines")
        config, roles = read_config(recipe.model.path), recipe.role_ranks
        self._trained: MegatronWeights | None = None
        if group.rank() in roles["train"]:
            model = build_model(config, recipe.train, getattr(torch, recipe.model.dtype))
            self._trained = megatron_weights(model, config)
        self._engine: RolloutEngine | None = None
        sink: WeightSink = NoSink()
        if group.rank() in roles["generation"]:
            self._engine = RolloutEngine(recipe, groups.own.rank(), launch_environment.run_id(), slots)
            sink = self._engine.sink()
        on_progress("planning")
        self._weights = SyntheticWeights(0, 1, changed or 0.0)
        self.changes: SyntheticChanges | None = None
        if changed is not None and self._trained is not None:
            self.changes = SyntheticChanges.create(self._weights, self._trained.holdings, self._trained.tensors)
        source: WeightSource = NoSource()
        if self._trained is not None:
            source = PlainSource(self._trained.tensors, self._trained.holdings, changes=self.changes or NOTHING_TRACKED)
        transport_group = groups.weights if recipe.is_split else None
        self.sync = sync = weight_sync(recipe, group, source, sink, transport_group=transport_group)
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
        self._methods: dict[str, Callable[[], object]] = {
            "hybrid3d": lambda: self._add("hybrid3d", self._whole(self._hybrid.run).seconds),
            "verified": lambda: self._whole(lambda: self._hybrid.run(verify=True)),
            "wire": self._wire.run,
            "finalize": lambda: self._whole(self._finalize),
            "sync": lambda: self._run_sync("sync", dense=True),
        }
        self._verifies = is_due(recipe.sync.verify, 0)
        if changed is not None:
            self._prepare_deltas()
        self._compared: dict[str, Method] = {}
        self._of_changes = {"delta"}
        self.ends: tuple[Peers, tuple[Holdings, Source], tuple[Demand, Sink]] | None = None
        if not recipe.is_split:
            self._prepare_gathering([signatures[r] for r in sorted(signatures)], recipe.sync.bucket_bytes)
        self._phases: dict[str, dict[str, float]] = {
            name: defaultdict(float) for name in ("hybrid3d", "delta", "sync", "delta_sync") if name in self._methods
        }

    def _prepare_deltas(self) -> None:
        """Add the methods that send changed elements."""
        sync = self.sync
        self._bits = {} if self.changes is None else self.changes.bits
        self._delta = DeltaExecutor(sync.plan, sync.sparse, sync.source, self._sink, sync.transport, device())
        self._methods |= {
            "delta": lambda: self._add("delta", self._whole(lambda: self._delta.run_delta(self._bits)).seconds),
            "delta_sync": lambda: self._run_sync("delta_sync", dense=False),
        }

    def _prepare_gathering(self, signatures: Sequence[Signature], bucket_bytes: int) -> None:
        """Add the gather on every rank, for ranks that have both engines."""
        assert self._trained is not None, "each rank trains"
        sync, local_bytes = self.sync, self.sync.plan.local_bytes
        peers = Peers.create(signatures, canonical_shapes(signatures), gather_groups(), self.group)
        self.ends = ends = peers, (self._trained.holdings, sync.source), (self._wanted.demand, self._sink)
        gather = GatherBaseline(*ends, bucket_bytes, sync.transport, device())
        self.compare("gather", gather)
        self._methods["gather_wire"] = Wire(*gather.bytes_by_peer(), local_bytes, sync.transport, device()).run

    def compare(self, name: str, method: Method, of_changes: bool = False) -> None:
        """Add a method that is checked, timed and counted like the sync; one `of_changes` sends changed elements."""
        self._compared[name] = method
        self._methods[name] = lambda: self._whole(method.run)
        if of_changes:
            self._of_changes.add(name)

    def _fill(self, weights: SyntheticWeights) -> None:
        """Give what this rank trains these values."""
        if self._trained is not None:
            fill(self._trained.holdings, self.sync.source, weights)

    def _run_sync(self, method: str, dense: bool) -> None:
        if dense:
            self.sync.require_dense()
        report = self.sync.run(0, self._verifies)
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
            self._phases[method][phase] += seconds

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return each method's seconds, bytes, operations and memory, and whether it was bit-exact, and shut vLLM down.

        What is returned is equal on every rank.
        """
        exact = {}
        checked = [name for name in ("hybrid3d", *self._compared, "delta") if name in self._methods]
        for number, name in enumerate(checked):
            self._on_progress(f"checking every bit of {name}")
            by_rank = distributed.gather_objects(self._wrong(name, 2 * number), self.group)
            exact[name] = sorted({tensor for wrong in by_rank for tensor in wrong})
        taken: dict[str, list[float]] = {name: [] for name in self._methods}
        for turn in range(repeats + 1):  # the first is a warmup
            self._on_progress(f"run {turn} of {repeats}" if turn else "warming up")
            for name, seconds in taken.items():
                seconds.append(self._seconds(name))
            if not turn:
                self._phases = {method: defaultdict(float) for method in self._phases}
        phases = distributed.gather_objects(self._phases, self.group)
        numbers = self._numbers()
        dist.barrier(self.group)
        rank, ranks = self.group.rank(), self.group.size()
        if self._engine is not None:
            self._engine.close()  # destroys the groups
        wait_for_all(self._groups.store, rank, ranks)
        return {
            **numbers,
            "bit_exact": {name: not wrong for name, wrong in exact.items()},
            "wrong": {name: wrong[:20] for name, wrong in exact.items()},
            "seconds": {name: statistics.median(seconds[1:]) for name, seconds in taken.items()},
            "phases": {method: _means([of_rank[method] for of_rank in phases], repeats) for method in self._phases},
            "spread": {name: [min(seconds[1:]), max(seconds[1:])] for name, seconds in taken.items()},
        }

    def _wrong(self, method: str, number: int) -> list[str]:
        """Run a method, and return the tensors of this rank that differ in any bit from the expected values.

        A method that sends changed elements runs after a dense sync of the weights before the change.
        """
        expected = SyntheticWeights(number)
        if method in self._of_changes:
            self._fill(expected)
            self._methods["hybrid3d"]()
            expected = SyntheticWeights(number, number + 1, self._weights.fraction)
        self._fill(expected)
        self._sink.expected, self._sink.wrong = expected, []
        self._methods[method]()
        self._sink.expected = None
        return self._sink.wrong

    def _seconds(self, method: str) -> float:
        """Run a method once, and return the seconds of the slowest rank."""
        if "delta_sync" in self._methods and method in ("sync", "delta_sync"):
            before = dict(self._phases[method])
            self._methods[method]()  # they free each other's staging memory
            self._phases[method] = defaultdict(float, before)
        synchronize()
        dist.barrier(self.group)
        start = time.perf_counter()
        self._methods[method]()
        synchronize()
        return float(max(distributed.gather_objects(time.perf_counter() - start, self.group)))

    def _finalize(self) -> None:
        """Run vLLM's processing after loading, without transferring anything."""
        for layer in self.sync.plan.layers:
            self._wanted.open(layer)
            self._wanted.close(layer)

    def _numbers(self) -> dict[str, int]:
        """Return sums over ranks, or maxima for keys that start with `max_`; equal on every rank."""
        sync, plan = self.sync, self.sync.plan
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
        for name, method in self._compared.items():
            found[f"{name}_bytes"] = self._whole(method.run)
            found[f"max_{name}_buffer_bytes"], found[f"{name}_operations"] = method.nbytes, method.operations
        if "delta" in self._methods:
            found |= self._delta_numbers()
        every = distributed.gather_objects(found, self.group)
        return {key: (max if key.startswith("max_") else sum)(one[key] for one in every) for key in found}

    def _delta_numbers(self) -> dict[str, Any]:
        done = self._whole(lambda: self._delta.run_delta(self._bits))
        pieces = [piece for piece in self._wanted.demand.pieces if piece.name in self.sync.sparse]
        return {
            "delta_bytes": done.received_bytes,
            "delta_bound_bytes": done.bound_bytes,
            "delta_network_bytes": done.network_bytes,
            "sparse_bytes": sum(piece.nbytes for piece in pieces),
            "max_delta_staging_bytes": done.staging_bytes + done.lent_bytes,
            "max_bitmap_bytes": sum(bits.nbytes for bits in self._bits.values()) + done.scratch_bytes,
            "delta_operations": self._delta.operations,
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
