"""Reward `code`: the answer is a Python program, and is right where it passes the reference's tests in a sandbox."""

from __future__ import annotations

import re
import time

from hybrid3d.rewards import sandbox
from hybrid3d.rewards.code_references import Tests, read_tests

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def code(answer: str, reference: str, prompt: str = "", *, seconds: float = 8.0) -> float:
    """1.0 where all tests pass, else 0.0; all of them together take at most `seconds`.

    Args:
        answer: the program is its last fence of Python, or all of it.
        reference: JSON with `stdin_stdout` (pairs of text), `tests` (source with assertions), `test` and `entry_point`
            (a row of HumanEval) or `test_list` (a row of MBPP); or the source as it is. Output is compared here; tests
            run in a process of their own, and the program in another: see `sandbox.judge`.

    Raises:
        ValueError: the reference is no such thing, tests nothing, or cannot be judged (SyntaxError: it is not Python).
    """
    program, deadline = extract_program(answer), time.monotonic() + seconds
    tests = read_tests(reference)
    if isinstance(tests, Tests):
        return float(_passes(program, tests, seconds))
    for given, wanted in tests:
        left = deadline - time.monotonic()
        outcome = sandbox.run(program, stdin=given, seconds=left) if left > 0 else None
        if outcome is None or not outcome.finished or not same_output(outcome.output, wanted):
            return 0.0
    return 1.0


def _passes(program: str, tests: Tests, seconds: float) -> bool:
    verdict = sandbox.judge(program, tests, seconds=seconds)
    if verdict.problem:
        raise ValueError(f"the reference cannot be judged: {verdict.problem}")
    if verdict.passed and not verdict.requests:
        raise ValueError("the reference tests nothing: the answer was asked for 0 values")
    return verdict.passed and verdict.assertions > 0  # an empty result may be why none was reached


def extract_program(answer: str) -> str:
    """The source in the last fence that says Python, or says nothing; the whole answer where there is none."""
    fences: list[tuple[str, str]] = [
        ((said.split() or [""])[0].lower(), source) for said, source in _FENCE.findall(answer)
    ]
    for languages in (("python", "py", "python3"), ("",)):
        if found := [source for said, source in fences if said in languages]:
            return found[-1]
    return answer


def same_output(printed: bytes, wanted: str) -> bool:
    """Equal text, whatever the white space at the ends of lines and of the whole."""
    return _lines(printed.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
