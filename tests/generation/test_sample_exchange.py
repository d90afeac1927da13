"""Samples between ranks, at eight gloo ranks: each rank gets what it is to get, once, and the bytes are counted.

`python tests/generation/test_sample_exchange.py` prints the bytes of a step's samples that each rank receives at TP4,
beside those that `torch.distributed.all_gather_object` receives for them.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.generation.engine import NO_CHOICES, ExpertChoices
from hybrid3d.generation.exchange import AnswerExchange, Message, deliver, deliver_choices
from hybrid3d.generation.samples import Sample, held_samples
from spawned import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

RANKS, TP, TOKENS = 8, 4, 300
COUNTS = (20, 60)  # samples of each replica: one has three times as many
LAYERS, PER_TOKEN = 5, 3


def samples_of(replica: int) -> list[Sample]:
    """Return what a replica has answered, always the same, each sample with choices of experts."""
    rng, made = random.Random(replica), []
    for number in range(COUNTS[replica]):
        tokens = tuple(rng.randrange(150_000) for _ in range(TOKENS))
        logprobs = tuple(-rng.random() for _ in tokens)
        experts = np.random.default_rng(number).integers(0, 64, (TOKENS + 3, LAYERS, PER_TOKEN), np.uint8)
        made.append(
            Sample(
                *(f"prompt {replica}", (1, 2, 3), tokens, (True,) * TOKENS, logprobs, "a" * 4 * TOKENS),
                *(float(number), (7,) * TOKENS),
                experts=ExpertChoices.of(experts),
            )
        )
    return made


class Counter:
    """Counts the bytes that this rank receives from others, in every function of torch.distributed that is used."""

    def __init__(self) -> None:
        self.nbytes = self.far = 0

    def counting(self, per_node: int) -> Any:
        rank, receive, gather, broadcast = dist.get_rank(), dist.irecv, dist.all_gather, dist.broadcast

        def irecv(tensor: torch.Tensor, group: Any, group_src: int, tag: int = 0) -> Any:
            self.nbytes += tensor.nbytes
            self.far += tensor.nbytes * (group_src // per_node != rank // per_node)
            return receive(tensor, group=group, group_src=group_src, tag=tag)

        def all_gather(outputs: list[torch.Tensor], *args: Any, **more: Any) -> Any:
            self.nbytes += sum(part.nbytes for other, part in enumerate(outputs) if other != rank)
            return gather(outputs, *args, **more)

        def broadcast_(tensor: torch.Tensor, *args: Any, group_src: int, **more: Any) -> Any:
            self.nbytes += tensor.nbytes * (group_src != rank)
            return broadcast(tensor, *args, group_src=group_src, **more)

        return mock.patch.multiple(dist, irecv=irecv, all_gather=all_gather, broadcast=broadcast_)


def exchange_answers(rank: int, per_node: int) -> dict[str, Any]:
    """Exchange the answers of two replicas of four ranks."""
    replica, leads = rank // TP, rank % TP == 0
    own = held_samples(samples_of(replica), rank) if leads else None
    counter = Counter()
    with counter.counting(per_node):
        exchange = AnswerExchange(dist.group.WORLD, per_node)
        found = exchange.gather(replica, own)
    assert list(found) == [0, 1]
    for number, samples in found.items():
        assert samples == [
            sample if leads and number == replica else Without(sample) for sample in samples_of(number)
        ], number
        assert all(sample.experts.held_by == number * TP for sample in samples)
        assert all(len(sample.experts) == TOKENS + 3 for sample in samples)
    signature = 32
    sizes = [len(pickle.dumps((i, held_samples(samples_of(i), i * TP)))) + signature for i in range(2)]
    return {"received": counter.nbytes, "far": counter.far, "counted": exchange.received_bytes, "sizes": sizes}


class Without:
    """Equal to a sample apart from the choices of experts, of which there are none."""

    def __init__(self, sample: Sample):
        self._sample = sample

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sample)
            and other.experts.data == b""
            and replace(other, experts=NO_CHOICES) == replace(self._sample, experts=NO_CHOICES)
        )


def gather_as_before(rank: int, per_node: int) -> dict[str, Any]:
    """Exchange the same by torch's `all_gather_object`, which pads all ranks' parts to the largest."""
    counter, values = Counter(), [None] * RANKS
    value = (rank // TP, samples_of(rank // TP)) if rank % TP == 0 else None
    with counter.counting(per_node), mock.patch.object(dist.distributed_c10d, "all_gather", dist.all_gather):
        dist.all_gather_object(values, value)
    return {"received": counter.nbytes}


def deliver_experts(rank: int, per_node: int) -> dict[str, Any]:
    """Give the choices of all samples to the ranks that train them: of two data-parallel ranks, TP2 x PP2 each."""
    everything = [*samples_of(0), *samples_of(1)]
    holders = [0] * COUNTS[0] + [TP] * COUNTS[1]
    told = [held_samples([sample], holder)[0] for sample, holder in zip(everything, holders, strict=True)]
    samples = [
        one if holder == rank else pickle.loads(pickle.dumps(one)) for one, holder in zip(told, holders, strict=True)
    ]
    shares = [range(0, 80, 2), range(1, 80, 2)]
    members = [[0, 1, 4, 5], [2, 3, 6, 7]]
    counter = Counter()
    with counter.counting(per_node):
        found = deliver_choices(samples, [*zip(shares, members, strict=True)], dist.group.WORLD, per_node)
    own = next(share for share, ranks in zip(shares, members, strict=True) if rank in ranks)
    for number, sample in enumerate(found):
        if number in own:
            assert sample.experts == everything[number].experts, number
            assert (sample.experts.array == everything[number].experts.array).all()
        elif holders[number] != rank:
            assert sample.experts.data == b""
    each = everything[0].experts.nbytes
    missing = sum(each for number in own if holders[number] != rank)
    return {"received": counter.nbytes, "missing": missing}


def gather_unequal(rank: int, per_node: int) -> dict[str, Any]:
    """Gather values of which one is much larger than the others, on all ranks and on the first."""
    value = bytes(1_000_000) if rank == 3 else b"little"
    everywhere, first = Counter(), Counter()
    with everywhere.counting(per_node):
        gathered = distributed.gather_objects(value, dist.group.WORLD)
    with first.counting(per_node):
        on_first = distributed.gather_to_first(value, dist.group.WORLD)
    expected = [b"little"] * 3 + [bytes(1_000_000)] + [b"little"] * 4
    assert gathered == expected
    assert on_first == (expected if rank == 0 else None)
    return {"everywhere": everywhere.nbytes, "first": first.nbytes}


def deliver_to_some(rank: int, per_node: int) -> dict[str, Any]:
    """Deliver a message to all, one to some ranks of other nodes, an empty one, and one to its own source."""
    makers = [(0, range(8), 1000), (3, [1, 4, 5, 7], 700), (2, range(8), 0), (6, [6], 50)]
    messages = [Message(src, receivers, nbytes) for src, receivers, nbytes in makers]
    contents = {
        number: torch.full((message.nbytes,), number, dtype=torch.uint8)
        for number, message in enumerate(messages)
        if message.src == rank
    }
    counter = Counter()
    with counter.counting(per_node):
        found = deliver(messages, contents, dist.group.WORLD, per_node)
    for number, message in enumerate(messages):
        has = message.nbytes and (rank in message.receivers or rank == message.src)
        assert not has or found[number].tolist() == [number] * message.nbytes
    return {"received": counter.nbytes, "far": counter.far}


def member(rank: int, work: Callable[[int, int], dict[str, Any]], per_node: int, folder: str) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(RANKS))
        distributed.start(dist.FileStore(f"{folder}/store", RANKS))
        found = work(rank, per_node)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()


def on_ranks(work: Callable[[int, int], dict[str, Any]], per_node: int = 8) -> list[dict[str, Any]]:
    """Return what each of eight ranks finds."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(member, (work, per_node, folder), RANKS)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


SIZES = 8 * (RANKS - 1)  # of the numbers that say how large the parts are


@pytest.mark.parametrize("per_node", [8, 4])
def test_exchange_gives_each_rank_each_answer_once(per_node: int) -> None:
    """The leading ranks get that of the other replica, the others both; a node gets no answer twice."""
    found = on_ranks(exchange_answers, per_node)
    first, second = found[0]["sizes"]
    expected = [second, *[first + second] * 3, first, *[first + second] * 3]
    assert [one["counted"] for one in found] == expected
    assert [one["received"] for one in found] == [nbytes + SIZES for nbytes in expected]
    far = [sum(one["far"] for one in found[node : node + per_node]) for node in range(0, RANKS, per_node)]
    assert far == ([0] if per_node == 8 else [second, first])


def test_expert_choices_reach_only_ranks_that_train_the_sample() -> None:
    found = on_ranks(deliver_experts, per_node=4)
    assert all(one["received"] == one["missing"] for one in found)
    of_all = sum(COUNTS) * (TOKENS + 3) * LAYERS * PER_TOKEN
    assert sorted({one["missing"] for one in found}) == [of_all * part // 80 for part in (10, 30, 40)]


def test_gathering_a_large_value_does_not_pad_the_others() -> None:
    found = on_ranks(gather_unequal)
    assert all(one["everywhere"] < 1_000_000 + 10_000 for one in found)
    assert [one["first"] < 100 for one in found] == [False, *[True] * 7]
    assert found[0]["first"] < 1_000_000 + 1_000


@pytest.mark.parametrize("per_node", [2, 8])
def test_messages_reach_only_their_receivers_and_a_node_once(per_node: int) -> None:
    found = on_ranks(deliver_to_some, per_node)
    assert [one["received"] for one in found] == [0, 1700, 1000, 1000, 1700, 1700, 1000, 1700]
    assert sum(one["far"] for one in found) == (0 if per_node == 8 else 3 * 1000 + 3 * 700)


def main() -> None:
    before, after = on_ranks(gather_as_before), on_ranks(exchange_answers)
    tokens = sum(COUNTS) * (TOKENS + 3)
    print(f"{RANKS} ranks, TP{TP}, {COUNTS} samples of {TOKENS} tokens: bytes received by each rank")
    print("all_gather_object, experts with them:", [one["received"] for one in before])
    print("each answer once, experts apart:     ", [one["received"] for one in after])
    print(f"experts that go to half of the ranks: {tokens * LAYERS * PER_TOKEN} in all")


if __name__ == "__main__":
    sys.exit(main())
