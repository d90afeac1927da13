"""Reads and tokenizes prompts and answers, in an order that is a pure function of seed and step.

Every problem with a data file is a `DataError` that names the file and the column or the row (rows count from 0, as in
pandas). A few broken rows are skipped and counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from hybrid3d.rl.chats import InvalidRow, encode_answer, render, turns_of
from hybrid3d.rl.data_files import DataError, Turn, read_columns
from hybrid3d.rl.token_texts import encode_part

MAX_ROWS_IN_MESSAGE = 3  # broken rows that a message names
MAX_LEFT_OUT_FRACTION = 0.5  # of a file's rows, broken and overlong together, unless `max_invalid_fraction` allows more


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

    Attributes:
        answer_ids: of an answer that is trained, with its end token, as the chat template renders it.
    """

    row: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = field(default=(), kw_only=True)


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
        trains_answers: bool = False,
        end_tokens: Sequence[int] = (),
    ) -> PromptData:
        """Read the columns `prompt` and `answer` and tokenize every prompt; with `chat_template` it may be chat turns.

        With `trains_answers` the template renders them together, up to one of the model's `end_tokens`, as
        `encode_answer` says.

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
                texts, told = (text_of(prompt, question), text_of(answer, reference)), list[int]()
                if chat_template and trains_answers:
                    ids, told = encode_answer(tokenizer, question, texts[1], end_tokens)
                else:
                    ids = encode(tokenizer, question)
                if not ids:
                    raise InvalidRow("the prompt has no tokens")
                examples.append(Example(row, *texts, tuple(ids), answer_ids=tuple(told)))
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
    """Encode a plain prompt with the special tokens that the tokenizer prepends (BOS), not those it appends (EOS).

    A prompt that begins with them, as a rendered chat does, gets no second ones.
    """
    bare = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.encode(text)
    # The last match is taken, so that of a text which itself begins with BOS what is prepended is found.
    starts = range(len(full) - len(bare), -1, -1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), 0)
    front = full[:start] if bare[:start] != full[:start] else []
    return [*front, *bare] if bare else []


def encode_chat(tokenizer: Tokenizer, prompt: str | list[Turn]) -> list[int]:
    """Encode chat turns, or a text as one user turn, with the tokenizer's template and its generation prompt.

    The template writes the special tokens itself, so encoding adds none.
    """
    return tokenizer.encode(render(tokenizer, turns_of(prompt), reply_follows=True), add_special_tokens=False)


def encode_pair(tokenizer: Tokenizer, example: Example, max_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return for `sft` the tokens of prompt, answer and EOS, and the prompt's length, which is excluded from the loss.

    The answer begins at a token boundary, because generation does, too. DataError: too long, or no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token: a model trained on answers without one never stops")
    answer_ids = example.answer_ids or (
        *encode_part(tokenizer, example.answer, example.prompt_ids),
        tokenizer.eos_token_id,
    )
    tokens = (*example.prompt_ids, *answer_ids)
    if len(tokens) > max_tokens:
        raise DataError(
            f"row {example.row} (from 0): prompt, answer and EOS are {len(tokens)} tokens, the model takes {max_tokens}"
        )
    return tokens, len(example.prompt_ids)


def text_of(column: str, value: str | list[Turn] | None) -> str:
    """Return a text, or that of the last turn. InvalidRow: it is null or blank."""
    if isinstance(value, list):
        if not all(turn and turn.get("role") and turn.get("content") is not None for turn in value):
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
