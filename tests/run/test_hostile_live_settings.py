"""Tests that any invalid `control.yaml` is refused and reported, and that the run continues."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from hybrid3d.config import load_recipe
from hybrid3d.run import live_settings
from hybrid3d.run.live_settings import LiveSettings
from run_ranks import ROOT

TEXTS: dict[str, str | bytes] = {
    "a boolean that is none": "guard.spike: !!bool abc",
    "an empty integer": 'run.steps: !!int ""',
    "a map of a list": "!!map [1]",
    "a set of a list": "optimizer: !!set [1]",
    "an ordered map": "!!omap [a: 1]",
    "pairs": "!!pairs [a: 1]",
    "a timestamp": "run.steps: !!timestamp abc",
    "a date that is none": "run.steps: 2024-13-45",
    "binary that is none": "run.steps: !!binary ?",
    "a float that is none": "optimizer.lr: !!float x",
    "recursion": "&a [*a]",
    "a map in itself": "&a {optimizer: *a}",
    "a key that is itself": "&a {*a : 1}",
    "a merge of itself": "&a {<<: *a}",
    "a merge of text": "<<: text",
    "aliases of aliases": "a: &a [1]\n" + "".join(
        f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "an alias of nothing": "a: *b",
    "a long hex number": f"run.steps: 0x{'f' * 5000}",
    "a long number": f"run.steps: {'9' * 5000}",
    "a long float": f"optimizer.lr: 1e{'9' * 400}",
    "sexagesimal": "run.steps: " + ":".join(["59"] * 200),
    "a surrogate": 'run.steps: "\\ud800"',
    "two halves of one": 'algorithm.kl.coef: "\\ud83d\\ude00"',
    "a NUL": 'run.steps: "\\0"',
    "a raw NUL": b"run.steps: 1\0",
    "no UTF-8": b"\xff\xfe\xfa",
    "UTF-16": "run.steps: 3".encode("utf-16"),
    "half a character": "run.steps: é".encode()[:-1],
    "deep lists": "[" * 5000,
    "deep maps": "{a: " * 5000,
    "deep indentation": "\n".join(" " * n + "a:" for n in range(2000)),
    "a tag of Python": "!!python/object/apply:os.system [true]",
    "a tag of nobody": "!abc 1",
    "a directive": "%YAML 9.9\n---\nrun.steps: 3",
    "two documents": "run.steps: 3\n---\nrun.steps: 4",
    "a list": "- run.steps: 3",
    "a number": "3",
    "a text": "run.steps",
    "a key twice": "run.steps: 3\nrun.steps: 4",
    "a key twice, nested and dotted": "run.steps: 3\nrun: {steps: 4}",
    "a list for a key": "? [a, b]\n: 1",
    "a map for a key": "? {a: b}\n: 1",
    "nothing for a key": "~: 1",
    "an empty key": '"": 1',
    "dots": "...: 1",
    "many dots": ".".join("a" * 2000) + ": 1",
    "a key with a surrogate": '"\\ud800": 1',
    "an unknown key": "run.stepz: 3",
    "what cannot change": "train.tp: 4",
    "a section of none": "critic.optimizer.lr: 1",
    "a section for a number": "run.steps: {a: 1}",
    "a list for a number": "run.steps: [1, 2]",
    "a NaN": "optimizer.lr: .nan",
    "infinity": "optimizer.lr: .inf",
    "tabs": "run:\n\tsteps: 3",
    "a quote that is open": 'run.steps: "3',
    "escapes": 'run.steps: "\\q"',
    "terminal codes": 'run.steps: "\\e[2J\\a"',
    "too much": b"# " + b"x" * 2_000_000,
    "many keys": "\n".join(f"key{n}: {n}" for n in range(30_000)),
}  # fmt: skip


class Said:
    """A fake `RunLogger` that stores events, which must be serializable as JSON."""

    def __init__(self, folder: Path):
        self.folder = SimpleNamespace(control=folder / "control.yaml")
        self.events: list[dict[str, Any]] = []

    def event(self, event: str, said: str = "", **fields: Any) -> None:
        json.dumps(fields).encode()
        self.events.append({"event": event, "said": said, **fields})


@pytest.fixture
def live(
    alone: dist.ProcessGroup, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LiveSettings:
    monkeypatch.setattr(live_settings, "STABLE_SECONDS", 0)
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={tiny_checkpoint('qwen2')}"])
    return LiveSettings(recipe, Said(tmp_path), {}, alone)  # type: ignore[arg-type]


def goes_on(live: LiveSettings) -> list[dict[str, Any]]:
    """Take two steps with this file and one with a valid file, and return the event of the first."""
    said, path = live._record, live._record.folder.control
    before, began = live.recipe, time.monotonic()
    assert live.settings_for_step(1) == before
    told, said.events = said.events, []
    assert live.settings_for_step(2) == before
    assert said.events == []  # once is enough
    assert time.monotonic() - began < 20
    json.loads(json.dumps(live.control))
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_text("run.eval_every: 7")
    assert live.settings_for_step(3).run.eval_every == 7
    path.unlink()
    said.events = []
    return told


@pytest.mark.parametrize("name", TEXTS)
def test_file_that_is_refused(name: str, live: LiveSettings) -> None:
    text = TEXTS[name]
    live._record.folder.control.write_bytes(text if isinstance(text, bytes) else text.encode())
    (told,) = goes_on(live)
    assert (told["event"], told["by"]) == ("control_refused", "control.yaml")
    assert told["why"].isprintable() or "\n" in told["why"]
    assert len(told["why"]) < 2000


def test_control_yaml_that_is_no_file_is_refused(live: LiveSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    path = live._record.folder.control
    makers: dict[str, Callable[[], object]] = {
        "a directory": path.mkdir,
        "a named pipe": lambda: os.mkfifo(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
    }
    for what, make in makers.items():
        make()
        (told,) = goes_on(live)
        assert what in told["why"]
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(path.parent)  # a socket's path is bounded in length
        bound.bind(path.name)
        (told,) = goes_on(live)
        assert "a socket" in told["why"]


def test_damaged_files(live: LiveSettings) -> None:
    """A valid file with bytes changed, removed or duplicated is either applied or refused."""
    good = yaml.safe_dump({"optimizer": {"lr": 3e-4}, "algorithm": {"kl": {"coef": 0.01}}, "run": {"eval_every": 3}})
    dice, path = random.Random(1), live._record.folder.control
    for _ in range(300):
        content = bytearray(good.encode())
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(content))
            content[at : at + dice.choice((0, 1, 9))] = bytes(
                dice.choices(b"\0\xff\xc3:{}[]&*!|>%@`'\"#- \n\t9ae.", k=dice.randint(0, 4))
            )
        path.write_bytes(bytes(content))
        live.settings_for_step(1)
        json.dumps(live.control)
