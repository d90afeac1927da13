"""Reads and tokenizes prompts and answers from parquet, in an order that is a pure function of seed and step.

Every problem with a data file is a `DataError` that names the file and the column or the row (rows count from 0, as in
pandas). `check_columns` reads the file's footer only, so it is cheap enough to run before any rank starts. A few broken
rows are skipped and counted.
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

# Raised by pyarrow for truncated or damaged files; UnicodeDecodeError if a name or a string is not UTF-8.
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)

MAX_ROWS, MAX_BYTES = 10_000_000, 8 * 2**30  # of a file's two columns, which every rank keeps in memory
BATCH_ROWS = 1024  # read at a time

_NOT_PARQUET = "not a readable parquet file, or one cut short"
MAX_ROWS_IN_MESSAGE = 3  # broken rows that a message names
MAX_LEFT_OUT_FRACTION = 0.5  # of a file's rows, broken and overlong together, unless `max_invalid_fraction` allows more

Turn = dict[str, str]
"""One turn of a conversation, with the keys `role` and `content`."""


class DataError(UserMistake):
    """A data file that cannot be used as it is."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer's interface that is used here."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, conversation: list[Turn], *, add_generation_prompt: bool, tokenize: bool) -> Any: ...


@dataclass(frozen=True)
class Example:
    """Holds a row of the data: its index in the file, its texts and the token ids of the prompt.

    If the row has chat turns, `prompt` is the text of the last turn.
    """

    row: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptData:
    """Holds the examples of a file, and returns those of each step.

    `skipped` counts the rows that were left out, by cause (`broken`, `overlong`), `truncated` the shortened prompts.
    """

    examples: tuple[Example, ...]
    seed: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0
    path: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Return how many rows the file has, how many are used, and how many are left out for which cause."""
        left_out = {cause: self.skipped.get(cause, 0) for cause in ("broken", "overlong")}
        used = len(self.examples)
        return {"rows": used + sum(left_out.values()), "used": used, **left_out, "truncated": self.truncated}

    def __str__(self) -> str:
        """Return one line with the file and its counts."""
        counts = self.counts
        if counts["used"] == counts["rows"]:
            text = f"{self.path}: all {counts['rows']} rows are used"
        else:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.skipped.items())
            text = f"{self.path}: {counts['used']} of {counts['rows']} rows are used; left out: {causes}"
        return f"{text}; {self.truncated} prompts are truncated" if self.truncated else text

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

        A row is broken if a text is null or blank, the prompt has no tokens or the template refuses it. Broken rows are
        skipped, up to the fraction `max_invalid_fraction` of all rows. Callers set `max_prompt_tokens` to
        `max_model_len - max_new_tokens`.

        Raises:
            DataError: more rows are broken; a prompt is longer than `max_prompt_tokens` and `overlong="error"`; or more
                than half of the rows (or more than `max_invalid_fraction`, if that is larger) would be left out.
        """
        if chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
        questions, references = read_columns(path, (prompt, answer), (prompt,) if chat_template else ())
        encode = encode_chat if chat_template else encode_prompt
        examples: list[Example] = []
        broken: dict[int, str] = {}
        for row, (question, reference) in enumerate(zip(questions, references, strict=True)):
            try:
                texts = text_of(prompt, question), text_of(answer, reference)
                if not (ids := encode(tokenizer, question)):
                    raise InvalidRow("the prompt has no tokens")
                examples.append(Example(row, *texts, tuple(ids)))
            except InvalidRow as reason:
                broken[row] = str(reason)
        check_broken(path, broken, len(questions), max_invalid_fraction)
        fitting, truncated = _fit(path, examples, max_prompt_tokens, overlong)
        skipped = {"broken": len(broken), "overlong": len(examples) - len(fitting)}
        if not fitting:
            raise DataError(f"{path}: no row can be used: {skipped['broken']} broken, {skipped['overlong']} too long")
        _check_left_out(
            path, skipped, len(questions), max(MAX_LEFT_OUT_FRACTION, max_invalid_fraction), max_prompt_tokens
        )
        left_out = {cause: count for cause, count in skipped.items() if count}
        return cls(tuple(fitting), seed, left_out, truncated, str(path))

    def batch(self, step: int, n: int) -> Sequence[Example]:
        """Return the `n` examples of a step (from 0): a pure function of seed, step and n, so resuming needs no state.

        Each epoch is a permutation of all rows. A batch at the end of an epoch continues with the next epoch, so that
        every row is used exactly once per epoch.
        """
        rows = len(self.examples)
        positions = (divmod(position, rows) for position in range(step * n, (step + 1) * n))
        return [self.examples[epoch_order(rows, self.seed, epoch)[index]] for epoch, index in positions]


@lru_cache(maxsize=4)  # consecutive steps use the same epoch or adjacent ones
def epoch_order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the permutation of `range(rows)` of an epoch; it depends on the seed and on the epoch."""
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a string, so that (1, 2) and (2, 1) are unrelated
    return tuple(order)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a plain prompt with the special tokens that the tokenizer prepends (BOS), not those it appends (EOS)."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.encode(text)
    # The last match is taken, so that a text which itself begins with BOS keeps the BOS that is prepended.
    starts = range(len(full) - len(bare), -1, -1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), 0)
    return [*full[:start], *bare] if bare else []


def encode_chat(tokenizer: Tokenizer, prompt: str | list[Turn]) -> list[int]:
    """Encode chat turns, or a text as one user turn, with the tokenizer's template and its generation prompt.

    The template writes the special tokens itself, so encoding adds none.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # "roles must alternate", or whatever an expression in it raises
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise InvalidRow(f"the chat template refuses the prompt: {kind}{error}") from error
    return tokenizer.encode(rendered, add_special_tokens=False)


def encode_pair(tokenizer: Tokenizer, example: Example, max_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return for `sft` the tokens of prompt, answer and EOS, and the prompt's length, which is excluded from the loss.

    Encodes the answer separately, because generation also begins at a token boundary. DataError: too long, or no EOS.
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
    """Check the columns of a file by its footer, and return its row count.

    A column may lie within structs, as `reward_model.ground_truth`. Columns in `chats` may also hold chat turns,
    `list<struct<role, content>>`.

    Raises:
        DataError: not readable, not parquet, truncated, too large or empty; or a column is missing or not of strings.
    """
    try:
        with _open_parquet(path) as file:
            schema, rows, size = file.schema_arrow, int(file.metadata.num_rows), _uncompressed_bytes(file, columns)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error
    if rows > MAX_ROWS or size > MAX_BYTES:
        raise DataError(
            f"{path}: {rows:,} rows of {size:,} bytes in the columns {', '.join(columns)}; every rank keeps them in "
            f"memory, at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes: split the file"
        )
    for column in columns:
        first = _column_path(schema, column)[0]
        if schema.names.count(first) > 1:
            raise DataError(f"{path}: {schema.names.count(first)} columns are called {first!r}: rename all but one")
        kind = _column_type(schema, column)
        if kind is None:
            raise DataError(f"{path}: no column {column!r}; the columns there: {', '.join(_names_in(schema))}")
        if _is_turns(kind) and column not in chats:
            raise DataError(
                f"{path}: column {column!r} holds chat turns: only prompts and pairs may, with data.chat_template: true"
            )
        if not _is_text(kind) and not _is_turns(kind):
            raise DataError(f"{path}: column {column!r} holds {kind}, expected strings")
    if rows == 0:
        raise DataError(f"{path}: no rows")
    return rows


def read_columns(
    path: str | Path, columns: Sequence[str], chats: Sequence[str] = (), first: int | None = None
) -> list[list[Any]]:
    """Return the strings or chat turns of each column, None where a value is null. DataError as in `check_columns`.

    Args:
        first: read only this many rows; None reads all.
    """
    check_columns(path, columns, chats)
    try:
        with _open_parquet(path) as file:  # `read_table` would add columns for folders named `key=value`
            return _read_batches(path, file, columns, first)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(error)}") from error


def _open_parquet(path: str | Path) -> pq.ParquetFile:
    """Open a local regular file: pyarrow itself would fetch an address, and wait for a FIFO.

    Raises a DataError if it is not a regular file, and one of `_UNREADABLE` if it is not parquet.
    """
    try:
        check_regular_file(path)
    except UnreadableFile as error:
        absent = not Path(path).exists()
        raise DataError(f"{path}: {'' if absent else f'{_NOT_PARQUET}: '}{error.why}") from None
    return pq.ParquetFile(pa.OSFile(str(path)))


def _uncompressed_bytes(file: pq.ParquetFile, columns: Sequence[str]) -> int:
    """Return the uncompressed bytes of these columns, according to the file's footer."""
    first = {_column_path(file.schema_arrow, column)[0] for column in columns}
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    parts = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in first)


def _read_batches(path: str | Path, file: pq.ParquetFile, columns: Sequence[str], first: int | None) -> list[list[Any]]:
    """Return the values of each column; counts their bytes in memory, which may be more than in the file."""
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
            values += _column_values(table, column).to_pylist()
        if first is not None and len(found[0]) >= first:
            return [values[:first] for values in found]
    if len(found[0]) != file.metadata.num_rows:
        raise DataError(f"{path}: {_NOT_PARQUET}: {len(found[0])} of {file.metadata.num_rows} rows are there")
    return found


class InvalidRow(DataError):
    """One row cannot be used; the message says why."""


def text_of(column: str, value: str | list[Turn] | None) -> str:
    """Return a text, or that of the last turn. InvalidRow: it is null or blank."""
    if isinstance(value, list):
        if not all(turn and turn["role"] and turn["content"] is not None for turn in value):
            raise InvalidRow(f"column {column!r} has a turn without role or content")
        value = value[-1]["content"] if value else ""
    if value is None or not value.strip():
        raise InvalidRow(f"column {column!r} is {'null' if value is None else 'blank'}")
    return value


def check_broken(path: str | Path, broken: Mapping[int, str], rows: int, most: float) -> None:
    if len(broken) > most * rows:
        first = [f"row {row} (from 0): {reason}" for row, reason in list(broken.items())[:MAX_ROWS_IN_MESSAGE]]
        more = [f"and {len(broken) - MAX_ROWS_IN_MESSAGE} more"] if len(broken) > MAX_ROWS_IN_MESSAGE else []
        raise DataError(
            f"{path}: {len(broken)} of {rows} rows are broken, and data.max_invalid_fraction={most:g} allows "
            f"{math.floor(most * rows)}: {'; '.join(first + more)}; "
            "repair these rows, or raise data.max_invalid_fraction"
        )


def _check_left_out(path: str | Path, skipped: Mapping[str, int], rows: int, most: float, limit: int) -> None:
    """Refuse a file of which too many rows would be left out: this is usually a mistake in the recipe or the file."""
    left_out = sum(skipped.values())
    if left_out > most * rows:
        raise DataError(
            f"{path}: {left_out} of {rows} rows would be left out, {skipped['broken']} broken and "
            f"{skipped['overlong']} with a prompt of more than {limit} tokens, and at most {math.floor(most * rows)} "
            "may be: raise rollout.max_model_len (or lower rollout.max_new_tokens), set data.overlong=truncate_left, "
            "or remove these rows from the file"
        )


def _column_type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """Return the type of a column, which may lie within structs; None if there is no such column."""
    first, *within = _column_path(schema, column)
    kind = schema.field(first).type if first in schema.names else None
    for name in within:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _column_values(table: pa.Table, column: str) -> pa.ChunkedArray:
    first, *within = _column_path(table.schema, column)
    return pc.struct_field(table.column(first), within) if within else table.column(first)


def _column_path(schema: pa.Schema, column: str) -> list[str]:
    return [column] if column in schema.names else column.split(".")


def _names_in(parts: Iterable[pa.Field], within: str = "") -> Iterator[str]:
    """Yield the names by which columns can be selected."""
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
    """Return the first line of the error of pyarrow or the system."""
    first = (str(error).splitlines() or [""])[0]
    return f"{_NOT_PARQUET}: {first}"


def _fit(path: str | Path, examples: list[Example], limit: int, overlong: str) -> tuple[list[Example], int]:
    """Drop or truncate prompts over the limit; returns the examples that are left, and how many were truncated."""
    long = [example for example in examples if len(example.prompt_ids) > limit]
    if not long:
        return examples, 0
    if overlong == "drop":
        return [example for example in examples if len(example.prompt_ids) <= limit], 0
    if overlong == "truncate_left" and limit > 0:
        return [replace(example, prompt_ids=example.prompt_ids[-limit:]) for example in examples], len(long)
    raise DataError(
        f"{path}: row {long[0].row} (from 0): the prompt has {len(long[0].prompt_ids)} tokens, at most "
        f"{limit} fit beside an answer ({len(long)} such rows in all): set data.overlong to drop or truncate_left"
    )
