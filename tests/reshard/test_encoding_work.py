"""What `encoding_work` counts is what our own functions do: their operations are counted as they run, by torch."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from hybrid3d.reshard.delta.encoding import pack_bits
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.delta.executor import DeltaExecutor
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View
from hybrid3d.reshard.plan.planner import make_plan

# Operations that start nothing on a GPU
VIEWS = {
    *("view", "as_strided", "slice", "detach", "alias", "unsqueeze", "squeeze", "expand", "select", "reshape"),
    *("_unsafe_view", "permute", "transpose", "t", "split", "empty", "lift_fresh", "split_with_sizes", "unbind"),
    *("_local_scalar_dense", "is_nonzero"),
}


class Operations(TorchDispatchMode):
    """Counts the operations of a thread that would be launches on a GPU, waits for them, and the bytes they touch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        self.waits += name in ("nonzero", "_local_scalar_dense")
        if name in VIEWS:
            return result
        given, made = ([x for x in tree_flatten(y)[0] if isinstance(x, torch.Tensor)] for y in ((args, kwargs), result))
        self.launches += 3 if name == "nonzero" else len(args[0]) if name == "_foreach_copy_" else 1
        if name in ("index", "index_put_"):  # only the elements at the positions are touched
            elements, values = given[0].itemsize, made[0] if name == "index" else given[1]
            positions = [x for x in given[1:] if x.dtype == torch.int64]
            self.nbytes += 2 * values.numel() * elements + sum(x.nbytes for x in positions)
        elif name == "nonzero":
            self.nbytes += 2 * given[0].nbytes + made[0].nbytes
        elif name in ("zeros", "fill_", "zero_", "arange"):
            self.nbytes += sum(x.nbytes for x in made)
        elif name == "_foreach_copy_":
            self.nbytes += 2 * sum(x.nbytes for x in args[0])
        else:
            self.nbytes += sum(x.nbytes for x in given + made)
        return result


class Passing:
    """A transport between threads, whose own copies are not counted."""

    shared_memory, blocks_host, received_bytes, network_bytes = None, True, 0, 0

    def __init__(self, rank: int, boxes: dict[tuple[int, int, int], queue.Queue]):
        self._rank, self._boxes, self._received = rank, boxes, list[tuple[torch.Tensor, int, int]]()

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        with _disable_current_modes():
            self._boxes.setdefault((self._rank, dst, tag), queue.Queue()).put(tensor.clone())

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._received.append((tensor, src, tag))

    def run(self) -> Passing:
        pending = Passing(self._rank, self._boxes)
        pending._received, self._received = self._received, []
        return pending

    def wait(self) -> None:
        with _disable_current_modes():
            for tensor, src, tag in self._received:
                tensor.copy_(self._boxes.setdefault((src, self._rank, tag), queue.Queue()).get(timeout=60))


_counting, _tolist = threading.local(), torch.Tensor.tolist


@pytest.fixture(autouse=True)
def count_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a list that is made of a tensor as a wait; torch does not dispatch it."""

    def tolist(tensor: torch.Tensor) -> list:
        _counting.operations.waits += 1
        return _tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)


def measure(names: list[str], held: list[View], wanted: list[View], local: bool, fraction: float) -> list[Any]:
    """Return by rank the operations of a run and what is counted; rank 0 has boxes [64, 4096] that rank 1 (0) wants."""
    box = Box((0, 0), (64, 4096))
    reader = 0 if local else 1
    demand = Demand(tuple(Piece(n, box, v, "bfloat16") for n, v in zip(names, wanted, strict=True)), ())
    holdings = Holdings(tuple(Piece(n, box, v, "bfloat16") for n, v in zip(names, held, strict=True)))
    size = 64 * 8192 * len(names)
    source, sink = torch.randn(size).bfloat16(), torch.zeros(size, dtype=torch.bfloat16)
    flags = torch.rand(size, generator=torch.Generator().manual_seed(0)) < fraction
    boxes: dict[tuple[int, int, int], queue.Queue] = {}
    plan = make_plan({0: holdings}, {reader: demand}, 1 << 30)
    sparse = frozenset(names)

    def run(rank: int) -> tuple[Operations, EncodingWork]:
        memory = NamedTensors({"held": source}), NamedTensors({"wanted": sink})
        executor = DeltaExecutor(plan[rank], sparse, *memory, Passing(rank, boxes))
        executor._bind_changes(changes := {"held": pack_bits(flags)} if rank == 0 else {})
        with Operations() as counted:
            _counting.operations = counted
            executor.run_delta(changes)
        return counted, count_encoding(plan[rank], sparse)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, sorted(plan)))
    for view in range(len(names)):  # it is a sync
        a, b = (t.as_strided(box.size, v[view].stride, v[view].offset) for t, v in ((source, held), (sink, wanted)))
        changed = flags.as_strided(box.size, held[view].stride, held[view].offset)
        assert b.equal(torch.where(changed, a, 0))
    return found


def dense(number: int) -> View:
    return View("held", number * 64 * 8192, (4096, 1))


def gapped(number: int) -> View:
    return View("held", number * 64 * 8192, (8192, 1))


def on(tensor: str, views: list[View]) -> list[View]:
    return [View(tensor, view.offset, view.stride) for view in views]


LAYER = "model.layers.0."
CASES = {
    "one contiguous box": ([LAYER + "a"], [dense(0)], [dense(0)]),
    "one box of columns": ([LAYER + "a"], [gapped(0)], [gapped(0)]),
    "columns of a contiguous box": ([LAYER + "a"], [gapped(0)], [dense(0)]),
    "equal experts": ([f"{LAYER}experts.{i}.a" for i in range(4)], *[[dense(i) for i in range(4)]] * 2),
    "three kinds": ([LAYER + x for x in "abc"], *[[dense(0), gapped(1), dense(2)]] * 2),
}


@pytest.mark.parametrize("local", [False, True], ids=["sent", "local"])
@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_that_run(case: str, local: bool) -> None:
    names, held, wanted = CASES[case]
    for counted, work in measure(names, on("held", held), on("wanted", wanted), local, 0.01):
        assert work.launches == pytest.approx(counted.launches, rel=0.12, abs=4)
        assert work.host_waits == pytest.approx(counted.waits, abs=1)
        assert counted.launches > 10


@pytest.mark.parametrize("fraction", [0.001, 0.007, 0.02, 0.1])
@pytest.mark.parametrize("case", list(CASES)[:2])
def test_bytes_are_those_that_are_touched(case: str, fraction: float) -> None:
    names, held, wanted = CASES[case]
    for counted, work in measure(names, on("held", held), on("wanted", wanted), False, fraction):
        assert work.moved_bytes(fraction) == pytest.approx(counted.nbytes, rel=0.15)
