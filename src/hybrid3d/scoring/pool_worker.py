"""Implements a worker process of the pool: it loads a reward or an environment once, and calls it.

Return values and errors become plain values, which every process can unpickle.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsFloat, cast

from hybrid3d.errors import escape_control_characters, set_stream_errors
from hybrid3d.process import adopt_orphans, kill_when_parent_exits, reap_orphans, set_shared_memory_prefix
from hybrid3d.scoring.functions import LARGEST_REWARD, load_function, unusable

ReturnKind = Literal["reward", "reply"]
Item = tuple[str | tuple[str, ...], str, str]
"""The arguments of a call: answer (for an environment, the turns), reference, prompt."""
CallResult = tuple[float | str | None, str, str]
"""The value, the kind of failure or "", and the message of the failure. A reply may be None without a failure."""

START_SECONDS = 120  # to import a function's module, which may import torch from a slow disk
TIME_SHARE = 0.8  # fraction of the time limit that a function with a parameter `seconds` is given

_function: Callable[..., Any]
_check_value: Callable[[object], CallResult]
_load_error = ""


def initialize(target: str, return_kind: ReturnKind, seconds: float) -> None:
    """Initialize this worker process. If the module does not load, every call fails with this error."""
    global _function, _check_value, _load_error
    _check_value = _number_result if return_kind == "reward" else _text_result
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would run only after a call into C returns
    kill_when_parent_exits(os.getppid())
    adopt_orphans()  # daemons that the function starts become children of this process, and end with it
    set_shared_memory_prefix()
    set_stream_errors()
    signal.alarm(START_SECONDS)
    try:
        _function = with_limit(load_function(target), seconds)
    except BaseException as error:  # including SystemExit: a user's module may do anything
        _load_error = describe(error)
    signal.alarm(0)


def with_limit(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Bind the parameter `seconds` of a function, if it has one, so that it can end before it is killed."""
    try:
        takes_seconds = "seconds" in inspect.signature(function).parameters
    except ValueError:  # a function in C without a signature
        takes_seconds = False
    return functools.partial(function, seconds=TIME_SHARE * seconds) if takes_seconds else function


def is_batched() -> bool:
    return not _load_error and bool(getattr(getattr(_function, "func", _function), "batched", False))


def call_function(items: Sequence[Item]) -> list[CallResult]:
    """Return the result for each of the items: a single one, or all of a batch if the function is batched."""
    reap_orphans()
    if _load_error:
        return [(None, "raised", _load_error)] * len(items)
    try:
        if not is_batched():
            return [_check_value(_function(*item)) for item in items]
        returned = _function(*(list(texts) for texts in zip(*items, strict=True)))
        values = _as_list(returned)
    except BaseException as error:  # including SystemExit
        return [(None, "raised", describe(error))] * len(items)
    if values is None:
        expected = "expected a list, a tuple or a 1-D array of numbers"
        return [(None, "wrong_type", f"{_shorten(returned)} ({type(returned).__name__}): {expected}")] * len(items)
    if len(values) != len(items):
        return [(None, "wrong_count", f"{len(values)} rewards for {len(items)} samples")] * len(items)
    return [_check_value(value) for value in values]


def _as_list(returned: Any) -> list[Any] | None:
    """Return the rewards of a batch as a list; None if the returned value is no list, tuple or 1-D array.

    A dict would give its keys and a string its characters. Arrays and tensors are recognized by their attributes,
    because neither numpy nor torch is imported here.
    """
    if isinstance(returned, list | tuple):
        return list(returned)
    if getattr(returned, "ndim", None) == 1 and callable(getattr(returned, "tolist", None)):
        return list(returned.tolist())
    return None


def _number_result(value: object) -> CallResult:
    """Convert a reward to a finite float. Strings are refused, scalars of numpy and torch are accepted."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except BaseException:  # a tensor of several elements, an integer too large for a float; including SystemExit
        number = math.nan
    kind = unusable(number)
    if not kind:
        return number, "", ""
    limit = f": at most {LARGEST_REWARD:g} in magnitude" if kind == "too_large" else ""
    return None, kind, f"{_shorten(value)} ({type(value).__name__}){limit}"


def _text_result(value: object) -> CallResult:
    """Convert a reply to a text or None. Unpaired surrogates are refused: they can be neither tokenized nor written."""
    if value is None:
        return None, "", ""
    try:
        # Converts an instance of a subclass to a plain str, which the rank can unpickle without the user's module
        return str.encode(cast(str, value), "utf-8").decode(), "", ""
    except (TypeError, UnicodeEncodeError):
        return None, "not_a_text", f"{_shorten(value)} ({type(value).__name__})"


def describe(error: BaseException) -> str:
    """Return the type and the message of an error on one line."""
    return f"{type(error).__name__}: {_shorten(error, str)}".removesuffix(": ")


def _shorten(value: object, shown: Callable[[object], str] = repr) -> str:
    try:
        return escape_control_characters(" ".join(shown(value).split())[:300])
    except BaseException as error:  # including SystemExit
        return f"<{type(error).__name__} while showing it>"
