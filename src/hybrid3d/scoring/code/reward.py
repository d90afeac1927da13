"""Implements the reward `code`: 1 if the answer, a Python program, passes the reference's tests in a sandbox."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from hybrid3d.scoring.code import sandbox
from hybrid3d.scoring.code.references import Tests, read_tests

_OPENING_FENCE = re.compile(r"^```([^\n`]*)\n", re.MULTILINE)
_CLOSING_FENCE = re.compile(r"^```[ \t]*\r?$", re.MULTILINE)


def code(answer: str, reference: str, prompt: str = "", *, seconds: float = 8.0) -> float:
    """Return 1.0 if all tests pass, else 0.0. All tests together may take at most `seconds`.

    Args:
        answer: the program is its last fenced block of Python, or the whole answer.
        reference: JSON with `stdin_stdout` (pairs of text), `tests` (source with assertions), `test` and `entry_point`
            (a row of HumanEval) or `test_list` (a row of MBPP); or the source of the tests. Printed output is compared
            in this process; tests run in one sandboxed process and the program in another: see `sandbox.judge`.

    Raises:
        ValueError: the reference has another format, tests nothing, or cannot be judged.
        SyntaxError: the tests of the reference are not Python.
    """
    program, deadline = extract_program(answer), time.monotonic() + seconds
    tests = read_tests(reference)
    if isinstance(tests, Tests):
        return float(_passes(program, tests, seconds))
    for stdin, expected in tests:
        seconds_left = deadline - time.monotonic()
        outcome = sandbox.run(program, stdin=stdin, seconds=seconds_left) if seconds_left > 0 else None
        if outcome is None or not outcome.finished or not same_output(outcome.output, expected):
            return 0.0
    return 1.0


def _passes(program: str, tests: Tests, seconds: float) -> bool:
    verdict = sandbox.judge(program, tests, seconds=seconds)
    if verdict.problem:
        raise ValueError(f"the reference cannot be judged: {verdict.problem}")
    if verdict.passed and not verdict.requests:
        raise ValueError("the reference tests nothing: its tests made 0 requests to the answer")
    return verdict.passed and verdict.assertions > 0  # assertions in a loop over an empty result are not run


def extract_program(answer: str) -> str:
    """Return the last fenced block marked as Python, else the last one without a language, else the whole answer."""
    fences = list(_fenced_blocks(answer))
    for languages in (("python", "py", "python3"), ("",)):
        if sources := [source for language, source in fences if language in languages]:
            return sources[-1]
    return answer


def _fenced_blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block; the search ends at a fence that is never closed."""
    end = 0
    while (opening := _OPENING_FENCE.search(answer, end)) and (closing := _CLOSING_FENCE.search(answer, opening.end())):
        yield (opening.group(1).split() or [""])[0].lower(), answer[opening.end() : closing.start()]
        end = closing.end()


def same_output(printed: bytes, expected: str) -> bool:
    """Compare two texts, ignoring white space at the ends of lines and of the text."""
    return _lines(printed.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
