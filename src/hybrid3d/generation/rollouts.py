"""Sampling and evaluation over all replicas: prompts are distributed to them, answers and rewards are gathered."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.evaluation import DATA_EVAL, EvalResult, HeldOutAnswer, measure, prefix_of
from hybrid3d.generation.partial_rollout import Place, Prompt
from hybrid3d.generation.replicas import OF_AGENT, OF_ENVIRONMENT, Advanced, Answers, NoReplicas, Replicas, Work
from hybrid3d.generation.samples import RolloutBatch, Sample, answers_of
from hybrid3d.rl.data import PromptData
from hybrid3d.scoring.functions import FINAL_ANSWERS


class FailedRewards(RuntimeError):
    """More rewards (and environments) of a step failed than the recipe allows, or all of them."""

    raised_on_all_ranks = True  # every rank raises it: one of them is enough to tell


class Rollouts:
    """Generates and scores samples over all replicas. What a replica that is lost had to answer, the others answer.

    Attributes:
        train, held_out: the prompts, the latter by the names of their files.
    """

    def __init__(self, recipe: Recipe, replicas: Replicas, train: PromptData, held_out: Mapping[str, PromptData]):
        self._recipe = recipe
        self._replicas = replicas
        self.train = train
        self.held_out = held_out

    @property
    def _scores_training(self) -> bool:
        """Whether training uses the reward by name; otherwise a reward model scores the samples later."""
        return self._recipe.reward.model is None

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate a step's samples.

        Groups of a prompt's samples with equal rewards have zero advantages: up to `extra_batches` further batches of
        prompts are generated to replace them (DAPO, arXiv 2503.14476, section 3.2). Where they still do not suffice,
        such groups fill the batch.

        Args:
            version: the engine's weights must have this version or a later one.
            batch: number of the first batch of prompts.
            recipe: with the settings of the step.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
            FailedRewards: more than `reward.max_failures` of the samples' rewards failed, or all of them.
            NoReplicas: all replicas have been lost.
        """
        wanted, group = recipe.algorithm.prompts_per_step, recipe.algorithm.samples_per_prompt
        extra = extra_batches(recipe)
        groups: list[list[Sample]] = []  # the answers to a prompt, with all their branches
        found: list[int] = []
        fillers: list[int] = []
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        batches = zero_variance = 0
        while len(found) < wanted and batches <= extra:
            answers, of_replicas = self._generate_answers(version, batch + batches, Sampling.for_training(recipe))
            batch_failures, batch_examples = _failures(of_replicas)
            failures.update(batch_failures)
            examples = batch_examples | examples
            for start in range(0, len(answers), group):
                of_prompt = answers[start : start + group]
                uniform = self._has_zero_variance([answer[0] for answer in of_prompt])
                (fillers if uniform and extra else found).append(len(groups))
                groups.append([branch for answer in of_prompt for branch in answer])
                zero_variance += uniform
            batches += 1
        answered = batches * wanted * (group + recipe.algorithm.uses_greedy_answers)
        self._check(failures, examples, answered, self._recipe.reward.max_failures)
        # In the order of generation, so that no minibatch has fillers only
        chosen = sorted([*found, *fillers][:wanted])
        return RolloutBatch(
            [sample for index in chosen for sample in groups[index]], batches, zero_variance, dict(failures), examples
        )

    def _has_zero_variance(self, answers: Sequence[Sample]) -> bool:
        equal = all(sample.reward == answers[0].reward for sample in answers)
        return self._scores_training and len(answers) > 1 and equal

    def _check(
        self, failures: Mapping[str, int], examples: Mapping[str, str], samples: int, allowed: float, where: str = ""
    ) -> None:
        """Raise FailedRewards if more than the fraction `allowed` failed, or all rewards or all environments did."""
        failed = sum(failures.values())
        of_environment = sum(count for kind, count in failures.items() if kind.startswith((OF_ENVIRONMENT, OF_AGENT)))
        all_failed = max(of_environment, failed - of_environment) >= samples > 0
        if not all_failed and (allowed == 1 or failed <= allowed * samples):
            return
        bound = f"reward.max_failures={allowed:g} allows {int(allowed * samples)}"
        if all_failed:
            bound = "when all fail the run ends, whatever reward.max_failures allows"
        kinds = ", ".join(f"{count} {kind} ({examples[kind]})" for kind, count in sorted(failures.items()))
        rollout = self._recipe.rollout
        assert rollout is not None, "checked when the recipe was read"
        other = "your agent" if rollout.agents is not None else rollout.environment
        what = "rewards" if other is None else "rewards and conversations"
        blamed = self._recipe.reward.name if other is None else f"{self._recipe.reward.name}, {other}"
        timeout = "reward.timeout_seconds" if rollout.agents is None else "rollout.agents.timeout_seconds"
        fix = f"fix {blamed}, or raise {timeout}"
        raise FailedRewards(f"{failed} of {samples} {what} failed{where}: {kinds}; {bound}: {fix}")

    def _generate_answers(
        self, version: int, batch: int, sampling: Sampling
    ) -> tuple[list[list[Sample]], list[Answers]]:
        algorithm, run = self._recipe.algorithm, self._recipe.run
        greedy: list[int | None] = [None] * algorithm.uses_greedy_answers
        work: list[Work] = [
            (example, seed)
            for i, example in enumerate(self.train.batch(batch, algorithm.prompts_per_step))
            for seed in [*request_seeds(run.seed, batch, i, algorithm.samples_per_prompt), *greedy]
        ]
        size = algorithm.samples_per_prompt + len(greedy)
        answers, of_replicas = self._answer(work, size, version, sampling, self._scores_training)
        return (_with_baselines(answers, size) if greedy else answers), of_replicas

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        """Answer the held-out problems as `evaluation` says, and score the answers.

        Args:
            version, recipe: as for `generate_batch`.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
            FailedRewards: all of the rewards failed.
            NoReplicas: all replicas have been lost.
        """
        metrics: dict[str, float] = {}
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for name, data in self.held_out.items():
            groups, of_replicas = self._answer_held_out(name, data, version, recipe)
            failed, of_kinds = _failures(of_replicas)
            of_file = "" if name == DATA_EVAL else f" of evaluation.data.{name}"
            count = sum(map(len, groups))
            self._check(failed, of_kinds, count, allowed=1.0, where=f" on held-out problems{of_file}")
            failures.update(failed)
            examples = {**of_kinds, **examples}
            found = measure(groups, recipe.evaluation.ks, self._final_answer is not None)
            metrics |= {f"{prefix_of(name)}{key}": value for key, value in found.items()}
        problems = {name: len(data.examples) for name, data in self.held_out.items()}
        return EvalResult(metrics, problems, dict(failures), examples)

    @property
    def _final_answer(self) -> Callable[[str], Hashable | None] | None:
        """What extracts final answers, for a majority vote; None where there are none, or agents give the rewards."""
        has_agents = self._recipe.rollout is not None and self._recipe.rollout.agents is not None
        return None if has_agents else FINAL_ANSWERS.get(self._recipe.reward.name)

    def _answer_held_out(
        self, name: str, data: PromptData, version: int, recipe: Recipe
    ) -> tuple[list[list[HeldOutAnswer]], list[Answers]]:
        """Return the answers to each problem of a file, and all that replicas have answered.

        The seeds are the same in each evaluation, so that two of them differ by their weights only.
        """
        evaluation, final, n = recipe.evaluation, self._final_answer, recipe.evaluation.samples
        work: list[Work] = [
            (example, evaluation_seed(recipe.run.seed, name, example.row, i) if evaluation.temperature else None)
            for example in data.examples
            for i in range(n)
        ]
        answers, of_replicas = self._answer(work, n, version, Sampling.for_evaluation(recipe), scored=True)
        found = [
            HeldOutAnswer(first.reward, None if final is None or n == 1 else final(first.answer))
            for first, *_ in answers
        ]
        return [found[start : start + n] for start in range(0, len(found), n)], of_replicas

    def _answer(
        self, work: Sequence[Work], size: int, version: int, sampling: Sampling, scored: bool
    ) -> tuple[list[list[Sample]], list[Answers]]:
        """Return the branches of each answer in the order of the work, and all that replicas have answered.

        Args:
            size: the number of answers in a row that one replica gives.
        """
        answers: dict[int, list[Sample]] = {}
        of_replicas: list[Answers] = []
        remaining: Sequence[int] = range(len(work))
        while remaining:
            shares = self._divide(remaining, size)
            found = self._replicas.answer(
                {number: [work[i] for i in share] for number, share in shares.items()}, version, sampling, scored
            )
            for number, of_replica in found.items():
                answers |= zip(shares[number], answers_of(of_replica.samples), strict=True)
                of_replicas.append(of_replica)
            remaining = [i for number, share in shares.items() if number not in found for i in share]
        return [answers[i] for i in range(len(work))], of_replicas

    def _divide(self, items: Sequence[Any], size: int = 1) -> dict[int, Sequence[Any]]:
        """Return each replica's consecutive share of the items, in units of `size` of them.

        Raises:
            NoReplicas: there is no replica.
        """
        numbers, units = self._replicas.numbers, len(items) // size
        if not numbers:
            raise NoReplicas("no rank can generate: all have been lost")
        bounds = [units * i // len(numbers) * size for i in range(len(numbers) + 1)]
        return {number: items[bounds[i] : bounds[i + 1]] for i, number in enumerate(numbers)}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's progress."""


class PartialRollouts(Rollouts):
    """Generates answers as `PartialRollout` says: those that a step does not wait for are trained in later steps."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._places: dict[int, list[Place]] = {}  # of each replica's prompts that were drawn and not trained
        self._new: dict[int, list[Prompt]] = {}  # those of them that the replica does not know of yet
        self._redrawn: list[Place] = []  # prompts of an earlier process, or of a replica that was lost
        self._drawn: int | None = None  # the number of batches of prompts that were drawn
        self._reported = 0  # the number of them that were reported
        self._dropped_tokens = 0  # since the last report
        self._taken: list[Answers] = []  # of the step, which goes on after all replicas were lost

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Draw the prompts again whose answers were not complete, or not trained, when the checkpoint was written."""
        self._redrawn = [(batch, i) for batch, i in progress.get("unfinished", ())]

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate until a step's samples are complete, and interrupt the other answers.

        Args and errors are those of `Rollouts.generate_batch`; `batch` is used by the first call.
        """
        if self._drawn is None:
            self._drawn = self._reported = batch
        size = recipe.algorithm.samples_per_prompt
        most = min(recipe.async_.batches_in_flight, recipe.run.steps - version + 1)
        while missing := recipe.algorithm.prompts_per_step - sum(len(a.samples) for a in self._taken) // size:
            self._fill(version, most, missing, recipe)
            wanted = {number: len(share) for number, share in self._divide(range(missing)).items()}
            self._taken += [advanced.answers for advanced in self._advance(version, wanted, recipe)]
        answers, self._taken = self._taken, []
        samples = [sample for of_replica in answers for sample in of_replica.samples]
        failures, examples = _failures(answers)
        self._check(failures, examples, len(samples), recipe.reward.max_failures)
        batches, self._reported = self._drawn - self._reported, self._drawn
        dropped, self._dropped_tokens = self._dropped_tokens, 0
        return RolloutBatch(
            samples,
            batches=batches,
            zero_variance_groups=sum(
                self._has_zero_variance(samples[start : start + size]) for start in range(0, len(samples), size)
            ),
            failures=failures,
            examples=examples,
            unfinished=sorted([*self._redrawn, *(place for places in self._places.values() for place in places)]),
            dropped_tokens=dropped,
        )

    def generate_ahead(self, version: int, recipe: Recipe, stop: Callable[[], bool]) -> None:
        """Generate answers that later steps train, until `stop` returns True.

        Raises:
            StaleWeights, NoReplicas: as for `generate_batch`.
        """
        ahead = recipe.async_
        most = min(ahead.batches_in_flight, ahead.max_staleness, recipe.run.steps - version)
        self._fill(version, most, recipe.algorithm.prompts_per_step, recipe)
        self._advance(version, None, recipe, stop)

    def _advance(
        self, version: int, wanted: Mapping[int, int] | None, recipe: Recipe, stop: Callable[[], bool] | None = None
    ) -> list[Advanced]:
        new, self._new = self._new, {}
        sampling = Sampling.for_training(recipe)
        found = self._replicas.advance(new, wanted, version, sampling, self._scores_training, stop)
        for number, advanced in found.items():
            self._places[number] = list(advanced.unfinished)
            self._dropped_tokens += advanced.dropped_tokens
        return list(found.values())

    def _fill(self, version: int, batches: int, wanted: int, recipe: Recipe) -> None:
        """Draw prompts until so many batches are being answered, and each replica has its share of those wanted."""
        assert self._drawn is not None
        prompts = recipe.algorithm.prompts_per_step
        for number in self._places.keys() - set(self._replicas.numbers):
            self._redrawn += self._places.pop(number)
            self._new.pop(number, None)
        self._draw(self._redrawn, version)
        self._redrawn = []
        while sum(map(len, self._places.values())) + prompts <= batches * prompts or (
            batches and self._lacks_prompts(wanted)
        ):
            self._draw([(self._drawn, i) for i in range(prompts)], version)
            self._drawn += 1

    def _lacks_prompts(self, wanted: int) -> bool:
        """Return whether a replica has fewer prompts than its share, as some were dropped, or a replica was lost."""
        shares = self._divide(range(wanted))
        return any(len(self._places.get(number, ())) < len(share) for number, share in shares.items())

    def _draw(self, places: Sequence[Place], version: int) -> None:
        """Give the prompts at these places to replicas: by their index in the batch, whose order the replicas share."""
        algorithm, seed = self._recipe.algorithm, self._recipe.run.seed
        shares = self._divide(range(algorithm.prompts_per_step))
        for batch, i in places:
            number = next(number for number, share in shares.items() if i in share)
            example = self.train.batch(batch, algorithm.prompts_per_step)[i]
            seeds = request_seeds(seed, batch, i, algorithm.samples_per_prompt)
            self._new.setdefault(number, []).append(Prompt((batch, i), example, seeds, version))
            self._places.setdefault(number, []).append((batch, i))


def make_rollouts(recipe: Recipe, *args: Any) -> Rollouts:
    """Return the rollouts that a recipe asks for; all other arguments are those of `Rollouts`."""
    return (Rollouts if recipe.async_.partial is None else PartialRollouts)(recipe, *args)


def _with_baselines(answers: Sequence[list[Sample]], size: int) -> list[list[Sample]]:
    """Return answers with the reward and the length of the greedy one: the last of each `size` in a row."""
    found = []
    for start in range(0, len(answers), size):
        *sampled, (greedy,) = answers[start : start + size]
        length = len(greedy.tokens)
        found += [[replace(s, baseline=greedy.reward, baseline_tokens=length) for s in answer] for answer in sampled]
    return found


def _failures(answers: Sequence[Answers]) -> tuple[dict[str, int], dict[str, str]]:
    """Return how many rewards and environments failed, by kind, and an example of each kind."""
    failures: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for of_replica in answers:
        failures.update(of_replica.failures)
        examples = {**of_replica.examples, **examples}
    return dict(failures), examples


def extra_batches(recipe: Recipe) -> int:
    """Return the maximum number of extra batches of prompts for dynamic sampling: see `Rollouts.generate_batch`."""
    # A reward model's scores are hardly ever equal
    return recipe.algorithm.combination.dynamic_sampling if recipe.reward.model is None else 0


def request_seed(seed: int, batch: int, prompt: int, sample: int) -> int:
    """Return a seed for a request, different for each and equal in every layout."""
    return _seed(f"{seed}/{batch}/{prompt}/{sample}")


def evaluation_seed(seed: int, name: str, row: int, sample: int) -> int:
    """Return a seed for an answer to a row of the held-out problems of this name."""
    return _seed(f"{seed}/evaluation/{name}/{row}/{sample}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def request_seeds(seed: int, batch: int, prompt: int, samples: int) -> list[int]:
    """Return the seeds of all answers to a prompt."""
    return [request_seed(seed, batch, prompt, sample) for sample in range(samples)]
