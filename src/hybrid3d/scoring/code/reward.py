"""Implements the reward `code`: 1 if the answer, a Python program, passes the reference's tests in a sandbox."""

from __future__ import annotations

import re
import time

from hybrid3d.scoring.code import sandbox
from hybrid3d.scoring.code.references import Tests, read_tests

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*\r?$", re.DOTALL | re.MULTILINE)


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
    fences: list[tuple[str, str]] = [
        ((info.split() or [""])[0].lower(), source) for info, source in _FENCE.findall(answer)
    ]
    for languages in (("python", "py", "python3"), ("",)):
        if sources := [source for language, source in fences if language in languages]:
            return sources[-1]
    return answer


def same_output(printed: bytes, expected: str) -> bool:
    """Compare two texts, ignoring white space at the ends of lines and of the text."""
    return _lines(printed.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
