"""Reward `code`: the answer is a Python program, and is right where it passes the reference's tests in a sandbox."""

from __future__ import annotations

import ast
import json
import re
import time
from typing import cast

from hybrid3d.rl import sandbox

_FENCE = re.compile(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def code(answer: str, reference: str, prompt: str = "", *, seconds: float = 8.0) -> float:
    """1.0 where all tests pass, else 0.0; all of them together take at most `seconds`.

    Args:
        answer: the program is its last fence of Python, or all of it.
        reference: `{"stdin_stdout": [["in", "out"], ...]}` in JSON; or `{"tests": "source with asserts"}`, or that
            source as it is. Output is compared here, where no program can reach it: it is the one to prefer. Asserts
            run in the program's own interpreter, which it can bend: see `sandbox.run`.

    Raises:
        ValueError: the reference is no such thing (SyntaxError: its tests are not Python).
    """
    program, deadline = extract_program(answer), time.monotonic() + seconds
    tests = read_tests(reference)
    if isinstance(tests, str):
        return float(sandbox.run(program, tests=tests, seconds=seconds).passed)
    for given, wanted in tests:
        left = deadline - time.monotonic()
        outcome = sandbox.run(program, stdin=given, seconds=left) if left > 0 else None
        if outcome is None or not outcome.finished or not same_output(outcome.output, wanted):
            return 0.0
    return 1.0


def extract_program(answer: str) -> str:
    """The source in the last fence that says Python, or says nothing; the whole answer where there is none."""
    fences = _FENCE.findall(answer)
    return fences[-1] if fences else answer


def read_tests(reference: str) -> str | list[tuple[str, str]]:
    """The reference's asserts, or its pairs of input and output. ValueError: it is neither."""
    try:
        read = json.loads(reference)
    except ValueError:
        read = {"tests": reference}
    if isinstance(read, dict):
        if isinstance(tests := read.get("tests"), str) and tests.strip():
            ast.parse(tests)
            return tests
        pairs = read.get("stdin_stdout")
        if isinstance(pairs, list) and pairs and all(_is_pair(pair) for pair in pairs):
            return [cast(tuple[str, str], tuple(pair)) for pair in pairs]
    raise ValueError(
        f"a reference for code needs tests, or stdin_stdout with pairs of text; this is {reference[:80]!r}"
    )


def same_output(printed: bytes, wanted: str) -> bool:
    """Equal text, whatever the white space at the ends of lines and of the whole."""
    return _lines(printed.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
