"""Partial rollouts on an engine that is written down here: who waits for whom, and which weights wrote which token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid3d.config import Async, load_recipe
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling
from hybrid3d.generation.replicas import EngineReplicas, NoReplicas
from hybrid3d.generation.rollouts import PartialRollouts
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.generation.scheduler import Answers, Prompt, Prompts, Scheduler
from hybrid3d.generation.turns import Conversations, Turns
from hybrid3d.rl.data import Example
from hybrid3d.scoring.scorer import Query, Scorers, Scores
from run_ranks import ROOT
from toys.second_thoughts import AGAIN, SecondThoughts

PROMPTS, ANSWERS, END = 4, 2, 0


class Engine:
    """Writes the token `100 + version` at each step, and token 0 at the length that it is told for a prompt's answer.

    Every prompt consists of its number. An answer's seed is its number among the answers to the prompt.
    """

    replica, replicas, leads, steps_together, end_tokens = 0, 1, True, False, (END,)

    def __init__(self, length: Callable[[int, int], int]):
        self.length, self.version, self.steps = length, 0, 0
        self.running: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self.told: dict[int, int] = {}  # how many tokens of a paused request were given back
        self.asked: list[tuple[int, int, int]] = []  # prompt, version, tokens that the answer has

    def submit(self, requests: Mapping[int, GenerationRequest], version: int) -> None:
        assert version == self.version
        assert not self.running.keys() & requests.keys()
        self.running |= {number: (request, []) for number, request in requests.items()}
        self.asked += [(r.prompt_ids[0], version, len(r.prompt_ids) - 1) for r in requests.values()]

    def step(self) -> dict[int, Completion]:
        self.steps += 1
        ended = {}
        for number, (request, tokens) in self.running.items():
            before = len(request.prompt_ids) - 1 + len(tokens)
            last = before + 1 >= self.length(request.prompt_ids[0], number % ANSWERS)
            tokens.append(END if last else 100 + self.version)
            if last or len(tokens) == request.max_new_tokens:
                ended[number] = self._completion(tokens[self.told.pop(number, 0) :])
        self.running = {number: one for number, one in self.running.items() if number not in ended}
        return ended

    def drain(self) -> dict[int, Completion]:
        ended: dict[int, Completion] = {}
        while self.running:
            ended |= self.step()
        return ended

    def interrupt(self) -> dict[int, Completion]:
        running, self.running = self.running, {}
        return {number: self._completion(tokens) for number, (_, tokens) in running.items()}

    def pause(self) -> tuple[dict[int, Completion], dict[int, Completion]]:
        paused = {n: self._completion(tokens[self.told.get(n, 0) :]) for n, (_, tokens) in self.running.items()}
        self.told = {n: len(tokens) for n, (_, tokens) in self.running.items()}
        return {}, paused

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.running[number]

    def _completion(self, tokens: list[int]) -> Completion:
        return Completion(tuple(tokens), tuple(-float(self.version) for _ in tokens), self.version)

    def broadcast(self, value: Any) -> Any:
        return value


def recipe_of(*more: str) -> Any:
    shape = [f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.samples_per_prompt={ANSWERS}"]
    needed = ["rollout.max_new_tokens=99", "rollout.max_model_len=200", "algorithm.correction.kind=truncate"]
    needed += ["run.steps=40", "train.micro_batch_size=4", "async.partial=continue"]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [*shape, *needed, "async.max_staleness=2", *more])


Reward = Callable[[Query], float]


def one(query: Query) -> float:
    return 1.0


class Tokenizer(SimpleNamespace):
    """Can be kept by what it is, as tokenizers can."""

    __hash__ = object.__hash__


def rollouts_on(engine: Engine, group: dist.ProcessGroup, recipe: Any, reward: Reward = one) -> PartialRollouts:
    tokenizer = Tokenizer(
        eos_token_id=END,
        decode=lambda tokens, **_: "".join(map(chr, tokens)),
        encode=lambda text, **_: [*map(ord, text)],
        __len__=lambda: 200,
    )

    def batch(number: int, prompts: int) -> list[Example]:
        return [Example(i, f"{number * prompts + i}", "", (number * prompts + i,)) for i in range(prompts)]

    train: Any = SimpleNamespace(batch=batch)
    replicas = EngineReplicas(recipe, engine, tokenizer, group)
    scorer = SimpleNamespace(score=lambda queries: Scores([reward(query) for query in queries]))
    return PartialRollouts(recipe, replicas, Scorers(scorer, scorer), train, {"eval": train})


def run(
    recipe: Any, length: Callable[[int, int], int], steps: int, group: Any, reward: Reward = one
) -> tuple[list[RolloutBatch], Engine]:
    """Generate the samples of all steps; the weights have a new version at each."""
    engine, batch = Engine(length), 0
    rollouts, found = rollouts_on(engine, group, recipe, reward), []
    for step in range(steps):
        engine.version = step
        found.append(rollouts.generate_batch(step, batch, recipe))
        batch += found[-1].batches
    return found, engine


def trained(batch: RolloutBatch) -> list[int]:
    return [int(sample.prompt) for sample in batch.samples[::ANSWERS]]


@pytest.mark.parametrize("partial", ["continue", "continue_with_cache"])
def test_stop_that_an_interruption_cuts_in_two_ends_an_answer(alone: dist.ProcessGroup, partial: str) -> None:
    """Step 0 writes the letter d, step 1 the letter e: the answers to prompt 0 end with the first `de`."""
    more = ["rollout.stop=[de]", f"async.partial={partial}", "rollout.sleep=false"]
    batches, engine = run(recipe_of(*more), lambda prompt, answer: 5 if prompt else 12, 3, alone)
    assert [trained(batch) for batch in batches[:2]] == [[1, 2, 3, 4], [0, 5, 6, 7]]
    for one in batches[1].samples[:ANSWERS]:
        assert (tuple(one.tokens), tuple(one.versions)) == ((100,) * 5 + (101,), (0,) * 5 + (1,))
        assert tuple(one.logprobs) == (0.0,) * 5 + (-1.0,)
    assert all(request.prompt_ids[0] for request, _ in engine.running.values())


def test_prompts_of_a_batch_are_drawn_together(alone: dist.ProcessGroup) -> None:
    engine, drawn = Engine(lambda prompt, answer: 5), list[int]()
    rollouts = rollouts_on(engine, alone, recipe_of())
    batch = rollouts.train.batch
    rollouts.train.batch = lambda number, prompts: drawn.append(number) or batch(number, prompts)  # type: ignore
    made = rollouts.generate_batch(0, 0, recipe_of())
    assert drawn == [*range(made.batches)]
    engine.version = 1
    rollouts.restore([(7, 1), (8, 0), (7, 3)])
    rollouts.generate_batch(1, made.batches, recipe_of())
    assert sorted(number for number in drawn if number > 6) == [7, 8]


def test_step_trains_first_complete_prompts_while_others_go_on(alone: dist.ProcessGroup) -> None:
    """The answers to prompt 0 have 12 tokens, all others 5."""
    batches, engine = run(recipe_of(), lambda prompt, answer: 5 if prompt else 12, 3, alone)
    assert [trained(batch) for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9, 10, 11]]
    assert [batch.batches for batch in batches] == [2, 1, 1]
    long = batches[2].samples[0]
    assert tuple(long.tokens) == (100,) * 5 + (101,) * 5 + (102, END)
    assert tuple(long.versions) == (0,) * 5 + (1,) * 5 + (2,) * 2
    assert tuple(long.logprobs) == tuple(-float(version) for version in long.versions)
    assert (long.weight_version, long.num_loss_tokens) == (0, 12)
    assert [asked for asked in engine.asked if not asked[0]] == [(0, 0, 0)] * 2 + [(0, 1, 5)] * 2 + [(0, 2, 10)] * 2
    assert [len(batch.unfinished or ()) for batch in batches] == [4, 4, 4]
    assert engine.steps == 5 + 5 + 2  # nobody waits for prompt 0, and in the last step it is there after 2 tokens
    row = batches[2].metrics(batches[2].samples, recipe_of().rollout, 2)
    assert row["rollout/continued_fraction"] == 2 / 8 + 6 / 8 * 0
    assert (row["rollout/staleness_max"], row["rollout/dropped_tokens"]) == (2, 0)


def test_step_waits_for_answers_that_would_be_too_old(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of("async.max_staleness=1")
    batches, engine = run(recipe, lambda prompt, answer: 40 if prompt == 1 and answer else 5, 3, alone)
    assert [trained(batch) for batch in batches] == [[0, 2, 3, 4], [1, 5, 6, 7], [8, 9, 10, 11]]
    assert engine.steps == 5 + 35 + 0  # step 1 waits; the prompts of step 2 are complete by then


def test_late_prompts_are_dropped_where_the_recipe_says_so(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of("async.max_staleness=1", "async.late_answers=drop")
    batches, _ = run(recipe, lambda prompt, answer: 40 if prompt == 1 and answer else 5, 4, alone)
    assert [trained(batch) for batch in batches] == [[0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert [batch.dropped_tokens for batch in batches] == [0, 5 + 10, 0, 0]  # of both answers to prompt 1


def test_answers_that_keep_their_cache_are_not_asked_for_again(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of("async.partial=continue_with_cache", "rollout.sleep=false")
    batches, engine = run(recipe, lambda prompt, answer: 5 if prompt else 12, 3, alone)
    assert [trained(batch) for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9, 10, 11]]
    long = batches[2].samples[0]
    assert tuple(long.tokens) == (100,) * 5 + (101,) * 5 + (102, END)
    assert tuple(long.versions) == (0,) * 5 + (1,) * 5 + (2,) * 2
    assert tuple(long.logprobs) == tuple(-float(version) for version in long.versions)
    assert [asked for asked in engine.asked if not asked[0]] == [(0, 0, 0)] * 2
    assert engine.steps == 5 + 5 + 2


def test_late_answers_that_keep_their_cache_are_cancelled(alone: dist.ProcessGroup) -> None:
    more = (
        "async.max_staleness=1",
        "async.late_answers=drop",
        "async.partial=continue_with_cache",
        "rollout.sleep=false",
    )
    batches, engine = run(recipe_of(*more), lambda prompt, answer: 40 if prompt == 1 and answer else 5, 4, alone)
    assert [trained(batch) for batch in batches] == [[0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert [batch.dropped_tokens for batch in batches] == [0, 5 + 10, 0, 0]
    assert not any(request.prompt_ids[0] == 1 for request, _ in engine.running.values())


def test_answers_that_restart_are_of_one_version(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of("async.partial=restart")
    batches, _ = run(recipe, lambda prompt, answer: 5 if prompt else 12, 3, alone)
    assert [trained(batch) for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9, 10, 11]]
    assert all(len(set(sample.versions)) == 1 for batch in batches for sample in batch.samples)
    assert tuple(batches[2].samples[0].tokens) == (102,) * 11 + (END,)
    assert [batch.dropped_tokens for batch in batches] == [0, 10, 10]


@pytest.mark.parametrize("extra", [1, 5])
def test_prompts_that_teach_nothing_are_replaced_in_parts_too(alone: dist.ProcessGroup, extra: int) -> None:
    """The answers to prompts 1 to 6 have equal rewards. Those to prompt 0 have 12 tokens, all others 5."""
    rewards: Counter[int] = Counter()

    def reward(query: Query) -> float:
        prompt = int(query.prompt)
        rewards[prompt] += 1
        return 1.0 if 1 <= prompt <= 6 else float(rewards[prompt] % 2)

    recipe = recipe_of(f"algorithm.dynamic_sampling={extra}", "async.batches_in_flight=3")
    batches, _ = run(recipe, lambda prompt, answer: 5 if prompt else 12, 2, alone, reward)
    assert rewards == dict.fromkeys(rewards, ANSWERS)  # each answer is scored once
    if extra == 1:  # of eight prompts
        assert trained(batches[0]) == [1, 2, 7, 8]
        assert set(rewards) == {*range(1, 13)}
    else:
        assert trained(batches[0]) == [7, 8, 9, 10]  # without waiting for prompt 0
        assert set(rewards) == {*range(1, 15)}
    assert [batch.zero_variance_groups for batch in batches] == [6, 0]
    left = {place[0] * PROMPTS + place[1] for place in batches[1].unfinished or ()}
    assert left.isdisjoint(rewards)
    assert left | set(rewards) == {*range(PROMPTS * sum(batch.batches for batch in batches))}  # none is lost


def test_replaced_prompts_are_not_waited_for_longer_than_others(alone: dist.ProcessGroup) -> None:
    """The answers to prompt 1 have equal rewards, and prompt 0 is trained in time in the next step."""
    rewards: Counter[int] = Counter()

    def reward(query: Query) -> float:
        rewards[int(query.prompt)] += 1
        return float(query.prompt != "1" and rewards[int(query.prompt)] % 2)

    recipe = recipe_of("algorithm.dynamic_sampling=2", "async.max_staleness=1")
    batches, engine = run(recipe, lambda prompt, answer: 5 if prompt else 40, 1, alone, reward)
    assert trained(batches[0]) == [2, 3, 4, 5]
    assert engine.steps == 5


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    bound=st.integers(1, 4),
    most=st.integers(2, 5),
    partial=st.sampled_from(["continue", "continue_with_cache", "restart"]),
    extra=st.sampled_from([0, 0, 1, 3]),
)
def test_partial_rollout_keeps_the_age_bound_and_loses_no_prompt(
    alone: dist.ProcessGroup, seed: int, bound: int, most: int, partial: str, extra: int
) -> None:
    """With dynamic sampling too: each prompt that was drawn is scored once, or not complete after the last step."""
    draw, steps = random.Random(seed), 12
    lengths: dict[tuple[int, int], int] = {}
    in_flight = min(most, bound + 1)
    more = [f"async.max_staleness={bound}", f"async.batches_in_flight={in_flight}", f"async.partial={partial}"]
    recipe = recipe_of(*more, "rollout.sleep=false", f"run.steps={steps - 1}", f"algorithm.dynamic_sampling={extra}")
    scored: Counter[int] = Counter()

    def reward(query: Query) -> float:
        scored[int(query.prompt)] += 1
        return float(extra and int(query.prompt) % 5 > 1 and scored[int(query.prompt)] % 2)

    def length(prompt: int, answer: int) -> int:
        return lengths.setdefault((prompt, answer), min(60, int(draw.lognormvariate(1.5, 1)) + 1))

    batches, _ = run(recipe, length, steps, alone, reward)
    for step, batch in enumerate(batches):
        assert len(batch.samples) == PROMPTS * ANSWERS
        for sample in batch.samples:
            assert step - bound <= min(sample.versions)
            assert max(sample.versions) <= step
            assert [100 + version for version in [*sample.versions][:-1]] == list(sample.tokens[:-1])
        assert partial == "restart" or batch.dropped_tokens == 0
    left = [number * PROMPTS + i for number, i in batches[-1].unfinished or ()]
    assert scored == dict.fromkeys(scored, ANSWERS)
    assert sorted([*scored, *left]) == [*range(PROMPTS * sum(batch.batches for batch in batches))]
    counts = Counter(int(sample.prompt) for batch in batches for sample in batch.samples)
    assert counts == dict.fromkeys(counts, ANSWERS)
    if not extra:
        assert set(counts) == set(range(steps * PROMPTS))
        assert (left, sum(batch.batches for batch in batches)) == ([], steps)


class SeveralReplicas:
    """Replicas of one engine each, in this process."""

    def __init__(self, parts: Sequence[Any]):
        self.parts, self.numbers = parts, tuple(range(len(parts)))

    def advance(self, prompts: Any, wanted: Any, *more: Any) -> Any:
        given = [{0: wanted[number]} if wanted else wanted for number in self.numbers]
        return {n: self.parts[n].advance({0: prompts.get(n, ())}, given[n], *more)[0] for n in self.numbers}


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("number", [2, 4])
def test_replicas_that_answer_replacements_drop_no_prompt(alone: dist.ProcessGroup, number: int, ahead: int) -> None:
    """A third of all prompts teaches nothing, so that each step asks the replicas again for a few."""
    draw, rewards, steps = random.Random(1), Counter[int](), 30
    lengths: dict[tuple[int, int], int] = {}
    more = ["async.batches_in_flight=2", "algorithm.prompts_per_step=8", f"run.steps={steps - 1}"]
    recipe = recipe_of(*more, "algorithm.dynamic_sampling=3", *(["roles.generation.ranks=2"] if ahead else []))

    def reward(query: Query) -> float:
        rewards[int(query.prompt)] += 1
        return float(int(query.prompt) % 3 > 0 and rewards[int(query.prompt)] % 2)

    def length(prompt: int, answer: int) -> int:
        return lengths.setdefault((prompt, answer), min(60, int(draw.lognormvariate(2, 1)) + 1))

    engines = [Engine(length) for _ in range(number)]
    parts = [rollouts_on(engine, alone, recipe, reward) for engine in engines]
    rollouts = parts[0]
    rollouts._replicas = SeveralReplicas([one._replicas for one in parts])  # type: ignore[assignment]
    batch, most = 0, 0
    for step in range(steps):
        for engine in engines:
            engine.version = step
        made = rollouts.generate_batch(step, batch, recipe)
        batch += made.batches
        assert made.dropped_tokens == 0
        held = [len(rollouts._places[replica]) for replica in range(number)]
        most = max(most, max(held) - min(held))
        if ahead:
            asked = iter([False] * ahead + [True] * number)
            rollouts.generate_ahead(step, recipe, lambda: next(asked))  # noqa: B023
    assert most <= 8


def test_resumed_run_draws_the_unfinished_prompts_again(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of()
    length = lambda prompt, answer: 5 if prompt else 12  # noqa: E731
    (first, second), _ = run(recipe, length, 2, alone)
    engine = Engine(length)
    engine.version = 2
    rollouts = rollouts_on(engine, alone, recipe)
    rollouts.restore(second.unfinished or ())
    third = rollouts.generate_batch(2, first.batches + second.batches, recipe)
    assert trained(third) == [9, 10, 11, 12]
    assert tuple(third.samples[0].versions) == (2,) * 5
    assert sorted(third.unfinished or ()) == [(0, 0), (3, 1), (3, 2), (3, 3)]


def test_replica_goes_on_with_too_many_restored_prompts(alone: dist.ProcessGroup) -> None:
    """As after a resume with other replicas: what cannot be trained within the bound is dropped, not trained late."""
    recipe = recipe_of("async.max_staleness=1")
    engine, steps = Engine(lambda prompt, answer: 5), []
    rollouts = rollouts_on(engine, alone, recipe)
    rollouts.restore([(batch, i) for batch in range(3) for i in range(PROMPTS)])
    for step in range(3):
        engine.version = step
        steps.append(rollouts.generate_batch(step, 3, recipe))
    assert [trained(batch) for batch in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert [batch.dropped_tokens for batch in steps] == [0, 4 * ANSWERS * 5, 0]


class LosingReplicas:
    """One replica, which can be replaced by another one that knows nothing of its prompts, or be lost."""

    def __init__(self, make: Callable[[], EngineReplicas]):
        self.make, self.number = make, 0
        self.there: EngineReplicas | None = make()
        self.before_advance: Callable[[], None] = lambda: None

    @property
    def numbers(self) -> tuple[int, ...]:
        return () if self.there is None else (self.number,)

    def replace(self, by_another: bool = True) -> None:
        self.number, self.there = self.number + 1, self.make() if by_another else None

    def advance(self, prompts: Any, wanted: Any, *more: Any) -> Any:
        before = self.number
        self.before_advance()
        if self.number != before:
            return {}  # it was lost during the call
        assert self.there is not None
        given = {0: wanted[self.number]} if wanted else wanted
        found = self.there.advance({0: prompts.get(self.number, ())}, given, *more)
        return {self.number: found[0]}


@pytest.mark.parametrize("by_another", [True, False])
@pytest.mark.parametrize("during", [True, False])
def test_lost_replica_loses_no_prompt(alone: dist.ProcessGroup, by_another: bool, during: bool) -> None:
    """Whether another replica is there at once, or later; lost between two steps, or in one."""
    recipe, engine = recipe_of(), Engine(lambda prompt, answer: 5 if prompt else 12)
    rollouts = rollouts_on(engine, alone, recipe)
    first = rollouts._replicas
    made = [first]

    def make() -> Any:
        if made:
            return made.pop()
        engine.running = {}
        another = rollouts_on(engine, alone, recipe)._replicas
        return another

    losing = LosingReplicas(make)
    rollouts._replicas = losing  # type: ignore[assignment]
    first_batch = rollouts.generate_batch(0, 0, recipe)
    assert trained(first_batch) == [1, 2, 3, 4]
    if during:

        def lose() -> None:
            losing.before_advance = lambda: None
            losing.replace(by_another)

        losing.before_advance = lose
    else:
        losing.replace(by_another)
    if not by_another:
        with pytest.raises(NoReplicas):
            rollouts.generate_batch(0, 0, recipe)
        losing.replace()
    two = rollouts.generate_batch(0, 0, recipe)
    assert trained(two) == [5, 6, 7, 8]
    assert two.unfinished == [(0, 0), (2, 1), (2, 2), (2, 3)]
    engine.version = 1
    three = rollouts.generate_batch(1, 0, recipe)
    assert 0 not in trained(three) or next(iter(three.samples[0].versions)) == 0
    assert sum(batch.batches for batch in (first_batch, two, three)) == 4


def test_generation_ahead_stops_when_it_is_told(alone: dist.ProcessGroup) -> None:
    recipe = recipe_of("roles.generation.ranks=2")
    engine = Engine(lambda prompt, answer: 9)
    rollouts = rollouts_on(engine, alone, recipe)
    rollouts.generate_batch(0, 0, recipe)
    before, asked = engine.steps, iter([False, False, False, True])
    rollouts.generate_ahead(0, recipe, lambda: next(asked))
    assert (engine.steps - before, engine.running) == (4, {})
    engine.version = 1
    second = rollouts.generate_batch(1, 2, recipe)
    assert trained(second) == [4, 5, 6, 7]  # complete in the first step already, with the first four
    assert tuple(second.samples[0].versions) == (0,) * 9


def test_engine_generates_other_answers_while_an_environment_thinks(
    alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replies to prompt 0 come after two steps, which do not wait for them."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n\n\ndef reply(turns, reference, prompt):\n"
        "    while prompt == '0' and not pathlib.Path('go').exists():\n        time.sleep(0.01)\n"
        "    return None if len(turns) > 1 else 'r'\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("rollout.environment=slow:reply", "async.max_staleness=4", "reward.workers=4")
    engine = Engine(lambda prompt, answer: 3)
    rollouts = rollouts_on(engine, alone, recipe)
    turns = rollouts._replicas._turns  # type: ignore[attr-defined]
    turns._tokenizer.encode = lambda text, add_special_tokens: [55, 56]
    seen, batch = [], 0
    try:
        for step in range(5):
            engine.version = step
            made = rollouts.generate_batch(step, batch, recipe)
            batch += made.batches
            seen.append(made)
            if step == 1:
                Path("go").touch()
    finally:
        turns.close()
    assert not any(0 in trained(made) for made in seen[:2])
    (late,) = (made for made in seen[2:] if 0 in trained(made))
    sample = late.samples[trained(late).index(0) * ANSWERS]
    assert (tuple(sample.tokens), tuple(sample.loss_mask)) == (
        (100, 100, 0, 55, 56, 0),
        (True,) * 3 + (False,) * 2 + (True,),
    )
    assert tuple(sample.versions)[:5] == (0,) * 5
    assert tuple(sample.versions)[5] >= 2
    assert len(sample.logprobs) == 4


def test_waiting_for_replies_ends_with_the_run(alone: dist.ProcessGroup) -> None:
    engine: Any = Engine(lambda prompt, answer: 3)
    tokenizer = Tokenizer(eos_token_id=END, encode=lambda text, **_: [], decode=lambda tokens, **_: "")
    turns = Turns(recipe_of(), engine, tokenizer, alone)
    settings = Async(max_staleness=1, partial="continue")
    partial = Scheduler(engine, Prompts(Conversations(turns, waves=False), settings), settings)
    assert partial.advance([], 0, 0, Sampling(), None, gives=True) == Answers()  # a replica that has no prompts


def test_toy_continuation_takes_a_second_thought_over_a_sync() -> None:
    """`toys/second_thoughts.py`: each part of an answer has three tokens, and the second is cut by new weights."""
    engine = Engine(lambda prompt, answer: 3 if engine.steps <= 3 else 7)
    settings = Async(partial="continue", max_staleness=1)
    scheduler = Scheduler(engine, Prompts(SecondThoughts(), settings), settings)  # type: ignore[arg-type]
    stop = iter([False, False, False, False, True])
    prompt = Prompt((0, 0), Example(0, "", "", (5,)), [1], 0)
    first = scheduler.advance([prompt], None, 0, Sampling(), lambda: next(stop), gives=False)
    assert first is not None
    assert (first.samples, first.unfinished) == ([], [(0, 0)])
    engine.version = 1
    second = scheduler.advance([], 1, 1, Sampling(), None, gives=True)
    assert second is not None
    (sample,) = second.samples
    assert [*sample.tokens] == [100, 100, END, AGAIN, 100, 100, END]
    assert [*sample.versions] == [0, 0, 0, 0, 0, 0, 1]
    assert [*sample.loss_mask] == [True, True, True, False, True, True, True]
