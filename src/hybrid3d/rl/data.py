"""Reads and tokenizes prompts, answers and preference pairs, in an order that is a pure function of seed and step.

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
from typing import Any, Literal

from hybrid3d.rl.chats import InvalidRow, encode_answer, render, turns_of
from hybrid3d.rl.data_files import DataError, Turn, read_columns
from hybrid3d.rl.token_texts import encode_part

MAX_ROWS_IN_MESSAGE = 3  # broken rows that a message names
MAX_LEFT_OUT_FRACTION = 0.5  # of a file's rows, broken and overlong together, unless `max_invalid_fraction` allows more

Tokens = tuple[int, ...]
Overlong = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True)
class Example:
    """Holds a row of the data: its index in the file, its texts and the token ids of the prompt.

    If the row has chat turns, `prompt` is the text of the last turn. Of a preference pair `answer` is the chosen one,
    and `rejected_ids` are the other's. Ids of answers are there if these are trained, with their end token.
    """

    row: int
    prompt: str
    answer: str
    prompt_ids: Tokens
    answer_ids: Tokens = field(default=(), kw_only=True)
    rejected_ids: Tokens = field(default=(), kw_only=True)

    @property
    def trained(self) -> tuple[Tokens, ...]:
        """The sequences that are trained: of prompt and answer, and of a pair's prompt and rejected answer."""
        return tuple((*self.prompt_ids, *ids) for ids in (self.answer_ids, self.rejected_ids) if ids)


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
        left_out = {cause: self.skipped.get(cause, 0) for cause in ("broken", "overlong")}
        used = len(self.examples)
        return {"rows": used + sum(left_out.values()), "used": used, **left_out, "truncated": self.truncated}

    def __str__(self) -> str:
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
        tokenizer: Any,
        *,
        prompt: str,
        answer: str,
        rejected: str = "",
        max_prompt_tokens: int,
        max_tokens: int = 0,
        chat_template: bool = False,
        overlong: Overlong = "error",
        max_invalid_fraction: float = 0.01,
        seed: int = 1,
        end_tokens: Sequence[int] = (),
        remedy: str = "",
    ) -> PromptData:
        """Read the columns and tokenize every row; with `chat_template` a prompt may be chat turns, and so may a pair.

        Answers are tokenized where they are trained, with `max_tokens`: with the template prompt and answer are
        rendered together, as `encode_answer` says. Each ends with EOS, or the one of the model's `end_tokens` that the
        template writes. A pair's answer of chat turns is the text of its last turn, which must be the assistant's;
        turns before it must be those of the prompt.

        A row is broken if a text is null or blank, the prompt has no tokens, the template refuses it, or the answers of
        a pair are equal. Broken rows are skipped, up to the fraction `max_invalid_fraction` of all rows.

        A prompt has at most `max_prompt_tokens`, and with its longest answer and EOS at most `max_tokens`. Longer rows
        are refused, dropped or lose the beginning of their prompt, as `overlong` says. With a `max_tokens` of 0 no
        answer is trained. `rejected` is the column of a pair's other answer, if there are pairs. Messages name
        the `remedy`, which makes `max_prompt_tokens` larger.

        Raises:
            DataError: more rows are broken; a row is too long and `overlong="error"`; or more than half of the rows (or
                more than `max_invalid_fraction`, if that is larger) would be left out.
        """
        if chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
        if max_tokens and tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no EOS token: a model trained on answers without one never stops")
        columns = [prompt, answer, rejected] if rejected else [prompt, answer]
        in_turns = [] if not chat_template else columns if rejected else [prompt]
        values = read_columns(path, columns, in_turns)
        examples: list[Example] = []
        broken: dict[int, str] = {}
        for row, texts in enumerate(zip(*values, strict=True)):
            try:
                examples.append(_encode(tokenizer, row, columns, texts, chat_template, max_tokens > 0, end_tokens))
            except InvalidRow as reason:
                broken[row] = str(reason)
        rows = len(values[0])
        _check_broken(path, broken, rows, max_invalid_fraction)
        fitting, truncated = _fit(path, examples, max_prompt_tokens, max_tokens, overlong)
        skipped = {"broken": len(broken), "overlong": len(examples) - len(fitting)}
        most = min(math.floor(max(MAX_LEFT_OUT_FRACTION, max_invalid_fraction) * rows), rows - 1)
        if sum(skipped.values()) > most:  # this is usually a mistake in the recipe or the file
            limits = f"with a prompt of more than {max_prompt_tokens} tokens"
            if max_tokens:
                limits += f", or of more than {max_tokens} with an answer"
            raise DataError(
                f"{path}: {sum(skipped.values())} of {rows} rows would be left out, {skipped['broken']} broken and "
                f"{skipped['overlong']} {limits}, and at most {most} may be: {remedy}set data.overlong=truncate_left, "
                "or remove these rows from the file"
            )
        return cls(tuple(fitting), seed, {why: count for why, count in skipped.items() if count}, truncated, str(path))

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
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a string, so that (1, 2) and (2, 1) are unrelated
    return tuple(order)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
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


def encode_chat(tokenizer: Any, prompt: str | list[Turn]) -> list[int]:
    """Encode chat turns, or a text as one user turn, with the tokenizer's template and its generation prompt.

    The template writes the special tokens itself, so encoding adds none.
    """
    return list(tokenizer.encode(render(tokenizer, turns_of(prompt), reply_follows=True), add_special_tokens=False))


def _encode(
    tokenizer: Any,
    row: int,
    columns: Sequence[str],
    values: Sequence[Any],
    chat_template: bool,
    trains_answers: bool,
    end_tokens: Sequence[int],
) -> Example:
    """Return the example of a row, from its prompt, its answer, and a pair's other answer. InvalidRow: it has none."""
    question, *told = values
    text = text_of(columns[0], question)
    texts = [text_of(name, _answer_turn(name, value, question)) for name, value in zip(columns[1:], told, strict=True)]
    answers: list[list[int]] = []
    if not trains_answers:
        ids = (encode_chat if chat_template else encode_prompt)(tokenizer, question)
    elif chat_template:
        encoded = [encode_answer(tokenizer, question, one, end_tokens) for one in texts]
        ids, answers = encoded[0][0], [answer for _, answer in encoded]
        if encoded[-1][0] != ids:
            raise InvalidRow(f"the chat template ends the prompts of {columns[1]!r} and {columns[2]!r} differently")
    else:
        ids = encode_prompt(tokenizer, question)
        answers = [[*encode_part(tokenizer, one, ids), tokenizer.eos_token_id] for one in texts]
    if not ids:
        raise InvalidRow("the prompt has no tokens")
    if len(answers) > 1 and answers[0] == answers[1]:
        raise InvalidRow(f"columns {columns[1]!r} and {columns[2]!r} have the same answer")
    answer_ids, rejected_ids, *_ = (*map(tuple, answers), (), ())
    return Example(row, text, texts[0], tuple(ids), answer_ids=answer_ids, rejected_ids=rejected_ids)


def text_of(column: str, value: str | list[Turn] | None) -> str:
    """Return a text, or that of the last turn. InvalidRow: it is null or blank."""
    if isinstance(value, list):
        if not all(turn and turn.get("role") and turn.get("content") is not None for turn in value):
            raise InvalidRow(f"column {column!r} has a turn without role or content")
        value = value[-1]["content"] if value else ""
    if value is None or not value.strip():
        raise InvalidRow(f"column {column!r} is {'null' if value is None else 'blank'}")
    return value


def _answer_turn(column: str, value: str | list[Turn] | None, question: str | list[Turn]) -> str | list[Turn] | None:
    """Return an answer, of chat turns only the last. InvalidRow: there are turns before it other than the prompt's."""
    if not isinstance(value, list) or not value:
        return value
    *before, last = value
    if not last or last.get("role") != "assistant":
        raise InvalidRow(f"column {column!r} does not end with a turn of the role assistant")
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if before and [_said(turn) for turn in before] != [_said(turn) for turn in turns]:
        raise InvalidRow(f"column {column!r} has turns before its answer that are not those of the prompt")
    return [last]


def _said(turn: Turn | None) -> tuple[str | None, str | None]:
    return (turn.get("role"), turn.get("content")) if turn else (None, None)


def _check_broken(path: str | Path, broken: Mapping[int, str], rows: int, most: float) -> None:
    if len(broken) > most * rows:
        first = [f"row {row} (from 0): {reason}" for row, reason in list(broken.items())[:MAX_ROWS_IN_MESSAGE]]
        more = [f"and {len(broken) - MAX_ROWS_IN_MESSAGE} more"] if len(broken) > MAX_ROWS_IN_MESSAGE else []
        raise DataError(
            f"{path}: {len(broken)} of {rows} rows are broken, and data.max_invalid_fraction={most:g} allows "
            f"{math.floor(most * rows)}: {'; '.join(first + more)}; "
            "repair these rows, or raise data.max_invalid_fraction"
        )


def _fit(
    path: str | Path, examples: Sequence[Example], max_prompt: int, max_tokens: int, overlong: Overlong
) -> tuple[list[Example], int]:
    """Drop or truncate rows over the limits; returns the examples that are left, and how many were truncated."""
    found, long, truncated = list[Example](), list[Example](), 0
    for example in examples:
        prompt, excess = len(example.prompt_ids), len(example.prompt_ids) - max_prompt
        if max_tokens:
            excess = max(excess, _longest(example) - max_tokens)
        if excess <= 0:
            found.append(example)
        elif overlong == "truncate_left" and excess < prompt:
            found.append(replace(example, prompt_ids=example.prompt_ids[excess:]))
            truncated += 1
        else:
            long.append(example)
    if long and overlong != "drop":
        first = long[0]
        problem = f"the prompt has {len(first.prompt_ids)} tokens"
        if max_tokens:
            answer = "the longer answer" if first.rejected_ids else "the answer"
            problem += f", with {answer} and EOS {_longest(first)}; at most {max_prompt} and {max_tokens} fit"
        else:
            problem += f", at most {max_prompt} fit beside an answer"
        raise DataError(
            f"{path}: row {first.row} (from 0): {problem} ({len(long)} such rows in all): set data.overlong to drop"
            + (" or truncate_left" if overlong == "error" else "")
        )
    return found, truncated


def _longest(example: Example) -> int:
    return len(example.prompt_ids) + max(len(example.answer_ids), len(example.rejected_ids))
