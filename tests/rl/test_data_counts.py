"""What becomes of a data file's rows: counted, told to whoever looks on, and refused where most would be missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from commands import PROBLEMS
from hybrid3d.cli import main
from hybrid3d.rl.data import DataError, PromptData
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.logger import Display, RunLogger
from test_rl_data import make_tokenizer, read

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("<bos> $A")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(fitting: int, overlong: int, broken: int, name: str = "data.parquet") -> Path:
        """Prompts of 3 tokens, of 6 tokens, and without any text."""
        questions = ["how many"] * fitting + ["how many apples has Ada"] * overlong + [""] * broken
        path = tmp_path / name
        pq.write_table(pa.table({"question": questions, "answer": ["7"] * len(questions)}), path)
        return path

    return write_file


def test_rows_are_counted(write: Write, tokenizer: Any) -> None:
    path = write(fitting=60, overlong=38, broken=2)
    dropped = read(path, tokenizer, max_prompt_tokens=3, overlong="drop", max_invalid_fraction=0.02)
    assert dropped.counts == {"rows": 100, "used": 60, "broken": 2, "overlong": 38, "truncated": 0}
    assert str(dropped) == f"{path}: 60 of 100 rows are used; left out: 2 broken, 38 overlong"
    cut = read(path, tokenizer, max_prompt_tokens=3, overlong="truncate_left", max_invalid_fraction=0.02)
    assert cut.counts == {"rows": 100, "used": 98, "broken": 2, "overlong": 0, "truncated": 38}
    assert str(cut) == f"{path}: 98 of 100 rows are used; left out: 2 broken; 38 prompts are truncated"
    assert str(read(write(5, 0, 0), tokenizer)) == f"{path}: all 5 rows are used"


def test_file_of_which_most_rows_would_be_left_out(write: Write, tokenizer: Any) -> None:
    path = write(fitting=10, overlong=390, broken=0)
    with pytest.raises(DataError) as caught:
        read(path, tokenizer, max_prompt_tokens=3, overlong="drop", remedy="raise this (or lower that), ")
    assert str(caught.value) == (
        f"{path}: 390 of 400 rows would be left out, 0 broken and 390 with a prompt of more than 3 tokens, and at most "
        "200 may be: raise this (or lower that), set data.overlong=truncate_left, or remove these rows from the file"
    )
    with pytest.raises(DataError, match=r"may be: set data\.overlong=truncate_left, or remove these rows from the"):
        read(path, tokenizer, max_prompt_tokens=3, overlong="drop")
    assert read(path, tokenizer, max_prompt_tokens=3, overlong="truncate_left").counts["truncated"] == 390


@pytest.mark.parametrize(
    ("fitting", "overlong", "broken", "max_invalid_fraction", "used"),
    [
        (50, 50, 0, 0.0, 50),
        (49, 51, 0, 0.0, None),
        (50, 40, 10, 0.1, 50),
        (49, 41, 10, 0.1, None),  # both kinds together
        (10, 0, 90, 0.9, 10),  # what `max_invalid_fraction` allows by itself
        (9, 1, 90, 0.9, None),
    ],
)
def test_left_out_rows_stay_within_half_or_max_invalid_fraction(
    write: Write,
    tokenizer: Any,
    fitting: int,
    overlong: int,
    broken: int,
    max_invalid_fraction: float,
    used: int | None,
) -> None:
    path = write(fitting, overlong, broken)
    settings = {"overlong": "drop", "max_invalid_fraction": max_invalid_fraction}
    if used is not None:
        assert read(path, tokenizer, max_prompt_tokens=3, **settings).counts["used"] == used
    else:
        with pytest.raises(DataError, match="rows would be left out"):
            read(path, tokenizer, max_prompt_tokens=3, **settings)


def test_counts_go_to_the_terminal_the_events_and_every_row(write: Write, tokenizer: Any, tmp_path: Path) -> None:
    def read_part(name: str, **rows: int) -> PromptData:
        path = write(**rows, name=name)
        return read(path, tokenizer, max_prompt_tokens=3, overlong="drop", max_invalid_fraction=0.1)

    train = read_part("train.parquet", fitting=6, overlong=3, broken=1)
    held_out = read_part("eval.parquet", fitting=4, overlong=0, broken=0)
    folder, shown = RunFolder(tmp_path), StringIO()
    record = RunLogger(folder, 0, Display("run", 2, Console(file=shown, width=500)))
    record.data({"train": train, "eval": held_out})
    record.step({"step": 0, "reward/mean": 0.5}, steps=2)
    record.step({"step": 1, "reward/mean": 0.6}, steps=2)
    assert shown.getvalue().splitlines()[:2] == [
        f"data.train {tmp_path}/train.parquet: 6 of 10 rows are used; left out: 1 broken, 3 overlong",
        f"data.eval {tmp_path}/eval.parquet: all 4 rows are used",
    ]
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [{key: value for key, value in event.items() if key != "time"} for event in events] == [
        {"event": "data", "split": "train", "file": f"{tmp_path}/train.parquet", **train.counts},
        {"event": "data", "split": "eval", "file": f"{tmp_path}/eval.parquet", **held_out.counts},
    ]
    constant = {"data/train_rows": 10, "data/train_used": 6, "data/train_broken": 1, "data/train_overlong": 3}
    constant |= {"data/eval_rows": 4, "data/eval_used": 4, "data/eval_broken": 0, "data/eval_overlong": 0}
    constant |= {"data/train_truncated": 0, "data/eval_truncated": 0}
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows == [
        {"step": 0, "reward/mean": 0.5, **constant},
        {"step": 1, "reward/mean": 0.6, **constant},
    ]


def test_run_that_leaves_out_most_rows_ends_before_ranks_start(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt of the demo's file is shorter than all others."""
    table = pq.read_table(demo / "train.parquet")
    questions = ["7", *table["question"].to_pylist()]
    answers = ["#### 7", *table["answer"].to_pylist()]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"question": questions, "answer": answers}), path)
    recipe = Path(__file__).parents[2] / "recipes/demo-cpu.yaml"
    settings = [f"data.train={path}", f"data.eval={demo}/eval.parquet", f"model.path={demo}/base"]
    settings += ["data.overlong=drop", "rollout.max_model_len=16", "rollout.max_new_tokens=8"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), *settings]) == 2
    said = capsys.readouterr().err
    assert f"{path}: {PROBLEMS} of {PROBLEMS + 1} rows would be left out" in said
    assert "may be: raise rollout.max_model_len (or lower rollout.max_new_tokens), set data.overlong=" in said
    assert not (tmp_path / "runs").exists()
