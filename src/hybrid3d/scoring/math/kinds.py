"""The kinds of final answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expression:
    """A number or a formula."""

    value: Any
    unit: str = ""  # canonical name, or "" if it has none
    is_percent: bool = False  # whether a percent sign follows
    places: int | None = None  # decimal places if it is written as a decimal
    word: str = ""  # the letters if it has nothing else, which may be a word


@dataclass(frozen=True)
class BasedNumber:
    """A number that is written in a base: its digits, upper case, without leading zeros."""

    digits: str
    base: int


@dataclass(frozen=True)
class Text:
    """Words, lower case; a single letter keeps its case."""

    words: str


@dataclass(frozen=True)
class Listing:
    """Several values of which the order does not matter: a list, whose values `joiner` separates, or a finite set."""

    items: tuple[Value, ...]
    joiner: str = ","
    is_set: bool = False


@dataclass(frozen=True)
class Bracketed:
    """A tuple, or an interval, with its brackets."""

    opening: str
    closing: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class MatrixValue:
    """The entries of a matrix by row."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class RealSet:
    """A set that is named, or computed from others."""

    operation: str  # cup, cap, setminus; or the name of a set
    parts: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Relation:
    """Formulas with relations between them: `==` alone, or inequalities."""

    operators: tuple[str, ...]
    sides: tuple[Expression, ...]


@dataclass(frozen=True)
class Labelled:
    """A value with the name of what has it, as in x = 5; `equation` if the name is a formula too."""

    label: str
    value: Value
    equation: Relation | None = None


@dataclass(frozen=True)
class Ratio:
    """The parts of a ratio, as in 3:2; `is_clock` if it may be a time, as in 2:15."""

    parts: tuple[Expression, ...]
    is_clock: bool = False


@dataclass(frozen=True)
class Choice:
    """The letter of a choice with the number that stands there."""

    letter: str
    value: Expression


@dataclass(frozen=True)
class Opaque:
    """A formula of which only the characters are known. It equals what has the same."""

    characters: str


Value = (
    Expression
    | BasedNumber
    | Text
    | Listing
    | Bracketed
    | MatrixValue
    | RealSet
    | Relation
    | Labelled
    | Ratio
    | Choice
    | Opaque
)
