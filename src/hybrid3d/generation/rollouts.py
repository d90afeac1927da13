"""Sampling and evaluation over all replicas: prompts are distributed to them, answers and rewards are gathered."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import PHASE_TIMEOUT, gather_objects
from hybrid3d.generation.engine import Engine
from hybrid3d.generation.multi_turn import MultiTurnRollout
from hybrid3d.generation.partial_rollout import PartialRollout, Place
from hybrid3d.generation.samples import EvalResult, RolloutBatch, Sample
from hybrid3d.generation.turns import Trajectory, Turns
from hybrid3d.rewards.scorer import Scorer, Scores
from hybrid3d.rl.algorithms import ALGORITHMS
from hybrid3d.rl.data import PromptData

OF_ENVIRONMENT = "environment_"  # prefix of the kinds of failures of environments, not of rewards


class FailedRewards(RuntimeError):
    """More rewards (and environments) of a step failed than the recipe allows, or all of them."""

    raised_on_all_ranks = True  # every rank raises it: one of them is enough to tell


class Rollouts:
    """Generates and scores samples over all replicas of the engine. Every rank calls every method together.

    Attributes:
        train, held_out: the prompts.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: Any,
        train: PromptData,
        held_out: PromptData,
        group: dist.ProcessGroup,
    ):
        """
        Args:
            group: all ranks that generate; the results are the same on each.
        """
        self._recipe = recipe
        self._engine = engine
        self._tokenizer = tokenizer
        self._group = group
        self._turns = Turns(recipe, engine, tokenizer, group)
        self._multi_turn = MultiTurnRollout(self._turns, engine, group)
        self.train = train
        self.held_out = held_out
        reward = recipe.reward
        self._scorer = Scorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)

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
        """
        wanted, group = recipe.algorithm.prompts_per_step, recipe.algorithm.samples_per_prompt
        extra = extra_batches(recipe)
        groups: list[list[Sample]] = []
        found: list[int] = []
        fillers: list[int] = []
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        batches = zero_variance = 0
        while len(found) < wanted and batches <= extra:
            samples, scores = self._generate_samples(version, batch + batches, recipe.rollout.temperature)
            batch_failures, batch_examples = _failures(scores)
            failures.update(batch_failures)
            examples = batch_examples | examples
            for start in range(0, len(samples), group):
                answers = samples[start : start + group]
                uniform = self._has_zero_variance(answers)
                (fillers if uniform and extra else found).append(len(groups))
                groups.append(answers)
                zero_variance += uniform
            batches += 1
        self._check(failures, examples, batches * wanted * group, self._recipe.reward.max_failures)
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
        of_environment = sum(count for kind, count in failures.items() if kind.startswith(OF_ENVIRONMENT))
        all_failed = max(of_environment, failed - of_environment) >= samples > 0
        if not all_failed and (allowed == 1 or failed <= allowed * samples):
            return
        bound = f"reward.max_failures={allowed:g} allows {int(allowed * samples)}"
        if all_failed:
            bound = "when all fail the run ends, whatever reward.max_failures allows"
        kinds = ", ".join(f"{count} {kind} ({examples[kind]})" for kind, count in sorted(failures.items()))
        environment = self._recipe.rollout.environment
        what = "rewards" if environment is None else "rewards and conversations"
        blamed = self._recipe.reward.name if environment is None else f"{self._recipe.reward.name}, {environment}"
        fix = f"fix {blamed}, or raise reward.timeout_seconds"
        raise FailedRewards(f"{failed} of {samples} {what} failed{where}: {kinds}; {bound}: {fix}")

    def _generate_samples(self, version: int, batch: int, temperature: float) -> tuple[list[Sample], list[Scores]]:
        algorithm, run = self._recipe.algorithm, self._recipe.run
        examples = self.train.batch(batch, algorithm.prompts_per_step)
        work = [
            (example, seed)
            for i, example in self._local(list(enumerate(examples)))
            for seed in request_seeds(run.seed, batch, i, algorithm.samples_per_prompt)
        ]
        trajectories = self._multi_turn.run(
            [example for example, _ in work], [s for _, s in work], version, temperature
        )
        return self._scored(trajectories, self._scores_training)

    def evaluate(self, version: int) -> EvalResult:
        """Answer the held-out problems greedily, and score the answers.

        Args:
            version: as for `generate_batch`.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
            FailedRewards: all of the rewards failed.
        """
        examples = self._local(list(self.held_out.examples))
        samples, scores = self._scored(self._multi_turn.run(examples, None, version))
        rewards = [sample.reward for sample in samples]
        failures, of_kinds = _failures(scores)
        self._check(failures, of_kinds, len(rewards), allowed=1.0, where=" on held-out problems")
        full = sum(reward == 1.0 for reward in rewards)
        return EvalResult(full / len(rewards), sum(rewards) / len(rewards), failures, of_kinds)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's progress."""

    def close(self) -> None:
        """End the processes that compute rewards and replies."""
        self._scorer.close()
        self._turns.close()

    def _scored(self, trajectories: Sequence[Trajectory], by_name: bool = True) -> tuple[list[Sample], list[Scores]]:
        """Return all replicas' samples and scores; one rank of each replica scores its own.

        Without `by_name` all rewards are 0, until the reward model's scores replace them.
        """
        trajectories = trajectories if self._engine.leads else []
        answers = [self._tokenizer.decode(trajectory.tokens, skip_special_tokens=True) for trajectory in trajectories]
        queries = [
            (a, trajectory.example.answer, trajectory.example.prompt)
            for a, trajectory in zip(answers, trajectories, strict=True)
        ]
        scores = self._scorer.score(queries) if by_name else Scores([0.0] * len(queries))
        samples = [
            Sample(
                prompt=trajectory.example.prompt,
                prompt_ids=trajectory.example.prompt_ids,
                tokens=tuple(trajectory.tokens),
                loss_mask=tuple(trajectory.loss_mask),
                logprobs=tuple(trajectory.logprobs),
                answer=answer,
                reward=reward,
                versions=tuple(trajectory.versions),
            )
            for trajectory, answer, reward in zip(trajectories, answers, scores.rewards, strict=True)
        ]
        failed = {
            f"{OF_ENVIRONMENT}{trajectory.failure}": trajectory.message
            for trajectory in reversed(trajectories)
            if trajectory.failure
        }
        failures = Counter(f"{OF_ENVIRONMENT}{trajectory.failure}" for trajectory in trajectories if trajectory.failure)
        all_scores = Scores([], failures | scores.failures, failed | scores.examples)
        return self._of_all_replicas(samples), self._of_all_replicas([all_scores])

    def _local(self, items: list) -> list:
        """Return this replica's consecutive share of the items."""
        share = self._share(len(items), self._engine.replica)
        return items[share.start : share.stop]

    def _share(self, count: int, replica: int) -> range:
        """Return the indices of a replica's share of so many items."""
        first, last = (count * (replica + i) // self._engine.replicas for i in (0, 1))
        return range(first, last)

    def _of_all_replicas(self, items: list) -> list:
        """Return the items of all replicas, in the order of replicas, which is the order of the shares."""
        shares = gather_objects((self._engine.replica, items) if self._engine.leads else None, self._group)
        return [item for _, share in sorted(filter(None, shares), key=lambda s: s[0]) for item in share]


class PartialRollouts(Rollouts):
    """Generates answers as `PartialRollout` says: those that a step does not wait for are trained in later steps."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Replicas wait here for the slowest of a whole step, which is no failure however long it takes
        members = dist.get_process_group_ranks(self._group)
        self._group = dist.new_group(members, timeout=PHASE_TIMEOUT, backend="gloo")
        self._partial = PartialRollout(self._engine, self._turns, self._recipe.async_)
        self._places: list[Place] = []  # of all replicas' prompts that were drawn and not trained
        self._restored: list[Place] = []
        self._drawn: int | None = None  # the number of batches of prompts that were drawn
        self._reported = 0, 0  # numbers of batches and of dropped tokens that were reported

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Draw the prompts again whose answers were not complete, or not trained, when the checkpoint was written."""
        self._restored = [(batch, i) for batch, i in progress.get("unfinished", ())]

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate until a step's samples are complete, and interrupt the other answers.

        Args and errors are those of `Rollouts.generate_batch`; `batch` is used by the first call.
        """
        if self._drawn is None:
            self._drawn, self._reported = batch, (batch, 0)
            self._draw(self._restored, version)
        ahead, prompts = recipe.async_, recipe.algorithm.prompts_per_step
        self._fill(version, min(ahead.batches_in_flight, recipe.run.steps - version + 1), prompts)
        wanted = len(self._share(prompts, self._engine.replica))
        self._partial.generate(version, wanted, recipe.rollout.temperature)
        groups = self._partial.take(wanted, version)
        trajectories = [answer for group in groups for answer in group.answers.values()]
        samples, scores = self._scored(trajectories, self._scores_training)
        failures, examples = _failures(scores)
        self._check(failures, examples, len(samples), recipe.reward.max_failures)
        self._places = self._of_all_replicas(self._partial.places)
        dropped = sum(self._of_all_replicas([self._partial.dropped_tokens]))
        reported, self._reported = self._reported, (self._drawn, dropped)
        size = recipe.algorithm.samples_per_prompt
        return RolloutBatch(
            samples,
            batches=self._drawn - reported[0],
            zero_variance_groups=sum(
                self._has_zero_variance(samples[start : start + size]) for start in range(0, len(samples), size)
            ),
            failures=failures,
            examples=examples,
            unfinished=sorted(self._places),
            dropped_tokens=dropped - reported[1],
        )

    def generate_ahead(self, version: int, recipe: Recipe, stop: Callable[[], bool]) -> None:
        """Generate answers that later steps train, until `stop` returns True on the leading rank of the replica."""
        ahead, prompts = recipe.async_, recipe.algorithm.prompts_per_step
        most = min(ahead.batches_in_flight, ahead.max_staleness, recipe.run.steps - version)
        self._fill(version, most, prompts)
        self._partial.generate(version, len(self._partial.places), recipe.rollout.temperature, stop)

    def _fill(self, version: int, batches: int, prompts: int) -> None:
        """Draw batches of prompts until so many are being answered, and every replica has a step's share."""
        assert self._drawn is not None
        while len(self._places) + prompts <= batches * prompts or (batches and self._lacks_prompts(prompts)):
            self._draw([(self._drawn, i) for i in range(prompts)], version)
            self._drawn += 1

    def _lacks_prompts(self, prompts: int) -> bool:
        """Return whether a replica has fewer prompts than its share of a step, as some were dropped."""
        shares = [self._share(prompts, replica) for replica in range(self._engine.replicas)]
        return any(sum(i in share for _, i in self._places) < len(share) for share in shares)

    def _draw(self, places: Sequence[Place], version: int) -> None:
        """Begin to answer the prompts at these places; each replica those of its share."""
        algorithm, seed = self._recipe.algorithm, self._recipe.run.seed
        local = self._share(algorithm.prompts_per_step, self._engine.replica)
        for batch, i in places:
            if i in local:
                example = self.train.batch(batch, algorithm.prompts_per_step)[i]
                seeds = request_seeds(seed, batch, i, algorithm.samples_per_prompt)
                self._partial.add((batch, i), example, seeds, version)
        self._places += places


def make_rollouts(recipe: Recipe, *args: Any) -> Rollouts:
    """Return the rollouts that a recipe asks for; all other arguments are those of `Rollouts`."""
    return (Rollouts if recipe.async_.partial is None else PartialRollouts)(recipe, *args)


def _failures(scores: Sequence[Scores]) -> tuple[dict[str, int], dict[str, str]]:
    """Return how many rewards and environments failed, by kind, and an example of each kind."""
    failures: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for replica_scores in scores:
        failures.update(replica_scores.failures)
        examples = {**replica_scores.examples, **examples}
    return dict(failures), examples


def extra_batches(recipe: Recipe) -> int:
    """Return the maximum number of extra batches of prompts for dynamic sampling: see `Rollouts.generate_batch`."""
    if recipe.algorithm.dynamic_sampling is not None:
        return recipe.algorithm.dynamic_sampling
    # A reward model's scores are hardly ever equal
    return ALGORITHMS[recipe.algorithm.name].dynamic_sampling if recipe.reward.model is None else 0


def request_seed(seed: int, batch: int, prompt: int, sample: int) -> int:
    """Return a seed for a request, different for each and equal in every layout."""
    digest = hashlib.sha256(f"{seed}/{batch}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def request_seeds(seed: int, batch: int, prompt: int, samples: int) -> list[int]:
    """Return the seeds of all answers to a prompt."""
    return [request_seed(seed, batch, prompt, sample) for sample in range(samples)]
