"""Renders chats with a tokenizer's template, and divides conversations into a prompt and the answer that is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from hybrid3d.rl.data_files import DataError, Turn
from hybrid3d.rl.token_texts import encode_part, special_tokens

SHOWN_CHARACTERS = 160  # of the end of a rendering, in messages
MARK = "the answer is here"  # rendered in an answer's place, to see what follows it


class InvalidRow(DataError):
    """One row cannot be used; the message says why."""


def without_nulls(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return turns without keys that are null: data files and clients add them, and templates ask whether they exist.

    A `content` that is null stays, as templates ask for that.
    """
    return [{key: value for key, value in turn.items() if value is not None or key == "content"} for turn in turns]


def render(tokenizer: Any, turns: Sequence[Mapping[str, Any]], *, reply_follows: bool) -> str:
    """Return the text of turns, with the beginning of the assistant's reply or without. InvalidRow: there is none."""
    given = without_nulls(turns)
    try:
        return str(tokenizer.apply_chat_template(given, add_generation_prompt=reply_follows, tokenize=False))
    except Exception as error:  # "roles must alternate", or whatever an expression in it raises
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise InvalidRow(f"the chat template refuses the prompt: {kind}{error}") from error


def turns_of(prompt: str | Sequence[Turn]) -> list[Turn]:
    """Return the turns of a prompt; a text is one of the user. InvalidRow: the assistant has the last turn."""
    turns: list[Turn] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if turns and turns[-1].get("role") == "assistant":
        raise InvalidRow(
            "the prompt ends with a turn of the assistant, as if it had the answer: end it before this turn"
        )
    return turns


def encode_answer(
    tokenizer: Any, prompt: str | Sequence[Turn], answer: str, end_tokens: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and of an answer up to its end token, as the template renders the conversation.

    A template may begin the reply that it asks for in another way than one that is there: with a thinking block, which
    an answer closes or does not have. Then the prompt ends where both are the same.

    `end_tokens` are the model's, by which the policy's answers end besides EOS. If the template writes none of them
    behind an answer, the first special token that it writes is the end.

    Raises:
        InvalidRow: the template refuses the conversation, or renders another answer; with both renderings.
    """
    asked, told = _divide(tokenizer, turns_of(prompt), answer, end_tokens)
    ids = list(tokenizer.encode(asked, add_special_tokens=False))
    tokens = encode_part(tokenizer, told, ids)
    if not tokens or tokens[-1] not in special_tokens(tokenizer).values():
        tokens.append(tokenizer.eos_token_id)
    return ids, tokens


def _divide(tokenizer: Any, turns: Sequence[Turn], answer: str, end_tokens: Sequence[int]) -> tuple[str, str]:
    """Return the text of the prompt, and that of the answer with its end token if the template writes one."""
    asked = render(tokenizer, turns, reply_follows=True)
    whole = render(tokenizer, [*turns, {"role": "assistant", "content": answer}], reply_follows=False)
    closing = _closing(tokenizer, turns)
    if closing is None or not whole.endswith(closing):
        return _closed_block(asked, whole, answer)
    said = whole.removesuffix(closing)
    start = len(asked)
    if not said.startswith(asked):  # history has no open thinking block
        start = _beginning(asked, said, answer)
    elif not _has(said[start:], answer.split("</think>")[-1]) or not _has(
        said[_history_length(tokenizer, turns, said) :], answer
    ):
        start = -1
    if start < 0:
        return _closed_block(asked, whole, answer)
    return said[:start], said[start:] + _end_token(tokenizer, closing, end_tokens)


def _closing(tokenizer: Any, turns: Sequence[Turn]) -> str | None:
    """Return what the template writes behind an answer, whatever this is; None if it drops or changes `MARK`."""
    marked = render(tokenizer, [*turns, {"role": "assistant", "content": MARK}], reply_follows=False)
    _, found, closing = marked.rpartition(MARK)
    return closing if found else None


def _beginning(asked: str, said: str, answer: str) -> int:
    """Return where the answer begins that a conversation ends with, behind what the prompt begins with; -1: nowhere."""
    text, bare = said.rstrip(), answer.strip()
    if not text.endswith(bare):
        return -1
    start = len(text) - len(bare)
    lead = answer[: len(answer) - len(answer.lstrip())]
    if not asked.startswith(said[:start]) and said[:start].endswith(lead):
        start -= len(lead)
    return start if asked.startswith(said[:start]) else -1


def _history_length(tokenizer: Any, turns: Sequence[Turn], whole: str) -> int:
    """Return where the assistant's reply begins in a conversation, whatever the template begins it with."""
    history = render(tokenizer, turns, reply_follows=False)
    return len(history) if whole.startswith(history) else 0


def _closed_block(asked: str, whole: str, answer: str) -> tuple[str, str]:
    """Return prompt and answer, if the answer goes on with the thinking block that the prompt has opened.

    An answer that opens it too, as traces of a model do, goes on behind that.
    """
    opened = re.search(r"<(\w+)>\s*\Z", asked)
    if opened is not None and f"</{opened[1]}>" in answer:
        tag, bare = f"<{opened[1]}>", answer.lstrip()
        return asked, bare.removeprefix(tag).lstrip("\n") if bare.startswith(tag) else answer
    raise InvalidRow(
        "the chat template asks for an answer in another way than it renders one: "
        f"a prompt ends with {asked[-SHOWN_CHARACTERS:]!r}, and the conversation with {whole[-SHOWN_CHARACTERS:]!r}: "
        "set data.chat_template to false, and write both columns as the model is to read them"
    )


def _end_token(tokenizer: Any, closing: str, end_tokens: Sequence[int]) -> str:
    """Return what a template writes after an answer, up to its end token; "" if it writes none: EOS follows.

    This is the first of EOS and the model's end tokens, or else the first special one.
    """
    special = special_tokens(tokenizer)
    for kind in ([tokenizer.eos_token, *(text for text in special if special[text] in end_tokens)], special):
        ends = [closing.find(text) + len(text) for text in kind if text and text in closing]
        if ends:
            return closing[: min(ends)]
    return ""


def _has(text: str, end: str) -> bool:
    """Return whether a text has another at its end, whatever blanks and lines a template adds or strips."""
    return re.sub(r"\s", "", text).endswith(re.sub(r"\s", "", end))
