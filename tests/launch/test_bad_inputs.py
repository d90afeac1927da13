"""Tests thousands of generated bad inputs: recipes, YAML, command lines and environments. Each is refused by name.

`make test-fast` runs a sample of 200, `make test-all` all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

import sound
from bad_inputs import Bad, Harness, check_labels, sample
from hybrid3d import cli
from hybrid3d.config import Recipe
from hybrid3d.config.schema import Schedule, key_of, section_type
from hybrid3d.launch import launcher
from test_user_files import BOMB, MERGE_BOMB

RECIPE: dict[str, Any] = {
    **sound.RECIPE,
    "algorithm": {"name": "ppo", "prompts_per_step": 4, "samples_per_prompt": 2},
    "critic": {"optimizer": {"lr": 1.0e-4}},
}
HUGE = "9" * 30
OF_ANY_TYPE = ("[1]", "{a: 1}", "2024-01-02", '"\\ud800"', '"a\\0b"', "!!bool abc", "0x" + "f" * 5_000, "[1", "*x")
BAD_VALUES: dict[Any, tuple[str, ...]] = {
    int: ("two", "1.5", "true", "-1", "'3'", ".nan", ".inf", HUGE, "日本", "1e3"),
    float: ("fast", "true", ".nan", "-.inf", "1e999", "-1e300", "1e300", "'nan'", "日本", HUGE),
    str: ("5", "true", "''", "' '", '"a\\e[31mb"', '"a\\nb"', "a" * 3_000, "1.5"),
    bool: ("5", "'no'", "1.0", "yes please", ":smile:"),
    Literal: ("5", "true", "nonsense", ":smile:", "'[red]x[/red]'", "a" * 3_000),
}


def settings(kind: type[Any] = Recipe, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Return each key of a recipe with its type and whether it may be null; a section's type is its dataclass."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        optional, section = NoneType in get_args(hint), section_type(hint)
        plain = next((arg for arg in get_args(hint) if arg is not NoneType), hint) if optional else hint
        key = f"{path}{key_of(name)}"
        yield key, section or plain, optional
        if section is not None:
            yield from settings(section, f"{key}.")


def plain_type(hint: Any) -> Any:
    """Return the plain type of a setting: int, float, str, bool or Literal."""
    while get_origin(hint) is not None and get_origin(hint) is not Literal:
        hint = get_args(hint)[0]
    return Literal if get_origin(hint) is Literal else hint


def of_recipes() -> Iterator[Bad]:
    commands = itertools.cycle(["train", "plan", "bench"])

    def bad(key: str, value: str, said: str = "") -> Bad:
        return Bad(f"{key}={value[:60]}", (next(commands), "recipe.yaml", f"{key}={value}"), (said or key,))

    for key, hint, optional in settings():
        if hint == Schedule:
            for value in ("5", "[1]", "{0: {run.steps: 5}}", "{soon: {run.steps: 5}}", "{1: 5}", "{1: [2]}"):
                yield bad(key, value)
            yield bad(key, "{" + HUGE + ": {run.steps: 5}}")
            yield bad(key, "{" + ", ".join(f"{step}: {{run.steps: 5}}" for step in range(1, 1_100)) + "}")
        elif dataclasses.is_dataclass(hint):
            yield from (bad(key, value) for value in ("5", "text", "[]", "2024-01-02", "''"))
            yield bad(f"{key}.nonsense", "1")
            yield bad(f"{key}.\x1b[31mx", "1", f"{key}.")
            yield bad(f"{key}.{'a' * 5_000}", "1", f"{key}.")
            if not optional:
                yield bad(key, "null")
        else:
            values = (*OF_ANY_TYPE, *BAD_VALUES[plain_type(hint)], *(() if optional else ("null",)))
            yield from (bad(key, value) for value in values if (key, value) != ("rollout.top_k", "-1"))  # all, for vLLM
    for key in ("nonsense", "trian.tp", "a.b.c.d", "train.tp.x", "name.x", "日本.語", ":smile:.x"):
        yield bad(key, "1", key.split(".")[0])


def of_contradictions() -> Iterator[Bad]:
    """Yield settings that contradict others, and layouts that do not fit the model."""
    for given in (
        "train.tp=3 rollout.tp=3 train.pp=3 train.ep=2 train.etp=2 train.cp=3 rollout.dp=3 train.pp=8 train.vpp=3 "
        "rollout.expert_parallel=true train.first_stage_layers=4 train.last_stage_layers=9 train.micro_batch_size=3 "
        "algorithm.prompts_per_step=3 rollout.max_new_tokens=128 rollout.max_model_len=100000 "
        "train.max_tokens_per_micro_batch=5 algorithm.minibatches=7 optimizer.warmup_steps=2 critic.warmup_steps=2 "
        "optimizer.min_lr=0.1 algorithm.correction.low=3 rollout.max_turns=3 reward.workers=9 "
        "algorithm.kl.where=loss guard.max_kl=1 guard.kl_explosion=1 "
        "reward.overlong_buffer=8 rollout.temperature=0.009 "
        "train.tp=65536 train.dp=65536 train.pp=65536 rollout.tp=65536 rollout.dp=65536"
    ).split():
        key = given.split("=")[0].removesuffix(".where").split(".")[-1]
        yield Bad(f"contradiction {given}", ("train", "recipe.yaml", given), (key,))
    ranks = ("train.tp=1", "train.pp=1", "train.dp=4096", "rollout.tp=1", "algorithm.prompts_per_step=8192")
    yield Bad(
        "more ranks than a machine has room for", ("train", "recipe.yaml", *ranks), ("4096 ranks", "GB of memory")
    )
    cache = "rollout.kv_cache_gib=16000"
    yield Bad("more KV cache than memory", ("train", "recipe.yaml", cache), ("rollout.kv_cache_gib", "GB of memory"))


def of_yaml() -> Iterator[Bad]:
    """Yield texts and files that are not recipes."""
    whole = yaml.safe_dump(RECIPE)
    texts = {
        "recursion": "a: &a [*a, *a]",
        "aliases": BOMB,
        "merges": MERGE_BOMB,
        "merge with itself": "a: &a {<<: *a}",
        "brackets": "[" * 100_000,
        "braces": "{a: " * 5_000,
        "indents": "\n".join(" " * depth + "a:" for depth in range(600)),
        "dashes": "- " * 50_000,
        "python object": "name: !!python/object/apply:os.system [ls]",
        "python name": "name: !!python/name:os.system",
        "python module": "name: !!python/module:os",
        "unknown tag": "name: !mine x",
        "no bool": "name: !!bool abc",
        "no int": 'name: !!int ""',
        "no float": "name: !!float x",
        "no timestamp": "name: !!timestamp x",
        "no date": "name: 2024-13-45",
        "no map": "name: !!map [1]",
        "no set": "name: !!set [1]",
        "no pairs": "name: !!pairs [1]",
        "no omap": "name: !!omap {a: 1}",
        "no binary": "name: !!binary é",
        "hexadecimal": "name: 0x" + "f" * 5_000,
        "digits": "name: " + "9" * 5_000,
        "sexagesimal": "name: " + "1:" * 5_000 + "1",
        "surrogate": 'name: "\\ud800"',
        "NUL": 'name: "a\\0b"',
        "raw NUL": "name: a\0b",
        "escape": "name: \x1b[31m",
        "key twice": whole + "name: again\n",
        "key of a list": "? [a]\n: 1\n" + whole,
        "key twice, deep": "run: {steps: 1, steps: 2}",
        "two documents": whole + "---\n" + whole,
        "undefined alias": "name: *x",
        "tab": "run:\n\tsteps: 1",
        "open quote": "name: 'a",
        "directive": "%YAML 3.0\n---\nname: a",
        "empty": "",
        "comment": "# nothing",
        "null": "null",
        "list": "- name",
        "number": "5",
        "text": "a recipe",
        "many values": "a: [" + "1," * 60_000 + "]",
        "many keys": "".join(f"k{number}: 1\n" for number in range(10_000)),
        "too large": "#" * 300_000,
        "long key": "a" * 50_000 + ": 1",
    }

    def write(text: str, name: str) -> Any:
        return lambda work: (work / name).write_bytes(text.encode("utf-8", "surrogatepass"))

    for index, (label, text) in enumerate(texts.items()):
        name = f"text-{index}.yaml"
        command = ("train", "plan", "bench")[index % 3]
        yield Bad(f"YAML: {label}", (command, name), (name,), write(text, name))
    data = {"latin-1": "name: caf\xe9".encode("latin-1"), "utf-16": whole.encode("utf-16"), "noise": bytes(range(256))}
    for label, content in data.items():
        name = f"bytes-{label}.yaml"
        yield Bad(
            f"YAML: {label}", ("plan", name), (name,), lambda work, name=name, c=content: (work / name).write_bytes(c)
        )


def make_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))


def of_paths() -> Iterator[Bad]:
    """Yield paths without a regular file, for every argument of a command that takes one."""

    def fifo(work: Path) -> None:
        (work / "pipe").unlink(missing_ok=True)
        os.mkfifo(work / "pipe")

    odd = {
        "long": "a" * 300,
        "very long": "b/" * 5_000,
        "NUL": "a\0b",
        "surrogate": "a\udcff",
        "line": "a\nb",
        "escape": "a\x1b[31mb",
        "emoji code": ":smile:",
        "markup": "[red]x[/red]",
        "blank": " ",
        "unicode": "日本.yaml",
    }
    visible = {"surrogate": "a\\udcff", "line": "a\\nb", "escape": "a\\x1b[31mb", "NUL": "a\\x00b"}
    for label, path in odd.items():
        said = (visible.get(label, path.strip()[:20]),)
        yield Bad(f"recipe path: {label}", ("plan", path), said)
        yield Bad(f"run path: {label}", ("eval", path), said if label == "unicode" else ())
        yield Bad(f"run to export: {label}", ("export", path, "out"), said if label == "unicode" else ())
    for label in ("long", "very long", "NUL", "surrogate", "line", "escape", "blank"):
        yield Bad(f"export to: {label}", ("export", "no-run", odd[label]), ("OUT",))
        picture = odd[label] + ("" if label == "blank" else ".png")
        yield Bad(f"picture: {label}", ("plan", "recipe.yaml", "--picture", picture), ("--picture",))
    for name in ("chart", "chart.txt", "chart.png.gz", "no/folder/chart.png", "model", "/dev/null/x.png", ""):
        yield Bad(f"picture: {name!r}", ("plan", "recipe.yaml", "--picture", name), ("--picture",))
    yield Bad("picture: a folder", ("plan", "recipe.yaml", "--picture", "a.png"), ("a.png",), make_folder)
    for command in ("train", "plan", "bench"):
        yield Bad(f"{command} a FIFO", (command, "pipe"), ("pipe", "FIFO"), fifo)
        yield Bad(f"{command} a socket", (command, "sock"), ("sock",), lambda work: make_socket(work / "sock"))
        yield Bad(f"{command} a device", (command, "/dev/zero"), ("/dev/zero", "a device"))
        yield Bad(f"{command} a folder", (command, "model"), ("model", "directory"))
        yield Bad(f"{command} nothing", (command, "nowhere.yaml"), ("nowhere.yaml",))


def make_folder(work: Path) -> None:
    (work / "a.png").mkdir(exist_ok=True)


def of_command_lines() -> Iterator[Bad]:
    lines = {
        "": "COMMAND",
        "nonsense": "nonsense",
        "train": "recipe",
        "plan": "recipe",
        "eval": "RUN",
        "export": "RUN",
        "export run": "OUT",
        "train recipe.yaml --jsn": "--jsn",
        "plan recipe.yaml --b=c": "--b=c",
        "eval run name=a": "name=a",
        "train recipe.yaml train.tp": "train.tp",
        "train recipe.yaml =3": "=3",
        "train recipe.yaml .=3": ".=3",
        "train recipe.yaml ..tp=3": "..tp=3",
        "train recipe.yaml train.=3": "train.=3",
        "train recipe.yaml other.yaml": "other.yaml",
        "eval run --step x": "--step",
        "eval run --step 1.5": "--step",
        f"eval run --step {HUGE}": "run",
        f"eval run --step {'9' * 5_000}": "--step",
        f"export run out --step {HUGE}": "run",
        "eval nowhere": "nowhere",
        "eval model": "model",
        "eval recipe.yaml": "recipe.yaml",
        "export nowhere out": "nowhere",
    }
    for line, said in lines.items():
        yield Bad(f"command: {line[:60]}", tuple(line.split()), (said,))
    for option, most in {"layers": 1_000, "hidden": 65_536, "experts": 4_096, "repeats": 10_000}.items():
        for value in ("0", "-5", "999999999", str(most + 1), HUGE):
            line = ("bench", "recipe.yaml", f"--{option}", value)
            yield Bad(f"bench --{option} {value}", line, (f"--{option}", f"from 1 to {most:,}"))
        for value in ("x", "1e3", "nan", "", "9" * 5_000, "1\x1b[31m"):
            line = ("bench", "recipe.yaml", f"--{option}", value)
            yield Bad(f"bench --{option} {value[:20]!r}", line, (f"--{option}",))


TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def of_environments() -> Iterator[Bad]:
    commands = itertools.cycle(["train", "plan", "bench"])

    def bad(given: dict[str, str], name: str, change: str | None, label: str = "") -> Bad:
        variables = {
            key: value for key, value in (given | {name: change or ""}).items() if change is not None or key != name
        }
        shown = () if change is None or not change.isprintable() or not change.strip() else (f"={change[:20]}",)
        return Bad(
            f"{label}{name}={str(change)[:30]!r}", (next(commands), "recipe.yaml"), (name, *shown), variables=variables
        )

    no_numbers = ("abc", "-1", "1.5", "", " ", "1e3", HUGE, "２", "1\x1b[31m", "0x1", "1,2", "none")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        yield from (bad(TWO_RANKS, name, value) for value in no_numbers)
    yield from (bad(TWO_RANKS, "LOCAL_WORLD_SIZE", value) for value in no_numbers if value)
    yield from (bad(TWO_RANKS, "WORLD_SIZE", value, "too few: ") for value in ("0", "1"))
    yield from (bad(TWO_RANKS, "RANK", value, "too many: ") for value in ("2", "100"))
    yield bad(TWO_RANKS, "LOCAL_RANK", "2", "too many: ")
    yield bad(TWO_RANKS | {"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE", "5", "too many: ")
    yield bad(TWO_RANKS, "WORLD_SIZE", None, "missing: ")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        yield bad(TWO_RANKS, name, None, "missing: ")
        yield bad(TWO_RANKS, name, "", "empty: ")
    for value in ("0", "65536", "29500x", "-1", "1.5", HUGE, "２"):
        yield bad(TWO_RANKS, "MASTER_PORT", value)
    for value in ("a b", "*", "a\nb", " "):
        yield bad(TWO_RANKS, "MASTER_ADDR", value)
    for name in ("WORLD_SIZE", "LOCAL_RANK", "HYBRID3D_CHECKED"):
        yield bad({}, name, "1", "alone: ")
    for value in ("abc", "nan", "inf", "0", "-1", "1e300", "", "5 minutes"):
        yield bad({}, "HYBRID3D_RENDEZVOUS_SECONDS", value)
    for value in ("*", "../x", "a b", "a" * 200, "a\n", ".x", "日本"):
        yield bad({}, "HYBRID3D_RUN", value)
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        yield from (bad(STEP, name, value) for value in ("abc", "-1", "1.5", "", HUGE))
        yield bad(STEP, name, None, "missing: ")
    for value in ("", "x", "2(x", "0", "2(x99999999)", "(x2)", HUGE):
        yield bad(STEP, "SLURM_STEP_TASKS_PER_NODE", value)
    yield bad(STEP, "SLURM_STEP_TASKS_PER_NODE", None, "missing: ")
    yield bad(STEP, "SLURM_PROCID", "5", "too many: ")
    yield bad(STEP, "SLURM_LOCALID", "1", "too many: ")
    yield bad(STEP, "SLURM_NODEID", "3", "too many: ")


GENERATED = (of_recipes, of_contradictions, of_yaml, of_paths, of_command_lines, of_environments)
CASES = [case for generate in GENERATED for case in generate()]
FAST = sample(CASES, 200)
# Without what no process can be given: a NUL character in an argument
GIVEN = [case for case in CASES if not any("\0" in text for text in (*case.arguments, *case.variables.values()))]
PROCESSES = sample(GIVEN, 36, seed=2)


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a valid recipe, model and data."""
    folder = tmp_path_factory.mktemp("bad")
    sound.write_inputs(folder, demo, RECIPE)
    return folder


@pytest.fixture
def harness(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Harness:
    started: list[object] = []
    monkeypatch.setattr(launcher, "launch", lambda *unused: started.append(unused) or cli.FAILED)
    monkeypatch.setattr("hybrid3d.launch.rank.run_rank", lambda *unused, **more: started.append(unused) or cli.FAILED)
    return Harness(work, started, capsys, monkeypatch)


def test_bad_input_cases_are_a_thousand_with_a_name_each() -> None:
    assert len(CASES) >= 1_000
    check_labels(CASES)


@pytest.mark.parametrize("case", FAST, ids=lambda case: ascii(case.label))
def test_sample_is_refused(harness: Harness, case: Bad) -> None:
    harness.refuse(case)


@pytest.mark.slow
def test_bad_inputs_are_all_refused(harness: Harness) -> None:
    failed = []
    for case in CASES:
        try:
            harness.refuse(case)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, f"{len(failed)} of {len(CASES)}:\n" + "\n".join(failed)


@pytest.mark.parametrize("case", PROCESSES[::4], ids=lambda case: ascii(case.label))
def test_sampled_bad_inputs_are_refused_as_processes(harness: Harness, case: Bad) -> None:
    harness.refuse_as_process(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES, ids=lambda case: ascii(case.label))
def test_further_bad_inputs_are_refused_as_processes(harness: Harness, case: Bad) -> None:
    harness.refuse_as_process(case)


def test_quoted_input_stands_as_it_was_written(harness: Harness) -> None:
    """Emoji codes and markup are printed literally, and control characters are escaped."""
    for value, said in {
        "':smile:'": "':smile:'",
        "'[red]x[/red]'": "'[red]x[/red]'",
        '"a\\e[31mb"': r"'a\x1b[31mb'",
    }.items():
        case = Bad(value, ("plan", "recipe.yaml", f"model.dtype={value}"), (said,))
        assert "\x1b" not in harness.refuse(case)
    case = Bad("path", ("plan", ":smile: [b]x[/b] \x1b[31m\u202e.yaml"), (r":smile: [b]x[/b] \x1b[31m\u202e.yaml",))
    harness.refuse(case)
    case = Bad("argparse", ("eval", "run", "\x1b[31mx=1"), (r"\x1b[31mx=1",))
    harness.refuse(case)
