"""The seconds by which `sync.delta: auto` chooses, against what was measured, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid3d.config.sections.engines import Machine
from hybrid3d.planning.hardware import CPU, hardware_of
from hybrid3d.planning.sync_choice import SyncLoad, delta_seconds, dense_seconds, hidden_seconds
from hybrid3d.reshard.delta.encoding_work import EncodingWork

BF16 = 2
# A rank of benchmarks/results/reshard-cpu.md's first case: it sends, receives and keeps a quarter of 349 MB
QUARTER = 348_729_344 / 4
LOAD = SyncLoad(near_sent=QUARTER, near_received=QUARTER, local=QUARTER)
ELEMENTS = QUARTER / BF16
WORK = EncodingWork(
    launches=2000, counted=2 * ELEMENTS, found=2 * ELEMENTS, encoded=ELEMENTS, decoded=ELEMENTS, accessed=4 * ELEMENTS
)


def test_predicted_seconds_match_what_was_measured_on_a_cpu() -> None:
    """0.050 s for all elements where ranks share memory, 0.239 s for 2 % of them, within a factor of 1.5."""
    dense = dense_seconds(LOAD, CPU, borrows=True)
    delta = delta_seconds(LOAD, WORK, 0.02, BF16, CPU, borrows=True)
    assert 1 / 1.5 < dense / 0.050 < 1.5
    assert 1 / 1.5 < delta / 0.239 < 1.5


def test_packed_weights_are_no_reason_to_leave_the_overlapped_path() -> None:
    """Of 100 bytes 99.9 are sent in full: what is saved is less than what the optimizer's step hides."""
    work = EncodingWork(launches=100, counted=1e-3 * ELEMENTS, full_bytes=0.999 * LOAD.nbytes)
    dense = dense_seconds(LOAD, CPU)
    exposed = dense - hidden_seconds(dense, 0.5, 1e8, CPU)
    assert exposed == pytest.approx(dense / 2)
    assert delta_seconds(LOAD, work, 0.005, BF16, CPU) > 0.99 * dense > exposed


def test_slow_network_is_where_changed_elements_pay() -> None:
    load = SyncLoad(far_sent=8e9, far_received=8e9)
    work = EncodingWork(launches=20_000, host_waits=1000, counted=4e9, found=4e9, encoded=4e9, decoded=4e9)
    h100 = hardware_of(Machine(kind="h100-8x400g"))
    assert dense_seconds(load, h100) == pytest.approx(8e9 / 50e9)
    by_hand = 20_000 * 5e-6 + 1000 * 20e-6 + work.moved_bytes(0.005) / (3350e9 / 2)
    assert delta_seconds(load, work, 0.005, BF16, h100) == pytest.approx(by_hand)
    assert by_hand < 0.16
    assert delta_seconds(load, work, 0.005, BF16, replace(h100, launch_seconds=1e-5)) > 0.16


def test_sync_with_nothing_to_move_takes_no_time() -> None:
    assert delta_seconds(SyncLoad(), EncodingWork(), 0.02, BF16, CPU) == 0.0 == dense_seconds(SyncLoad(), CPU)
