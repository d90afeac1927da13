"""Parquet to token ids, in an order that never repeats or drops a row; and what a broken file is answered with."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import (
    DataError,
    Example,
    PromptData,
    encode_chat,
    encode_prompt,
    epoch_order,
)
from hybrid3d.rl.data_files import check_columns, read_columns

MEND = "repair these rows, or raise data.max_invalid_fraction"
PAD, BOS, EOS, UNK, USER, BOT = range(6)
WORDS = "how many apples has Ada 3 4 #### 7".split()
ID = {word: 6 + index for index, word in enumerate(WORDS)}
CHAT = (
    "<bos>{% for m in messages %}{{ '<bot>' if m.role == 'assistant' else '<user>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)

QUESTIONS = ["how many apples has Ada", "how many", "apples", "3 4", "Ada has 3"]
ANSWERS = ["#### 7", "#### 3", "#### 4", "7", "#### 3"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A real Hugging Face tokenizer, one id a word; `<bos> text` as most do."""
    return make_tokenizer("<bos> $A", chat_template=CHAT)


def make_tokenizer(template: str, **settings: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<bot>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<bot>"],
        **settings,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(**columns: Any) -> Path:
        path = tmp_path / "data.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    return write_file


@pytest.fixture
def path(write: Callable[..., Path]) -> Path:
    return write(question=QUESTIONS, answer=ANSWERS, level=[1, 2, 3, 4, 5])


def read(path: Path, tokenizer: Any, **settings: Any) -> PromptData:
    return PromptData.read(
        path, tokenizer, prompt="question", answer="answer", **{"max_prompt_tokens": 100, "seed": 1, **settings}
    )


# ---- encoding


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


@pytest.mark.parametrize(
    ("template", "front"), [("<bos> $A", [BOS]), ("$A <eos>", []), ("<bos> $A <eos>", [BOS]), ("$A", [])]
)
def test_plain_prompt_keeps_bos_and_gets_no_eos(template: str, front: list[int]) -> None:
    assert encode_prompt(make_tokenizer(template), "how many apples") == front + ids("how many apples")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<bos> 3", [BOS, ID["3"]]),  # as in a rendered chat
        ("3 <eos>", [BOS, ID["3"], EOS]),
        ("<bos>", [BOS]),
        ("", []),
    ],
)
def test_special_tokens_written_in_the_text_stay(text: str, expected: list[int]) -> None:
    assert encode_prompt(make_tokenizer("<bos> $A <eos>"), text) == expected


def test_chat_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    assert encode_chat(tokenizer, "how many") == [BOS, USER, *ids("how many"), BOT]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "how many"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert encode_chat(tokenizer, "how many") == expected


def test_read_encodes_every_row(path: Path, tokenizer: Any) -> None:
    data = read(path, tokenizer)
    assert [example.row for example in data.examples] == [0, 1, 2, 3, 4]
    assert data.examples[1] == Example(1, "how many", "#### 3", (BOS, *ids("how many")))
    chat = read(path, tokenizer, chat_template=True)
    assert chat.examples[2].prompt_ids == (BOS, USER, ID["apples"], BOT)


def test_pair_has_its_loss_on_answer_and_eos(path: Path, tokenizer: Any) -> None:
    example = read(path, tokenizer, max_tokens=9).examples[1]
    (tokens,) = example.trained
    assert tokens == (BOS, *ids("how many"), *ids("#### 3"), EOS)
    batch = Batch.from_sequences([tokens], [len(example.prompt_ids)], pad_id=PAD)
    assert batch.response_mask.tolist() == [[0, 0, 0, 1, 1, 1]]
    message = r"row 0 \(from 0\): the prompt has 6 tokens, with the answer and EOS 9; at most 100 and 8 fit \(1 such"
    with pytest.raises(DataError, match=message):
        read(path, tokenizer, max_tokens=8)
    cut = read(path, tokenizer, max_tokens=5, overlong="truncate_left").examples[1]
    assert cut.trained == ((*ids("how many"), *ids("#### 3"), EOS),)


def test_pair_needs_an_eos(path: Path) -> None:
    silent = make_tokenizer("<bos> $A")
    silent.eos_token = None
    with pytest.raises(DataError, match="the tokenizer has no EOS token"):
        read(path, silent, max_tokens=100)


def test_long_prompts_are_refused(path: Path, tokenizer: Any) -> None:
    """Row 0 has 6 tokens, row 4 has 4, with BOS."""
    assert len(read(path, tokenizer, max_prompt_tokens=6).examples) == 5
    with pytest.raises(DataError) as caught:
        read(path, tokenizer, max_prompt_tokens=3)
    assert str(caught.value) == (
        f"{path}: row 0 (from 0): the prompt has 6 tokens, at most 3 fit beside an answer "
        "(2 such rows in all): set data.overlong to drop or truncate_left"
    )


def test_long_prompts_are_dropped_or_lose_their_beginning(path: Path, tokenizer: Any) -> None:
    """Rows 0 and 4 have 6 and 4 tokens, the others 3 or fewer."""
    dropped = read(path, tokenizer, max_prompt_tokens=3, overlong="drop")
    assert [example.row for example in dropped.examples] == [1, 2, 3]
    assert (dropped.skipped, dropped.truncated) == ({"overlong": 2}, 0)
    cut = read(path, tokenizer, max_prompt_tokens=3, overlong="truncate_left")
    assert [example.prompt_ids for example in cut.examples] == [
        tuple(ids("apples has Ada")),
        (BOS, *ids("how many")),
        (BOS, *ids("apples")),
        (BOS, *ids("3 4")),
        tuple(ids("Ada has 3")),
    ]
    assert cut.examples[0].prompt == QUESTIONS[0]
    assert (cut.skipped, cut.truncated) == ({}, 2)
    within = read(path, tokenizer, max_prompt_tokens=6, overlong="drop")
    assert (len(within.examples), within.skipped, within.truncated) == (5, {}, 0)


def test_prompt_without_tokens_is_refused(write: Callable[..., Path]) -> None:
    from transformers import PreTrainedTokenizerFast

    class Deaf(PreTrainedTokenizerFast):  # type: ignore[misc]
        def encode(self, text: str, **_: Any) -> list[int]:
            return [] if text == "?" else [1]

    deaf = Deaf(tokenizer_object=make_tokenizer("$A").backend_tokenizer)
    with pytest.raises(DataError, match=r"row 1 \(from 0\): the prompt has no tokens"):
        read(write(question=["3", "?"], answer=["3", "4"]), deaf)


def test_missing_chat_template_is_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.chat_template=true, but the tokenizer has no chat template"):
        read(path, make_tokenizer("<bos> $A"), chat_template=True)


# ---- chat turns

TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def turn(role: str | None, content: str | None) -> dict[str, str | None]:
    return {"role": role, "content": content}


def test_chat_turns_go_through_the_template_whole(write: Callable[..., Path], tokenizer: Any) -> None:
    """The template of this file writes `<user>` before each turn's content, whatever its role."""
    prompts = [[turn("system", "Ada has"), turn("user", "how many")], [turn("user", "apples")]]
    path = write(question=pa.array(prompts, TURNS), answer=["7", "3"])
    data = read(path, tokenizer, chat_template=True)
    assert data.examples == (
        Example(0, "how many", "7", (BOS, USER, *ids("Ada has"), USER, *ids("how many"), BOT)),
        Example(1, "apples", "3", (BOS, USER, *ids("apples"), BOT)),
    )
    assert check_columns(path, ["question", "answer"], ["question"]) == 2


def test_chat_turns_are_for_prompts_that_go_through_the_template(write: Callable[..., Path], tokenizer: Any) -> None:
    turns = pa.array([[turn("user", "apples")]], TURNS)
    for columns, asked in (
        (dict(question=turns, answer=["7"]), {}),
        (dict(question=["7"], answer=turns), {"chat_template": True}),
    ):
        with pytest.raises(DataError, match=r"chat turns: only prompts and pairs may, with data\.chat_template: true"):
            read(write(**columns), tokenizer, **asked)
    others = pa.array([[{"role": "user", "text": "apples"}]])
    with pytest.raises(DataError, match=r"column 'question' holds list<.*expected strings"):
        read(write(question=others, answer=["7"]), tokenizer, chat_template=True)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "column 'question' is null"),
        ([], "column 'question' is blank"),
        ([turn("user", " ")], "column 'question' is blank"),
        ([turn("user", None)], "column 'question' has a turn without role or content"),
        ([turn(None, "apples"), turn("user", "apples")], "column 'question' has a turn without role or content"),
        ([None], "column 'question' has a turn without role or content"),
        ([turn("system", "how"), turn("system", "many")], "the chat template refuses the prompt: one system turn"),
    ],
)
def test_broken_chat_turns(write: Callable[..., Path], prompt: Any, said: str) -> None:
    refusing = "{% if messages | length > 1 and messages[1].role == 'system' %}{{ raise_exception('one system turn') }}"
    tokenizer = make_tokenizer("<bos> $A", chat_template=refusing + "{% endif %}" + CHAT)
    path = write(question=pa.array([prompt, [turn("user", "apples")]], TURNS), answer=["7", "3"])
    with pytest.raises(DataError) as caught:
        read(path, tokenizer, chat_template=True)
    assert str(caught.value) == (
        f"{path}: 1 of 2 rows are broken, and data.max_invalid_fraction=0.01 allows 0: row 0 (from 0): {said}; {MEND}"
    )
    data = read(path, tokenizer, chat_template=True, max_invalid_fraction=0.5)
    assert [example.row for example in data.examples] == [1]


# ---- order


def examples(rows: int) -> tuple[Example, ...]:
    return tuple(Example(row, "", "", ()) for row in range(rows))


def drawn(data: PromptData, steps: range, n: int) -> list[int]:
    return [example.row for step in steps for example in data.batch(step, n)]


@settings(deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(0, 2**63), epochs=st.integers(1, 3))
def test_epochs_are_permutations_of_the_rows(rows: int, n: int, seed: int, epochs: int) -> None:
    data = PromptData(examples(rows), seed)
    stream = drawn(data, range(-(-rows * epochs // n)), n)
    for epoch in range(epochs):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@settings(deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(0, 2**31), step=st.integers(0, 10_000))
def test_batch_is_a_pure_function_of_seed_and_step(rows: int, n: int, seed: int, step: int) -> None:
    """A new object that jumps to a step finds what one that walked past it, forwards and backwards, found."""
    walked = PromptData(examples(rows), seed)
    for other in (step + 1, 0, step + 40, max(0, step - 1)):
        walked.batch(other, n)
    first = walked.batch(step, n)
    epoch_order.cache_clear()
    assert PromptData(examples(rows), seed).batch(step, n) == first
    assert len(first) == n


def test_batches_of_any_size_walk_the_same_stream() -> None:
    data = PromptData(examples(10), seed=7)
    assert drawn(data, range(6), 5) == drawn(data, range(10), 3) == drawn(data, range(1), 30)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(50, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert tuple(range(50)) not in orders


def test_epoch_order_puts_every_row_everywhere() -> None:
    """In 3,000 epochs of 3 rows the six orders come 500 times each, give or take: 5 sigma are 102."""
    counts = Counter(epoch_order(3, 1, epoch) for epoch in range(3000))
    assert len(counts) == 6
    assert all(abs(count - 500) < 102 for count in counts.values())


def test_order_is_the_same_in_every_process() -> None:
    """Ranks must agree, and a run that is resumed tomorrow with the one of today: recorded once, with Python 3.11."""
    assert epoch_order(8, 1, 0) == (1, 5, 4, 2, 7, 0, 3, 6)


# ---- files


@pytest.mark.parametrize(
    "column", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_string_columns_of_every_kind_are_read(write: Callable[..., Path], column: pa.DataType) -> None:
    path = write(question=pa.array(["a", "b", "a"]).cast(column), answer=["1", "2", "3"])
    assert check_columns(path, ["question", "answer"]) == 3
    assert read_columns(path, ["answer", "question"]) == [["1", "2", "3"], ["a", "b", "a"]]


def test_folder_that_looks_like_a_partition(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "answer=5"
    folder.mkdir()
    moved = path.rename(folder / "data.parquet")
    assert read_columns(moved, ["answer"]) == [ANSWERS]


def test_columns_within_structs(write: Callable[..., Path]) -> None:
    """As of data sets that keep what a reward needs apart."""
    path = write(
        question=["a", "b", "c"],
        reward_model=[{"style": "rule", "ground_truth": "1"}, {"style": "rule", "ground_truth": None}, None],
        **{"in.name": ["x", "y", "z"]},
    )
    assert check_columns(path, ["question", "reward_model.ground_truth"]) == 3
    assert read_columns(path, ["reward_model.ground_truth", "in.name"]) == [["1", None, None], ["x", "y", "z"]]
    there = "the columns there: question, reward_model.style, reward_model.ground_truth, in.name"
    for missing in ("reward_model.truth", "reward_model.style.rule", "question.text", "model.style", "reward_model."):
        with pytest.raises(DataError, match=re.escape(f"no column {missing!r}; {there}")):
            check_columns(path, [missing])
    with pytest.raises(DataError, match=r"column 'reward_model' holds struct<.*expected strings"):
        check_columns(path, ["reward_model"])


def test_column_may_serve_twice(path: Path) -> None:
    assert read_columns(path, ["answer", "answer"]) == [ANSWERS, ANSWERS]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["question", "solution"], "no column 'solution'; the columns there: question, answer, level"),
        (["level"], "column 'level' holds int64, expected strings"),
    ],
)
def test_columns_that_do_not_serve(path: Path, columns: list[str], message: str) -> None:
    for check in (check_columns, read_columns):
        with pytest.raises(DataError) as caught:
            check(path, columns)
        assert str(caught.value) == f"{path}: {message}"


def test_file_without_rows_is_refused(write: Callable[..., Path]) -> None:
    path = write(question=pa.array([], pa.string()), answer=pa.array([], pa.string()))
    with pytest.raises(DataError) as caught:
        check_columns(path, ["question"])
    assert str(caught.value) == f"{path}: no rows"


@pytest.mark.parametrize(("value", "state"), [(None, "null"), ("", "blank"), (" \n", "blank")])
def test_rows_that_say_nothing(write: Callable[..., Path], tokenizer: Any, value: str | None, state: str) -> None:
    path = write(question=["3", "4", "7"], answer=["1", "2", value])
    with pytest.raises(DataError) as caught:
        read(path, tokenizer)
    assert str(caught.value) == (
        f"{path}: 1 of 3 rows are broken, and data.max_invalid_fraction=0.01 allows 0: row 2 (from 0): "
        f"column 'answer' is {state}; {MEND}"
    )


def test_broken_rows_that_are_few_are_skipped_and_counted(write: Callable[..., Path], tokenizer: Any) -> None:
    """2 of 200 rows are 1 %, which is allowed; 3 are more."""
    questions: list[str | None] = ["how many"] * 200
    questions[7], questions[150] = None, ""
    data = read(write(question=questions, answer=["7"] * 200), tokenizer)
    assert [example.row for example in data.examples] == [row for row in range(200) if row not in (7, 150)]
    assert data.skipped == {"broken": 2}
    questions[9] = " "
    path = write(question=questions, answer=["7"] * 200)
    assert read(path, tokenizer, max_invalid_fraction=0.015).skipped == {"broken": 3}
    questions[10] = None
    path = write(question=questions, answer=["7"] * 200)
    with pytest.raises(DataError) as caught:
        read(path, tokenizer, max_invalid_fraction=0.015)
    assert str(caught.value) == (
        f"{path}: 4 of 200 rows are broken, and data.max_invalid_fraction=0.015 allows 3: row 7 (from 0): column "
        "'question' is null; row 9 (from 0): column 'question' is blank; row 10 (from 0): column 'question' is null; "
        "and 1 more; "
        f"{MEND}"
    )


def test_data_without_usable_rows_is_refused(write: Callable[..., Path], tokenizer: Any) -> None:
    path = write(question=["how many", ""], answer=["7", "7"])
    message = "2 of 2 rows would be left out, 1 broken and 1 with a prompt of more than 2 tokens, and at most 1 may be"
    with pytest.raises(DataError, match=message):
        read(path, tokenizer, overlong="drop", max_invalid_fraction=0.5, max_prompt_tokens=2)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        check_columns(tmp_path / "none.parquet", ["a"])
    assert str(caught.value) == f"{tmp_path}/none.parquet: no such file"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"question,answer\nhow many,3\n", b"PAR1" + bytes(60) + b"PAR1"])
def test_files_that_are_not_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable parquet file, or one cut short"):
        check_columns(path, ["question"])
    with pytest.raises(DataError, match="not a readable parquet file, or one cut short"):
        check_columns(tmp_path, ["question"])


def test_file_cut_anywhere_is_a_data_error(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            check_columns(path, ["question"])


def test_byte_changed_anywhere_is_a_data_error_or_harmless(path: Path) -> None:
    """No format without checksums can do better; what must not come is a traceback from inside pyarrow."""
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            texts = read_columns(path, ["question", "answer"])
            assert [len(column) for column in texts] == [5, 5]
        except DataError:
            refused += 1
    assert refused > 50
