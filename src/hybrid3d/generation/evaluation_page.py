"""What `hybrid3d eval` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from hybrid3d.generation.evaluation import DATA_EVAL, EvalResult
from hybrid3d.rl.data import PromptData


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
