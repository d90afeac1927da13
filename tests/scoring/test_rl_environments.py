"""The calculator against GSM8K's own annotations and Python's fractions; where stops end; users' environments."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid3d.scoring.environments import (
    EnvironmentRunner,
    Reply,
    calculate,
    calculator,
    check_environment,
)

pytestmark = pytest.mark.processes

# From the data set's first rows of `train` (arXiv 2110.14168).
ANNOTATED = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.",
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.",
    "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.",
    "Working 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.",
    "In the beginning, Betty has only 100 / 2 = $<<100/2=50>>50.",
    "This means, Betty needs 100 - 50 - 30 - 15 = $<<100-50-30-15=5>>5 more.",
)


@pytest.mark.parametrize("text", ANNOTATED)
def test_calculator_writes_what_the_data_set_has(text: str) -> None:
    for annotation in re.finditer(r"=(?=[0-9.]+>>)", text):
        rest = text[annotation.end() :]
        assert calculator([text[: annotation.end()]]) == rest[: rest.index(">>") + 2]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("<<(1+2)*-3=", "-9>>"),
        ("<< 1.50 * 2 =", "3>>"),
        ("<<0.1+0.2=", "0.3>>"),
        ("<<2/3=", "0.666667>>"),
        ("<<-0*5=", "0>>"),
        ("<<100*100=", "10000>>"),
        ("<<1=1>> and <<7-9=", "-2>>"),
        ("<<<1+1=", "2>>"),
        ("48/2=", ""),
        ("<<48/2", ""),
        ("<<48/2=2", ""),
        ("<<1/0=", ""),
        ("<<0/0=", ""),
        ("<<2**99=", ""),
        ("<<7//2=", ""),
        ("<<1,000+1=", ""),
        ("<<2(3)=", ""),
        ("<<()=", ""),
        ("<<=", ""),
        ("<<x=", ""),
        ("<<1\n+1=", ""),
        (f"<<{'(' * 32}{')' * 32}=", ""),
        (f"<<{'-' * 63}1=", "-1>>"),
        (f"<<{'9' * 32}*{'9' * 31}=", f"{(10**32 - 1) * (10**31 - 1)}>>"),
        (f"<<{'1' * 65}=", ""),
        (f"<<{'1' * 100000}=", ""),
    ],
)
def test_calculator_answers_only_what_is_its_business(written: str, words: str) -> None:
    assert calculator(["<<1+1=", "2>>", written]) == words


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(0, 999)), max_size=8), st.integers(0, 999))
def test_calculate_agrees_with_fractions(rest: list[tuple[str, int]], first: int) -> None:
    source = str(first) + "".join(f"{sign}{number}" for sign, number in rest)
    try:
        exact = eval(re.sub(r"\d+", r"Fraction(\g<0>)", source), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert calculate(source) is None
    else:
        found = calculate(source)
        assert found is not None
        assert abs(Fraction(found) - exact) <= Fraction(1, 2 * 10**6)


# ---- a user's own

MINE = """\
import os, time

print("imported")

def echo(turns, reference, prompt):
    match turns[-1]:
        case "raise": raise KeyError("no such tool")
        case "sleep": time.sleep(1000)
        case "die": os._exit(7)
        case "number": return 3
        case "bye": return None
    return "|".join([*turns, reference, prompt])

def plain(turns, reference, prompt):
    return ""

def wrong(turns, reference, prompt):
    return ""

def of_two(turns, reference):
    return ""

echo.stops = ("!", "</tool>")
wrong.stops = "="
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("mine")
def test_environment_that_fails_ends_a_conversation_and_no_more() -> None:
    replier = EnvironmentRunner("mine:echo", workers=2, timeout_seconds=1.0)
    turns = [("a", "b", "c"), ("raise",), ("sleep",), ("die",), ("number",), ("bye",), ("d",)]
    try:
        assert replier.reply([(of_one, "r", "p") for of_one in turns]) == [
            Reply("a|b|c|r|p"),
            Reply(None, "raised", "KeyError: 'no such tool'"),
            Reply(None, "hung", "no reply within 1 s"),
            Reply(None, "died", "the worker ended with exit code 7"),
            Reply(None, "not_a_text", "3 (int)"),
            Reply(None),
            Reply("d|r|p"),
        ]
        assert replier.reply([]) == []
    finally:
        replier.close()


@pytest.mark.usefixtures("mine")
def test_environments_that_load() -> None:
    assert check_environment("calculator") == ("=",)
    assert check_environment("mine:echo") == ("!", "</tool>")
    assert check_environment("mine:plain") == ()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("calc", "unknown environment 'calc'; known: calculator, or a function of your own as module:function"),
        ("mine:none", "environment 'mine:none' does not load: AttributeError: module 'mine' has no attribute 'none'"),
        ("mine:wrong", "TypeError: stops='=': expected texts that end in a printable character of ASCII, as in ('=',)"),
        ("mine:of_two", "does not take (turns, reference, prompt): too many positional arguments"),
    ],
)
def test_environments_that_do_not_load(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_environment(spec)
