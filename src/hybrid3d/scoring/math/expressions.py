"""Reads tokens of a formula as sympy's expressions, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from hybrid3d.scoring.math import operations as operations
from hybrid3d.scoring.math.latex_tokens import FUNCTIONS, GREEK, ORDINALS, Malformed, Token, Unreadable, literal

DEGREE, PERCENT = sympy.Symbol("°"), sympy.Symbol("%")
"""Factors that stand for the signs after a number."""

MAX_COMPARED = 8  # formulas of which the greatest or the least is taken
MAX_DEPTH = 40  # parentheses and braces within each other
_NAMED = {
    "sqrt",
    "frac",
    "binom",
    "overline",
    "bar",
    "dot",
    "hat",
    "vec",
    "tilde",
    "widehat",
    "overrightarrow",
    "boxed",
}
_ACCENTS = _NAMED - {"sqrt", "frac", "binom", "boxed"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_COMMAND_PAIRS = {"lfloor": "rfloor", "lceil": "rceil"}
_PRODUCT = {"*", "/"}


class ExpressionReader:
    """Reads an expression from tokens, and stops at what cannot belong to it: a relation, a comma, a word.

    Attributes:
        position: the number of tokens that have been read.
    """

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
        return operations.checked(total)

    @property
    def rest(self) -> list[Token]:
        """The tokens that have not been read."""
        return self._tokens[self.position :]

    def _peek(self, ahead: int = 0) -> Token | None:
        place = self.position + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def _next_is(self, *symbols: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "symbol" and token.text in symbols

    def _next_command(self, *names: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "command" and token.text in names

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
        while self._next_is("+", "-"):
            sign *= -1 if self._take().text == "-" else 1
        return sign * self._product()

    def _product(self) -> Any:
        result = self._mixed_number() or self._factor()
        while True:
            if self._next_is(*_PRODUCT):
                operator = self._take().text
                factor = self._signed_factor()
                result = operations.checked(result * factor if operator == "*" else operations.quotient(result, factor))
            elif self._starts_factor():
                result = operations.checked(result * self._factor())
            else:
                return result

    def _signed_factor(self) -> Any:
        return -self._signed_factor() if self._next_is("-") and self._take() else self._factor()

    def _mixed_number(self) -> Any:
        r"""Return the number at `1\frac{1}{2}` or `1 1/2`; None if none stands here."""
        digits = [token.text for token in self._tokens[self.position : self.position + 4]]
        if len(digits) == 4 and digits[2] == "/" and all(text.isdigit() for text in (*digits[:2], digits[3])):
            start, self.position = self.position, self.position + 4
            if 0 < int(digits[1]) < int(digits[3]) and not self._next_is("^", "!", "/") and not self._starts_factor():
                return operations.number(digits[0]) + operations.number(digits[1]) / operations.number(digits[3])
            self.position = start
        start = self.position
        whole, fraction = self._peek(), self._peek(1)
        if (
            whole is None
            or not whole.text.isdigit()
            or fraction != Token("command", "frac", bool(fraction and fraction.spaced))
        ):
            return None
        self.position += 2
        upper, lower = self._argument(digit=True), self._argument(digit=True)
        if upper.is_Integer and lower.is_Integer and 0 < upper < lower and not self._next_is("^"):
            return operations.number(whole.text) + upper / lower
        self.position = start
        return None

    def _starts_factor(self) -> bool:
        """Return whether the next token starts a factor without a sign of multiplication before it.

        A number does not: what `4 5` or `x2` means nobody can say.
        """
        token = self._peek()
        if token is None or token.kind == "number":
            return False
        if token.kind == "word":
            return token.text in ("e", "i") and self._word_is_constant()
        if token.kind == "symbol" and token.text == "{":
            after = self._peek(1)
            return after is not None and after.kind != "number"
        if token.kind == "symbol":
            return token.text in ("(", "[") or (token.text == "|" and not self._in_bars)
        names = FUNCTIONS | GREEK | (_NAMED - {"boxed"}) | _COMMAND_PAIRS.keys() | {"infty", "pi"}
        return token.kind == "letter" or token.text in names

    def _word_is_constant(self) -> bool:
        """Return whether the next word, e or i, is a constant: other words beside it would make it a part of a text."""
        after = self._peek(1)
        return after is None or after.kind != "word"

    def _factor(self) -> Any:
        base, has_power = self._atom(), False
        while True:
            if self._next_is("^") and not self._ordinal_follows():
                if has_power:
                    raise Unreadable("a power of a power without parentheses")
                base, has_power = self._raised(base), True
            elif self._next_is("!"):
                self._take()
                base = operations.factorial(base)
                if self._next_is("!"):
                    raise Unreadable("a double factorial")
            elif self._next_is("%"):
                self._take()
                base = base * PERCENT
            elif self._next_command("circ"):
                self._take()
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
        if self._next_command("circ"):
            self._take()
            return base * DEGREE
        group = [token.text for token in self._tokens[self.position : self.position + 3]]
        if group == ["{", "circ", "}"]:
            self.position += 3
            return base * DEGREE
        if self._next_is("-", "+"):  # a sign without braces, as in 10^-3
            return operations.power(base, -self._atom() if self._take().text == "-" else self._atom())
        return operations.power(base, self._atom())

    def _atom(self) -> Any:
        token = self._take()
        if token.kind == "number":
            return self._decimal(token)
        if token.kind == "letter":
            return self._symbol(token.text)
        if token.kind == "word" and len(token.text) == 1:
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
        if self._next_command("choose") and self._take():
            inside = operations.binomial(inside, self.read())
        self._in_bars = outside
        self._expect(closes, kind)
        return inside

    def _decimal(self, token: Token) -> Any:
        r"""Return a number, whose last digits may repeat, as in `0.1\overline{6}`."""
        if "." in token.text and self._next_command("overline", "bar", "dot"):
            self._take()
            repeated = self._digits()
            places = len(token.text) - token.text.index(".") - 1
            period = sympy.Rational(int(repeated), 10 ** len(repeated) - 1)
            return operations.number(token.text + "0") + period / 10**places
        return self._scientific(token) or operations.number(token.text)

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
        return operations.number(token.text) * sympy.Integer(10) ** int(sign + digits.text)

    def _digits(self) -> str:
        braced = self._next_is("{") and bool(self._take())
        token = self._take()
        if not token.text.isdigit() or len(token.text) > operations.MAX_DIGITS:
            raise Unreadable(f"{token.text!r} stands where digits are expected")
        if braced:
            self._expect("}")
        return token.text

    def _symbol(self, name: str) -> Any:
        """Return a symbol with its subscript and primes, the constant e or i, or a function's value."""
        if self._next_is("_"):
            self._take()
            name += f"_{self._raw_argument()}"
        while self._next_is("'"):
            name += self._take().text
        if name in ("e", "i"):
            return sympy.E if name == "e" else sympy.I
        if name[0] in "fgh" and len(name) < 3 and self._next_is("("):
            self._take()
            arguments = [self.read()]
            while self._next_is(",") and self._take():
                arguments.append(self.read())
            self._expect(")")
            return sympy.Function(name)(*arguments)
        return sympy.Symbol(name, real=True)

    def _command(self, name: str) -> Any:
        if name == "frac":
            upper = self._argument(digit=True)
            return operations.quotient(upper, self._argument(digit=True))
        if name == "sqrt":
            index: Any = sympy.Integer(2)
            if self._next_is("["):
                self._take()
                index = self._inside("]")
            return operations.power(self._argument(), operations.quotient(sympy.Integer(1), index))
        if name == "binom":
            upper = self._argument(digit=True)
            return operations.binomial(upper, self._argument(digit=True))
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
            self._tokens[self.position : self.position + 1] = [
                Token("number", token.text[0]),
                *([Token("number", token.text[1:])] if token.text[1:].isdigit() else [Token("symbol", token.text[1:])]),
            ]
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
        base, power = None, None
        while self._next_is("^", "_"):
            if self._take().text == "_":
                base = self._atom()
            else:
                power = -self._atom() if self._next_is("-") and self._take() else self._atom()
        if name in ("gcd", "lcm", "max", "min"):
            value = self._of_several(name)
        else:
            argument = self._function_argument().subs(DEGREE, sympy.pi / 180)
            if power == -1:
                name, power = f"arc{name}", None
            value = operations.apply(name, argument, base)
        return value if power is None else operations.power(value, power)

    def _function_argument(self) -> Any:
        if self._next_is("(", "["):
            return self._inside(_PAIRS[self._take().text])
        result = self._signed_factor()
        while self._starts_factor() and not self._next_command(*FUNCTIONS):
            result = result * self._factor()
        return result

    def _of_several(self, name: str) -> Any:
        self._expect("(")
        values = [self.read()]
        while self._next_is(",") and self._take():
            values.append(self.read())
        self._expect(")")
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
