"""The reward of `make demo-llm`, an example of a user's function: `reward.name=examples.right_kind:right_kind`."""

import re

KINDS = ("animal", "country", "plant", "tool")


def right_kind(answer: str, reference: str, prompt: str = "") -> float:
    """Return 1.0 if the answer names the reference's kind and no other kind, else 0.0."""
    words = re.findall(r"[\w-]+", answer.lower())  # "plant-based" is another word than "plant"
    named = {kind for kind in KINDS if kind in words}
    return float(named == {reference})
