"""Measures bandwidth and latency of a recipe's process groups, each with the operation that it is used for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hybrid3d.bench.baselines import Wire
from hybrid3d.config import Recipe
from hybrid3d.distributed import RoleGroups, gather_objects
from hybrid3d.reshard.move.device import device, synchronize
from hybrid3d.reshard.move.transport import Transport, make_transport
from hybrid3d.train.megatron.runtime import groups_by_axis

PROBE_BYTES = 1 << 20
MAX_BYTES = 1 << 28
SECONDS_PER_RUN = 0.1  # that a measured run should take
REPEATS = 5
LATENCY_REPEATS = 20
SMALLEST_BYTES = 64  # of a message whose time is latency; each of up to 16 ranks gets a float32 of it

Operation = Callable[[int], Callable[[], object]]
"""Takes a number of bytes and returns what moves as many through a group once."""


@dataclass(frozen=True)
class GroupMeasurement:
    """How fast ranks communicate, or copy within their memory, while all of them do so.

    Attributes:
        name: of the group: an axis of the train layout, `sync`, or `copies` for copies of a rank alone.
        ranks: the number of ranks in a group.
        link: which of a machine's numbers is measured, as in `Machine`: `nvlink`, `network` or `copies`.
        bandwidth: bytes per second that a rank sends; of collectives, the bus bandwidth as nccl-tests defines it,
            which does not depend on the number of ranks. Of copies, bytes read plus bytes written.
        latency: seconds of the same operation with a few bytes; the median of the slowest rank's.
        nbytes: size of the messages of which `bandwidth` is the median.
    """

    name: str
    operation: str
    ranks: int
    link: str
    bandwidth: float
    latency: float
    nbytes: int


@dataclass(frozen=True)
class _Pattern:
    """An operation of this rank in one of its groups."""

    operation: str
    ranks: int
    link: str
    bus_factor: float  # of the operation's bytes, what a rank sends at least, which nccl-tests' bus bandwidth counts
    make: Operation


def measure(recipe: Recipe, groups: RoleGroups) -> list[GroupMeasurement]:
    """Measure all groups, one kind after the other, and all groups of a kind at once, as in a run.

    Every rank calls this together, after Megatron's groups were built. The results are equal on every rank.
    """
    everyone = groups.everyone
    patterns: dict[str, _Pattern] = {}
    if everyone.rank() in recipe.role_ranks["train"]:
        patterns |= _axes(recipe.machine.gpus_per_node)
    if recipe.rollout is not None:
        patterns |= _sync(recipe, groups)
    patterns["copies"] = _Pattern("copy", 1, "copies", 2, _copy)
    names = dict.fromkeys(name for of_rank in gather_objects(list(patterns), everyone) for name in of_rank)
    return [_measure(name.partition("/")[0], patterns.get(name), everyone) for name in names]


def _axes(ranks_per_node: int) -> dict[str, _Pattern]:
    """Return the pattern of each of Megatron's groups that has more than one rank."""
    operations: Mapping[str, tuple[str, Callable[[dist.ProcessGroup, int], Callable[[], object]]]] = {
        "tp": ("all-reduce", _all_reduce),
        "pp": ("send and receive", _send_on),
        "cp": ("send and receive", _send_on),  # Transformer Engine's ring
        "dp": ("all-reduce", _all_reduce),
        "ep": ("all-to-all", _all_to_all),
        "etp": ("all-reduce", _all_reduce),
    }
    patterns = {}
    for axis, group in groups_by_axis().items():
        size, (operation, start) = group.size(), operations[axis]
        if size == 1:
            continue
        factor = {"all-reduce": 2 * (size - 1) / size, "all-to-all": (size - 1) / size}.get(operation, 1.0)
        far = len({rank // ranks_per_node for rank in dist.get_process_group_ranks(group)}) > 1
        patterns[axis] = _Pattern(operation, size, "network" if far else "nvlink", factor, partial(start, group))
    return patterns


def _sync(recipe: Recipe, groups: RoleGroups) -> dict[str, _Pattern]:
    """Return the patterns of a sync: each rank sends to all that may want of it, in its node and in others."""
    group, per_node = groups.weights, recipe.machine.gpus_per_node
    rank, roles = group.rank(), recipe.role_ranks
    transport = make_transport(device(), group, per_node, kind=recipe.sync.transport)
    others = [other for other in range(group.size()) if other != rank]
    patterns = {}
    for link in ("nvlink", "network"):
        peers = [other for other in others if (other // per_node == rank // per_node) == (link == "nvlink")]
        sends = [peer for peer in peers if peer in roles["generation"]] if rank in roles["train"] else []
        receives = [peer for peer in peers if peer in roles["train"]] if rank in roles["generation"] else []
        if sends or receives:
            make = partial(_wire, sends, receives, transport)
            patterns[f"sync/{link}"] = _Pattern("sends to all", group.size(), link, 1.0, make)
    return patterns


def _all_reduce(group: dist.ProcessGroup, nbytes: int) -> Callable[[], object]:
    tensor = torch.zeros(max(1, nbytes // 4), device=device())
    return lambda: dist.all_reduce(tensor, group=group)


def _all_to_all(group: dist.ProcessGroup, nbytes: int) -> Callable[[], object]:
    count = max(1, nbytes // 4 // group.size()) * group.size()
    out, given = (torch.zeros(count, device=device()) for _ in range(2))
    return lambda: dist.all_to_all_single(out, given, group=group)


def _send_on(group: dist.ProcessGroup, nbytes: int) -> Callable[[], object]:
    """Send to the next rank while receiving from the one before, as pipeline stages do."""
    size, rank = group.size(), group.rank()
    given, out = (torch.zeros(max(1, nbytes // 4), device=device()) for _ in range(2))

    def run() -> None:
        send = dist.P2POp(dist.isend, given, group=group, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run


def _wire(sends: Sequence[int], receives: Sequence[int], transport: Transport, nbytes: int) -> Callable[[], object]:
    each = max(1, nbytes // max(len(sends), len(receives)))
    return Wire(dict.fromkeys(sends, each), dict.fromkeys(receives, each), 0, transport, device()).run


def _copy(nbytes: int) -> Callable[[], object]:
    given, out = (torch.zeros(max(1, nbytes), dtype=torch.uint8, device=device()) for _ in range(2))
    return lambda: out.copy_(given)


def _measure(name: str, pattern: _Pattern | None, everyone: dist.ProcessGroup) -> GroupMeasurement:
    """Measure a pattern; None is for a rank that takes no part in it."""
    _time(pattern, PROBE_BYTES, 1, everyone)  # connects the ranks
    probe = statistics.median(_time(pattern, PROBE_BYTES, 3, everyone))
    nbytes = int(min(MAX_BYTES, max(PROBE_BYTES, PROBE_BYTES * SECONDS_PER_RUN / probe)))
    seconds = statistics.median(_time(pattern, nbytes, REPEATS, everyone))
    latency = statistics.median(_time(pattern, SMALLEST_BYTES, LATENCY_REPEATS, everyone))
    facts = None if pattern is None else (pattern.operation, pattern.ranks, pattern.link, pattern.bus_factor)
    known = [one for one in gather_objects(facts, everyone) if one is not None]
    operation, ranks, _, factor = known[0]
    links = {one[2] for one in known}
    link = "network" if "network" in links else links.pop()  # the groups that cross nodes are the slowest
    return GroupMeasurement(name, operation, ranks, link, factor * nbytes / seconds, latency, nbytes)


def _time(pattern: _Pattern | None, nbytes: int, repeats: int, everyone: dist.ProcessGroup) -> list[float]:
    """Return the seconds of the slowest rank of each run, equal on every rank."""
    run = (lambda: None) if pattern is None else pattern.make(nbytes)
    taken = []
    for _ in range(repeats):
        synchronize()
        dist.barrier(everyone)
        start = time.perf_counter()
        run()
        synchronize()
        taken.append(time.perf_counter() - start)
    return [max(each) for each in zip(*gather_objects(taken, everyone), strict=True)]
