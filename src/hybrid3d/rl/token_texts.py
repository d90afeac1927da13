"""Encodes and decodes parts of a text: what is added to tokens that are there, and what some of them say.

A tokenizer is no map of texts to tokens that may be applied piece by piece. SentencePiece tokenizers put a blank in
front of whatever they encode and take one off whatever they decode, as if it were the beginning of a text; normalizers
strip and join. So a part is encoded and decoded behind what stands before it, everywhere by these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

# Texts that stand for what is before a part. One is used only if it keeps its own tokens in front of the part.
ANCHORS = ("\n", "=", ",", "a", "1")
TAIL_TOKENS = 16  # before a part that are decoded with it; more if these have no text

_ADDED: WeakKeyDictionary[Any, dict[int, tuple[str, bool]]] = WeakKeyDictionary()


def encode_part(tokenizer: Any, text: str, before: Sequence[int]) -> list[int]:
    """Return the tokens that a text adds to the tokens before it, which stay as they are.

    The tokenizer sees the last one of these if it is an added token, behind which some tokenizers encode as at the
    beginning of a text; otherwise only that there are some.
    """
    if not text:
        return []
    for anchor in _anchors(tokenizer, before):
        front = tokenizer.encode(anchor, add_special_tokens=False)
        both = tokenizer.encode(anchor + text, add_special_tokens=False)
        if both[: len(front)] == front and anchor in _decode(tokenizer, front, False):
            return list(both[len(front) :])
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode_part(
    tokenizer: Any, tokens: Sequence[int], before: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Return the text that tokens add to that of the tokens before them, as vLLM's detokenizer gives it.

    Blanks are never cleaned up. A character that the first of the tokens complete is theirs.
    """
    size = TAIL_TOKENS
    while True:
        tail = list(before[-size:])
        front = _decode(tokenizer, tail, skip_special_tokens)
        if front.strip("\ufffd ") or size >= len(before):
            break
        size *= 4
    both = _decode(tokenizer, [*tail, *tokens], skip_special_tokens)
    return _without(front, both)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are left out of decoded text, by their text."""
    return {text: number for number, (text, is_special) in _added_tokens(tokenizer).items() if is_special}


class TokenTexts:
    """The texts of single tokens, as they are within a text; special tokens have none."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        fronts = ((anchor, tokenizer.encode(anchor, add_special_tokens=False)) for anchor in ANCHORS)
        self._front: list[int] = next(
            (ids for anchor, ids in fronts if ids and anchor in _decode(tokenizer, ids, True)), []
        )
        self._front_text = _decode(tokenizer, self._front, True)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def tokens_with(self) -> Mapping[str, Sequence[int]]:
        """The tokens whose text contains a character, by character; it takes a second to decode all tokens."""
        found: dict[str, list[int]] = {}
        for token in range(len(self)):
            for character in set(self.decode([token])):
                found.setdefault(character, []).append(token)
        return found

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens in the middle of a text."""
        both = _decode(self._tokenizer, [*self._front, *token_ids], skip_special_tokens)
        return _without(self._front_text, both)


def _anchors(tokenizer: Any, before: Sequence[int]) -> Iterator[str]:
    if before and (token := _added_tokens(tokenizer).get(before[-1])) is not None:
        yield token[0]
    yield from ANCHORS


def _added_tokens(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Return the text of each added token, and whether it is special: read once, as transformers makes them anew."""
    found = _ADDED.get(tokenizer)
    if found is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found = _ADDED[tokenizer] = {number: (token.content, token.special) for number, token in added.items()}
    return found


def _without(front: str, both: str) -> str:
    """Return a text without what it has in common with the text before it, whose last character may be a part."""
    if both.startswith(front):
        return both[len(front) :]
    same = zip(front, both, strict=False)
    return both[next((i for i, (one, other) in enumerate(same) if one != other), len(both)) :]


def _decode(tokenizer: Any, tokens: Sequence[int], skip_special_tokens: bool) -> str:
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
