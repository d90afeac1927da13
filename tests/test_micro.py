"""Micro batches as the model takes them, on a batch small enough to write down."""

from __future__ import annotations

import pytest
import torch

from hybrid3d.rl.batch import Batch

pytestmark = pytest.mark.engines

ROWS = torch.tensor([0, 2])


@pytest.fixture
def batch() -> Batch:
    """Wider than its longest sequence: a part of a batch that had a longer one."""
    return Batch.from_sequences([[5, 6, 7], [8, 9], [1, 2, 3, 4], [3], [1] * 6], [2, 1, 1, 1, 1], pad_id=99)[:4]


def test_sequences_lie_one_behind_the_other(batch: Batch) -> None:
    from hybrid3d.train.micro import in_one_row

    packed = in_one_row(batch, ROWS, 9)
    assert packed.tokens.tolist() == [[5, 6, 7, 1, 2, 3, 4, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    assert packed.padded.tolist() == [[False] * 7 + [True] * 2]
    assert packed.packing.cu_seqlens_q.tolist() == packed.packing.cu_seqlens_kv.tolist() == [0, 3, 7, 9]
    assert packed.packing.max_seqlen_q == packed.packing.max_seqlen_kv == 4
    assert packed.packing.cu_seqlens_q.dtype == torch.int32
    full = in_one_row(batch, ROWS, 7)
    assert full.packing.cu_seqlens_q.tolist() == [0, 3, 7]
    assert not full.padded.any()


def test_what_is_said_of_a_next_token_comes_back_to_it(batch: Batch) -> None:
    """Of the token at position n of the model's output it is said 100 + n."""
    from hybrid3d.train.micro import in_one_row, in_rows

    packed = in_one_row(batch, ROWS, 9)
    said = torch.arange(100.0, 109.0)[None]
    assert packed.after.tolist() == [[6, 7, 1, 2, 3, 4, 0, 0]]
    assert packed.aligned(packed.before(said)).tolist() == [[0, 100, 101, 0, 0, 0], [0, 103, 104, 105, 0, 0]]
    assert packed.last(said).tolist() == [102, 106]
    for width in (4, 8):  # narrower than the batch, and wider
        rows = in_rows(batch, ROWS, width)
        said = torch.tensor([[100.0], [200.0]]) + torch.arange(width)
        aligned = rows.aligned(rows.before(said))
        assert aligned.shape == (2, 6)
        assert aligned[0, :3].tolist() == [0, 100, 101]
        assert aligned[1, :4].tolist() == [0, 200, 201, 202]
        assert rows.last(said).tolist() == [102, 203]
        assert rows.padded.sum(dim=1).tolist() == [width - 3, width - 4]


def test_gradients_go_back_to_where_they_came_from(batch: Batch) -> None:
    from hybrid3d.train.micro import in_one_row

    packed = in_one_row(batch, ROWS, 9)
    said = torch.zeros(1, 9, requires_grad=True)
    weights = torch.arange(12.0).reshape(2, 6)
    (packed.aligned(packed.before(said)) * weights).sum().backward()
    assert said.grad.tolist() == [[1, 2, 0, 7, 8, 9, 0, 0, 0]]
