r"""Extracts the final answer of a text: the number after `####`, or the content of the last `\boxed{}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from decimal import Decimal

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[()\[\],; ]|\\\\|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
_ANNOUNCED = re.compile(r"\banswer(?:\s+is)?\s*(?:[:=]|(?<=is))\s*", re.IGNORECASE)
_FINALLY_ANNOUNCED = re.compile(r"\bfinal\s+answer(?:\s+is)?\s*(?:[:=]|(?<=is))\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}[^\d\\(\[{A-Za-z+-]*")
_MAX_LAST_LINE = 2000  # characters of an answer without a marker in which a formula is looked for


def final_number(text: str) -> Decimal | None:
    """Return the word after the last `####` as a Decimal, which compares all digits, or None if it is no number."""
    _, marker, tail = text.rpartition("####")
    words = tail.replace("$", "").split()
    if not marker or not words:
        return None
    word = words[0].replace(",", "").rstrip(".")
    return Decimal(word) if _NUMBER.fullmatch(word) else None


def final_text(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, else the text after the last `####`; None if there is neither.

    `\fbox{}` is a box too. Boxes that only commas, "and" or "or" separate are one answer, joined by commas.
    """
    boxes = list(_boxes(text))
    if boxes:
        joined = [boxes[-1]]
        while len(joined) < len(boxes):
            before = boxes[-len(joined) - 1]
            if not _BETWEEN_BOXES.fullmatch(text, before[1], joined[0][0]):
                break
            joined.insert(0, before)
        contents = [content for _, _, content in joined]
        return ", ".join(content for n, content in enumerate(contents) if n == 0 or content != contents[n - 1])
    _, marker, tail = text.rpartition("####")
    return tail.strip() if marker else None


def last_formula(text: str) -> str | None:
    """Return what an answer without a box and `####` gives as its answer; None if it has nothing of the kind.

    It is what follows "the answer is" in the last sentence that has these words, else the last formula between dollar
    signs of the last line, else what stands there after its last words. What stands beside it as an alternative, such
    as "4 or 5", belongs to it.
    """
    sentences = [sentence for sentence in _SENTENCE_END.split(text[-20 * _MAX_LAST_LINE :]) if sentence.strip()]
    for announcement in (_FINALLY_ANNOUNCED, _ANNOUNCED):
        for sentence in reversed(sentences):
            if found := announcement.search(sentence):
                return sentence[found.end() :].strip() or None
    if not sentences:
        return None
    line = sentences[-1][-_MAX_LAST_LINE:]
    if formulas := list(_FORMULA.finditer(line)):
        first = len(formulas) - 1
        while first and _BETWEEN_BOXES.fullmatch(line, formulas[first - 1].end(), formulas[first].start()):
            first -= 1
        return line[formulas[first].start() : formulas[-1].end()]
    parts = [part.strip(" .,;:!?*_") for part in _WORDS.split(line)]
    return next((part for part in reversed(parts) if part), None)


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and content of each box that is not within another; "" if it is cut short or empty."""
    end = 0
    for found in _BOX.finditer(text):
        if found.start() < end:
            continue
        start = found.end()
        if text[start : start + 1] == "{":
            content = _inside_braces(text, start + 1)
            end = start + len(content) + 2
        else:  # TeX takes the next character, or the next command
            bare = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]").match(text, start)
            content, end = (bare.group(), bare.end()) if bare else ("", start)
        yield found.start(), end, content.strip()


def _inside_braces(text: str, start: int) -> str:
    """Return the text from `start` to the closing brace; "" if there is none, as in a truncated answer."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and not _is_escaped(text, index):
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return text[start:index]
    return ""


def _is_escaped(text: str, index: int) -> bool:
    r"""Return whether a brace has a backslash before it; in `\\}` too, which is `\}` escaped twice, or a line's end."""
    return text[index - 1] == "\\"


def _final_formula(text: str) -> str | None:
    """Return the final text without white space, by which formulas are compared; None if it is empty."""
    found = final_text(text)
    return None if found is None else "".join(found.split()) or None


FINAL_ANSWERS: Mapping[str, Callable[[str], Hashable | None]] = {"gsm8k": final_number, "math": _final_formula}
"""How to extract what answers are compared by, for each reward whose answers have a final answer."""
