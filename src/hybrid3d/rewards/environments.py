"""Environments by name: what answers the policy within a conversation, such as a tool; and a calculator.

An environment is a function of the conversation so far. So it keeps nothing that could be lost or mixed up: it may run
in any process, be killed for taking too long, and a run that is repeated hears the same words again.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from typing import Protocol

from hybrid3d.rewards.registry import check_target

ENVIRONMENTS = {"calculator": "hybrid3d.rewards.environments:calculator"}
"""Those that are cheap, raise nothing and end whatever was written: they need no process of their own."""

MAX_EXPRESSION_CHARS = 64  # characters of an expression
RESULT_PRECISION = Decimal("1e-6")  # of a result
_CALL = re.compile(rf"<<([-+*/(). 0-9]{{1,{MAX_EXPRESSION_CHARS}}})=\Z")
_OPERATORS: dict[type[ast.AST], Callable[..., Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Environment(Protocol):
    """What comes back when the policy has ended a turn: by one of the `stops`, or by its end token.

    Attributes:
        stops: texts; none where it is asked at the end token only. Each ends in a printable ASCII character.
    """

    stops: Sequence[str]

    def __call__(self, turns: Sequence[str], reference: str, prompt: str) -> str | None:
        """Return the text that continues the context, or None to end the conversation.

        An empty string: the environment does not act, so the policy goes on writing, or has ended.

        Args:
            turns: what the policy and the environment wrote in turn; the last is the policy's.
            reference, prompt: of the data set.
        """


class Vocabulary(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def __len__(self) -> int: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


def find_environment(spec: str) -> str:
    """`module:function` of a name in the table, or of a user's own. ValueError: it is neither."""
    return ENVIRONMENTS.get(spec) or check_target(spec, ENVIRONMENTS, "environment")


def stops_of(environment: object) -> tuple[str, ...]:
    """The stops that an environment names; TypeError where they are no such texts."""
    stops = getattr(environment, "stops", ())
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) and stop and stop[-1].isascii() and stop[-1].isprintable() and stop[-1] != " "
        for stop in stops
    ):
        raise TypeError(f"stops={stops!r}: expected texts that end in a printable character of ASCII, as in ('=',)")
    return tuple(stops)


def stop_tokens(vocabulary: Vocabulary, stops: Sequence[str]) -> tuple[int, ...]:
    """The tokens at which generating pauses: whose text has the last character of a stop in it.

    An engine compares tokens, and a stop can be cut into tokens in many ways; but each of them has a last one. Whether
    the stop is there, the text tells (`ends_with_stop`).

    Raises:
        ValueError: a stop can never be written.
    """
    texts = [vocabulary.decode([token], skip_special_tokens=True) for token in range(len(vocabulary) if stops else 0)]
    for stop in stops:
        if not any(stop[-1] in text for text in texts):
            raise ValueError(f"stop {stop!r}: none of the tokenizer's {len(texts)} tokens has {stop[-1]!r} in it")
    ends = {stop[-1] for stop in stops}
    return tuple(token for token, text in enumerate(texts) if not ends.isdisjoint(text))


def ends_with_stop(text: str, last: str, stops: Sequence[str]) -> bool:
    """Whether a stop ends within the last token of a text; `last` is that token's."""
    return any(stop in text[-(len(last) + len(stop) - 1) :] for stop in stops)


def calculator(turns: Sequence[str], reference: str = "", prompt: str = "") -> str | None:
    """`24>>` where the policy has written `<<48/2=`, and no words elsewhere.

    The form is that of GSM8K's annotations (arXiv 2110.14168, appendix C). An expression has numbers, + - * / and
    parentheses, and `MAX_EXPRESSION_CHARS` characters at most; a result is rounded to `RESULT_PRECISION`.
    """
    call = _CALL.search(turns[-1][-(MAX_EXPRESSION_CHARS + 3) :])
    value = None if call is None else calculate(call[1])
    return "" if value is None else f"{value:f}>>"


calculator.stops = ("=",)  # type: ignore[attr-defined]  # as a user's own says it


def calculate(expression: str) -> Decimal | None:
    """The value of an expression, None where it has none. Decimal, because 0.1 + 0.2 is 0.3 in a data set."""
    with localcontext(Context(prec=2 * MAX_EXPRESSION_CHARS)):
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body, expression.strip())
            return (value.quantize(RESULT_PRECISION) + 0).normalize()  # + 0: no sign at zero
        except (SyntaxError, ArithmeticError, KeyError):
            return None


def _value(node: ast.expr, source: str) -> Decimal:
    """KeyError: an operator that is not in the table."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, source))
    if isinstance(node, ast.Constant):
        return Decimal(source[node.col_offset : node.end_col_offset])
    raise SyntaxError(f"{type(node).__name__} in an expression")
