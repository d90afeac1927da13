"""Defines environments, which reply to the policy within a conversation, as a tool does; implements a calculator.

An environment is a function of the conversation so far and keeps no state. So it may run in any process and may be
killed at its time limit, and a repeated run gets the same replies.

`EnvironmentRunner` runs an environment on batches of conversations, with a time limit for each reply.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from queue import SimpleQueue
from typing import TypeVar

from hybrid3d.scoring.functions import check_target, load_function
from hybrid3d.scoring.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.scoring.pool_worker import CallResult

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


def find_environment(spec: str) -> str:
    """Return the `module:function` of a builtin, or `spec` itself if it has this form. ValueError: it is neither."""
    return ENVIRONMENTS.get(spec) or check_target(spec, ENVIRONMENTS, "environment")


def stops_of(environment: object) -> tuple[str, ...]:
    """Return the stops of an environment. TypeError: they are not texts that end in a printable ASCII character."""
    stops = getattr(environment, "stops", ())
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) and stop and stop[-1].isascii() and stop[-1].isprintable() and stop[-1] != " "
        for stop in stops
    ):
        raise TypeError(f"stops={stops!r}: expected texts that end in a printable character of ASCII, as in ('=',)")
    return tuple(stops)


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


POLL_SECONDS = 0.05

T = TypeVar("T")

ConversationItem = tuple[tuple[str, ...], str, str]
"""The turns, the reference and the prompt of one conversation."""


@dataclass(frozen=True)
class Reply:
    """An environment's reply to one conversation: a text that continues the context, or a failure with its message.

    The text is None if the conversation is over, also if the call failed. The failure is a kind of those in `Scores`
    (`not_a_text` instead of `not_a_number`), or "".
    """

    text: str | None
    failure: str = ""
    message: str = ""


class EnvironmentRunner:
    """Calls one environment in `workers` processes, which start with the first turn; a builtin one needs none.

    It is called with the alternating texts of the policy and the environment, of which the last is the policy's, and
    with the reference and the prompt of the data set. It returns the text that continues the context, or None to end
    the conversation; with an empty string the policy continues, or has ended its answer.

    Raises:
        ValueError: `spec` is neither the name of an environment nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float):
        target = find_environment(spec)
        self._function = load_function(target) if spec in ENVIRONMENTS else None
        self._pool = ProcessPoolClient(target, "reply", workers, timeout_seconds)
        # Each thread has a pool with one worker, so that no reply waits for another
        self._threads: ThreadPoolExecutor | None = None
        self._idle: SimpleQueue[ProcessPoolClient] = SimpleQueue()
        count = 0 if self._function else workers
        self._singles = [ProcessPoolClient(target, "reply", 1, timeout_seconds) for _ in range(count)]
        for pool in self._singles:
            self._idle.put(pool)

    def reply(self, items: Sequence[ConversationItem]) -> list[Reply]:
        """Return the reply to each conversation, in order."""
        if self._function is not None:
            return [Reply(self._function(*item)) for item in items]
        return [_reply(result) for result in self._pool.call(items)]

    def reply_soon(self, item: ConversationItem) -> Future[Reply]:
        """Ask for the reply to a conversation, and return at once; at most `workers` replies are made at a time."""
        if self._function is not None:
            return completed(Reply(self._function(*item)))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._singles), "environment")
        return self._threads.submit(self._reply_alone, item)

    def _reply_alone(self, item: ConversationItem) -> Reply:
        pool = self._idle.get()
        try:
            return _reply(pool.call([item])[0])
        finally:
            self._idle.put(pool)

    def close(self) -> None:
        """End all processes; the next call starts them again."""
        if self._threads is not None:
            threads, self._threads = self._threads, None
            threads.shutdown(wait=False, cancel_futures=True)
            while self._idle.qsize() < len(self._singles):  # end the calls that are being waited for
                for pool in self._singles:
                    pool.kill()
                time.sleep(POLL_SECONDS)
            threads.shutdown()
            for pool in self._singles:
                pool.close()
        self._pool.close()


def completed(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _reply(result: CallResult) -> Reply:
    text, kind, message = result
    return Reply(None if text is None else str(text), kind, message)


def check_environment(spec: str) -> tuple[str, ...]:
    """Load an environment; return its stops. ValueError: it does not exist, or cannot be loaded or called; says why."""
    target = find_environment(spec)
    if spec in ENVIRONMENTS:
        return stops_of(load_function(target))
    return load_in_subprocess(spec, target, "reply", "environment")
