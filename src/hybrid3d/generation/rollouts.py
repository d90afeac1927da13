"""Sampling and evaluation over all replicas: prompts are distributed to them, answers and rewards are gathered."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid3d.config import Algorithm, Recipe
from hybrid3d.generation.agents.answers import OF_AGENT
from hybrid3d.generation.engine import NO_CHOICES, Sampling
from hybrid3d.generation.evaluation import DATA_EVAL, EvalResult, HeldOutAnswer, measure
from hybrid3d.generation.replicas import Replicas, available
from hybrid3d.generation.samples import RolloutBatch, Sample, answers_of, queries_of, with_baselines, with_rewards
from hybrid3d.generation.scheduler import Answers, Place, Prompt
from hybrid3d.generation.turns import OF_ENVIRONMENT, seed_of
from hybrid3d.rl.data import PromptData
from hybrid3d.scoring.functions import FINAL_ANSWERS
from hybrid3d.scoring.scorer import Scorer, Scorers, ask_all, shares_of


class FailedRewards(RuntimeError):
    """More rewards (and environments) of a step failed than the recipe allows, or all of them."""

    raised_on_all_ranks = True  # every rank raises it: one of them is enough to tell


class Failures:
    """Conversations and rewards that failed, by kind, and an example of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, counts: Mapping[str, int], examples: Mapping[str, str]) -> None:
        self.counts.update(counts)
        self.examples = {**examples, **self.examples}


class Selection:
    """The prompts that were answered for a step, of which it trains as many as are wanted.

    Groups of a prompt's samples with equal rewards have zero advantages: further prompts are answered to replace them
    (DAPO, arXiv 2503.14476, section 3.2), up to `extra` times as many as are wanted. Where they still do not suffice,
    such groups fill the batch.

    Attributes:
        greedy: answers that are trained on by nobody, which a reward model scores later.
        zero_variance: the number of groups with equal rewards.
    """

    def __init__(self, wanted: int, extra: int):
        self.failures = Failures()
        self.greedy: list[Sample] = []
        self.zero_variance = 0
        self._wanted, self._extra = wanted, extra
        self._groups: list[list[Sample]] = []  # the answers to a prompt, with all their branches
        self._found: list[int] = []
        self._fillers: list[int] = []

    @property
    def prompts(self) -> int:
        """How many prompts were answered."""
        return len(self._groups)

    @property
    def missing(self) -> int:
        """How many prompts are still to be answered."""
        most = self._wanted * (1 + self._extra)
        return max(0, min(self._wanted - len(self._found), most - len(self._groups)))

    def add(self, answers: Sequence[Sequence[Sample]], has_zero_variance: bool) -> None:
        """Add all answers to a prompt."""
        (self._fillers if has_zero_variance and self._extra else self._found).append(len(self._groups))
        self._groups.append([branch for answer in answers for branch in answer])
        self.zero_variance += has_zero_variance

    def samples(self) -> list[Sample]:
        """Return the samples that are trained."""
        # In the order of generation, so that no minibatch has fillers only
        chosen = sorted([*self._found, *self._fillers][: self._wanted])
        return [sample for index in chosen for sample in self._groups[index]]


class Rollouts:
    """Generates and scores samples over all replicas. What a replica that is lost had to answer, the others answer."""

    def __init__(
        self,
        recipe: Recipe,
        replicas: Replicas,
        scorers: Scorers,
        train: PromptData,
        held_out: Mapping[str, PromptData],
    ):
        self._recipe, self._replicas, self._scorers = recipe, replicas, scorers
        self.train, self.held_out = train, held_out

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate a step's samples from batches of prompts, of which `batch` is the first; see `Selection`.

        Args:
            version: the engine's weights must have this version or a later one.
            recipe: with the settings of the step.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
            FailedRewards: more than `reward.max_failures` of the samples' rewards failed, or all of them.
            NoReplicas: all replicas have been lost.
        """
        selection = Selection(recipe.algorithm.prompts_per_step, extra_batches(recipe))
        batches = 0
        while selection.missing:
            drawn = self._answer_prompts(version, batch + batches, Sampling.for_training(recipe), selection.failures)
            self._select(drawn, selection)
            batches += 1
        return self._batch(selection, batches)

    def _select(self, answers: Sequence[list[Sample]], selection: Selection) -> None:
        """Score answers, all to a prompt in a row, and add them to a step's."""
        scored, greedy = self._scored(answers, selection.failures)
        selection.greedy += greedy
        per_prompt = self._recipe.algorithm.samples_per_prompt
        for start in range(0, len(scored), per_prompt):
            of_prompt = scored[start : start + per_prompt]
            selection.add(of_prompt, self._has_zero_variance(of_prompt))

    def _batch(self, selection: Selection, batches: int) -> RolloutBatch:
        """Return a step's samples; `batches` of prompts were drawn for them."""
        failures = selection.failures
        self._check(failures, selection.prompts * self._answers_per_prompt, self._recipe.reward.max_failures)
        return RolloutBatch(
            selection.samples(),
            batches,
            selection.zero_variance,
            dict(failures.counts),
            failures.examples,
            greedy=selection.greedy,
        )

    @property
    def _answers_per_prompt(self) -> int:
        """How many answers to a prompt are generated; the last one may be greedy."""
        return self._recipe.algorithm.samples_per_prompt + self._recipe.algorithm.uses_greedy_answers

    def _has_zero_variance(self, answers: Sequence[Sequence[Sample]]) -> bool:
        """Return whether the answers to a prompt have equal rewards; not counted where a model gives them."""
        rewards = {branches[0].reward for branches in answers}
        return self._recipe.reward.model is None and len(answers) > 1 and len(rewards) == 1

    def _scored(
        self, answers: Sequence[list[Sample]], failures: Failures
    ) -> tuple[Sequence[list[Sample]], list[Sample]]:
        """Return the answers that are trained on, with rewards and baselines, and greedy answers.

        Where a reward model scores answers when experience is made, they have no rewards yet, and greedy answers are
        returned apart; otherwise there are none.
        """
        has_greedy, size = self._recipe.algorithm.uses_greedy_answers, self._answers_per_prompt
        if self._scorers.training is None:
            if not has_greedy:
                return answers, []
            greedy = [replace(sample, experts=NO_CHOICES) for answer in answers[size - 1 :: size] for sample in answer]
            return [answer for number, answer in enumerate(answers, 1) if number % size], greedy
        scored = _with_scores(self._scorers.training, answers, size, failures)
        return (with_baselines(scored, size) if has_greedy else scored), []

    def _check(self, failures: Failures, samples: int, allowed: float, where: str = "") -> None:
        """Raise FailedRewards if more than the fraction `allowed` failed, or all rewards or all environments did."""
        counts, failed = failures.counts, failures.counts.total()
        of_environment = sum(count for kind, count in counts.items() if kind.startswith((OF_ENVIRONMENT, OF_AGENT)))
        all_failed = max(of_environment, failed - of_environment) >= samples > 0
        if not all_failed and (allowed == 1 or failed <= allowed * samples):
            return
        bound = f"reward.max_failures={allowed:g} allows {int(allowed * samples)}"
        if all_failed:
            bound = "when all fail the run ends, whatever reward.max_failures allows"
        kinds = ", ".join(f"{count} {kind} ({failures.examples[kind]})" for kind, count in sorted(counts.items()))
        rollout = self._recipe.rollout
        assert rollout is not None, "checked when the recipe was read"
        other = "your agent" if rollout.agents is not None else rollout.environment
        what = "rewards" if other is None else "rewards and conversations"
        blamed = self._recipe.reward.name if other is None else f"{self._recipe.reward.name}, {other}"
        timeout = "reward.timeout_seconds" if rollout.agents is None else "rollout.agents.timeout_seconds"
        fix = f"fix {blamed}, or raise {timeout}"
        raise FailedRewards(f"{failed} of {samples} {what} failed{where}: {kinds}; {bound}: {fix}")

    def _answer_prompts(
        self, version: int, batch: int, sampling: Sampling, failures: Failures
    ) -> Sequence[list[Sample]]:
        """Return the answers to a batch of prompts, `_answers_per_prompt` in a row."""
        algorithm, run = self._recipe.algorithm, self._recipe.run
        prompts = [
            Prompt((batch, i), example, request_seeds(run.seed, batch, i, algorithm), version)
            for i, example in enumerate(self.train.batch(batch, algorithm.prompts_per_step))
        ]
        return self._answer(prompts, version, sampling, failures)

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        """Answer the held-out problems as `evaluation` says, and score the answers.

        Args and errors are those of `generate_batch`, but `FailedRewards`: all of the rewards failed.
        """
        metrics: dict[str, float] = {}
        failures = Failures()
        for name, data in self.held_out.items():
            of_file = Failures()
            groups = self._answer_held_out(name, data, version, recipe, of_file)
            prefix, where = f"eval/{name}/", f" of evaluation.data.{name}"
            if name == DATA_EVAL:
                prefix, where = "eval/", ""
            self._check(of_file, sum(map(len, groups)), allowed=1.0, where=f" on held-out problems{where}")
            failures.add(of_file.counts, of_file.examples)
            found = measure(groups, recipe.evaluation.ks, self._final_answer is not None)
            metrics |= {f"{prefix}{key}": value for key, value in found.items()}
        problems = {name: len(data.examples) for name, data in self.held_out.items()}
        return EvalResult(metrics, problems, dict(failures.counts), failures.examples)

    @property
    def _final_answer(self) -> Callable[[str], Hashable | None] | None:
        """What extracts final answers, for a majority vote; None where there are none, or agents give the rewards."""
        has_agents = self._recipe.rollout is not None and self._recipe.rollout.agents is not None
        return None if has_agents else FINAL_ANSWERS.get(self._recipe.reward.name)

    def _answer_held_out(
        self, name: str, data: PromptData, version: int, recipe: Recipe, failures: Failures
    ) -> list[list[HeldOutAnswer]]:
        """Return the answers to each problem of a file.

        The seeds are the same in each evaluation, so that two of them differ by their weights only.
        """
        evaluation, final, n = recipe.evaluation, self._final_answer, recipe.evaluation.samples
        prompts = []
        for i, example in enumerate(data.examples):
            seeds = [seed_of(f"{recipe.run.seed}/evaluation/{name}/{example.row}/{k}") for k in range(n)]
            prompts.append(Prompt((0, i), example, seeds if evaluation.temperature else [None] * n, version))
        answers = self._answer(prompts, version, Sampling.for_evaluation(recipe), failures)
        answers = _with_scores(self._scorers.held_out, answers, n, failures)
        found = [
            HeldOutAnswer(first.reward, None if final is None or n == 1 else final(first.answer))
            for first, *_ in answers
        ]
        return [found[start : start + n] for start in range(0, len(found), n)]

    def _answer(
        self, prompts: Sequence[Prompt], version: int, sampling: Sampling, failures: Failures
    ) -> Sequence[list[Sample]]:
        """Return the branches of each answer, all answers to a prompt in a row."""
        answers: dict[int, list[list[Sample]]] = {}

        def ask(numbers: Mapping[int, list[int]]) -> Mapping[int, Answers]:
            shares = {replica: [prompts[i] for i in of_replica] for replica, of_replica in numbers.items()}
            return self._replicas.advance(shares, None, version, sampling, apart=True)

        for numbers, found in ask_all(partial(available, self._replicas), [[i] for i in range(len(prompts))], ask):
            of_replica = answers_of(found.samples)
            assert len(of_replica) == sum(len(prompts[i].seeds) for i in numbers), "a replica answers all it is given"
            remaining = iter(of_replica)
            answers |= {i: [*itertools.islice(remaining, len(prompts[i].seeds))] for i in numbers}
            failures.add(found.failures, found.examples)
        return [answer for i in range(len(prompts)) for answer in answers[i]]

    def restore(self, unfinished: Sequence[Place]) -> None:
        """Continue from a checkpoint, when the prompts at these places were drawn and not trained."""


class PartialRollouts(Rollouts):
    """Generates answers in parts: no step waits for its longest ones, which later steps go on with."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._places: dict[int, list[Place]] = {}  # of each replica's prompts that were drawn and not trained
        self._new: dict[int, list[Prompt]] = {}  # those of them that the replica does not know of yet
        self._redrawn: list[Place] = []  # prompts of an earlier process, or of a replica that was lost
        self._drawn: int | None = None  # the number of batches of prompts that were drawn
        self._reported = 0  # the number of them that were reported
        self._dropped_tokens = 0  # since the last report
        self._selection: Selection | None = None  # of a step, which goes on after all replicas were lost
        self._taken: list[Answers] = []  # those of its answers that are not scored yet

    def restore(self, unfinished: Sequence[Place]) -> None:
        """Draw the prompts again whose answers were not complete, or not trained, when the checkpoint was written."""
        self._redrawn = [*unfinished]

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate until a step's samples are complete, and interrupt the other answers.

        Args and errors are those of `Rollouts.generate_batch`; `batch` is used by the first call.
        """
        if self._drawn is None:
            self._drawn = self._reported = batch
        most = min(recipe.async_.batches_in_flight, recipe.run.steps - version + 1)
        selection = self._selection or Selection(recipe.algorithm.prompts_per_step, extra_batches(recipe))
        self._selection = selection
        while self._taken or selection.missing:
            if not self._taken:
                # What is missing later takes no more prompts than it needs: the next steps could not train them in time
                self._fill(version, 1 if selection.prompts else most, selection.missing, recipe)
                self._taken = self._advance(version, self._shares(selection.missing), recipe)
            taken = [answer for of_replica in self._taken for answer in answers_of(of_replica.samples)]
            self._select(taken, selection)
            for of_replica in self._taken:
                selection.failures.add(of_replica.failures, of_replica.examples)
            self._taken = []
        self._selection = None
        batches, self._reported = self._drawn - self._reported, self._drawn
        dropped, self._dropped_tokens = self._dropped_tokens, 0
        unfinished = sorted([*self._redrawn, *(place for places in self._places.values() for place in places)])
        return replace(self._batch(selection, batches), unfinished=unfinished, dropped_tokens=dropped)

    def generate_ahead(self, version: int, recipe: Recipe, stop: Callable[[], bool]) -> None:
        """Generate answers that later steps train, until `stop` returns True. Raises StaleWeights, NoReplicas."""
        ahead = recipe.async_
        most = min(ahead.batches_in_flight, ahead.max_staleness, recipe.run.steps - version)
        self._fill(version, most, recipe.algorithm.prompts_per_step, recipe)
        self._advance(version, None, recipe, stop)

    def _advance(
        self, version: int, wanted: Mapping[int, int] | None, recipe: Recipe, stop: Callable[[], bool] | None = None
    ) -> list[Answers]:
        new, self._new = self._new, {}
        sampling = Sampling.for_training(recipe)
        found = self._replicas.advance(new, wanted, version, sampling, stop)
        for number, advanced in found.items():
            self._places[number] = list(advanced.unfinished)
            self._dropped_tokens += advanced.dropped_tokens
        return list(found.values())

    def _fill(self, version: int, batches: int, wanted: int, recipe: Recipe) -> None:
        """Draw prompts until so many batches are being answered, and as many as are wanted."""
        assert self._drawn is not None
        prompts = recipe.algorithm.prompts_per_step
        for number in self._places.keys() - set(self._replicas.numbers):
            self._redrawn += self._places.pop(number)
            self._new.pop(number, None)
        self._draw(self._redrawn, version)
        self._redrawn = []
        least = max((batches - 1) * prompts + 1, wanted if batches else 0)
        while sum(map(len, self._places.values())) < least:
            self._draw([(self._drawn, i) for i in range(prompts)], version)
            self._drawn += 1

    def _shares(self, wanted: int) -> dict[int, int]:
        """Return how many of the prompts that are wanted each replica is to give: those that have most give most.

        Prompts are drawn evenly: those of a replica that was asked for fewer than others would become too old.
        """
        left = {number: len(self._places.get(number, ())) for number in available(self._replicas)}
        shares = dict.fromkeys(left, 0)
        for _ in range(wanted):
            fullest = max(left, key=lambda number: (left[number], -number))
            shares[fullest] += 1
            left[fullest] -= 1
        return shares

    def _draw(self, places: Sequence[Place], version: int) -> None:
        """Give the prompts at these places to replicas: by their index in the batch, whose order the replicas share."""
        algorithm, seed = self._recipe.algorithm, self._recipe.run.seed
        shares = shares_of(available(self._replicas), range(algorithm.prompts_per_step))
        batches = {batch: self.train.batch(batch, algorithm.prompts_per_step) for batch in dict(places)}
        for batch, i in places:
            number = next(number for number, share in shares.items() if i in share)
            seeds = request_seeds(seed, batch, i, algorithm)
            self._new.setdefault(number, []).append(Prompt((batch, i), batches[batch][i], seeds, version))
            self._places.setdefault(number, []).append((batch, i))


def make_rollouts(recipe: Recipe, *args: Any) -> Rollouts:
    """Return the rollouts that a recipe asks for; all other arguments are those of `Rollouts`."""
    return (Rollouts if recipe.async_.partial is None else PartialRollouts)(recipe, *args)


def _with_scores(
    scorer: Scorer, answers: Sequence[list[Sample]], per_prompt: int, failures: Failures
) -> list[list[Sample]]:
    scores = scorer.score(queries_of(answers, per_prompt))
    failures.add(scores.failures, scores.examples)
    return with_rewards(answers, scores.rewards)


def extra_batches(recipe: Recipe) -> int:
    """Return the maximum number of extra batches of prompts for dynamic sampling: see `Selection`."""
    # A reward model's scores are hardly ever equal
    return recipe.algorithm.combination.dynamic_sampling if recipe.reward.model is None else 0


def request_seeds(seed: int, batch: int, prompt: int, algorithm: Algorithm) -> list[int | None]:
    """Return the seeds of all answers to a prompt; None answers greedily, last."""
    sampled = [seed_of(f"{seed}/{batch}/{prompt}/{sample}") for sample in range(algorithm.samples_per_prompt)]
    return [*sampled, *[None] * algorithm.uses_greedy_answers]
