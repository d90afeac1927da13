"""Arithmetic with sympy that refuses what is undefined, and what would take long or much memory."""

from __future__ import annotations

from typing import Any

import sympy

from hybrid3d.scoring.math.latex_tokens import FUNCTIONS, Malformed, Unreadable

MAX_DIGITS = 1000  # of a number
MAX_POWER = 10_000  # exponent of what is no number, and digits of a power of numbers
MAX_FACTORIAL = 2000


def checked(value: Any) -> Any:
    """Return a value. Malformed: it is undefined, as 0/0 is, or no expression."""
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo):
        raise Malformed("it is undefined")
    return value


def number(text: str) -> Any:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    return sympy.Rational(text.rstrip(".") or "0")


def quotient(upper: Any, lower: Any) -> Any:
    if lower.is_zero:
        raise Malformed("a division by zero")
    return checked(upper / lower)


def power(base: Any, exponent: Any) -> Any:
    """Return a power. Unreadable: computing it would take too long or too much memory, or it is undefined."""
    if base.is_Rational and exponent.is_number:
        bits = max(abs(base.p), base.q).bit_length()
        if not exponent.is_finite or abs(exponent.evalf(15)) * bits > MAX_POWER / sympy.log(2, 10).evalf(15):
            raise Unreadable(f"a power of more than {MAX_POWER} digits")
    elif exponent.is_number and (not exponent.is_finite or abs(exponent.evalf(15)) > MAX_POWER):
        raise Unreadable(f"a power with an exponent of more than {MAX_POWER}")
    if base.is_zero and exponent.is_number and not exponent.is_positive:
        raise Malformed("a power of zero that is undefined")
    return checked(base**exponent)


def factorial(argument: Any) -> Any:
    if argument.is_number and not (argument.is_Integer and 0 <= argument <= MAX_FACTORIAL):
        raise Unreadable(f"a factorial of what is no whole number up to {MAX_FACTORIAL}")
    return sympy.factorial(argument)


def binomial(upper: Any, lower: Any) -> Any:
    if any(part.is_number and not (part.is_Integer and 0 <= part <= MAX_FACTORIAL) for part in (upper, lower)):
        raise Unreadable(f"a binomial of what is no whole number up to {MAX_FACTORIAL}")
    return sympy.binomial(upper, lower)


def apply(name: str, argument: Any, base: Any) -> Any:
    if base is not None and name != "log":
        raise Unreadable(f"{name} with a subscript")
    if name in ("log", "lg"):
        return checked(quotient(sympy.log(argument), sympy.log(sympy.Integer(10) if base is None else base)))
    names = {"ln": "log"} | {f"arc{name}": f"a{name}" for name in FUNCTIONS}
    function = getattr(sympy, names.get(name, name), None)
    if function is None or name in ("det",):
        raise Unreadable(f"{name} cannot be read here")
    return checked(function(argument))
