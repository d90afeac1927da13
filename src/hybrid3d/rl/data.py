"""Prompts and answers from parquet, tokenized, in an order that is a pure function of seed and step.

Everything that can be wrong with a data file is a `DataError` that names the file and the column or the row (rows count
from 0, as in pandas). `check_columns` finds what the file's footer can tell, cheaply, before any rank starts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

# What pyarrow raises at files that are cut short or damaged; the last where a name or a string is no UTF-8.
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)


class DataError(ValueError):
    """A data file that cannot be used as it is."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any: ...


@dataclass(frozen=True)
class Example:
    """A row of the data: its number in the file, its texts, and the prompt as the model sees it."""

    row: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptData:
    """All examples of a file, and the order in which steps take them."""

    examples: tuple[Example, ...]
    seed: int

    @classmethod
    def read(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        prompt: str,
        answer: str,
        max_prompt_tokens: int,
        chat_template: bool = False,
        seed: int = 1,
    ) -> PromptData:
        """Read the columns `prompt` and `answer` and tokenize every prompt.

        `max_prompt_tokens` is what `max_model_len - max_new_tokens` leaves; a longer prompt is a DataError.
        """
        rows = read_columns(path, (prompt, answer))
        if chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
        examples = []
        for row, (question, reference) in enumerate(zip(*rows, strict=True)):
            ids = encode_chat(tokenizer, question) if chat_template else encode_prompt(tokenizer, question)
            examples.append(Example(row, question, reference, tuple(ids)))
        _check_lengths(path, examples, max_prompt_tokens)
        return cls(tuple(examples), seed)

    def batch(self, step: int, n: int) -> list[Example]:
        """The `n` examples of a step (from 0): a pure function of seed, step and n, so that resuming needs no state.

        Steps walk through one epoch after another, each a permutation of all rows; where an epoch ends within a batch,
        the batch goes on with the next, and no row is dropped or taken twice in an epoch.
        """
        rows = len(self.examples)
        places = (divmod(place, rows) for place in range(step * n, (step + 1) * n))
        return [self.examples[epoch_order(rows, self.seed, epoch)[index]] for epoch, index in places]


@lru_cache(maxsize=4)  # a step needs the same epoch as the step before it, or its successor
def epoch_order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The permutation of `range(rows)` that an epoch walks through. Each epoch of each seed has its own."""
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a string, so that (1, 2) and (2, 1) are unrelated
    return tuple(order)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A plain prompt: the special tokens that the tokenizer puts in front (BOS), none that it appends (EOS)."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.encode(text)
    # The last match, so that a text which itself begins with BOS keeps the one in front of it.
    starts = range(len(full) - len(bare), -1, -1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), 0)
    return [*full[:start], *bare] if bare else []


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as a user's turn of the tokenizer's chat template, up to where the assistant begins to speak.

    The template writes the special tokens itself, so encoding adds none.
    """
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(rendered, add_special_tokens=False)


def encode_pair(tokenizer: Tokenizer, example: Example, max_tokens: int) -> tuple[tuple[int, ...], int]:
    """For `sft`: the tokens of prompt, answer and EOS, and the prompt's length, which `Batch` keeps out of the loss.

    The answer is encoded apart from the prompt, because generation begins at a token boundary too.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token: a model trained on answers without one never stops")
    answer_ids = tokenizer.encode(example.answer, add_special_tokens=False)
    tokens = (*example.prompt_ids, *answer_ids, tokenizer.eos_token_id)
    if len(tokens) > max_tokens:
        raise DataError(
            f"row {example.row} (from 0): prompt, answer and EOS are {len(tokens)} tokens, the model takes {max_tokens}"
        )
    return tokens, len(example.prompt_ids)


def check_columns(path: str | Path, columns: Sequence[str]) -> int:
    """The file's row count, read with its schema from the footer alone.

    DataError: not readable, not parquet (or cut short), no rows, a column missing or not of strings.
    """
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, int(file.metadata.num_rows)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error
    for column in columns:
        if column not in schema.names:
            raise DataError(f"{path}: no column {column!r}; the columns there: {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not _is_text(kind):
            raise DataError(f"{path}: column {column!r} holds {kind}, expected strings")
    if rows == 0:
        raise DataError(f"{path}: no rows")
    return rows


def read_columns(path: str | Path, columns: Sequence[str]) -> list[list[str]]:
    """The strings of each column. DataError as in `check_columns`, and with its row at a null or a blank string."""
    check_columns(path, columns)
    try:
        with pq.ParquetFile(path) as file:  # not `read_table`, which finds more columns in folders named `key=value`
            table = file.read(columns=list(columns))
        texts: list[list[str | None]] = [table.column(column).to_pylist() for column in columns]
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error
    for column, values in zip(columns, texts, strict=True):
        for row, value in enumerate(values):
            if value is None or not value.strip():
                state = "null" if value is None else "blank"
                raise DataError(f"{path}: row {row} (from 0): column {column!r} is {state}")
    return cast(list[list[str]], texts)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _reason(error: Exception) -> str:
    """One line of what pyarrow or the system said."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    first = (str(error).splitlines() or [""])[0]
    return f"not a readable parquet file, or one cut short: {first}"


def _check_lengths(path: str | Path, examples: Sequence[Example], limit: int) -> None:
    for example in examples:
        if not example.prompt_ids:
            raise DataError(f"{path}: row {example.row} (from 0): the prompt has no tokens")
    long = [example for example in examples if len(example.prompt_ids) > limit]
    if long:
        raise DataError(
            f"{path}: row {long[0].row} (from 0): the prompt has {len(long[0].prompt_ids)} tokens, and "
            f"the model's length less that of an answer leaves {limit} ({len(long)} such rows in all)"
        )
