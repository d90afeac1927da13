"""Stops: texts that end a turn or an answer. A special token is not in decoded text, so it is looked for as a token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.rl.token_texts import TokenTexts, encode_part, special_tokens
from hybrid3d.scoring.environments import check_environment


@dataclass(frozen=True)
class Stops:
    """Stops, by how they are found: texts in decoded text, and special tokens."""

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()


def find_stops(tokenizer: Any, stops: Sequence[str]) -> Stops:
    """Return the stops of a recipe, an environment or an agent.

    Raises:
        ValueError: one is never found: a special token is a part of it, or the tokenizer writes it in another way.
    """
    if not stops:
        return Stops()
    special, pieces = special_tokens(tokenizer), TokenTexts(tokenizer)
    texts = tuple(stop for stop in stops if stop not in special)
    for stop in texts:
        parts = sorted((token for token in special if token and token in stop), key=len)
        if parts:
            raise ValueError(
                f"stop {stop!r} contains the special token {parts[-1]!r}, which is not in decoded text, so that it "
                f"never stops: set {parts[-1]!r} alone, or leave the token out of it"
            )
        written = pieces.decode(encode_part(tokenizer, stop, ()))
        if stop not in written:
            raise ValueError(
                f"stop {stop!r} is never in decoded text, as the tokenizer writes it {written!r}: set this instead"
            )
    return Stops(texts, frozenset(special[stop] for stop in stops if stop in special))


def pause_tokens(texts: TokenTexts, stops: Stops) -> frozenset[int]:
    """Return the tokens at which an engine pauses: those whose text contains the last character of a stop.

    An engine stops at tokens, and a stop can be tokenized in many ways, but its last character is always in one of
    these tokens. Whether the text really ends in the stop is checked by `ends_with_stop`. Stops of an environment end
    in ASCII, as `stops_of` requires; other ones are those of `rollout.stop` with agents.

    Raises:
        ValueError: no token contains the last character of a stop.
    """
    tokens = set(stops.ids)
    for stop in stops.texts:
        last = stop[-1] if stop[-1].isascii() else f"{stop[-1]}\ufffd"  # which stands for a part of a character
        ending = [token for character in last for token in texts.tokens_with.get(character, ())]
        if not ending:
            raise ValueError(f"stop {stop!r}: none of the tokenizer's {len(texts)} tokens has {stop[-1]!r} in it")
        tokens.update(ending)
    return frozenset(tokens)


def ends_with_stop(text: str, last: str, stops: Sequence[str]) -> bool:
    """Return whether a stop ends within the last token of a text; `last` is the text of this token."""
    return any(stop in text[-(len(last) + len(stop) - 1) :] for stop in stops)


def check_stops(recipe: Recipe, tokenizer: Any) -> None:
    """Check that the stops of the recipe and its environment can end something.

    Raises:
        RecipeError: one cannot, or the environment does not load.
    """
    rollout = recipe.rollout
    if rollout is None:
        return
    where = "rollout.stop"
    try:
        stops, texts = find_stops(tokenizer, rollout.stop), TokenTexts(tokenizer)
        if rollout.agents is not None:
            pause_tokens(texts, stops)
        where = "rollout.environment"
        if rollout.environment is not None:
            replied = check_environment(rollout.environment)
            pause_tokens(texts, find_stops(tokenizer, replied))
            for end, stop in itertools.product(rollout.stop, replied):
                if end in stop:
                    raise ValueError(f"its stop {stop!r} ends the answer by rollout.stop={end!r}: it would never reply")
    except ValueError as error:
        raise RecipeError(recipe.name, [f"{where}: {error}"]) from None
