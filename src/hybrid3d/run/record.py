"""What a run leaves behind of each step: a row of metrics, a few samples, events; and what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid3d.generation.samples import EvalResult, RolloutBatch, Sample
from hybrid3d.rl.data import PromptData
from hybrid3d.run.display import Display
from hybrid3d.run.run_folder import RunFolder

SAMPLES_KEPT = 4  # a step, in samples.jsonl


class Record:
    """Rank 0 writes to the folder and speaks; to the others every method is silent."""

    def __init__(self, folder: RunFolder, rank: int, display: Display):
        self.folder = folder
        self._speaks = rank == 0
        self._display = display
        self._constants: dict[str, float] = {}

    def step(self, row: Mapping[str, float], steps: int, samples: Sequence[Sample] = ()) -> None:
        """Record a step's metrics, and some of its samples; the run has this many steps."""
        self._display.show(row, steps)
        if self._speaks:
            row = {**row, **self._constants}
            self.folder.add_metrics({key: value if math.isfinite(value) else None for key, value in row.items()})
            kept = samples[:: max(1, len(samples) // SAMPLES_KEPT)][:SAMPLES_KEPT]
            self.folder.add_samples(
                {
                    "step": row["step"],
                    "weights": s.weight_version,
                    "prompt": s.prompt,
                    "answer": s.answer,
                    "reward": s.reward,
                    "prompt_tokens": s.prompt_ids,
                    "answer_tokens": s.tokens,
                }
                for s in kept
            )

    def event(self, event: str, said: str = "", **fields: Any) -> None:
        """To events.jsonl and, if it is to be said, to who looks on."""
        if self._speaks:
            self.folder.add_event(event, **fields)
            if said:
                self._display.say(said)

    def data(self, **files: PromptData) -> None:
        """Tell what is used of each file (`train`, `eval`), now and in every row of the metrics."""
        for name, data in files.items():
            counts = data.counts
            self._constants |= {f"data/{name}_{key}": count for key, count in counts.items()}
            self.event("data", f"data.{name} {data}", split=name, file=data.path, **counts)

    def failed(self, of: RolloutBatch | EvalResult, step: int) -> None:
        """Tell of rewards that failed, whose samples have the recipe's default, and of replies that did."""
        if of.failures:
            held_out = isinstance(of, EvalResult)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(of.failures.items()))
            where = "failed on held-out problems" if held_out else "failed"
            said = f"step {step}: {where}: {kinds}; such as: {next(iter(of.examples.values()))}"
            told = {"failures": of.failures, "examples": of.examples, "held_out": held_out}
            self.event("reward_failed", said, step=step, **told)

    def corrupted(self, tensors: Sequence[str], step: int) -> None:
        """Tell what a sync had to move once more."""
        count = len(tensors)
        if count:
            said = f"step {step}: {count} tensors had not landed as they were sent; everything was moved once more"
            self.event("sync_corrupted", said, step=step, count=count, tensors=tensors[:20])
