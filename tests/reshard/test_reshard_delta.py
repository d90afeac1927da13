"""Syncs of changed elements: what lands is compared with numpy's truth, what is sent with the entropy of it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.delta.encoding import (
    count_bits,
    decode,
    encode,
    entropy_bytes,
    form_of,
    pack_bits,
    set_bits,
    unpack_bits,
)
from hybrid3d.reshard.delta.executor import DeltaExecutor, DeltaMessage, DeltaReport, delta_plan
from hybrid3d.reshard.delta.runs import Elements, RunChanges, changed_positions, gather_elements, scatter_elements
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece, View
from hybrid3d.reshard.plan.planner import make_plan
from test_reshard_box import World, worlds
from test_reshard_executor import Layers, Ranks, by_element, canonical, truth, unlike, write_pieces
from worlds import run_in_threads


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 99))
def test_bits_are_those_of_numpy(n: int, p: float, seed: int) -> None:
    bits = np.random.default_rng(seed).random(n) < p
    packed = pack_bits(torch.from_numpy(bits))
    assert packed.numpy().tobytes() == np.packbits(bits, bitorder="little").tobytes()
    assert set_bits(packed).tolist() == np.flatnonzero(bits).tolist()
    assert int(count_bits(packed)) == bits.sum()
    assert unpack_bits(packed)[:n].numpy().tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0, 1e-5, 1e-4, 5e-4, 0.001, 0.004, 0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 7, 576, 300_000])
def test_encoded_run_comes_back_within_4_percent_of_its_entropy(n: int, share: float, dtype: torch.dtype) -> None:
    random = np.random.default_rng(n)
    positions = torch.from_numpy(np.flatnonzero(random.random(n) < share))
    values = torch.from_numpy(random.standard_normal(len(positions))).to(dtype)
    form = form_of(n, len(positions), dtype.itemsize)
    if form.kind == "dense" or not len(positions):
        assert form.nbytes == (n * dtype.itemsize if len(positions) else 0)
        return
    out = torch.full((form.nbytes,), 0x5A, dtype=torch.uint8)
    encode(positions, values, n, out)
    got, got_values = decode(out, n, len(positions), dtype)
    assert got.tolist() == positions.tolist()
    assert by_element(got_values).equal(by_element(values))
    if len(positions) > 1000:
        assert form.nbytes <= 1.04 * entropy_bytes(n, len(positions), dtype.itemsize)


def test_form_is_no_larger_than_all_values_or_a_bitmap() -> None:
    for n in (1, 10, 1000):
        for k in range(n + 1):
            assert form_of(n, k, 2).nbytes <= min(2 * n, 2 * k + math.ceil(n / 8))


def test_entropy_is_that_of_counted_choices() -> None:
    for n, k in ((8, 3), (100, 7), (1000, 1000), (5, 0)):
        bits = math.log2(Fraction(math.comb(n, k))) + 16 * k
        assert entropy_bytes(n, k, 2) == pytest.approx(bits / 8, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.integers(0, 1 << 30))
def test_changed_elements_of_any_box_are_found_and_put_back(shape: list[int], turned: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.standard_normal(shape))
    changed = torch.from_numpy(random.random(shape) < 0.3)
    first = [int(random.integers(0, n)) for n in shape]
    inside = tuple(slice(a, int(random.integers(a + 1, n + 1))) for a, n in zip(first, shape, strict=True))
    box, mask = values[inside], changed[inside]
    if turned:
        box, mask = box.transpose(0, -1), mask.transpose(0, -1)
    size = tuple(box.shape)
    piece = Piece("x", Box((0,) * len(size), size), View("a", box.storage_offset(), box.stride()), "float64")
    positions = changed_positions({"a": pack_bits(changed.flatten())}, piece)
    assert positions.tolist() == np.flatnonzero(mask.contiguous().numpy()).tolist()
    elements = gather_elements(box, positions)
    assert elements.tolist() == box.reshape(-1)[positions].tolist()
    target = torch.zeros(shape, dtype=torch.float64).as_strided(box.shape, box.stride(), box.storage_offset())
    scatter_elements(target, positions, elements)
    assert target.equal(torch.where(mask, box, 0.0))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 99))
def test_run_of_boxes_is_their_elements_one_behind_the_other(data: st.DataObject, seed: int) -> None:
    """Columns of the experts of two buffers: where they begin at multiples of eight their bits are read at once."""
    random, unit = np.random.default_rng(seed), data.draw(st.sampled_from([8, 3]))
    experts, rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    width = data.draw(st.integers(1, columns))
    memory = {name: torch.from_numpy(random.standard_normal((experts, rows, columns * unit))) for name in "ab"}
    flags = {name: random.random(tensor.shape) < 0.3 for name, tensor in memory.items()}
    changes = {name: pack_bits(torch.from_numpy(bits.flatten())) for name, bits in flags.items()}
    pieces, views, bits = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        name, first = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, columns - width)) * unit
        chosen = data.draw(st.lists(st.integers(0, experts - 1), min_size=1, unique=True))
        for expert in sorted(chosen):
            view = memory[name][expert, :, first : first + width * unit]
            box = Box((0, 0), tuple(view.shape))
            pieces.append(Piece("x", box, View(name, view.storage_offset(), view.stride()), "float64"))
            views.append(view)
            bits.append(flags[name][expert, :, first : first + width * unit].flatten())
    scratch = torch.empty(sum(map(len, bits)) // 8 + 1, dtype=torch.uint8)
    found, other = RunChanges(pieces, changes, scratch), RunChanges(pieces[:1], changes, scratch)
    assert found._copies is not None or unit == 3
    assert int(other.count()) == bits[0].sum()  # in the same scratch memory
    run, expected = Elements(views), np.concatenate(bits)
    assert int(found.count()) == expected.sum()
    assert found.count_by_piece() == [part.sum() for part in bits]
    positions = found.positions()
    assert positions.tolist() == np.flatnonzero(expected).tolist()
    values = torch.cat([view.flatten() for view in views])
    assert run.gather(positions).equal(values[positions])
    new = torch.from_numpy(random.standard_normal(expected.shape))
    buffer = torch.zeros(len(expected))  # one behind the other, so that equal views are merged
    targets = [part.view(view.shape) for part, view in zip(buffer.split([*map(len, bits)]), views, strict=True)]
    Elements(targets).scatter(positions, new[positions])
    assert buffer.equal(torch.where(torch.from_numpy(expected), new, 0).float())


class Live(Layers):
    """A sink that keeps what was written, as live weights do."""

    def open(self, layer: int | None) -> None:
        self._left.remove(layer)
        self.order.append(layer)
        self._open.append(layer)

    def close(self, layer: int | None) -> None:
        assert self._open.pop(0) == layer

    def end(self) -> None:
        assert not self._left
        assert not self._open


class Deltas(Ranks):
    """All ranks of a world, which send only what changed; of some tensors everything."""

    verify = False

    def __init__(self, world: World, limit: int, sparse: set[str], per_node: int = 1 << 30, relays: bool = False):
        super().__init__(world, make_plan(world.holdings, world.demand, limit, per_node, relays))
        self.sinks = [Live(world.wanted, rank) for rank in self.ranks]
        for rank, (sink, held) in enumerate(zip(self.sinks, self.held, strict=True)):
            wanted = truth(world, rank, canonical(world, 0))
            for name, memory in sink._memory.items():
                memory.copy_(wanted[name])
            write_pieces(world.held.pieces[rank], canonical(world, 0), held)
        self.executors = [
            DeltaExecutor(self.plan[rank], sparse, NamedTensors(held), sink, via)
            for rank, (held, sink, via) in enumerate(zip(self.held, self.sinks, self.transports, strict=True))
        ]

    def send(self, values: dict[str, torch.Tensor]) -> list[DeltaReport]:
        before = [{name: tensor.clone() for name, tensor in held.items()} for held in self.held]
        for rank in self.ranks:
            write_pieces(self.world.held.pieces[rank], values, self.held[rank])
        self.changes = [
            {name: pack_bits((by_element(old[name]) != by_element(new)).any(1)) for name, new in held.items()}
            for old, held in zip(before, self.held, strict=True)
        ]
        return self.again()

    def again(self) -> list[DeltaReport]:
        return run_in_threads(self._send, self.ranks)

    def _send(self, rank: int) -> DeltaReport:
        self.sinks[rank].begin()
        with self.mailbox.failing_together():
            report = self.executors[rank].run_delta(self.changes[rank], self.verify)
        self.sinks[rank].end()
        return report

    def wrong(self, values: dict[str, torch.Tensor]) -> list[tuple[int, str]]:
        return [
            (rank, name)
            for rank, sink in zip(self.ranks, self.sinks, strict=True)
            for name in unlike(sink._memory, truth(self.world, rank, values))
        ]


def changed(values: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    return {
        name: torch.where(torch.from_numpy(random.random(v.shape) < share), -v, v) if v.dim() else v
        for name, v in values.items()
    }


@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(4, 300), st.sampled_from([0.0, 0.02, 0.2, 0.9]), st.integers(0, 99), st.booleans())
def test_changed_elements_land_bit_for_bit(world: World, limit: int, share: float, seed: int, all_sparse: bool) -> None:
    names = sorted(world.shapes)
    ranks = Deltas(world, limit, set(names if all_sparse else names[::2]))
    values = canonical(world, 0)
    for turn in range(3):
        values = changed(values, share, seed + turn)
        ranks.send(values)
        assert ranks.wrong(values) == []
    ranks.again()  # new values, not differences
    assert ranks.wrong(values) == []


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(4, 300))
def test_delta_sync_without_changes_sends_only_counts(world: World, limit: int) -> None:
    ranks = Deltas(world, limit, set(world.shapes))
    reports = ranks.send(canonical(world, 0))
    for rank, report in zip(ranks.ranks, reports, strict=True):
        messages = [m for b in delta_plan(ranks.plan[rank], set(world.shapes)).buckets for m in b.messages]
        assert all(isinstance(m, DeltaMessage) for m in messages)
        assert report.received_bytes == 8 * sum(m.dst == rank for m in messages)
        local = sum(t.box.numel for t in ranks.plan[rank].transfers if t.is_local)
        longest = max([sum(t.box.numel for t in m.transfers) for m in messages if m.src == rank], default=0)
        assert report.staging_bytes <= 2 * limit
        assert report.scratch_bytes <= (max(local, longest) + 7) // 8
