"""Reads tokens of a formula as sympy's expressions, all of them or none.

Arithmetic is refused where it is undefined, or would take long or much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from hybrid3d.scoring.math.latex_tokens import FUNCTIONS, GREEK, ORDINALS, Malformed, Token, Unreadable, literal

DEGREE, PERCENT = sympy.Symbol("°"), sympy.Symbol("%")
"""Factors that stand for the signs after a number."""

MAX_DIGITS = 1000  # of a number
MAX_POWER = 10_000  # exponent of what is no number, and digits of a power of numbers
MAX_FACTORIAL = 2000
MAX_COMPARED = 8  # formulas of which the greatest or the least is taken
MAX_DEPTH = 40  # parentheses and braces within each other
_ACCENTS = set("overline bar dot hat vec tilde widehat overrightarrow".split())
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_COMMAND_PAIRS = {"lfloor": "rfloor", "lceil": "rceil"}


class ExpressionReader:
    """Reads an expression from tokens, and stops at what cannot belong to it: a relation, a comma, a word."""

    def __init__(self, tokens: Sequence[Token]):
        self._tokens = list(tokens)
        self.position = 0
        self._depth = 0
        self._in_bars = False

    def read(self) -> Any:
        """Read a sum. Unreadable: there is none."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} parentheses within each other")
        total = self._signed_product()
        while self._next_is("+", "-"):
            total = total + self._signed_product()
        self._depth -= 1
        return checked(total)

    @property
    def rest(self) -> list[Token]:
        return self._tokens[self.position :]

    def _peek(self, ahead: int = 0) -> Token | None:
        place = self.position + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def _next_is(self, *texts: str, kind: str = "symbol") -> bool:
        token = self._peek()
        return token is not None and token.kind == kind and token.text in texts

    def _take_if(self, *texts: str, kind: str = "symbol") -> str:
        """Take the next token if it is one of these, and return its text; "" if it is none of them."""
        return self._take().text if self._next_is(*texts, kind=kind) else ""

    def _take(self) -> Token:
        token = self._peek()
        if token is None:
            raise Malformed("it ends too early")
        self.position += 1
        return token

    def _expect(self, symbol: str, kind: str = "symbol") -> None:
        token = self._take()
        if (token.kind, token.text) != (kind, symbol):
            raise Unreadable(f"{token.text!r} stands where {symbol!r} is expected")

    def _signed_product(self) -> Any:
        sign = 1
        while taken := self._take_if("+", "-"):
            sign *= -1 if taken == "-" else 1
        return sign * self._product()

    def _product(self) -> Any:
        result = self._mixed_number() or self._factor()
        while True:
            if operator := self._take_if("*", "/"):
                factor = self._signed_factor()
                result = checked(result * factor if operator == "*" else _quotient(result, factor))
            elif self._starts_factor():
                result = checked(result * self._factor())
            else:
                return result

    def _signed_factor(self) -> Any:
        return -self._signed_factor() if self._take_if("-") else self._factor()

    def _mixed_number(self) -> Any:
        r"""Return the number at `1\frac{1}{2}` or `1 1/2`; None if none stands here."""
        start, texts = self.position, [token.text for token in self.rest[:4]]
        if len(texts) == 4 and texts[2] == "/" and all(text.isdigit() for text in (*texts[:2], texts[3])):
            self.position += 4
            if 0 < int(texts[1]) < int(texts[3]) and not self._next_is("^", "!", "/") and not self._starts_factor():
                return _number(texts[0]) + _number(texts[1]) / _number(texts[3])
            self.position = start
        if texts[1:2] != ["frac"] or self.rest[1].kind != "command" or not texts[0].isdigit():
            return None
        self.position += 2
        upper, lower = self._argument(digit=True), self._argument(digit=True)
        if upper.is_Integer and lower.is_Integer and 0 < upper < lower and not self._next_is("^"):
            return _number(texts[0]) + upper / lower
        self.position = start
        return None

    def _starts_factor(self) -> bool:
        """Return whether the next token starts a factor without a sign of multiplication before it.

        A number does not: what `4 5` or `x2` means nobody can say.
        """
        token, after = self._peek(), self._peek(1)
        if token is None or token.kind == "number":
            return False
        if token.kind == "word":  # a constant, which other words beside it would make a part of a text
            return token.text in ("e", "i") and (after is None or after.kind != "word")
        if token.kind == "symbol" and token.text == "{":
            return after is not None and after.kind != "number"
        if token.kind == "symbol":
            return token.text in ("(", "[") or (token.text == "|" and not self._in_bars)
        names = FUNCTIONS | GREEK | _ACCENTS | _COMMAND_PAIRS.keys() | {"sqrt", "frac", "binom", "infty", "pi"}
        return token.kind == "letter" or token.text in names

    def _factor(self) -> Any:
        base, has_power = self._atom(), False
        while True:
            if self._next_is("^") and not self._ordinal_follows():
                if has_power:
                    raise Unreadable("a power of a power without parentheses")
                base, has_power = self._raised(base), True
            elif self._take_if("!"):
                base = _factorial(base)
                if self._next_is("!"):
                    raise Unreadable("a double factorial")
            elif self._take_if("%"):
                base = base * PERCENT
            elif self._take_if("circ", kind="command"):
                base = base * DEGREE
            else:
                return base

    def _ordinal_follows(self) -> bool:
        """Return whether the power that follows is a word, as in `4^{th}`."""
        after = [token for token in self._tokens[self.position + 1 : self.position + 5] if token.text not in "{}"]
        if after and after[0].kind == "word":
            return after[0].text in ORDINALS
        # Letters are a power, as in e^{st}, unless they are what ends the number's name
        number, letters = self._tokens[self.position - 1], "".join(token.text for token in after)
        if number.kind != "number" or not number.text.isdigit():
            return False
        ends = {1: "st", 2: "nd", 3: "rd"} if int(number.text[-2:]) not in (11, 12, 13) else {}
        return letters == ends.get(int(number.text[-1]), "th")

    def _raised(self, base: Any) -> Any:
        self._take()
        if self._take_if("circ", kind="command"):
            return base * DEGREE
        if [token.text for token in self.rest[:3]] == ["{", "circ", "}"]:
            self.position += 3
            return base * DEGREE
        if sign := self._take_if("-", "+"):  # without braces, as in 10^-3
            return _power(base, -self._atom() if sign == "-" else self._atom())
        return _power(base, self._atom())

    def _atom(self) -> Any:
        token = self._take()
        if token.kind == "number":
            return self._decimal(token)
        if token.kind == "letter" or (token.kind == "word" and len(token.text) == 1):
            return self._symbol(token.text)
        if token.kind == "symbol" and token.text in _PAIRS:
            return self._inside(_PAIRS[token.text])
        if token.kind == "symbol" and token.text == "|" and not self._in_bars:
            self._in_bars = True
            inside = self.read()
            self._in_bars = False
            self._expect("|")
            return sympy.Abs(inside)
        if token.kind == "command":
            return self._command(token.text)
        raise Unreadable(f"{token.text!r} cannot be read here")

    def _inside(self, closes: str, kind: str = "symbol") -> Any:
        outside, self._in_bars = self._in_bars, False
        inside = self.read()
        if self._take_if("choose", kind="command"):
            inside = _binomial(inside, self.read())
        self._in_bars = outside
        self._expect(closes, kind)
        return inside

    def _decimal(self, token: Token) -> Any:
        r"""Return a number, whose last digits may repeat, as in `0.1\overline{6}`."""
        if "." in token.text and self._take_if("overline", "bar", "dot", kind="command"):
            repeated = self._digits()
            places = len(token.text) - token.text.index(".") - 1
            period = sympy.Rational(int(repeated), 10 ** len(repeated) - 1)
            return _number(token.text + "0") + period / 10**places
        return self._scientific(token) or _number(token.text)

    def _scientific(self, token: Token) -> Any:
        """Return the number at `3e8` or `3E-8`; None if none stands here. 2e-3 is 2 e - 3."""
        letter, digits = self._peek(), self._peek(1)
        if letter is None or digits is None or letter.text not in ("e", "E") or letter.spaced or digits.spaced:
            return None
        sign, used = "", 2
        if digits.text in ("-", "+") and letter.text == "E" and (after := self._peek(2)) is not None:
            sign, digits, used = digits.text, after, 3
        if not digits.text.isdigit() or len(digits.text) > 3:
            return None
        self.position += used
        return _number(token.text) * sympy.Integer(10) ** int(sign + digits.text)

    def _digits(self) -> str:
        braced = self._take_if("{")
        token = self._take()
        if not token.text.isdigit() or len(token.text) > MAX_DIGITS:
            raise Unreadable(f"{token.text!r} stands where digits are expected")
        if braced:
            self._expect("}")
        return token.text

    def _symbol(self, name: str) -> Any:
        """Return a symbol with its subscript and primes, the constant e or i, or a function's value."""
        if self._take_if("_"):
            name += f"_{self._raw_argument()}"
        while prime := self._take_if("'"):
            name += prime
        if name in ("e", "i"):
            return sympy.E if name == "e" else sympy.I
        if name[0] in "fgh" and len(name) < 3 and self._take_if("("):
            return sympy.Function(name)(*self._arguments())
        return sympy.Symbol(name, real=True)

    def _arguments(self) -> list[Any]:
        """Read expressions between commas, and the parenthesis that closes behind them."""
        values = [self.read()]
        while self._take_if(","):
            values.append(self.read())
        self._expect(")")
        return values

    def _command(self, name: str) -> Any:
        if name in ("frac", "binom"):
            upper, lower = self._argument(digit=True), self._argument(digit=True)
            return _quotient(upper, lower) if name == "frac" else _binomial(upper, lower)
        if name == "sqrt":
            index = self._inside("]") if self._take_if("[") else sympy.Integer(2)
            return _power(self._argument(), _quotient(sympy.Integer(1), index))
        if name == "boxed":
            return self._argument()
        if name == "infty":
            return sympy.oo
        if name == "pi":
            return sympy.pi
        if name in GREEK:
            return self._symbol(name)
        if name in _ACCENTS:
            return sympy.Symbol(f"{name} {self._raw_argument()}", real=True)
        if name in _COMMAND_PAIRS:
            inside = self._inside(_COMMAND_PAIRS[name], "command")
            return sympy.floor(inside) if name == "lfloor" else sympy.ceiling(inside)
        if name in FUNCTIONS:
            return self._function(name)
        raise Unreadable(f"\\{name} cannot be read here")

    def _argument(self, digit: bool = False) -> Any:
        """Read what stands in braces, or the next atom; of a number the first digit, where TeX would take that."""
        token = self._peek()
        if digit and token is not None and token.kind == "number" and len(token.text) > 1:
            first, others = token.text[0], token.text[1:]
            parts = [Token("number", first), Token("number" if others.isdigit() else "symbol", others)]
            self._tokens[self.position : self.position + 1] = parts
        return self._atom()

    def _raw_argument(self) -> str:
        """Return the tokens in braces, or the next token, as a name."""
        if not self._next_is("{"):
            return str(self._take()).strip()
        end, depth = self.position, 0
        while True:
            token = self._peek(end - self.position)
            if token is None:
                raise Malformed("it ends too early")
            depth += (token.text == "{") - (token.text == "}")
            end += 1
            if depth == 0:
                break
        inside = self._tokens[self.position + 1 : end - 1]
        self.position = end
        return literal(inside).strip().replace("<", "").replace(">", "")

    def _function(self, name: str) -> Any:
        base, exponent = None, None
        while taken := self._take_if("^", "_"):
            if taken == "_":
                base = self._atom()
            else:
                exponent = -self._atom() if self._take_if("-") else self._atom()
        if name in ("gcd", "lcm", "max", "min"):
            value = self._of_several(name)
        else:
            argument = self._function_argument().subs(DEGREE, sympy.pi / 180)
            if exponent == -1:
                name, exponent = f"arc{name}", None
            value = _apply(name, argument, base)
        return value if exponent is None else _power(value, exponent)

    def _function_argument(self) -> Any:
        if opens := self._take_if("(", "["):
            return self._inside(_PAIRS[opens])
        result = self._signed_factor()
        while self._starts_factor() and not self._next_is(*FUNCTIONS, kind="command"):
            result = result * self._factor()
        return result

    def _of_several(self, name: str) -> Any:
        self._expect("(")
        values = self._arguments()
        functions: dict[str, Callable[..., Any]] = {"max": sympy.Max, "min": sympy.Min}
        if name in functions:
            if not all(value.is_Rational for value in values) and (
                len(values) > MAX_COMPARED or any(value.has(*functions.values()) for value in values)
            ):
                raise Unreadable(f"{name} of more than {MAX_COMPARED} formulas")
            # sympy compares every two of its arguments, which is slow with symbols, unless it may leave them
            return functions[name](*values, evaluate=all(value.is_number for value in values))
        if len(values) < 2 or not all(value.is_Integer for value in values):
            raise Unreadable(f"{name} of what are no integers")
        return sympy.Integer((sympy.igcd if name == "gcd" else sympy.ilcm)(*values))


def checked(value: Any) -> Any:
    """Return a value. Malformed: it is undefined, as 0/0 is, or no expression."""
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo):
        raise Malformed("it is undefined")
    return value


def _number(text: str) -> Any:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    return sympy.Rational(text.rstrip(".") or "0")


def _quotient(upper: Any, lower: Any) -> Any:
    if lower.is_zero:
        raise Malformed("a division by zero")
    return checked(upper / lower)


def _power(base: Any, exponent: Any) -> Any:
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


def _factorial(argument: Any) -> Any:
    if argument.is_number and not (argument.is_Integer and 0 <= argument <= MAX_FACTORIAL):
        raise Unreadable(f"a factorial of what is no whole number up to {MAX_FACTORIAL}")
    return sympy.factorial(argument)


def _binomial(upper: Any, lower: Any) -> Any:
    if any(part.is_number and not (part.is_Integer and 0 <= part <= MAX_FACTORIAL) for part in (upper, lower)):
        raise Unreadable(f"a binomial of what is no whole number up to {MAX_FACTORIAL}")
    return sympy.binomial(upper, lower)


def _apply(name: str, argument: Any, base: Any) -> Any:
    if base is not None and name != "log":
        raise Unreadable(f"{name} with a subscript")
    if name in ("log", "lg"):
        return checked(_quotient(sympy.log(argument), sympy.log(sympy.Integer(10) if base is None else base)))
    names = {"ln": "log"} | {f"arc{name}": f"a{name}" for name in FUNCTIONS}
    function = getattr(sympy, names.get(name, name), None)
    if function is None or name in ("det",):
        raise Unreadable(f"{name} cannot be read here")
    return checked(function(argument))
