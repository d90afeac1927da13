"""Selects the samples that a page shows, in one pass over a file of any size and in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from hybrid3d.report.run_data import is_number, read_lines

HEAD, TAIL = 4000, 2000  # characters of a longer text that are shown


@dataclass
class SampleSelection:
    """The samples of a run that fit a budget of bytes: those of every n-th step and of the last.

    Attributes:
        shown: the samples, as the page embeds them.
        total: how many there are in the file.
        every: n.
        shortened: how many of those shown have a text that is cut in its middle.
        unreadable: how many lines of the file are no samples.
    """

    shown: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    every: int = 1
    shortened: int = 0
    unreadable: int = 0


def select_samples(path: Path, max_bytes: int) -> SampleSelection:
    """Select samples of `samples.jsonl`, evenly over the steps, whose JSON has at most `max_bytes` together."""
    selection = SampleSelection()  # a quarter of the bytes is left for the last step
    kept: dict[int, tuple[list[dict[str, Any]], int]] = {}  # by the place of their step: samples and their bytes
    last: tuple[int, list[dict[str, Any]], int] = (-1, [], 0)
    size = 0
    for place, (_, group) in enumerate(groupby(_samples(path, selection), key=lambda sample: sample["step"])):
        samples, nbytes = _within(group, max_bytes // 4)
        last = place, samples, nbytes
        if place % selection.every == 0:
            kept[place] = samples, nbytes
            size += nbytes
        while size > max_bytes * 3 // 4 and len(kept) > 1:
            selection.every *= 2
            size -= sum(kept.pop(other)[1] for other in list(kept) if other % selection.every)
    kept.setdefault(last[0], last[1:])
    selection.shown = [sample for place in sorted(kept) for sample in kept[place][0]]
    selection.shortened = sum(sample.pop("shortened") for sample in selection.shown)
    return selection


def _samples(path: Path, selection: SampleSelection) -> Iterator[dict[str, Any]]:
    for parsed in read_lines(path):
        if not isinstance(parsed, dict) or not is_number(parsed.get("step")):
            selection.unreadable += 1
            continue
        selection.total += 1
        sample: dict[str, Any] = {"step": parsed["step"], "shortened": False}
        for key in ("reward", "weights"):
            value = parsed.get(key)
            sample[key] = value if is_number(value) else None
        for key in ("prompt", "answer"):
            text = parsed.get(key)
            text = text if isinstance(text, str) else json.dumps(text)
            sample["shortened"] |= len(text) > HEAD + TAIL
            sample[key] = shorten(text)
        for key in ("prompt_tokens", "answer_tokens"):
            tokens = parsed.get(key)
            sample[key] = len(tokens) if isinstance(tokens, list) else None
        yield sample


def _within(samples: Iterator[dict[str, Any]], max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the first samples of a step whose JSON fits, and its bytes; all are read."""
    kept, size = [], 0
    for sample in samples:
        nbytes = len(json.dumps(sample))
        if size + nbytes <= max_bytes:
            kept.append(sample)
            size += nbytes
    return kept, size


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """Return a text without the middle of what exceeds `head + tail` characters."""
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}\n[… {left_out:,} characters …]\n{text[len(text) - tail :]}"
