"""The roles of a run, and the order in which the training loop calls them. Imports no engine.

A role is a task of a group of ranks. The loop is the same whether ranks have several roles (`Colocated`) or one each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hybrid3d.config import Recipe
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.run.memory import Peaks
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.progress import Progress
from hybrid3d.run.timeline import Span
from hybrid3d.trainer.step_experience import Experience


class SyncResult(Protocol):
    """The report of a sync.

    Attributes:
        corrupted: names of tensors that arrived corrupted and were sent again.
        dense_reason: why all elements were sent; empty if only those were that changed.
        choice: what `sync.delta: auto` chose and why, as fields of an event; empty where it had no choice.
    """

    @property
    def corrupted(self) -> tuple[str, ...]: ...

    @property
    def dense_reason(self) -> str: ...

    @property
    def choice(self) -> Mapping[str, Any]: ...

    def metrics(self) -> StepMetrics:
        """Return this rank's share of the metrics `sync/*`."""
        ...


class Generator(Protocol):
    """Generates samples with the weights of the last sync. The calls of a step, in this order, after `sync(version)`:

    1. `evaluate(version)`, if an evaluation is due;
    2. `generate_batch(version)`.
    """

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        """Answer the held-out problems as `evaluation` of the recipe says, with weights of this version."""
        ...

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate and score a step's samples, with weights of this version.

        Args:
            batch: number of the first batch of prompts.
        """
        ...


class Trainer(Protocol):
    """Updates the models with samples. The calls of step `v`, in this order, while the policy has version `v`:

    1. `make_experience(batch, v)`;
    2. `update(experience, v)`, except at a run's last step. Afterwards the policy has version `v + 1`.
    """

    def make_experience(self, batch: RolloutBatch, step: int, recipe: Recipe) -> Experience:
        """Compute the experience of a step: log-probabilities, values, advantages."""
        ...

    def update(self, experience: Any, step: int, recipe: Recipe) -> StepMetrics:
        """Update the models; return this rank's share of the metrics of the updates."""
        ...

    @property
    def progress(self) -> Progress:
        """The state besides models that a checkpoint saves, as far as it is the learner's."""
        ...

    def restore(self, progress: Progress, recipe: Recipe) -> None:
        """Continue from a checkpoint's progress."""
        ...


class Roles(Generator, Trainer, Protocol):
    """All roles of a run, as the loop calls them, which runs on the ranks that train. Every one of them makes these
    calls, in this order, for each version `v`:

    1. `sync(v)`;
    2. the calls of `Generator`;
    3. the calls of `Trainer`, which may begin the sync to `v + 1`.

    `close` ends the run. Each call takes the recipe with the settings of its step.

    Attributes:
        activities: what this rank does in a phase of the loop, where that is not the phase.
    """

    @property
    def activities(self) -> Mapping[str, str]: ...

    def sync(self, version: int, recipe: Recipe) -> SyncResult:
        """Sync the policy's weights, which have this version, to the generator."""
        ...

    def worker_spans(self, begin: float, end: float) -> Mapping[int, Sequence[Span]]:
        """Return what each rank that does not run the loop did between two moments, on the first rank."""
        ...

    def pop_worker_peak_memory(self) -> Mapping[int, Peaks]:
        """Return the peak memory of each rank that does not run the loop since the last call, on the first rank."""
        ...

    def close(self, recipe: Recipe) -> None:
        """Shut the roles down, and destroy the process groups."""
        ...
