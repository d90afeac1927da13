"""Padding, masks and rows, on batches small enough to write down."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.rl.batch import Batch

SEQUENCES = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [3]]
PROMPTS = [2, 1, 1, 1]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_sequences(SEQUENCES, PROMPTS, pad_id=99)


def test_written_down(batch: Batch) -> None:
    assert batch.tokens.tolist() == [
        [5, 6, 7, 99],
        [8, 9, 99, 99],
        [1, 2, 3, 4],
        [3, 99, 99, 99],
    ]
    assert batch.response_mask.tolist() == [
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 1],
        [0, 0, 0, 0],
    ]
    assert batch.prompt_lengths.tolist() == [2, 1, 1, 1]
    assert batch.lengths.tolist() == [3, 2, 4, 1]
    assert (batch.tokens.dtype, batch.lengths.dtype) == (torch.int64, torch.int64)
    assert batch.response_mask.dtype == torch.float32
    assert len(batch) == 4


def test_environment_tokens_count_nowhere() -> None:
    own = [[True], [False], [True, False, True], []]
    batch = Batch.from_sequences(SEQUENCES, PROMPTS, loss_mask=own, pad_id=99)
    assert batch.response_mask.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert batch.align([[-0.5], [], [-0.1, -0.3], []]).tolist()[2] == pytest.approx([0, -0.1, 0, -0.3])
    everything = [[True], [True], [True] * 3, []]
    whole = Batch.from_sequences(SEQUENCES, PROMPTS, loss_mask=everything, pad_id=99)
    assert torch.equal(whole.response_mask, Batch.from_sequences(SEQUENCES, PROMPTS, pad_id=99).response_mask)
    said = r"loss_mask has \[1, 1, 2, 0\] tokens per response, the responses have \[1, 1, 3, 0\]"
    with pytest.raises(ValueError, match=said):
        Batch.from_sequences(SEQUENCES, PROMPTS, loss_mask=[[True], [True], [True] * 2, []], pad_id=99)


def test_selected_batch_rows_keep_the_width(batch: Batch) -> None:
    some = batch[2:]
    assert some.tokens.tolist() == batch.tokens[2:].tolist()
    assert some.lengths.tolist() == [4, 1]
    assert some.prompt_lengths.tolist() == [1, 1]
    assert some.response_mask.tolist() == batch.response_mask[2:].tolist()


def test_align_puts_values_at_generated_tokens(batch: Batch) -> None:
    """Sequence 0 generated its token 2, sequence 1 its token 1, sequence 2 its tokens 1 to 3, sequence 3 none."""
    assert batch.align([[-0.5], [-1.5], [-2.0, -3.0, -4.0], []]).tolist() == [
        [0, 0, -0.5, 0],
        [0, -1.5, 0, 0],
        [0, -2.0, -3.0, -4.0],
        [0, 0, 0, 0],
    ]


def test_align_refuses_other_lengths(batch: Batch) -> None:
    message = r"got \[1, 1, 2, 1\] values per response, the responses have \[1, 1, 3, 0\] tokens"
    with pytest.raises(ValueError, match=message):
        batch.align([[0.0], [0.0], [0.0, 0.0], [0.0]])


def test_to_moves_every_tensor(batch: Batch) -> None:
    moved = batch.to("meta")
    devices = {t.device.type for t in (moved.tokens, moved.prompt_lengths, moved.lengths, moved.response_mask)}
    assert devices == {"meta"}


@pytest.mark.parametrize(
    ("sequences", "prompts", "message"),
    [
        ([], [], "got 0 prompt lengths for 0 sequences"),
        ([[1]], [1, 1], "got 2 prompt lengths for 1 sequences"),
        ([[1, 2], [1, 2]], [1, 3], "sequence 1 of 2 tokens cannot have a prompt of 3"),
        ([[1, 2]], [0], "sequence 0 of 2 tokens cannot have a prompt of 0"),
        ([[]], [0], "sequence 0 of 0 tokens cannot have a prompt of 0"),
    ],
)
def test_batch_refuses_sequences_that_make_none(sequences: list[list[int]], prompts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch.from_sequences(sequences, prompts, pad_id=0)


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6)


@settings(deadline=None)
@given(lengths=lengths)
def test_everything_can_be_read_back(lengths: list[tuple[int, int]]) -> None:
    """Prompt and response of every sequence, found again through the lengths and through the mask."""
    sequences = [[100 * row + i + 1 for i in range(p + r)] for row, (p, r) in enumerate(lengths)]
    batch = Batch.from_sequences(sequences, [p for p, _ in lengths], pad_id=0)
    assert batch.tokens.shape[1] == max(map(len, sequences))
    for row, (sequence, (prompt, _)) in enumerate(zip(sequences, lengths, strict=True)):
        assert batch.tokens[row, : batch.lengths[row]].tolist() == sequence
        assert not batch.tokens[row, batch.lengths[row] :].any()
        assert batch.tokens[row][batch.response_mask[row] == 1].tolist() == sequence[prompt:]
