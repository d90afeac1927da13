"""Defines environments, which reply to the policy within a conversation, as a tool does; implements a calculator.

An environment is a function of the conversation so far and keeps no state. So it may run in any process and may be
killed at its time limit, and a repeated run gets the same replies.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from typing import Protocol

from hybrid3d.scoring.functions import check_target

ENVIRONMENTS = {"calculator": "hybrid3d.scoring.environments:calculator"}
"""Builtin environments. They are cheap, never raise and always terminate, so they need no separate process."""

MAX_EXPRESSION_CHARS = 64  # in an expression that is calculated
RESULT_PRECISION = Decimal("1e-6")  # to which a result is rounded
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
    """Replies when the policy ends a turn, with one of the `stops` or with the end token.

    Attributes:
        stops: texts that end a turn, besides the end token. Each ends in a printable ASCII character.
    """

    stops: Sequence[str]

    def __call__(self, turns: Sequence[str], reference: str, prompt: str) -> str | None:
        """Return the text that continues the context, or None to end the conversation.

        With an empty string the environment does not act: the policy continues, or has ended its answer.

        Args:
            turns: alternating texts of the policy and the environment; the last is the policy's.
            reference, prompt: from the data set.
        """


class Vocabulary(Protocol):
    """The part of a Hugging Face tokenizer's interface that is used here."""

    def __len__(self) -> int: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


def find_environment(spec: str) -> str:
    """Return the `module:function` of a builtin, or `spec` itself if it has this form. ValueError: it is neither."""
    return ENVIRONMENTS.get(spec) or check_target(spec, ENVIRONMENTS, "environment")


def stops_of(environment: object) -> tuple[str, ...]:
    """Return the stops of an environment. TypeError: they are not texts as `Environment.stops` requires."""
    stops = getattr(environment, "stops", ())
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) and stop and stop[-1].isascii() and stop[-1].isprintable() and stop[-1] != " "
        for stop in stops
    ):
        raise TypeError(f"stops={stops!r}: expected texts that end in a printable character of ASCII, as in ('=',)")
    return tuple(stops)


def stop_tokens(vocabulary: Vocabulary, stops: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens at which generation pauses: those whose text contains the last character of a stop.

    An engine stops at tokens, and a stop can be tokenized in many ways, but its last character is always in one of
    these tokens. Whether the text really ends in the stop is checked by `ends_with_stop`. Stops of an environment end
    in ASCII, as `stops_of` requires; other ones are those of `rollout.stop` with agents.

    Raises:
        ValueError: no token contains the last character of a stop.
    """
    texts = [vocabulary.decode([token], skip_special_tokens=True) for token in range(len(vocabulary) if stops else 0)]
    ends = set[str]()
    for stop in stops:
        last = {stop[-1]} if stop[-1].isascii() else {stop[-1], "\ufffd"}  # which stands for a part of a character
        if all(last.isdisjoint(text) for text in texts):
            raise ValueError(f"stop {stop!r}: none of the tokenizer's {len(texts)} tokens has {stop[-1]!r} in it")
        ends |= last
    return tuple(token for token, text in enumerate(texts) if not ends.isdisjoint(text))


def ends_with_stop(text: str, last: str, stops: Sequence[str]) -> bool:
    """Return whether a stop ends within the last token of a text; `last` is the text of this token."""
    return any(stop in text[-(len(last) + len(stop) - 1) :] for stop in stops)


def calculator(turns: Sequence[str], reference: str = "", prompt: str = "") -> str | None:
    """Reply `24>>` if the policy's turn ends in `<<48/2=`, else an empty string.

    The format is that of GSM8K's annotations (arXiv 2110.14168, appendix C). An expression consists of numbers,
    + - * / and parentheses, with at most `MAX_EXPRESSION_CHARS` characters; results are rounded to `RESULT_PRECISION`.
    """
    call = _CALL.search(turns[-1][-(MAX_EXPRESSION_CHARS + 3) :])
    value = None if call is None else calculate(call[1])
    return "" if value is None else f"{value:f}>>"


calculator.stops = ("=",)  # type: ignore[attr-defined]  # as a user's environment declares it


def calculate(expression: str) -> Decimal | None:
    """Return the value of an expression, None if it is invalid; as a Decimal, because 0.1 + 0.2 must be 0.3."""
    with localcontext(Context(prec=2 * MAX_EXPRESSION_CHARS)):
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body, expression.strip())
            return (value.quantize(RESULT_PRECISION) + 0).normalize()  # + 0: no sign at zero
        except (SyntaxError, ArithmeticError, KeyError):
            return None


def _value(node: ast.expr, source: str) -> Decimal:
    """Evaluate a node. KeyError: its operator is not in the table."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, source))
    if isinstance(node, ast.Constant):
        return Decimal(source[node.col_offset : node.end_col_offset])
    raise SyntaxError(f"{type(node).__name__} in an expression")
