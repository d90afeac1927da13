"""What an evaluation on held-out problems measures, from several answers to each, and what `hybrid3d eval` prints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hybrid3d.rl.data import PromptData

DATA_EVAL = "eval"  # the name of the problems of `data.eval`


@dataclass(frozen=True)
class HeldOutAnswer:
    """An answer to a held-out problem; a majority vote compares `final`, None if it has nothing of the kind."""

    reward: float
    final: Hashable | None = None

    @property
    def is_right(self) -> bool:
        """Whether it has full reward, which is 1."""
        return self.reward == 1.0


@dataclass(frozen=True)
class EvalResult:
    """Answers to held-out problems.

    Attributes:
        metrics: by name, beginning with `eval/`.
        problems: by the name of their file, how many there are.
        failures, examples: as in `RolloutBatch`.
    """

    metrics: dict[str, float]
    problems: dict[str, int]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """The share of the answers to the problems of `data.eval` that are right."""
        return self.metrics["eval/accuracy"]


def measure(groups: Sequence[Sequence[HeldOutAnswer]], ks: Sequence[int], votes: bool) -> dict[str, float]:
    """Return the metrics of answers, n to each problem in a row.

    With n > 1 pass@k is estimated for each k of `ks`; `votes`: answers have what a majority vote compares.
    """
    n = len(groups[0])
    right = [sum(answer.is_right for answer in answers) for answers in groups]
    found = {
        "accuracy": sum(right) / (n * len(groups)),
        "reward": fmean(answer.reward for answers in groups for answer in answers),
    }
    if n > 1:
        found[f"mean@{n}"] = found["accuracy"]
        found |= {f"pass@{k}": fmean(pass_at_k(n, count, k) for count in right) for k in ks}
        if votes:
            found[f"majority@{n}"] = fmean(majority(answers) for answers in groups)
    return found


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the probability that one or more of k answers are right, without bias, if `right` of n answers are.

    It is 1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1): the share of sets of k answers that have a right one.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[HeldOutAnswer]) -> float:
    """Return the share of right ones among the answers that have the most common final answer.

    Where several are equally common, it is the mean over them, which is the expectation of a choice at random. Answers
    without a final answer do not vote.
    """
    votes = Counter(answer.final for answer in answers if answer.final is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [final for final, count in votes.items() if count == most]
    return fmean(fmean(answer.is_right for answer in answers if answer.final == final) for final in winners)


def format_files(held_out: Mapping[str, PromptData]) -> Iterator[str]:
    """Yield a line for each file with held-out problems."""
    for name, data in held_out.items():
        yield f"{setting_of(name)} {data}"


def setting_of(name: str) -> str:
    """Return the setting that names the file of held-out problems of this name."""
    return "data.eval" if name == DATA_EVAL else f"evaluation.data.{name}"


def format_result(result: EvalResult, step: int, as_json: bool) -> Iterator[str]:
    """Yield the lines of a result, or one JSON object."""
    if as_json:
        fields = {"metrics": result.metrics, "problems": result.problems, "failures": result.failures}
        yield json.dumps({"step": step, **fields})
        return
    yield f"step {step}: held-out accuracy {result.accuracy:.4f} of {result.problems[DATA_EVAL]} problems"
    for key, value in result.metrics.items():
        if key != "eval/accuracy":
            yield f"{key} {value:.4f}"
    failures = sum(result.failures.values())
    if failures:
        yield f"{failures} rewards failed, for example: {next(iter(result.examples.values()))}"
