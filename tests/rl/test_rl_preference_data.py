"""Preference pairs from parquet: tokens of both answers, chat turns, and rows that are refused, dropped or cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import ROOT
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.inputs.tokenizer_checks import check_chat_template
from hybrid3d.launch.preflight import check_data_references
from hybrid3d.rl.data import Example, PromptData
from hybrid3d.rl.data_files import DataError
from test_rl_data import BOS, BOT, CHAT, EOS, ID, TURNS, USER, ids, make_tokenizer, tokenizer, turn, write

__all__ = ["tokenizer", "write"]  # fixtures

Write = Callable[..., Path]
QUESTIONS, CHOSEN, REJECTED = ["how many apples", "3 4"], ["#### 7", "7"], ["#### 3", "#### 4 4"]


def read(path: Path, tokenizer: Any, **settings: Any) -> PromptData:
    limits = {"max_prompt_tokens": 100, "max_tokens": 100}
    columns = {"prompt": "question", "answer": "chosen", "rejected": "rejected"}
    return PromptData.read(path, tokenizer, **{**limits, **columns, **settings})


def test_pair_answers_follow_the_prompt_and_end_with_eos(write: Write, tokenizer: Any) -> None:
    data = read(write(question=QUESTIONS, chosen=CHOSEN, rejected=REJECTED), tokenizer)
    prompt = (BOS, *ids("how many apples"))
    assert data.examples[0] == Example(
        0,
        "how many apples",
        "#### 7",
        prompt,
        answer_ids=(*ids("#### 7"), EOS),
        rejected_ids=(*ids("#### 3"), EOS),
    )
    assert data.examples[0].trained == ((*prompt, *ids("#### 7"), EOS), (*prompt, *ids("#### 3"), EOS))
    assert data.counts == {"rows": 2, "used": 2, "broken": 0, "overlong": 0, "truncated": 0}
    assert {pair.row for pair in data.batch(0, 2)} == {0, 1}


def test_chat_turns(write: Write, tokenizer: Any) -> None:
    """Answers of their own, and those behind the prompt's turns, as the two usual kinds of files have them."""
    asked = turn("user", "apples")
    answer = {name: turn("assistant", text) for name, text in (("chosen", "7"), ("rejected", "3"))}
    wanted = (BOS, USER, ID["apples"], BOT)
    for question, before in (
        (pa.array([[asked]], TURNS), []),
        (pa.array([[asked]], TURNS), [asked]),
        (["apples"], [asked]),
    ):
        turns = {name: pa.array([[*before, one]], TURNS) for name, one in answer.items()}
        (pair,) = read(write(question=question, **turns), tokenizer, chat_template=True).examples
        assert pair.trained == ((*wanted, ID["7"], EOS), (*wanted, ID["3"], EOS))
        assert pair.answer == "7"
    with pytest.raises(DataError, match=r"column 'question' holds chat turns: only prompts and pairs may"):
        read(write(question=pa.array([[asked]], TURNS), chosen=["7"], rejected=["3"]), tokenizer)


BEFORE = [turn("user", "apples")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (None, "3", "column 'chosen' is null"),
        ("7", " ", "column 'rejected' is blank"),
        ("7", "7", "columns 'chosen' and 'rejected' have the same answer"),
        ("7", " 7", "columns 'chosen' and 'rejected' have the same answer"),
        ([], [turn("assistant", "3")], "column 'chosen' is blank"),
        (
            [turn("user", "7")],
            [turn("assistant", "3")],
            "'chosen' does not end with a turn of the role assistant",
        ),
        (
            [*BEFORE, turn("assistant", "7")],
            [turn("user", "3 4"), turn("assistant", "3")],
            "column 'rejected' has turns before its answer that are not those of the prompt",
        ),
    ],
)
def test_broken_pairs(write: Write, tokenizer: Any, chosen: Any, rejected: Any, reason: str) -> None:
    turns = isinstance(chosen, list)
    right = ([turn("assistant", "7")], [turn("assistant", "3")]) if turns else ("7", "3")
    kind = TURNS if turns else pa.string()
    path = write(
        question=["apples"] * 3,
        chosen=pa.array([right[0], chosen, right[0]], kind),
        rejected=pa.array([right[1], rejected, right[1]], kind),
    )
    with pytest.raises(DataError, match=rf"1 of 3 rows are broken.*row 1 \(from 0\): .*{reason}"):
        read(path, tokenizer, chat_template=turns)
    data = read(path, tokenizer, chat_template=turns, max_invalid_fraction=0.4)
    assert [pair.row for pair in data.examples] == [0, 2]
    assert data.skipped == {"broken": 1}


def test_missing_column(write: Write, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'rejected'; the columns there: question, chosen"):
        read(write(question=QUESTIONS, chosen=CHOSEN), tokenizer)


def test_tokenizer_without_eos(write: Write) -> None:
    silent = make_tokenizer("$A")
    silent.eos_token = None
    with pytest.raises(DataError, match="has no EOS token"):
        read(write(question=QUESTIONS, chosen=CHOSEN, rejected=REJECTED), silent)


@pytest.mark.parametrize("limits", [{"max_tokens": 6}, {"max_prompt_tokens": 3}])
def test_long_pairs(write: Write, tokenizer: Any, limits: dict[str, int]) -> None:
    """The first pair has a prompt of 4 tokens and 7 with either answer, the second 3 and at most 6 or 7."""
    path = write(question=["how many apples", "3 4"], chosen=CHOSEN, rejected=["#### 3", "#### 4"])
    message = r"row 0 \(from 0\): the prompt has 4 tokens, with the longer answer and EOS 7; at most .* \(1 such rows"
    with pytest.raises(DataError, match=message):
        read(path, tokenizer, **limits)
    dropped = read(path, tokenizer, overlong="drop", **limits)
    assert [pair.row for pair in dropped.examples] == [1]
    assert dropped.counts == {"rows": 2, "used": 1, "broken": 0, "overlong": 1, "truncated": 0}
    cut = read(path, tokenizer, overlong="truncate_left", **limits)
    assert cut.examples[0].prompt_ids == tuple(ids("how many apples"))
    assert cut.examples[0].trained[0] == (*ids("how many apples"), *ids("#### 7"), EOS)
    assert cut.truncated == 1


def test_answers_that_leave_no_room_for_a_prompt(write: Write, tokenizer: Any) -> None:
    path = write(question=["how"], chosen=["#### 7 7 7 7"], rejected=["#### 3"])
    with pytest.raises(DataError, match=r"set data\.overlong to drop$"):
        read(path, tokenizer, max_tokens=6, overlong="truncate_left")
    message = r"1 of 1 rows would be left out, 0 broken and 1 .* of more than 6 with an answer, and at most 0 may be"
    with pytest.raises(DataError, match=message):
        read(path, tokenizer, max_tokens=6, overlong="drop")


def test_recipe_reads_preference_pairs(demo: Path) -> None:
    def recipe_of(*overrides: str) -> Recipe:
        files = [f"data.train={demo}/preferences.parquet", f"data.eval={demo}/preferences-eval.parquet"]
        return load_recipe(ROOT / "recipes/demo-preferences.yaml", [f"model.path={demo}/base", *files, *overrides])

    recipe, config = recipe_of(), read_config(demo / "base")
    tokenizer = read_tokenizer(recipe)
    train, held_out = read_data(recipe, config, tokenizer)
    assert all(len(example.trained) == 2 for example in (*train.examples, *held_out["eval"].examples))
    assert (len(train.examples), len(held_out["eval"].examples)) == (4096, 256)
    assert train.examples[0].answer.startswith("#### ")  # the reference answer of an evaluation is the chosen one
    check_data_references(recipe, train, held_out)
    tokenizer.chat_template = CHAT.replace("<bot>", "").replace("<user>", "")
    in_chats = recipe_of("data.chat_template=true")
    check_chat_template(in_chats, tokenizer)
    assert len(read_data(in_chats, config, tokenizer)[0].examples) == 4096


def test_overlong_answers_of_sft_are_handled_as_recipe_says(demo: Path, tmp_path: Path) -> None:
    """Of three rows the model has 25 positions for two."""
    path = tmp_path / "answers.parquet"
    pq.write_table(pa.table({"question": ["how many"] * 3, "answer": ["7", "7 " * 40, "7"]}), path)
    settings = [f"model.path={demo}/base", "rollout=null", f"data.train={path}", f"data.eval={path}"]

    def read_train(*overrides: str) -> PromptData:
        recipe = load_recipe(ROOT / "recipes/demo-warmup.yaml", [*settings, *overrides])
        config = read_config(demo / "base") | {"max_position_embeddings": 25}
        return read_data(recipe, config, read_tokenizer(recipe))[0]

    with pytest.raises(DataError) as caught:
        read_train()
    assert re.fullmatch(
        rf"{path}: row 1 \(from 0\): the prompt has \d tokens, with the answer and EOS [4-9]\d; at most 25 and 25 fit "
        r"\(1 such rows in all\): set data\.overlong to drop or truncate_left",
        str(caught.value),
    )
    dropped = read_train("data.overlong=drop")
    assert dropped.counts == {"rows": 3, "used": 2, "broken": 0, "overlong": 1, "truncated": 0}
    assert [example.row for example in dropped.examples] == [0, 2]


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_sequence_needs_room_in_a_micro_batch(demo: Path, name: str) -> None:
    of_name = {"sft": ("demo-warmup", "warmup", "eval"), "dpo": ("demo-preferences", "preferences", "preferences-eval")}
    recipe, train, held_out = of_name[name]
    overrides = [f"model.path={demo}/base", "rollout=null", "train.max_tokens_per_micro_batch=9"]
    overrides += [f"data.train={demo}/{train}.parquet", f"data.eval={demo}/{held_out}.parquet"]
    found = load_recipe(ROOT / f"recipes/{recipe}.yaml", overrides)
    with pytest.raises(
        DataError, match=r"tokens, for which train\.max_tokens_per_micro_batch=9 has no room: set it to"
    ):
        read_data(found, read_config(demo / "base"), read_tokenizer(found))


def test_json_lines(tmp_path: Path, tokenizer: Any) -> None:
    path, asked = tmp_path / "pairs.jsonl", turn("user", "apples")
    row = {"prompt": [asked], "chosen": [turn("assistant", "7")], "rejected": [turn("assistant", "3")], "score": 0.5}
    path.write_text("\n".join(json.dumps(row | {"id": i}) for i in range(3)) + "\n")
    data = read(path, tokenizer, chat_template=True, prompt="prompt")
    assert [pair.trained[0] for pair in data.examples] == [(BOS, USER, ID["apples"], BOT, ID["7"], EOS)] * 3
    with pytest.raises(DataError, match=r"no column 'question'; the columns there: prompt, chosen, rejected, score"):
        read(path, tokenizer, chat_template=True)
    path.write_text('{"prompt": "apples", "chosen": "7"')
    with pytest.raises(
        DataError, match=r"pairs\.jsonl: not a readable file of JSON Lines: line 1, column 35: Expecting '"
    ):
        read(path, tokenizer)
    path.write_text("")
    with pytest.raises(DataError, match=r"pairs\.jsonl: no rows"):
        read(path, tokenizer)


def test_json_lines_of_prompts_are_those_of_parquet(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"question": "3 4" if i else "apples", "answer": None if i == 1 else "#### 7"} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    of_json, of_parquet = (
        PromptData.read(tmp_path / name, tokenizer, prompt="question", answer="answer", max_prompt_tokens=9)
        for name in ("a.jsonl", "a.parquet")
    )
    assert of_json.examples == of_parquet.examples
    assert of_json.counts == of_parquet.counts
    assert of_json.counts["broken"] == 1
