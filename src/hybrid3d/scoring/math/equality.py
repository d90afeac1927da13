"""Whether two final answers are equal: their kinds, and their values exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

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

DIGITS = 60  # to which two numbers that are not rational must agree
MAX_DIGITS = 2000  # with which a difference of numbers is computed
POINTS = 6  # at which two formulas with symbols must agree
MIN_PLACES, MIN_SIGNIFICANT = 6, 4  # of a decimal that may stand for what rounds to it
MAX_DEGREE = 4  # of inequalities that are solved
MAX_ITEMS = 100  # of lists that are compared without order


def are_equal(first: Value, second: Value) -> bool:
    """Return whether two values are equal. Names, units and signs of percent that one of them lacks do not matter."""
    if isinstance(first, Choice) or isinstance(second, Choice):
        return _choices_equal(first, second)
    if isinstance(first, Labelled) or isinstance(second, Labelled):
        return _labelled_equal(first, second)
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Listing) and not isinstance(other, Listing):
            if _assignments_equal(one, other):
                return True
            if len(one.items) == 1 and not isinstance(other, RealSet | Relation | Bracketed):
                return are_equal(one.items[0], other)
    if isinstance(first, Listing) and isinstance(second, Listing):
        return _listings_equal(first, second)
    if isinstance(first, Bracketed) and isinstance(second, Bracketed):
        brackets = (first.opening, first.closing) == (second.opening, second.closing)
        return brackets and _all_equal(first.items, second.items)
    if isinstance(first, Expression) and isinstance(second, Expression):
        return _expressions_equal(first, second)
    if isinstance(first, Relation) and isinstance(second, Relation):
        return _relations_equal(first, second) or (_variable(first) == _variable(second) and _sets_equal(first, second))
    if isinstance(first, MatrixValue) and isinstance(second, MatrixValue):
        return len(first.rows) == len(second.rows) and all(map(_all_equal, first.rows, second.rows))
    if isinstance(first, Ratio) or isinstance(second, Ratio):
        return _ratios_equal(first, second)
    if isinstance(first, Text) or isinstance(second, Text):
        words = [_word(value) for value in (first, second)]
        return words[0] == words[1] != ""
    if isinstance(first, BasedNumber | Opaque):
        return first == second
    return _sets_equal(first, second)


def rounds_to(decimal: Value, value: Value) -> bool:
    """Return whether a value rounds to a decimal at that decimal's own number of places."""
    if not (isinstance(decimal, Expression) and isinstance(value, Expression)):
        return False
    if not decimal.value.is_Rational or not value.value.is_number:
        return False
    places = decimal.places or 0
    difference = abs((value.value - decimal.value).evalf(30))
    return bool(difference <= sympy.Rational(1, 2 * 10**places))


def _all_equal(first: Sequence[Value], second: Sequence[Value]) -> bool:
    return len(first) == len(second) and all(map(are_equal, first, second))


def _choices_equal(first: Value, second: Value) -> bool:
    """Return whether letter and value of two choices are equal, or that of the two which the other value is."""
    if isinstance(first, Choice) and isinstance(second, Choice):
        return first.letter == second.letter and are_equal(first.value, second.value)
    choice, other = (first, second) if isinstance(first, Choice) else (second, first)
    assert isinstance(choice, Choice), "one of both is"
    return _word(other) == choice.letter or are_equal(choice.value, other)


def _labelled_equal(first: Value, second: Value) -> bool:
    equations = [_equation(value) for value in (first, second)]
    have_same_name = isinstance(first, Labelled) and isinstance(second, Labelled) and first.label == second.label
    if equations[0] is not None and equations[1] is not None and not have_same_name:
        return _relations_equal(equations[0], equations[1])
    if isinstance(first, Labelled) and isinstance(second, Labelled):
        return first.label == second.label and are_equal(first.value, second.value)
    plain = [value.value if isinstance(value, Labelled) else value for value in (first, second)]
    return are_equal(plain[0], plain[1])


def _equation(value: Value) -> Relation | None:
    if isinstance(value, Labelled):
        return value.equation
    return value if isinstance(value, Relation) and value.operators == ("==",) else None


def _assignments_equal(listing: Listing, other: Value) -> bool:
    """Return whether x = 1, y = 2 is the tuple (1, 2): the values in the order of their names."""
    values = _assigned(listing)
    if values is None or not isinstance(other, Bracketed):
        return False
    return (other.opening, other.closing) == ("(", ")") and _all_equal(values, other.items)


def _assigned(listing: Listing) -> list[Value] | None:
    """Return the values of a list in which each has a name of its own, in the order of these; else None."""
    if listing.is_set or not all(isinstance(item, Labelled) for item in listing.items):
        return None
    named = {item.label: item.value for item in listing.items if isinstance(item, Labelled)}
    return [named[name] for name in sorted(named)] if len(named) == len(listing.items) > 1 else None


def _listings_equal(first: Listing, second: Listing) -> bool:
    if len(first.items) != len(second.items) or len(first.items) > MAX_ITEMS:
        return False
    for one, other in ((first, second), (second, first)):
        values = _assigned(one)
        if values is not None and not any(isinstance(item, Labelled) for item in other.items):
            return _all_equal(values, other.items)
    left = list(second.items)
    for item in first.items:
        place = next((place for place, other in enumerate(left) if are_equal(item, other)), None)
        if place is None:
            return _sets_equal(first, second)
        del left[place]
    return True


def _expressions_equal(first: Expression, second: Expression) -> bool:
    if first.unit and second.unit and first.unit != second.unit:
        return False
    values = [first.value, second.value]
    for place, (one, other) in enumerate(((first, second), (second, first))):
        if len(one.unit) == 1 and not other.unit and other.value.free_symbols - one.value.free_symbols:
            values[place] = one.value * sympy.Symbol(one.unit, real=True)  # 10 m, with a letter that may be a symbol
    if _values_equal(*values) or _is_rounded(first, second) or _is_rounded(second, first):
        return True
    if first.is_percent != second.is_percent:  # 50 % is 50, as for Hendrycks' grader, and 0.5
        hundredth = [
            value / 100 if side.is_percent else value for value, side in zip(values, (first, second), strict=True)
        ]
        return _values_equal(*hundredth)
    return first.word != "" and first.word == second.word and len(first.word) > 1


def _is_rounded(decimal: Expression, value: Expression) -> bool:
    """Return whether a decimal of many places stands for a value which has more."""
    places = decimal.places or 0
    if places < MIN_PLACES or (value.places or MIN_PLACES) < MIN_PLACES:
        return False
    significant = len(str(abs(int(decimal.value * 10**places)))) if places < 1000 else 0
    return significant >= MIN_SIGNIFICANT and rounds_to(decimal, value)


def _values_equal(first: Any, second: Any) -> bool:
    """Return whether two formulas are equal: rationals exactly, others to 60 digits, with symbols at random points."""
    if first == second:
        return True
    if first.is_Rational and second.is_Rational:
        return False
    if first.is_infinite or second.is_infinite:
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols:
        return _numbers_agree(first, second) is True
    if first.atoms(sympy.core.function.AppliedUndef) != second.atoms(sympy.core.function.AppliedUndef):
        return False
    chance = random.Random(f"{sympy.srepr(first)} {sympy.srepr(second)}")
    agreed = 0
    for attempt in range(3 * POINTS):
        signs = (1,) if attempt % 2 else (1, -1)
        point = {s: sympy.Float(chance.choice(signs) * chance.uniform(0.3, 3.0), 2 * DIGITS) for s in symbols}
        agrees = _numbers_agree(first.xreplace(point), second.xreplace(point))
        if agrees is False:
            return False
        agreed += agrees is True
        if agreed == POINTS:
            return True
    return False


def _numbers_agree(first: Any, second: Any) -> bool | None:
    """Return whether two numbers agree to 60 digits; None if one is undefined."""
    if first.is_Rational and second.is_Rational:
        return bool(first == second)
    values = [value.evalf(2 * DIGITS, maxn=8 * DIGITS) for value in (first, second)]
    if any(value.has(sympy.nan, sympy.zoo, sympy.oo) for value in values):
        return None
    if not all(value.is_number and not value.free_symbols for value in values):
        return None
    size, limit = max(abs(value) for value in values), sympy.Float(10) ** -DIGITS
    if abs(values[0] - values[1]) > max(size, sympy.Float("1e-20")) * limit:
        return False
    if first.has(sympy.Float) or second.has(sympy.Float):
        return True
    # Of large numbers, or small ones, only their difference says whether they are equal
    return bool(abs((first - second).evalf(15, maxn=MAX_DIGITS)) <= min(size, 1) * limit)


def _word(value: Value) -> str:
    return value.words if isinstance(value, Text) else value.word if isinstance(value, Expression) else ""


def _ratios_equal(first: Value, second: Value) -> bool:
    if isinstance(first, Ratio) and isinstance(second, Ratio):
        if (first.is_clock and second.is_clock) or any(part.value.is_zero for part in (*first.parts, *second.parts)):
            return _all_equal(first.parts, second.parts)
        scaled = [
            [Expression(part.value / ratio.parts[0].value, part.unit) for part in ratio.parts]
            for ratio in (first, second)
        ]
        return _all_equal(*scaled)
    values = [_as_quotient(value) for value in (first, second)]
    return values[0] is not None and values[1] is not None and _expressions_equal(values[0], values[1])


def _as_quotient(value: Value) -> Expression | None:
    """Return 3:2 as 3/2."""
    if isinstance(value, Ratio):
        upper, lower = value.parts[0].value, value.parts[-1].value
        return Expression(upper / lower) if len(value.parts) == 2 and not lower.is_zero else None
    return value if isinstance(value, Expression) else None


def _relations_equal(first: Relation, second: Relation) -> bool:
    """Return whether each relation of one is one of the other's, up to a factor: 2 y = 4 x is y = 2 x."""
    left, right = list(_differences(first)), list(_differences(second))
    if len(left) != len(right) or len(right) > 3:
        return False
    return any(all(map(_same_difference, left, order)) for order in itertools.permutations(right))


def _differences(relation: Relation) -> Iterable[tuple[str, Any]]:
    """Yield each relation of a chain as an operator and a difference that it compares with 0; > turned to <."""
    for operator, left, right in zip(relation.operators, relation.sides, relation.sides[1:], strict=False):
        difference = left.value - right.value
        yield (operator.replace(">", "<"), -difference) if ">" in operator else (operator, difference)


def _same_difference(first: tuple[str, Any], second: tuple[str, Any]) -> bool:
    if first[0] != second[0] or first[1].free_symbols != second[1].free_symbols:
        return False
    if first[1].is_zero or second[1].is_zero:
        return bool(first[1].is_zero and second[1].is_zero)
    point = {s: sympy.Rational(7 * n + 3, 11) for n, s in enumerate(sorted(first[1].free_symbols, key=str))}
    below = second[1].xreplace(point)
    if below.is_zero or not below.is_finite:
        return False
    factor = first[1].xreplace(point) / below
    if first[0] not in ("==", "!=") and not factor.is_positive:
        return False
    return not factor.is_zero and _values_equal(first[1], factor * second[1])


def _sets_equal(first: Value, second: Value) -> bool:
    """Return whether two values are the same set of real numbers, or sets that are written in the same way."""
    written = [value for value in (first, second) if isinstance(value, RealSet)]
    if len(written) == 2 and written[0].operation == written[1].operation and _all_equal(*(w.parts for w in written)):
        return True
    sets = [as_set(value) for value in (first, second)]
    if sets[0] is None or sets[1] is None:
        return False
    if sets[0] == sets[1]:
        return True
    pieces = [_pieces(found) for found in sets]
    if pieces[0] is None or pieces[1] is None or len(pieces[0]) != len(pieces[1]):
        return False
    return all(
        one[2:] == other[2:] and _values_equal(one[0], other[0]) and _values_equal(one[1], other[1])
        for one, other in zip(pieces[0], pieces[1], strict=True)
    )


def _pieces(found: Any) -> list[tuple[Any, Any, bool, bool]] | None:
    """Return a union's intervals and points in order, as start, end, and whether these are left out."""
    pieces = []
    for part in found.args if isinstance(found, sympy.Union) else [found]:
        if isinstance(part, sympy.Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif isinstance(part, sympy.FiniteSet):
            pieces += [(point, point, False, False) for point in part.args]
        else:
            return None
    return sorted(pieces, key=lambda piece: (float(piece[0]), float(piece[1])))


def as_set(value: Value) -> Any:
    """Return a value as a set of real numbers; None if it is none. Lists of inequalities are joined as they say."""
    if isinstance(value, Labelled):
        return as_set(value.value)
    if isinstance(value, Bracketed):
        return _interval(value)
    if isinstance(value, Relation):
        return _solutions(value)
    if isinstance(value, RealSet):
        named = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
        if not value.parts:
            return named.get(value.operation)
        parts = [as_set(part) for part in value.parts]
        if parts[0] is None or parts[1] is None:
            return None
        operations = {"cup": sympy.Union, "cap": sympy.Intersection, "setminus": sympy.Complement}
        return operations[value.operation](*parts)
    if isinstance(value, Listing):
        if value.items and all(isinstance(item, Relation) for item in value.items) and value.joiner in ("and", "or"):
            sets = [as_set(item) for item in value.items]
            if any(found is None for found in sets) or len({_variable(item) for item in value.items}) != 1:
                return None
            return (sympy.Union if value.joiner == "or" else sympy.Intersection)(*sets)
        numbers = [item.value for item in value.items if isinstance(item, Expression) and _is_real(item.value)]
        return sympy.FiniteSet(*numbers) if len(numbers) == len(value.items) and value.is_set else None
    return None


def _interval(value: Bracketed) -> Any:
    ends = [item.value for item in value.items if isinstance(item, Expression) and _is_real(item.value)]
    if len(value.items) != 2 or len(ends) != 2 or not ends[0] < ends[1]:
        return None
    return sympy.Interval(*ends, value.opening == "(", value.closing == ")")


def _is_real(number: Any) -> bool:
    return bool(number.is_number and number.is_extended_real)


def _variable(relation: Value) -> Any:
    assert isinstance(relation, Relation), "the items of a list of inequalities"
    symbols = set().union(*(side.value.free_symbols for side in relation.sides))
    return symbols.pop() if len(symbols) == 1 else None


def _solutions(relation: Relation) -> Any:
    """Return the real numbers that satisfy inequalities in one symbol; None if they have several, or no simple form."""
    variable = _variable(relation)
    if variable is None:
        return None
    found = sympy.S.Reals
    for operator, difference in _differences(relation):
        if _greatest_degree(difference) > MAX_DEGREE or not difference.is_polynomial(variable):
            return None
        polynomial = sympy.Poly(difference, variable)
        coefficients = polynomial.all_coeffs()
        if not all(c.is_Rational if len(coefficients) > 2 else _is_real(c) for c in coefficients):
            return None
        found = found & sympy.solve_univariate_inequality(
            sympy.Rel(difference, 0, operator), variable, relational=False
        )
    return found


def _greatest_degree(formula: Any) -> Any:
    """Return what a polynomial's degree is not above, as it is written: expanding it may take long."""
    if formula.is_Add:
        return max(map(_greatest_degree, formula.args))
    if formula.is_Mul:
        return sum(map(_greatest_degree, formula.args))
    if formula.is_Pow and formula.exp.is_Integer and formula.exp > 0:
        return formula.exp * _greatest_degree(formula.base)
    return 1 if formula.free_symbols else 0
