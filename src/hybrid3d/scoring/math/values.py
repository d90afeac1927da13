"""Reads a formula as a final answer of one of the kinds, whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NoReturn

import sympy

from hybrid3d.scoring.math.equality import are_equal, rounds_to
from hybrid3d.scoring.math.expressions import checked
from hybrid3d.scoring.math.kinds import (
    BasedNumber,
    Bracketed,
    Choice,
    Expression,
    Labelled,
    Listing,
    MatrixValue,
    Opaque,
    Ratio,
    RealSet,
    Relation,
    Text,
    Value,
)
from hybrid3d.scoring.math.latex_tokens import BASES, GREEK, Malformed, Token, Unreadable, characters, literal, tokenize
from hybrid3d.scoring.math.quantities import read_quantity

INEQUALITIES = {"<": "<", ">": ">", "leq": "<=", "geq": ">=", "neq": "!="}
_RELATIONS = {"=", "approx", "in", *INEQUALITIES}
_OPENING, _CLOSING = {"(", "[", "{", "lfloor", "lceil", "langle"}, {")", "]", "}", "rfloor", "rceil", "rangle"}
CHOICES = set("ABCDE")  # of a question
_SET_OPERATIONS = {"cup", "cap", "setminus"}
_SIGNS = {"pm": "+-", "mp": "-+"}  # of the upper and of the lower value
_GREEK = "|".join(sorted(GREEK, key=len, reverse=True))
_LABEL = re.compile(
    rf"(?:[A-Za-z]|<[A-Za-z]>|\\(?:{_GREEK}) )(?:_(?:\{{[^{{}}]*\}}|.))?'*(?:\^\{{-1\}})?"
    r"(?:\([A-Za-z](?:,[A-Za-z])*\))?"
    r"|[A-Z]{2,4}|m?\\angle [A-Z]{1,4}|\\(?:overline|vec|triangle) \{?[A-Za-z]{1,4}\}?|\[[A-Z]{3,6}\]|(?:<[^<>]+>)+"
    r"|\([A-Za-z](?:,[A-Za-z])+\)"
)
_BASED = re.compile(
    r"\(?(?P<digits>\d[0-9A-Z]*|[A-F]+\d[0-9A-F]*|[A-F]{2,})\)?(?:_|\(?base)[{(]*"
    rf"(?:(?P<base>\d{{1,2}})|(?P<name>{'|'.join(BASES)}))[)}}]*"
)  # without the marks of words


def read_values(formula: str) -> list[Value]:
    """Return what a formula may mean: 1,234 is one number or two. Unreadable: empty, or with more than can be read."""
    readings = []
    for comma_thousands in (True, False):
        tokens = _without_end(tokenize(formula, comma_thousands))
        value = _computed_or_known(lambda tokens: _choice(tokens) or _list(tokens), tokens)
        if value not in readings:
            readings.append(value)
        if "," not in formula:
            break
    return readings


def _computed_or_known(read: Callable[[list[Token]], Value], tokens: list[Token]) -> Value:
    """Read a value, or else keep the characters, unless it says nothing, or what is false."""
    try:
        return read(tokens)
    except Unreadable as error:
        if not isinstance(error, Malformed) and _is_known_by_characters(tokens):
            return Opaque(characters(tokens))
        raise error from None


def _choice(tokens: list[Token]) -> Choice | None:
    r"""Read a choice with its value, which must be a number, as `\textbf{(B)}\ 12`; None if there is none."""
    if [token.text for token in tokens[:3:2]] != ["(", ")"] or tokens[1].text not in CHOICES or len(tokens) < 4:
        return None
    starts = () if tokens[1].kind != "word" else ("frac", "sqrt", "$", "-")  # others are products or differences
    if tokens[3].kind != "number" and tokens[3].text not in starts:
        return None
    value = _list(tokens[3:])
    if not isinstance(value, Expression) or not value.value.is_number or value.unit.upper() in CHOICES:
        return None
    return Choice(tokens[1].text, value)


def split(tokens: Sequence[Token], is_separator: Callable[[Token], bool]) -> list[tuple[list[Token], Token | None]]:
    """Split tokens outside all brackets; each part with the separator after it. Malformed: brackets do not balance."""
    parts: list[tuple[list[Token], Token | None]] = []
    part, depth = list[Token](), 0
    for token in tokens:
        starts = token.text in _OPENING or token.text.startswith("begin{")
        ends = token.text in _CLOSING or token.text.startswith("end{")
        depth += (starts and token.kind != "word") - (ends and token.kind != "word")
        if depth < 0:
            raise Malformed("a bracket is closed that is not open")
        if depth == 0 and not ends and is_separator(token):
            parts.append((part, token))
            part = []
        else:
            part.append(token)
    if depth:
        raise Malformed("a bracket is not closed")
    return [*parts, (part, None)]


def _without_end(tokens: list[Token]) -> list[Token]:
    """Return tokens without a full stop at the end."""
    return tokens[:-1] if [(token.kind, token.text) for token in tokens[-1:]] == [("symbol", ".")] else tokens


def _is_separator(token: Token) -> bool:
    return (token.kind == "symbol" and token.text in (",", ";")) or (
        token.kind == "word" and token.text in ("and", "or")
    )


def _list(tokens: list[Token]) -> Value:
    """Read what may be several values. Commas may stand before "and"."""
    parts, joiners = list[list[Token]](), set[str]()
    separated = split(tokens, _is_separator)
    for number, (part, separator) in enumerate(separated):
        if separator is not None:
            joiners.add(separator.text)
        before = separated[number - 1][1] if number > 0 else None
        follows_comma = before is not None and (before.kind, before.text) == ("symbol", ",")
        if not part and follows_comma and separator is not None and separator.kind == "word":
            continue
        parts.append(part)
    if len(parts) == 1:
        return _item(parts[0])
    items = list[Value]()
    for part in parts:
        item = _item(part)
        items += item.items if isinstance(item, Listing) and not item.is_set else [item]
    words = joiners - {",", ";"}
    return Listing(tuple(items), words.pop() if len(words) == 1 else ",")


def _item(tokens: list[Token]) -> Value:
    if not tokens:
        raise Malformed("it is empty")
    upper, lower = ([_signed(token, place) for token in tokens] for place in (0, 1))
    return _relation(tokens) if upper == lower else Listing((_relation(upper), _relation(lower)))


def _signed(token: Token, place: int) -> Token:
    is_sign = token.kind == "command" and token.text in _SIGNS
    return Token("symbol", _SIGNS[token.text][place], token.spaced) if is_sign else token


def _is_relation(token: Token) -> bool:
    return token.kind in ("symbol", "command") and token.text in _RELATIONS


def _relation(tokens: list[Token]) -> Value:
    parts = split(tokens, _is_relation)
    if len(parts) == 1:
        return _set(tokens)
    sides = [part for part, _ in parts]
    operators = [separator.text for _, separator in parts if separator is not None]
    if operators == ["in"]:
        return Labelled(_label(sides[0]) or _no_label(), _set(sides[1]))
    if set(operators) <= {"=", "approx"}:
        return _equation(sides, operators)
    if set(operators) <= INEQUALITIES.keys():
        return Relation(tuple(INEQUALITIES[name] for name in operators), tuple(_formula(side) for side in sides))
    raise Unreadable("relations of several kinds")


def _no_label() -> NoReturn:
    raise Unreadable("what has the value is no name")


def _label(tokens: Sequence[Token]) -> str | None:
    """Return the name that stands before the equals sign of `x = 5`; None if it is no name."""
    text = literal([replace(token, spaced=False) for token in tokens])
    if not _LABEL.fullmatch(text):
        return None
    name = re.sub(r"[<>{} ]", "", text)
    return name.lower() if "<" in text and len(text) > 3 else name


def _equation(sides: list[list[Token]], operators: list[str]) -> Value:
    """Read equal formulas: a name and its value, or an equation. Unreadable: two of them are not equal, as 4 = 5."""
    if operators[0] == "approx" and not sides[0]:
        return _set(sides[1]) if len(sides) == 2 else _no_label()
    if len(sides) == 2 and _label(sides[0]) is None and _label(sides[1]) is not None:
        sides = sides[::-1]  # 5 = x
    label = _label(sides[0])
    if label is None and len(sides) == 2:
        left, right = (_set(side) for side in sides)
        if isinstance(left, Expression) and isinstance(right, Expression) and _is_condition(left, right):
            return Relation(("==",), (left, right))
    values = [_set(side) for side in (sides if label is None else sides[1:])]
    for (value, after), operator in zip(pairwise(values), operators[len(sides) - len(values) :], strict=True):
        if not (are_equal(value, after) or (operator == "approx" and rounds_to(after, value))):
            kind = Malformed if _is_known(value) and _is_known(after) else Unreadable
            raise kind("it says that two values are equal which are not")
    value = values[-1] if "approx" not in operators else values[0]
    if label is None:
        return value
    return Labelled(label, value, _as_equation(sides[0], value))


def _is_known(value: Value) -> bool:
    """Return whether a value is a number without a unit, or several, so that it is equal to others or not."""
    if isinstance(value, Bracketed | Listing):
        return all(map(_is_known, value.items))
    if isinstance(value, Expression):
        return not value.unit and not value.value.free_symbols
    return isinstance(value, BasedNumber)


def _is_condition(left: Expression, right: Expression) -> bool:
    return bool(left.value.free_symbols | right.value.free_symbols) and not are_equal(left, right)


def _as_equation(name: list[Token], value: Value) -> Relation | None:
    try:
        return Relation(("==",), (_formula(name), value)) if isinstance(value, Expression) else None
    except Unreadable:
        return None


def _formula(tokens: list[Token]) -> Expression:
    value = _set(tokens)
    if not isinstance(value, Expression):
        raise Unreadable("a formula is expected")
    return value


def _set(tokens: list[Token]) -> Value:
    """Read a union, an intersection or a difference of sets, from the left, or a value."""
    parts = split(tokens, lambda token: token.kind == "command" and token.text in _SET_OPERATIONS)
    value = _value(parts[0][0])
    for (_, separator), (part, _) in pairwise(parts):
        assert separator is not None, "a part stands behind it"
        after = _value(part)
        if not all(isinstance(operand, Bracketed | RealSet | Listing) for operand in (value, after)):
            raise Unreadable(f"\\{separator.text} of what are no sets")
        value = RealSet(separator.text, (value, after))
    return value


def _value(tokens: list[Token]) -> Value:
    if not tokens:
        raise Malformed("it is empty")
    text = literal(tokens)
    if text in (r"\emptyset ", r"\{ \} "):
        return Listing((), is_set=True)
    if named := re.fullmatch(r"\\mathbb \{?<?([RQZNC])>?\}?", text):
        return RealSet(named[1])
    for read in (_based_number, _words, _matrix, _brackets, _ratio):
        value = read(tokens)
        if value is not None:
            return value
    return _computed_or_known(read_quantity, tokens)


def _is_known_by_characters(tokens: list[Token]) -> bool:
    """Return whether what cannot be read may still be compared by its characters: its end, at least, is no operator."""
    has_name = any(token.kind in ("number", "letter", "word") for token in tokens)
    edges = {"+", "-", "*", "/", "^", "_", "=", "<", ">", "\\", "?"}
    is_cut = tokens[-1].text in edges and not (len(tokens) > 1 and tokens[-2].text in ("^", "_"))
    return has_name and not is_cut and tokens[0].text not in edges - {"+", "-", "\\", "_", "^"}


def _based_number(tokens: list[Token]) -> BasedNumber | None:
    r"""Read `101_2`, `(101)_2`, `1A_{16}`, `101_{\text{two}}`, `101 \text{ base } 2` or `101 \text{ (base 2)}`."""
    found = _BASED.fullmatch(re.sub("[<>]", "", literal(tokens)))
    if found is None:
        return None
    base = BASES[found["name"]] if found["name"] else int(found["base"])
    digits = found["digits"].lstrip("0") or "0"
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return BasedNumber(digits, base)


def _words(tokens: list[Token]) -> Text | None:
    """Read words alone, and letters in parentheses, as `(A)` and `\text{(A)}`."""
    if not any(token.kind == "word" for token in tokens):
        return None
    if not all(token.kind == "word" or token.text in ("(", ")", "-", "'", ".", "?", "!") for token in tokens):
        return None
    words = [token.text for token in tokens if token.kind == "word"]
    if len(words) == 1 and len(words[0]) == 1:
        return Text(words[0])
    if len(words) > 1 and words[0].lower() in ("a", "an", "the"):
        words = words[1:]
    return Text(" ".join(words).lower())


def _matrix(tokens: list[Token]) -> Value | None:
    """Read a matrix, which a number may stand before; None if there is none."""
    kinds = {f"{brackets}matrix" for brackets in ("", "b", "p", "B", "small")} | {"array"}
    starts = [place for place, token in enumerate(tokens) if token.text in {f"begin{{{kind}}}" for kind in kinds}]
    if len(starts) != 1:
        return None
    start = starts[0]
    before, rest = tokens[:start], tokens[start + 1 :]
    if before and before[-1].text in ("[", "(") and rest[-1].text in ("]", ")"):
        before, rest = before[:-1], rest[:-1]
    if not rest or not rest[-1].text.startswith("end{"):
        raise Unreadable("something stands behind a matrix")
    factor = _formula(before).value if before else sympy.Integer(1)
    rows = []
    for row, _ in split(rest[:-1], lambda token: token == Token("command", "\\", token.spaced)):
        if row:
            cells = [_formula(cell) for cell, _ in split(row, lambda token: token.text == "&")]
            rows.append(tuple(replace(cell, value=checked(factor * cell.value)) for cell in cells))
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("the rows of a matrix have different lengths")
    return MatrixValue(tuple(rows))


def _brackets(tokens: list[Token]) -> Value | None:
    """Read a tuple, an interval or a finite set that is all there is; None if there is none."""
    first, last = tokens[0], tokens[-1]
    pairs = {"(": ")]", "[": ")]", "{": "}", "langle": ("rangle",)}
    if first.kind not in ("symbol", "command") or first.text not in pairs or last.text not in pairs[first.text]:
        return None
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth == 0 and place < len(tokens) - 1:
            return None
    inside = tokens[1:-1]
    if first.text == "{":
        if first.kind == "symbol":  # braces that only group
            return None if any(token.text == "choose" for token in inside) else _list(inside)
        return _braces(inside)
    parts = split(inside, lambda token: token.kind == "symbol" and token.text in (",", ";"))
    if len(parts) == 1:
        if first.text == "langle" or (first.text, last.text) in (("(", "]"), ("[", ")")):
            raise Unreadable("brackets of two kinds around one value")
        return _words(inside) if len(inside) == 1 else None
    opening, closing = ("(", ")") if first.text == "langle" else (first.text, last.text)
    return Bracketed(opening, closing, tuple(_item(part) for part, _ in parts))


def _braces(inside: list[Token]) -> Value:
    r"""Read a set: `\{1, 2\}`, or `\{x : x > 1\}`, which is what its condition says."""
    if not inside:
        return Listing((), is_set=True)
    for marks in (("mid", ":"), ("|",)):
        described = split(inside, lambda token, marks=marks: token.text in marks)  # type: ignore[misc]
        if len(described) == 2:
            break
    if len(described) == 2:
        variable, _ = split(described[0][0], _is_relation)[0]
        condition = _relation(described[1][0])
        if _label(variable) is None or not isinstance(condition, Relation):
            raise Unreadable("a set of what cannot be read")
        return condition
    value = _list(inside)
    return Listing(value.items if isinstance(value, Listing) and not value.is_set else (value,), is_set=True)


def _ratio(tokens: list[Token]) -> Ratio | None:
    parts = split(tokens, lambda token: token.kind == "symbol" and token.text == ":")
    if len(parts) == 1:
        return None
    is_clock = all(
        part and len(part[0].text) == 2 and literal(part[1:]) in ("", "<AM>", "<PM>") for part, _ in parts[1:]
    )
    return Ratio(tuple(read_quantity(part) for part, _ in parts), is_clock)
