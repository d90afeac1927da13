"""The small batches that the scripts beside this file hand to other libraries, and how their JSON is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH = 6  # tokens of the longest completion
LENGTHS = [6, 4, 1, 5, 6, 3, 2, 6]
HOLES = [(0, 2), (0, 3), (3, 1), (4, 0), (7, 4)]  # (row, column) of tokens that the policy did not write


def rounded(values: Tensor) -> Tensor:
    """To four decimals: inputs are short in the JSON, and exactly what it says."""
    return torch.tensor([[round(value, 4) for value in row] for row in values.tolist()], dtype=torch.float64)


def make_batch(seed: int, holes: Sequence[tuple[int, int]] = (), empty: int | None = None) -> dict[str, Tensor]:
    """Eight sequences in two groups of four; every tensor is [8, 6], but for the advantages [8].

    Ratios of new to old and of old to rollout logprobs pass the usual clips on both sides. What padding holds is
    noise, so that code which reads it is found out.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = partial(torch.randn, len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    logprobs = -0.05 - noise().abs()
    old = (logprobs + 0.35 * noise()).clamp(max=-0.01)
    rollout = (old + 0.3 * noise()).clamp(max=-0.01)
    reference = (logprobs + 0.4 * noise()).clamp(max=-0.01)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()
    for row, column in holes:
        mask[row, column] = 0.0
    if empty is not None:
        mask[empty] = 0.0
    return {
        "logprobs": rounded(logprobs),
        "old_logprobs": rounded(old),
        "rollout_logprobs": rounded(rollout),
        "ref_logprobs": rounded(reference),
        "entropies": rounded(noise().abs()),
        "mask": mask,
        "advantages": torch.tensor([1.25, -0.5, 0.75, -1.5, 0.4, -1.1, -0.3, 1.0], dtype=torch.float64),
    }


BATCHES = {
    "ragged": make_batch(seed=11),
    "holes": make_batch(seed=12, holes=HOLES),
    "empty_sequence": make_batch(seed=13, empty=5),
}
BATCHES["on_policy"] = {**BATCHES["ragged"], "old_logprobs": BATCHES["ragged"]["logprobs"]}


def lists(value: Any) -> Any:
    """As JSON holds it: nested lists, and None where a number is not finite."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return [lists(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(name: str, numbers: dict[str, Any]) -> None:
    """Write `numbers` beside this file; each list of numbers is one line, so that a difference can be read."""
    text = json.dumps(numbers, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\s+", " ", row[0]), text)
    Path(__file__).with_name(name).write_text(text + "\n")
