"""The reward of `make demo-llm`: an example of a function of your own, `reward.name=recipes.right_kind:right_kind`."""

import re

KINDS = ("animal", "country", "plant", "tool")


def right_kind(answer: str, reference: str, prompt: str = "") -> float:
    """1.0 where the answer names the reference's kind and none of the others, in whatever words, else 0.0."""
    words = re.findall(r"[\w-]+", answer.lower())  # "plant-based" is a word of its own and names no plant
    named = {kind for kind in KINDS if kind in words}
    return float(named == {reference})
