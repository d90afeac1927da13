"""Micro batches as the model takes them, on a batch small enough to write down."""

from __future__ import annotations

from inspect import signature
from unittest import mock

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
    from hybrid3d.train.micro_batches import in_one_row

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


def test_next_token_values_come_back_to_their_token(batch: Batch) -> None:
    """Of the token at position n of the model's output it is said 100 + n."""
    from hybrid3d.train.micro_batches import in_one_row, in_rows

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
    from hybrid3d.train.micro_batches import in_one_row

    packed = in_one_row(batch, ROWS, 9)
    said = torch.zeros(1, 9, requires_grad=True)
    weights = torch.arange(12.0).reshape(2, 6)
    (packed.aligned(packed.before(said)) * weights).sum().backward()
    assert said.grad.tolist() == [[1, 2, 0, 7, 8, 9, 0, 0, 0]]


class Ranks:
    """What a micro batch asks of the group of ranks that share its sequences."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


def of_megatron(rows: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A rank's share of rows as Megatron's own training loop takes it; without groups it sees one rank."""
    from megatron.core import utils

    size, rank = (lambda group: group.size()), (lambda group: group.rank())
    with (
        mock.patch.multiple(utils, get_pg_size=size, get_pg_rank=rank),
        mock.patch.multiple(torch.distributed, get_world_size=size, get_rank=rank),  # what Megatron-Core 0.19 asks
    ):
        share = utils.get_batch_on_this_cp_rank
        is_hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(share).parameters else {}  # since 0.19
        return share({"tokens": rows, "cu_seqlens": None}, **is_hybrid, cp_group=ranks)["tokens"]


def whole_again(shares: list[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    return torch.cat(shares, dim=1)[:, order]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ranks_share_rows_as_megatron_wants_it(batch: Batch, cp: int) -> None:
    from hybrid3d.train.micro_batches import in_rows

    shares = []
    for rank in range(cp):
        rows = in_rows(batch, ROWS, 4 * cp, Ranks(rank, cp))
        for each in (rows.tokens, rows.positions):
            assert torch.equal(rows.share(each), of_megatron(each, Ranks(rank, cp)))
        shares.append(rows.share(rows.positions))
    assert torch.equal(whole_again(shares, rows.context.order), rows.positions)


@pytest.mark.parametrize("cp", [2, 3])
def test_ranks_share_each_packed_sequence(batch: Batch, cp: int) -> None:
    """Each is padded to a multiple of the chunks, and shared as a row of its own would be."""
    from hybrid3d.train.micro_batches import in_one_row

    shares, size = [], 6 * cp
    for rank in range(cp):
        packed = in_one_row(batch, ROWS, size, Ranks(rank, cp))
        ends = packed.packing.cu_seqlens_q.tolist()
        assert ends == packed.packing.cu_seqlens_kv_padded.tolist() == ([0, 4, 8, 12] if cp == 2 else [0, 6, 12, 18])
        sequences = packed.tokens.split(torch.tensor(ends).diff().tolist(), dim=1)
        theirs = [of_megatron(one, Ranks(rank, cp)) for one in sequences]
        assert torch.equal(packed.share(packed.tokens), torch.cat(theirs, dim=1))
        shares.append(packed.share(packed.tokens))
    assert torch.equal(whole_again(shares, packed.context.order), packed.tokens)
    first, second = packed.positions[0, : ends[1]], packed.positions[0, ends[1] : ends[2]]
    assert first.tolist() == second.tolist() == list(range(ends[1]))
    assert (~packed.padded[0]).nonzero().flatten().tolist() == [0, 1, 2, *(ends[1] + n for n in range(4))]


def test_next_token_values_of_ranks_come_back_to_their_token(batch: Batch) -> None:
    """Of the token at position n of the whole row it is said 100 + n; the ranks' shares are put together here."""
    from hybrid3d.train import micro_batches

    for pack in (
        lambda group: micro_batches.in_one_row(batch, ROWS, 12, group),
        lambda group: micro_batches.in_rows(batch, ROWS, 8, group),
    ):
        whole = pack(Ranks(0, 2))
        said = 100.0 + torch.arange(whole.tokens.shape[1]).expand_as(whole.tokens)
        following = torch.zeros_like(whole.tokens)
        for rank in range(2):
            shared = pack(Ranks(rank, 2))
            assert torch.equal(shared.before(shared.share(said)), shared.share(said))
            following[:, shared.context.own] = shared.after
        assert torch.equal(following[:, :-1], whole.tokens[:, 1:])
        aligned = whole._aligned(said[:, :-1], 1)
        second = 104 if len(said) == 1 else 100
        assert aligned[0, :3].tolist() == [0, 100, 101]
        assert aligned[1, :4].tolist() == [0, *range(second, second + 3)]
        assert whole._last(said).tolist() == [102, second + 3]
