r"""Implements the reward `math`: 1 if answer and reference are equal as mathematics."""

from __future__ import annotations

from hybrid3d.scoring.functions import final_text, last_formula
from hybrid3d.scoring.math.equality import are_equal
from hybrid3d.scoring.math.kinds import Listing, Opaque, Value
from hybrid3d.scoring.math.values import read_values

MAX_WORDS = 6  # of a reference that is a text


def math(answer: str, reference: str, prompt: str = "") -> float:
    r"""Return 1.0 if the answer's final expression equals the reference's, else 0.0, also if the answer has none.

    The final expression is in the last `\boxed{}`, or after the last `####`; without either it is what follows "the
    answer is", or the last formula. It is read whole: an answer of which a part cannot be read is not equal, unless its
    characters are the reference's. Kinds must be equal as well as values; docs/algorithms.md says what is held equal.

    Raises:
        ValueError: the reference has no mathematical expression.
    """
    expected = read_reference(reference)
    final = final_text(answer)
    formula = last_formula(answer) if final is None else final
    try:
        found = read_values(formula or "")
        return float(any(are_equal(one, other) for one in found for other in expected))
    # What sympy cannot compare is not shown to be equal. It raises many kinds of errors for what an answer may hold.
    except Exception:
        return 0.0


def read_reference(reference: str) -> list[Value]:
    """Return what a reference, a whole solution or a bare formula, may mean.

    ValueError: it has no mathematical expression, and is no text of a few words.
    """
    final = final_text(reference)
    formula = (reference if final is None else final).strip()
    try:
        values = read_values(formula)
    except Exception as error:  # sympy raises many kinds of errors for what a text may hold
        raise ValueError(f"the reference has no mathematical expression ({error}): {reference[:80]!r}") from None
    if all(map(_has_unread, values)) and final is None and _is_prose(formula):
        raise ValueError(
            f"the reference has no mathematical expression, and no \\boxed{{}} or ####: {reference[:80]!r}"
        )
    return values


def _has_unread(value: Value) -> bool:
    return any(map(_has_unread, value.items)) if isinstance(value, Listing) else isinstance(value, Opaque)


def _is_prose(text: str) -> bool:
    words = [word for word in text.split() if word.strip(".,;:!?'\"()-").isalpha() and len(word) > 1]
    return len(words) > MAX_WORDS or (len(words) > 1 and text.endswith((".", "?", "!")))
