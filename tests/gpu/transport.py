"""The NCCL transport on one GPU: a rank that sends to itself, and two executors that share the rank.

Gloo refuses to send to its own rank, so that on a CPU messages are copied within memory instead. Sends between
different ranks are part of the check `two_ranks`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from gpu import one_rank
from gpu.record import Record
from hybrid3d.bench.values import SyntheticWeights, fill, wrong
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.device import SideStream, synchronize
from hybrid3d.reshard.move.device import device as own_device
from hybrid3d.reshard.move.executor import ExecutionReport, Executor
from hybrid3d.reshard.move.memory import BatchedCopies, DeviceBuffer
from hybrid3d.reshard.move.transport import Pending, Transport, as_bytes, make_transport
from hybrid3d.reshard.move.verify import checksum
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View
from hybrid3d.reshard.plan.planner import make_plan

REPEATS = 50
ROWS = {"cuda": 16384, "cpu": 512}
BUCKET_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


class _Copies:
    """Stands in for gloo on one rank: copies each message within memory when it is started."""

    blocks_host = False
    shared_memory = None

    def __init__(self) -> None:
        self.received_bytes = self.network_bytes = 0
        self._sends: list[torch.Tensor] = []
        self._receives: list[torch.Tensor] = []

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._sends.append(tensor)

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received_bytes += tensor.nbytes
        self._receives.append(tensor)

    def run(self) -> Pending:
        for target, source in zip(self._receives, self._sends, strict=True):
            target.copy_(source)
        self._sends, self._receives = [], []
        return _Done()


class _Done:
    def wait(self) -> None: ...


def self_transport(group: dist.ProcessGroup) -> Transport:
    return make_transport(own_device(), group, ranks_per_node=1) if own_device().type == "cuda" else _Copies()


def sends_to_itself(record: Record, device: str) -> None:
    """Send a contiguous tensor directly and a strided one through staging, on a side stream, 50 times.

    Each time the tensors have other values, the staging memory is released, and checksums of both ends are compared.
    """
    transport, side = self_transport(one_rank.start()), SideStream()
    shape = (ROWS[device], 1024)
    direct, received = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "ab")
    whole, target = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "ab")
    half, columns = whole[:, 256:768], target[:, :512]
    buffers = [DeviceBuffer(half.numel() * 2, device) for _ in "ab"]
    outgoing, incoming = (b.flat_view(0, b.nbytes, torch.bfloat16).view(half.shape) for b in buffers)
    packing, unpacking = BatchedCopies(), BatchedCopies()
    packing.add(outgoing, half)
    unpacking.add(columns, incoming)
    pattern = torch.randn(shape, device=device)
    for buffer in buffers:
        buffer.release()
    began = time.perf_counter()
    for number in range(REPEATS):
        direct.copy_(pattern + number)
        whole.copy_(pattern - number)
        with side.behind():
            for buffer in buffers:
                buffer.allocate()
            packing.run()
            for tag, (source, there) in enumerate([(direct, received), (outgoing, incoming)]):
                transport.submit_recv(as_bytes(there), 0, tag)
                transport.submit_send(as_bytes(source), 0, tag)
            transport.run().wait()
            unpacking.run()
            sums = [checksum(box) for box in (direct, received, half, columns)]
            for buffer in buffers:
                buffer.release()
        synchronize()
        for kind, arrived, sent in (("direct", received, direct), ("staged", columns, half)):
            assert not one_rank.bits_differ(arrived, sent), (
                f"repeat {number}: the {kind} message arrived with other bits"
            )
        assert sums[::2] == sums[1::2], f"repeat {number}: checksums of equal boxes differ"
        record(repeats=number + 1)
    seconds = (time.perf_counter() - began) / REPEATS
    record(sent_bytes=transport.received_bytes, milliseconds_a_repeat=round(seconds * 1e3, 3))
    as_bytes(received)[12345] ^= 4
    assert checksum(received) != checksum(direct), "a flipped bit did not change the checksum"
    record(flipped_bit="seen", gb_per_s=round(_rate(transport, direct, received) / 1e9, 1))


def _rate(transport: Transport, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the bytes per second of the transport alone, sending one tensor."""
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        transport.submit_recv(as_bytes(target), 0, 0)
        transport.submit_send(as_bytes(source), 0, 0)
        transport.run().wait()
    synchronize()
    return 10 * source.nbytes / (time.perf_counter() - began)


class _Exchange:
    """Joins the transports of two executors: what both have submitted is started by whoever comes second."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.sends: dict[int, torch.Tensor] = {}
        self.receives: dict[int, torch.Tensor] = {}
        self.pending: Pending = _Done()
        self.both = threading.Barrier(2, action=self._start, timeout=60)

    def _start(self) -> None:
        assert self.sends.keys() == self.receives.keys(), "the two ends have submitted different messages"
        for tag, sent in self.sends.items():
            self._transport.submit_recv(self.receives[tag], 0, tag)
            self._transport.submit_send(sent, 0, tag)
        self.sends, self.receives = {}, {}
        self.pending = self._transport.run()


class _End:
    """One executor's transport. `corrupt` is called with what has arrived."""

    blocks_host = False
    shared_memory = None

    def __init__(self, exchange: _Exchange, corrupt: Callable[[dict[int, torch.Tensor]], None]):
        self.received_bytes = self.network_bytes = 0
        self._exchange, self._corrupt = exchange, corrupt
        self._arriving: dict[int, torch.Tensor] = {}

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._exchange.sends[tag] = tensor

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received_bytes += tensor.nbytes
        self._exchange.receives[tag] = self._arriving[tag] = tensor

    def run(self) -> Pending:
        self._exchange.both.wait()
        arriving, self._arriving = self._arriving, {}
        return _Arrival(self._exchange.pending, arriving, self._corrupt)


class _Arrival:
    def __init__(
        self, pending: Pending, arriving: dict[int, torch.Tensor], corrupt: Callable[[dict[int, torch.Tensor]], None]
    ):
        self._pending, self._arriving, self._corrupt = pending, arriving, corrupt

    def wait(self) -> None:
        self._pending.wait()
        self._corrupt(self._arriving)


def executors(record: Record, device: str) -> None:
    """Sync between two executors on one rank, verified; then with one bit flipped on the way, which must be found."""
    transport, side = self_transport(one_rank.start()), SideStream()
    holdings, demand, held, wanted = _two_ranks(ROWS[device] // 4, device)
    plans = make_plan({0: holdings}, {1: demand}, BUCKET_BYTES[device])
    source, sink = NamedTensors(held), NamedTensors(wanted)
    flips: list[int] = []

    def corrupt(arriving: dict[int, torch.Tensor]) -> None:
        if flips and arriving:
            next(iter(arriving.values()))[flips.pop()] ^= 1

    exchange = _Exchange(transport)
    ends = [_End(exchange, lambda arriving: None), _End(exchange, corrupt)]
    both = [Executor(plans[rank], source, sink, ends[rank], own_device()) for rank in (0, 1)]

    def run(executor: Executor) -> ExecutionReport:
        with side.behind():
            return executor.run(verify=True)

    def sync() -> list[ExecutionReport]:
        with ThreadPoolExecutor(2) as pool:
            reports = list(pool.map(run, both))
        synchronize()
        return reports

    dtypes = {piece.name: piece.dtype for piece in holdings.pieces}
    for number in range(3):
        fill(holdings, source, SyntheticWeights(number))
        reports = sync()
        assert reports[1].corrupted == (), f"sync {number}: verification found {reports[1].corrupted} corrupted"
        differing = wrong(demand.pieces, sink, SyntheticWeights(number), dtypes)
        assert not differing, f"sync {number}: {differing[:3]} arrived with other bits"
        record(syncs=number + 1)
    nbytes = sum(piece.nbytes for piece in demand.pieces)
    assert reports[1].received_bytes == nbytes, f"received {reports[1].received_bytes} bytes, expected {nbytes}"
    record(received_bytes=nbytes, staging_bytes=[r.staging_bytes for r in reports], buckets=len(plans[1].buckets))
    assert all(report.staging_bytes for report in reports), "nothing was staged"
    flips.append(77)
    found = sync()[1].corrupted
    assert len(found or ()) == 1, f"one bit was flipped on the way, and verification found {found}"
    record(flipped_bit_found_in=found)


def _two_ranks(rows: int, device: str) -> tuple[Holdings, Demand, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what rank 0 holds and rank 1 wants, and the tensors of both: contiguous, strided and small boxes."""
    width = 1024
    held, wanted, pieces, wants = {}, {}, [], []
    for layer in range(3):
        for kind, columns in (("rows", width), ("columns", width // 2), ("bias", 0)):
            name = f"model.layers.{layer}.{kind}.weight"
            shape = (rows, width) if columns else (width,)
            full = Box.full(shape)
            stride = (width, 1) if columns else (1,)
            held[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            pieces.append(Piece(name, full, View(name, 0, stride), "bfloat16"))
            box = Box((0, width - columns), (rows, columns)) if columns else full
            # Into a tensor that is twice as wide, as a fused one is, where only half of the columns are wanted
            pitch = width if columns == width // 2 else columns
            wanted[name] = torch.zeros((rows, pitch) if columns else shape, dtype=torch.bfloat16, device=device)
            wants.append(Piece(name, box, View(name, 0, (pitch, 1) if columns else (1,)), "bfloat16"))
    return Holdings(tuple(pieces)), Demand(tuple(wants)), held, wanted
