"""What a process of the pool does: it loads a function once, and turns whatever that does into plain values.

The function is a reward, or an environment.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsFloat, cast

from hybrid3d.errors import escape_control_characters
from hybrid3d.process import adopt_orphans, kill_when_parent_exits, reap_orphans, set_shared_memory_prefix
from hybrid3d.rewards.registry import load_function

ReturnKind = Literal["reward", "reply"]
Item = tuple[str | tuple[str, ...], str, str]
"""Answer (of an environment: the turns), reference, prompt."""
CallResult = tuple[float | str | None, str, str]
"""What is return_kind, or None with the kind of failure and what was said of it; a reply may be None by itself."""

START_SECONDS = 120  # to import a function's module: that of a user may import torch from a slow disk
BATCH_SECONDS = 420  # for all calls of one: the ranks that wait for them give up after ten minutes
TIME_SHARE = 0.8  # of the time limit, for a function that keeps to one by itself

_function: Callable[..., Any]
_check_value: Callable[[object], CallResult]
_load_error = ""


def initialize(target: str, return_kind: ReturnKind, seconds: float) -> None:
    """Make this process a worker. A module that does not load fails every call, and so is counted and told."""
    global _function, _check_value, _load_error
    _check_value = _number_result if return_kind == "reward" else _text_result
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for a call into C to return
    kill_when_parent_exits(os.getppid())
    adopt_orphans()  # its daemons are this process's while it lives, and end with it
    set_shared_memory_prefix()
    signal.alarm(START_SECONDS)
    try:
        _function = with_limit(load_function(target), seconds)
    except BaseException as error:  # SystemExit as well: a user's module may do anything
        _load_error = describe(error)
    signal.alarm(0)


def with_limit(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """One with a parameter `seconds` is told how long it may take, and can end in order before it is killed."""
    try:
        told = "seconds" in inspect.signature(function).parameters
    except ValueError:  # a function in C that does not say
        told = False
    return functools.partial(function, seconds=TIME_SHARE * seconds) if told else function


def is_batched() -> bool:
    """Whether the function takes lists."""
    return not _load_error and bool(getattr(getattr(_function, "func", _function), "batched", False))


def call_function(items: Sequence[Item]) -> list[CallResult]:
    """The verdict on each of the items: one, or for a batched function all."""
    reap_orphans()
    if _load_error:
        return [(None, "raised", _load_error)] * len(items)
    try:
        if not is_batched():
            return [_check_value(_function(*item)) for item in items]
        returned = _function(*(list(texts) for texts in zip(*items, strict=True)))
        values = _as_list(returned)
    except BaseException as error:  # SystemExit as well
        return [(None, "raised", describe(error))] * len(items)
    if values is None:
        said = f"{_shorten(returned)} ({type(returned).__name__}): expected a list, a tuple or a 1-D array of numbers"
        return [(None, "wrong_type", said)] * len(items)
    if len(values) != len(items):
        return [(None, "wrong_count", f"{len(values)} rewards for {len(items)} samples")] * len(items)
    return [_check_value(value) for value in values]


def _as_list(returned: Any) -> list[Any] | None:
    """The rewards of a batch, in order; None where what was returned has no order of its own, or is no sequence.

    A dict would give its keys and a string its characters, of which some are numbers. Arrays and tensors are recognized
    by what they can do, because neither numpy nor torch is imported here.
    """
    if isinstance(returned, list | tuple):
        return list(returned)
    if getattr(returned, "ndim", None) == 1 and callable(getattr(returned, "tolist", None)):
        return list(returned.tolist())
    return None


def _number_result(value: object) -> CallResult:
    """A finite float. Strings are none, scalars of numpy and torch are."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except BaseException:  # a tensor of several elements, an integer past the floats; SystemExit as well
        number = math.nan
    if math.isfinite(number):
        return number, "", ""
    return None, "not_a_number", f"{_shorten(value)} ({type(value).__name__})"


def _text_result(value: object) -> CallResult:
    """A text, or None. Half of a surrogate pair is no text: it cannot be tokenized, nor written to a file."""
    if value is None:
        return None, "", ""
    try:
        # A plain str, whatever class this is: the rank unpickles it, and must not import a user's module for that
        return str.encode(cast(str, value), "utf-8").decode(), "", ""
    except (TypeError, UnicodeEncodeError):
        return None, "not_a_text", f"{_shorten(value)} ({type(value).__name__})"


def describe(error: BaseException) -> str:
    """One line: type and message."""
    return f"{type(error).__name__}: {_shorten(error, str)}".removesuffix(": ")


def _shorten(value: object, shown: Callable[[object], str] = repr) -> str:
    try:
        return escape_control_characters(" ".join(shown(value).split())[:300])
    except BaseException as error:  # SystemExit as well
        return f"<{type(error).__name__} while showing it>"
