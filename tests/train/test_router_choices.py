"""Replayed choices of experts: how they are kept, whose they are, and what Megatron's routing makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid3d.generation.engine import NO_CHOICES, Completion, ExpertChoices
from hybrid3d.generation.samples import AnswerTokens, Sample, filled_up
from hybrid3d.rl.batch import Batch

LAYERS, PER_TOKEN, EXPERTS = 3, 2, 8
SETTINGS = {
    "softmax": {},
    "softmax before top-k": {"use_pre_softmax": True},
    "groups and bias": {
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
        "expert_bias": torch.linspace(-0.5, 0.5, EXPERTS),
    },
}


def choices(*tokens: int) -> ExpertChoices:
    """Choices that can be told apart: expert 10 x token + layer, and 100 more."""
    array = [[[10 * t + layer, 100 + 10 * t + layer] for layer in range(LAYERS)] for t in tokens]
    return ExpertChoices.of(np.array(array, np.uint8))


def test_choices_are_kept_as_bytes() -> None:
    kept = choices(0, 1, 2)
    assert (len(kept), len(kept.data), kept.dtype) == (3, 3 * LAYERS * PER_TOKEN, "uint8")
    assert kept.array[1].tolist() == [[10, 110], [11, 111], [12, 112]]
    assert kept == choices(0, 1, 2) != choices(0, 1, 3)
    assert hash(kept) == hash(choices(0, 1, 2))
    assert kept.first(2) == choices(0, 1)
    assert kept.first(9) is kept
    many = ExpertChoices.of(np.array([[[256, 300]]], np.uint16))
    assert (many.array[0].tolist(), many.dtype, len(many.data)) == ([[256, 300]], "uint16", 4)
    assert len(NO_CHOICES) == 0
    assert NO_CHOICES.extended(kept) == kept.extended(NO_CHOICES) == kept


def test_answer_that_goes_on_keeps_its_first_choices() -> None:
    """Each request returns those of its whole context; what it computed again was chosen before."""
    answer = AnswerTokens()
    answer.append_generated(
        Completion((7, 8), (-1.0, -1.0), 0, experts=choices(0, 1, 2))
    )  # of two tokens before it, and 7
    answer.append_written([9])
    answer.append_generated(Completion((10,), (-1.0,), 1, experts=choices(10, 11, 12, 3, 4)))  # of 8 and 9 too
    assert answer.experts == choices(0, 1, 2, 3, 4)
    assert len(answer.experts) == 2 + len(answer.tokens) - 1


def test_filling_branches_have_choices_for_their_tokens() -> None:
    sample = Sample("", (1, 2, 3), (4, 5), (True, True), (-1.0, -1.0), "", 0.0, (0, 0), experts=choices(0, 1, 2, 3))
    _, filling = filled_up([sample], 2)
    assert filling.experts == choices(0, 1)


@pytest.mark.engines
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_choices_go_to_the_tokens_that_a_rank_computes(packed: bool, tp: int) -> None:
    """Megatron's router gets [T', b] tokens, split over TP: the choice of token n is n, of padding -1."""
    from hybrid3d.train.megatron.router_replay import RouterReplay
    from hybrid3d.train.micro_batches import in_one_row, in_rows

    sequences = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35]]
    batch = Batch.from_sequences(sequences, [1, 1, 1], pad_id=99)
    experts = batch.tokens[:, :, None, None].expand(-1, -1, LAYERS, PER_TOKEN).to(torch.int16)
    real = torch.arange(5) < batch.lengths[:, None]
    experts = experts.masked_fill(~real[:, :, None, None], -1)
    batch = Batch(batch.tokens, batch.prompt_lengths, batch.lengths, batch.response_mask, experts)
    rows = torch.tensor([2, 0])
    micro = in_one_row(batch, rows, 12) if packed else in_rows(batch, rows, 8)
    expected = torch.where(micro.padded, -1, micro.tokens).T  # [T', b], as Megatron has them
    found = []
    for rank in range(tp):
        replay = RouterReplay.__new__(RouterReplay)
        replay._splits_sequences = tp > 1
        with on_tp_rank(rank, tp):
            local = replay._local(micro.experts)
        assert local.shape == (expected.numel() // tp, LAYERS, PER_TOKEN)
        found.append(local)
    whole = torch.cat(found)
    assert whole[:, 1, 0].tolist() == whole[:, 2, 1].tolist() == expected.flatten().tolist()
    back = micro.unpacked(whole.unflatten(0, (micro.tokens.shape[1], len(micro.tokens))).transpose(0, 1))
    assert back.equal(batch.experts[rows])
    wider = in_rows(batch, rows, 4)  # of a batch whose longest sequence is in another micro batch
    assert wider.experts.shape[1] == 4


class on_tp_rank:
    """Megatron's TP group, of which only rank and size are used."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __enter__(self) -> None:
        from megatron.core import parallel_state

        self._before, parallel_state._TENSOR_MODEL_PARALLEL_GROUP = parallel_state._TENSOR_MODEL_PARALLEL_GROUP, self

    def __exit__(self, *error: object) -> None:
        from megatron.core import parallel_state

        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = self._before


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(1), requires_grad=True)


def routed(logits: torch.Tensor, kind: str, replay: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function(logits, PER_TOKEN, router_replay=replay, **SETTINGS[kind])


@pytest.mark.engines
@pytest.mark.parametrize("kind", SETTINGS)
def test_given_experts_are_weighted_as_megatron_weights_them(kind: str, logits: torch.Tensor) -> None:
    """With a choice for every token Megatron's own `RouterReplay` is the truth, also for the gradients."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from hybrid3d.train.megatron.router_replay import RouterChoices

    given = torch.rand(6, EXPERTS, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :PER_TOKEN]
    theirs, ours = RouterReplay(), RouterChoices()
    RouterReplay.clear_global_router_replay_instances()
    theirs.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    theirs.set_target_indices(given)
    ours.given, ours.counts = given.to(torch.int16), True
    weights = torch.linspace(-1, 1, 6 * EXPERTS).reshape(6, EXPERTS)
    gradients = []
    for replay in (theirs, ours):
        probs, chosen = routed(logits, kind, replay)
        (gradient,) = torch.autograd.grad((probs * weights).sum(), logits)
        gradients.append((probs, chosen, gradient))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert chosen.nonzero()[:, 1].reshape(6, PER_TOKEN).tolist() == given.sort(-1).values.tolist()
    assert (probs > 0).equal(chosen)
    assert gradients[0][2].abs().sum() > 0
    own = routed(logits, kind)[1]
    assert 0 < int(ours.equal) == int((own & chosen).sum()) < 6 * PER_TOKEN


@pytest.mark.engines
@pytest.mark.parametrize("kind", SETTINGS)
def test_router_chooses_where_nothing_is_given(kind: str, logits: torch.Tensor) -> None:
    from hybrid3d.train.megatron.router_replay import RouterChoices

    replay, (probs, chosen) = RouterChoices(), routed(logits, kind)
    for a, b in zip(routed(logits, kind, replay), (probs, chosen), strict=True):
        assert torch.equal(a, b)
    own = replay.made
    replay.given = own.roll(1, 0).to(torch.int16)
    replay.given[2:] = -1
    some_probs, some = routed(logits, kind, replay)
    assert some[2:].equal(chosen[2:])
    assert some_probs[2:].equal(probs[2:])
    assert some[1].equal(chosen[0])


@pytest.mark.engines
def test_recomputed_layers_get_the_choices_of_their_micro_batch(logits: torch.Tensor) -> None:
    """With full recomputation the forward passes of several micro batches may come before their backward passes."""
    from collections import deque

    from hybrid3d.train.megatron.router_replay import RouterChoices

    replay = RouterChoices()
    replay.recomputed = deque()
    given = [torch.full((6, PER_TOKEN), 2 * n, dtype=torch.int16) + torch.tensor([0, 1]).short() for n in range(3)]
    for one in given:
        replay.given = one
        with torch.no_grad():
            routed(logits, "softmax", replay)
        assert replay.made.tolist() == one.tolist()
    for one in given:
        routed(logits, "softmax", replay)
        assert replay.made.tolist() == one.tolist()
    assert not replay.recomputed
