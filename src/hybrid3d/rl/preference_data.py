"""Reads and tokenizes preference pairs: prompts with a chosen and a rejected answer each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid3d.rl.chats import InvalidRow, encode_answer
from hybrid3d.rl.data import (
    MAX_LEFT_OUT_FRACTION,
    Example,
    PromptData,
    Tokenizer,
    check_broken,
    encode_prompt,
    text_of,
)
from hybrid3d.rl.data_files import DataError, Turn, read_columns
from hybrid3d.rl.token_texts import encode_part

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Pair(Example):
    """Holds a row of the data, whose `answer` is the text of the chosen answer.

    Attributes:
        chosen, rejected: tokens of the prompt, the answer and EOS.
    """

    chosen: Tokens
    rejected: Tokens


@dataclass(frozen=True)
class PairData(PromptData):
    """Holds the pairs of a file, and returns those of each step."""

    examples: tuple[Pair, ...]

    @classmethod
    def read_pairs(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        *,
        prompt: str,
        chosen: str,
        rejected: str,
        max_prompt_tokens: int,
        max_tokens: int,
        chat_template: bool = False,
        overlong: Literal["error", "drop", "truncate_left"] = "error",
        max_invalid_fraction: float = 0.01,
        seed: int = 1,
        end_tokens: Sequence[int] = (),
    ) -> PairData:
        """Read the three columns and tokenize every row; with `chat_template` each may be chat turns.

        An answer of chat turns is the text of its last turn, which must be the assistant's; turns before it must be
        those of the prompt. Each answer ends with EOS, or the one of the model's `end_tokens` that the template writes.
        Broken rows, which are skipped up to the fraction `max_invalid_fraction`, are those of `PromptData.read`, and
        pairs whose answers are equal.

        Args:
            max_prompt_tokens, max_tokens: of a prompt, and of a prompt with the longer of its answers and EOS. Longer
                rows are refused, dropped or lose the beginning of their prompt, as `overlong` says.

        Raises:
            DataError: as of `PromptData.read`, or the tokenizer has no EOS token.
        """
        if chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no EOS token: a model trained on answers without one never stops")
        columns = (prompt, chosen, rejected)
        values = read_columns(path, columns, columns if chat_template else ())
        pairs: list[Pair] = []
        broken: dict[int, str] = {}
        for row, texts in enumerate(zip(*values, strict=True)):
            try:
                of_row = dict(zip(columns, texts, strict=True))
                pairs.append(_encode(tokenizer, row, of_row, columns, chat_template, end_tokens))
            except InvalidRow as reason:
                broken[row] = str(reason)
        rows = len(values[0])
        check_broken(path, broken, rows, max_invalid_fraction)
        fitting, truncated = _fit_pairs(path, pairs, max_prompt_tokens, max_tokens, overlong)
        left_out = {"broken": len(broken), "overlong": len(pairs) - len(fitting)}
        most = max(MAX_LEFT_OUT_FRACTION, max_invalid_fraction)
        if not fitting or sum(left_out.values()) > most * rows:
            raise DataError(
                f"{path}: {sum(left_out.values())} of {rows} pairs would be left out, {left_out['broken']} broken and "
                f"{left_out['overlong']} of more than {max_tokens} tokens or with a prompt of more than "
                f"{max_prompt_tokens}, and at most {int(most * rows)} may be: set data.overlong=truncate_left, or "
                "remove these rows from the file"
            )
        return cls(tuple(fitting), seed, {why: count for why, count in left_out.items() if count}, truncated, str(path))

    def batch(self, step: int, n: int) -> Sequence[Pair]:
        found = super().batch(step, n)
        return [pair for pair in found if isinstance(pair, Pair)]  # all of them: only the type is narrower


def _encode(
    tokenizer: Tokenizer,
    row: int,
    values: dict[str, Any],
    columns: tuple[str, str, str],
    chat_template: bool,
    end_tokens: Sequence[int] = (),
) -> Pair:
    """Return the pair of a row. InvalidRow: it has none."""
    prompt, *answers = columns
    question = values[prompt]
    text = text_of(prompt, question)
    texts = [text_of(column, _answer_turn(column, values[column], question)) for column in answers]
    if chat_template:
        (ids, chosen), (other_ids, rejected) = (encode_answer(tokenizer, question, one, end_tokens) for one in texts)
        if ids != other_ids:
            raise InvalidRow(f"the chat template ends the prompts of {columns[1]!r} and {columns[2]!r} differently")
    else:
        ids = encode_prompt(tokenizer, question)
        chosen, rejected = ([*encode_part(tokenizer, one, ids), _end(tokenizer)] for one in texts)
    if not ids:
        raise InvalidRow("the prompt has no tokens")
    if chosen == rejected:
        raise InvalidRow(f"columns {columns[1]!r} and {columns[2]!r} have the same answer")
    return Pair(row, text, texts[0], tuple(ids), (*ids, *chosen), (*ids, *rejected))


def _end(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_token_id is not None, "checked by the caller"
    return tokenizer.eos_token_id


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


def _fit_pairs(
    path: str | Path, pairs: Sequence[Pair], max_prompt_tokens: int, max_tokens: int, overlong: str
) -> tuple[list[Pair], int]:
    """Drop or truncate pairs over the limits; returns those that are left, and how many were truncated."""
    found, long, truncated = list[Pair](), list[Pair](), 0
    for pair in pairs:
        prompt, longest = len(pair.prompt_ids), max(len(pair.chosen), len(pair.rejected))
        excess = max(prompt - max_prompt_tokens, longest - max_tokens, 0)
        if not excess:
            found.append(pair)
        elif overlong == "truncate_left" and excess < prompt:
            found.append(
                Pair(
                    pair.row,
                    pair.prompt,
                    pair.answer,
                    pair.prompt_ids[excess:],
                    pair.chosen[excess:],
                    pair.rejected[excess:],
                )
            )
            truncated += 1
        else:
            long.append(pair)
    if long and overlong != "drop":
        first = long[0]
        raise DataError(
            f"{path}: row {first.row} (from 0): the prompt has {len(first.prompt_ids)} tokens, with the longer answer "
            f"and EOS {max(len(first.chosen), len(first.rejected))}; at most {max_prompt_tokens} and {max_tokens} fit "
            f"({len(long)} such rows in all): set data.overlong to drop"
            + (" or truncate_left" if overlong == "error" else "")
        )
    return found, truncated
