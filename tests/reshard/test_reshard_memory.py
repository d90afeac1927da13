"""Buffers that are released between uses: their views stay valid and have the right contents afterwards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.move import executor
from hybrid3d.reshard.move.memory import ALIGNMENT, DeviceBuffer, align_up
from hybrid3d.reshard.plan.planner import make_plan
from test_reshard_box import World, worlds
from test_reshard_executor import Ranks, canonical


class ReleasedBuffer(DeviceBuffer):
    """A CPU buffer that is released like a GPU buffer."""

    def __init__(self, nbytes: int, device: torch.device | str):
        super().__init__(nbytes, device)
        self._kept = False

    @property
    def taken_bytes(self) -> int:
        return self._bytes.untyped_storage().nbytes()


def test_device_buffer_on_a_cpu_keeps_its_memory() -> None:
    memory = DeviceBuffer(64, "cpu")
    view = memory.flat_view(8, 16, torch.float32)
    view.copy_(torch.arange(4.0))
    where = view.data_ptr()
    for _ in range(2):
        memory.release()
        kept = view.untyped_storage().nbytes()
        assert kept == 64  # and not the view's: a view of nothing cannot be shown
        assert view.tolist() == [0, 1, 2, 3]
        memory.allocate()
        assert view.tolist() == [0, 1, 2, 3]
        assert view.data_ptr() == where


def test_views_stay_right_though_memory_is_given_back() -> None:
    """Views stay valid although other memory is allocated in the meantime."""
    memory = ReleasedBuffer(4096, "cpu")
    floats, halves = (
        memory.flat_view(0, 2048, torch.float32),
        memory.flat_view(2048, 1024, torch.bfloat16).view(16, 32).t(),
    )
    last, whole = memory.flat_view(4088, 8, torch.float64), memory.flat_view(0, 4096, torch.uint8)
    views, others = (floats, halves, last), []
    for turn in range(3):
        memory.release()
        assert memory.taken_bytes == 0
        assert memory.nbytes == 4096
        others.append(torch.full((4096,), turn, dtype=torch.uint8))
        memory.allocate()
        assert memory.taken_bytes == 4096
        assert [view.data_ptr() - whole.data_ptr() for view in views] == [0, 2048, 4088]
        whole.fill_(0xFF)
        for number, view in enumerate(views):
            view.copy_(torch.arange(view.numel()).view(view.shape) + number)
        for number, view in enumerate(views):
            assert view.equal((torch.arange(view.numel()).view(view.shape) + number).to(view.dtype))
        assert whole[:2048].equal(floats.view(torch.uint8))
        assert (whole[3072:4088] == 0xFF).all()
        assert all((other == number).all() for number, other in enumerate(others))


def test_tensor_that_lies_in_memory_is_known() -> None:
    memory, other = ReleasedBuffer(64, "cpu"), DeviceBuffer(64, "cpu")
    view = memory.flat_view(8, 16, torch.float32)
    strided, copy = view[1:].as_strided((1, 2), (5, 2)), view.clone()
    for _ in range(2):
        assert memory.contains(view)
        assert memory.contains(strided)
        assert not memory.contains(copy)
        assert not other.contains(view)
        memory.release()


def test_align_up_gives_the_next_aligned_offset() -> None:
    assert [align_up(n) for n in (0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        *[ALIGNMENT] * 3,
        2 * ALIGNMENT,
    ]


@settings(max_examples=30, deadline=None)
@given(worlds(), st.integers(4, 100))
def test_staging_may_be_given_back_between_runs(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(executor, "DeviceBuffer", ReleasedBuffer)
        ranks = Ranks(world, plan)
    staging = [memory for one in ranks.executors for memory in one._staging]
    assert all(isinstance(memory, ReleasedBuffer) for memory in staging)
    for seed in (1, 2, 3):
        assert all(memory.taken_bytes == 0 for memory in staging)
        values = canonical(world, seed)
        reports = ranks.run(values)
        assert ranks.wrong(values) == []
        assert [report.staging_bytes for report in reports] == [sum(plan[rank].staging_bytes) for rank in ranks.ranks]
    assert all(memory.taken_bytes == 0 for memory in staging)
