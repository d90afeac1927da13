"""How a check of the audit, which is a process, hands over what it found: a line of JSON as soon as it is known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import FAMILIES

Answers = Iterable[tuple[str, Any]]
"""Pairs of a subject, such as a family and a layout, and what was found about it, as JSON has it.

A check that runs with both builds finds the same with both. One that runs with the CUDA build alone finds a list of
problems, which is empty.
"""


@dataclass(frozen=True)
class Options:
    """What a check is told.

    Attributes:
        models: the folder of the tiny models' configs (`cases.py`).
        families: of models.
        cuda: whether this is the environment with the CUDA builds.
        device: the kind of GPU that is faked, as in `fake_device.DEVICES`.
        part: of a check that has several.
        inject: a fault of `faults.py`.
        transformer_engine: the folder with Transformer Engine's Python.
    """

    models: Path
    families: tuple[str, ...]
    cuda: bool
    device: str
    part: str | None
    inject: str | None
    transformer_engine: Path


def answer(check: Callable[[Options], Answers]) -> None:
    """Run a check as the command line says, and append each answer to the file that it names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--build", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--part")
    parser.add_argument("--inject")
    parser.add_argument("--transformer-engine", type=Path, required=True)
    given = parser.parse_args()
    options = Options(
        given.models,
        tuple(given.families),
        given.build == "cuda",
        given.device,
        given.part,
        given.inject,
        given.transformer_engine,
    )
    with given.answers.open("w") as file:
        for subject, found in check(options):
            print(json.dumps({"subject": subject, "found": found}), file=file, flush=True)
