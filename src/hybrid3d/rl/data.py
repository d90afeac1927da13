"""Prompts and answers from parquet, tokenized, in an order that is a pure function of seed and step.

Everything that can be wrong with a data file is a `DataError` that names the file and the column or the row (rows count
from 0, as in pandas). `check_columns` finds what the file's footer can tell, cheaply, before any rank starts. A few
broken rows are skipped and counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid3d.errors import UserMistake
from hybrid3d.storage.user_files import UnreadableFile, check_regular_file

# What pyarrow raises at files that are cut short or damaged; the last where a name or a string is no UTF-8.
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)


MAX_ROWS, MAX_BYTES = 10_000_000, 8 * 2**30  # of a file's two columns, which a rank keeps in memory
BATCH_ROWS = 1024  # read at a time

_NO_PARQUET = "not a readable parquet file, or one cut short"
ROWS_NAMED = 3  # of those that are broken, in a message
MOST_LEFT_OUT = 0.5  # of a file's rows, broken and overlong together, unless `max_invalid_fraction` allows more

Turn = dict[str, str]
"""A turn of a conversation: `role` and `content`."""


class DataError(UserMistake):
    """A data file that cannot be used as it is."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, conversation: list[Turn], *, add_generation_prompt: bool, tokenize: bool) -> Any: ...


@dataclass(frozen=True)
class Example:
    """A row of the data: its number in the file, its texts, and the prompt as the model sees it.

    `prompt` is the last turn's text where the row has chat turns.
    """

    row: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptData:
    """The examples of a file, and the order in which steps take them.

    `skipped` counts the rows that were left out, by cause: `broken`, `overlong`; `truncated` those that were shortened.
    `path` is the file.
    """

    examples: tuple[Example, ...]
    seed: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    path: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How many rows the file has, how many are used, and why the others are not."""
        left_out = {cause: self.skipped.get(cause, 0) for cause in ("broken", "overlong")}
        used = len(self.examples)
        return {"rows": used + sum(left_out.values()), "used": used, **left_out, "truncated": self.truncated}

    def __str__(self) -> str:
        """One line of the file and its counts."""
        counts = self.counts
        if counts["used"] == counts["rows"]:
            said = f"{self.path}: all {counts['rows']} rows are used"
        else:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.skipped.items())
            said = f"{self.path}: {counts['used']} of {counts['rows']} rows are used; left out: {causes}"
        return f"{said}; {self.truncated} prompts are truncated" if self.truncated else said

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
        overlong: Literal["error", "drop", "truncate_left"] = "error",
        max_invalid_fraction: float = 0.01,
        seed: int = 1,
    ) -> PromptData:
        """Read the columns `prompt` and `answer` and tokenize every prompt; with `chat_template` it may be chat turns.

        A row is invalid where a text is null or blank, the prompt has no tokens or the template refuses it. Invalid
        rows are skipped, up to the share `max_invalid_fraction` of all; more are a DataError. So is, with
        `overlong="error"`, a prompt of more than `max_prompt_tokens`, which is what `max_model_len - max_new_tokens`
        leaves; and so it is where more than half of the rows would be left out (or more than `max_invalid_fraction`,
        if that is larger).
        """
        if chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
        questions, references = read_columns(path, (prompt, answer), (prompt,) if chat_template else ())
        encode = encode_chat if chat_template else encode_prompt
        examples: list[Example] = []
        broken: dict[int, str] = {}
        for row, (question, reference) in enumerate(zip(questions, references, strict=True)):
            try:
                said = _text(prompt, question), _text(answer, reference)
                if not (ids := encode(tokenizer, question)):
                    raise _Broken("the prompt has no tokens")
                examples.append(Example(row, *said, tuple(ids)))
            except _Broken as reason:
                broken[row] = str(reason)
        _check_broken(path, broken, len(questions), max_invalid_fraction)
        fitting, truncated = _fit(path, examples, max_prompt_tokens, overlong)
        skipped = {"broken": len(broken), "overlong": len(examples) - len(fitting)}
        if not fitting:
            raise DataError(f"{path}: no row can be used: {skipped['broken']} broken, {skipped['overlong']} too long")
        _check_left_out(path, skipped, len(questions), max(MOST_LEFT_OUT, max_invalid_fraction), max_prompt_tokens)
        left_out = {cause: count for cause, count in skipped.items() if count}
        return cls(tuple(fitting), seed, left_out, truncated, str(path))

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


def encode_chat(tokenizer: Tokenizer, prompt: str | list[Turn]) -> list[int]:
    """Chat turns, or a text as a user's turn, in the tokenizer's template, up to where the assistant begins to speak.

    The template writes the special tokens itself, so encoding adds none.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # "roles must alternate", or whatever an expression in it raises
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise _Broken(f"the chat template refuses the prompt: {kind}{error}") from error
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


def check_columns(path: str | Path, columns: Sequence[str], chats: Sequence[str] = ()) -> int:
    """The file's row count, read with its schema from the footer alone.

    A column may lie within structs, as `reward_model.ground_truth`.

    DataError: not readable, not parquet (or cut short), no rows, a column missing, not of strings or, for those that
    are in `chats` too, of chat turns: `list<struct<role, content>>`.
    """
    try:
        with _opened(path) as file:
            schema, rows, size = file.schema_arrow, int(file.metadata.num_rows), _bytes_of(file, columns)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error
    if rows > MAX_ROWS or size > MAX_BYTES:
        raise DataError(
            f"{path}: {rows:,} rows of {size:,} bytes in the columns {', '.join(columns)}; every rank keeps them in "
            f"memory, at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes: split the file"
        )
    for column in columns:
        first = _path_of(schema, column)[0]
        if schema.names.count(first) > 1:
            raise DataError(f"{path}: {schema.names.count(first)} columns are called {first!r}: rename all but one")
        kind = _kind_of(schema, column)
        if kind is None:
            raise DataError(f"{path}: no column {column!r}; the columns there: {', '.join(_names_in(schema))}")
        if _is_turns(kind) and column not in chats:
            raise DataError(
                f"{path}: column {column!r} holds chat turns: only data.prompt may, with chat_template: true"
            )
        if not _is_text(kind) and not _is_turns(kind):
            raise DataError(f"{path}: column {column!r} holds {kind}, expected strings")
    if rows == 0:
        raise DataError(f"{path}: no rows")
    return rows


def read_columns(
    path: str | Path, columns: Sequence[str], chats: Sequence[str] = (), first: int | None = None
) -> list[list[Any]]:
    """The strings or chat turns of each column, None where there are none. DataError as in `check_columns`.

    Args:
        first: read so many rows only.
    """
    check_columns(path, columns, chats)
    try:
        with _opened(path) as file:  # not `read_table`, which finds more columns in folders named `key=value`
            return _read_batches(path, file, columns, first)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error


def _opened(path: str | Path) -> pq.ParquetFile:
    """A regular file on a disk of this machine: pyarrow would fetch an address, and wait for a FIFO.

    DataError: it is none. Anything of `_UNREADABLE`: it is no parquet.
    """
    try:
        check_regular_file(path)
    except UnreadableFile as error:
        absent = not Path(path).exists()
        raise DataError(f"{path}: {'' if absent else f'{_NO_PARQUET}: '}{error.why}") from None
    return pq.ParquetFile(pa.OSFile(str(path)))


def _bytes_of(file: pq.ParquetFile, columns: Sequence[str]) -> int:
    """The bytes that a file's footer says of these columns, not compressed."""
    first = {_path_of(file.schema_arrow, column)[0] for column in columns}
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    parts = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in first)


def _read_batches(path: str | Path, file: pq.ParquetFile, columns: Sequence[str], first: int | None) -> list[list[Any]]:
    """The values of each column. A repeated value is short in a file: what its repeats come to is counted as read."""
    found: list[list[Any]] = [[] for _ in columns]
    size = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)):
        size += batch.nbytes
        if size > MAX_BYTES:
            raise DataError(
                f"{path}: more than {MAX_BYTES:,} bytes in the columns {', '.join(columns)}: split the file"
            )
        table = pa.Table.from_batches([batch])
        for values, column in zip(found, columns, strict=True):
            values += _column_of(table, column).to_pylist()
        if first is not None and len(found[0]) >= first:
            return [values[:first] for values in found]
    if len(found[0]) != file.metadata.num_rows:
        raise DataError(f"{path}: {_NO_PARQUET}: {len(found[0])} of {file.metadata.num_rows} rows are there")
    return found


class _Broken(DataError):
    """What is the matter with one row."""


def _text(column: str, value: str | list[Turn] | None) -> str:
    """A text, or the last turn's, in which something is said."""
    if isinstance(value, list):
        if not all(turn and turn["role"] and turn["content"] is not None for turn in value):
            raise _Broken(f"column {column!r} has a turn without role or content")
        value = value[-1]["content"] if value else ""
    if value is None or not value.strip():
        raise _Broken(f"column {column!r} is {'null' if value is None else 'blank'}")
    return value


def _check_broken(path: str | Path, broken: Mapping[int, str], rows: int, most: float) -> None:
    if len(broken) > most * rows:
        first = [f"row {row} (from 0): {reason}" for row, reason in list(broken.items())[:ROWS_NAMED]]
        more = [f"and {len(broken) - ROWS_NAMED} more"] if len(broken) > ROWS_NAMED else []
        raise DataError(
            f"{path}: {len(broken)} of {rows} rows are broken, and data.max_invalid_fraction={most:g} allows "
            f"{math.floor(most * rows)}: {'; '.join(first + more)}; "
            "mend these rows, or raise data.max_invalid_fraction"
        )


def _check_left_out(path: str | Path, skipped: Mapping[str, int], rows: int, most: float, limit: int) -> None:
    """So many rows missing are a mistake in the recipe or the file more often than what was meant."""
    left_out = sum(skipped.values())
    if left_out > most * rows:
        raise DataError(
            f"{path}: {left_out} of {rows} rows would be left out, {skipped['broken']} broken and "
            f"{skipped['overlong']} with a prompt of more than {limit} tokens, and at most {math.floor(most * rows)} "
            "may be: raise rollout.max_model_len (or lower rollout.max_new_tokens), set data.overlong=truncate_left, "
            "or take these rows out of the file"
        )


def _kind_of(schema: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column, which may lie within structs; None where there is none of the name."""
    first, *within = _path_of(schema, column)
    kind = schema.field(first).type if first in schema.names else None
    for name in within:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _column_of(table: pa.Table, column: str) -> pa.ChunkedArray:
    first, *within = _path_of(table.schema, column)
    return pc.struct_field(table.column(first), within) if within else table.column(first)


def _path_of(schema: pa.Schema, column: str) -> list[str]:
    return [column] if column in schema.names else column.split(".")


def _names_in(parts: Iterable[pa.Field], within: str = "") -> Iterator[str]:
    """The names that a column can be asked for by."""
    for part in parts:
        if within and "." in part.name:
            continue
        if pa.types.is_struct(part.type):
            yield from _names_in(part.type, f"{within}{part.name}.")
        else:
            yield within + part.name


def _is_turns(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    parts = {part.name: part.type for part in kind.value_type}
    return all(name in parts and _is_text(parts[name]) for name in ("role", "content"))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _reason(error: Exception) -> str:
    """One line of what pyarrow or the system said."""
    first = (str(error).splitlines() or [""])[0]
    return f"{_NO_PARQUET}: {first}"


def _fit(path: str | Path, examples: list[Example], limit: int, overlong: str) -> tuple[list[Example], int]:
    """Those whose prompts are within the limit, or are made to be; and how many were made to be."""
    long = [example for example in examples if len(example.prompt_ids) > limit]
    if not long:
        return examples, 0
    if overlong == "drop":
        return [example for example in examples if len(example.prompt_ids) <= limit], 0
    if overlong == "truncate_left" and limit > 0:
        return [replace(example, prompt_ids=example.prompt_ids[-limit:]) for example in examples], len(long)
    raise DataError(
        f"{path}: row {long[0].row} (from 0): the prompt has {len(long[0].prompt_ids)} tokens, and "
        f"the model's length less that of an answer leaves {limit} ({len(long)} such rows in all)"
    )
