"""Generates the samples of the next steps while the models are updated."""

from __future__ import annotations

import threading
from collections import deque

from hybrid3d.config import Recipe
from hybrid3d.generation.replicas import NoReplicas
from hybrid3d.generation.rollouts import FailedRewards, PartialRollouts, Rollouts
from hybrid3d.generation.samples import RolloutBatch


class GenerationAhead:
    """The samples of the next steps, as far ahead as `async.max_staleness` allows, in a thread during each update."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts = rollouts
        self._ahead: deque[RolloutBatch | FailedRewards] = deque()  # of the next steps
        self._next_batch = 0  # number of the first batch of prompts that is not generated yet
        self._updated = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread

    def __len__(self) -> int:
        """The number of steps whose samples are there."""
        return len(self._ahead)

    def next_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Return the samples of a step, generated before or now; arguments and errors as `Rollouts.generate_batch`."""
        if not self._ahead:
            self._next_batch = batch
            return self._generate(version, recipe)
        outcome = self._ahead.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def begin(self, step: int, recipe: Recipe) -> None:
        """Begin to generate, in a thread, while the models are updated in this step."""
        if recipe.async_.max_staleness:
            self._updated.clear()
            self._thread = threading.Thread(target=self._run, args=(step, recipe), name="ahead", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait for what is being generated, after the update; errors other than failed rewards are raised here."""
        self._updated.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, step: int, recipe: Recipe) -> None:
        try:
            self._generate_ahead(step, recipe)
        except NoReplicas:  # the next sync waits for one
            pass
        except BaseException as error:
            self._error = error

    def _generate_ahead(self, step: int, recipe: Recipe) -> None:
        if isinstance(self._rollouts, PartialRollouts):
            self._rollouts.generate_ahead(step, recipe, self._updated.is_set)
            return
        most = min(recipe.async_.max_staleness, recipe.run.steps - step)
        while len(self._ahead) < most and not (self._ahead and self._updated.is_set()):
            try:
                self._ahead.append(self._generate(step, recipe))
            except FailedRewards as error:  # raised by the step that needs these samples
                self._ahead.append(error)
                break

    def _generate(self, version: int, recipe: Recipe) -> RolloutBatch:
        """Generate the samples of the first step that has none yet."""
        generated = self._rollouts.generate_batch(version, self._next_batch, recipe)
        self._next_batch += generated.batches
        return generated
