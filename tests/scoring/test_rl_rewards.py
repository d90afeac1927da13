"""The exact-match reward: a table of what counts as the same number."""

import pytest

from hybrid3d.scoring.functions import find_reward, gsm8k, load_function, overlong_penalty

REFERENCE = "Natalia sold 48/2 = <<48/2=24>>24 clips in May. 48+24 = <<48+24=72>>72 altogether.\n#### 72"


@pytest.mark.parametrize(
    "answer",
    [
        "#### 72",
        "####72",
        "so it is 72.\n#### 72\n",
        "#### 72.0",
        "#### 72.",
        "#### $72",
        "#### $ 72.00 dollars",
        "#### +72",
        "#### 072",
        "#### 72 clips in all",
        "#### 71 no,\n#### 72",
        "##### 72",
        "#### 7,2",  # commas are thousands' separators wherever they stand
        "####\n72",
    ],
)
def test_right_answers(answer: str) -> None:
    assert gsm8k(answer, REFERENCE) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "72",
        "### 72",
        "#### ",
        "#### seventy-two",
        "#### 73",
        "#### 720",
        "#### -72",
        "#### 72.0000000000000001",  # equal as floats
        "#### 72 ####",
        "#### 72\n#### 71",
        "#### 72x",
        "#### 7 2",
        "#### 144/2",
        "#### 7.2e1",
        "#### 7_2",
        "#### ٧٢",  # digits to Python, not to this data set
        "#### nan",
        "#### Infinity",
        "#### .",
        "#### -",
        "#### 7.2.",
    ],
)
def test_wrong_answers(answer: str) -> None:
    assert gsm8k(answer, REFERENCE) == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("#### 1234567.5", "#### 1,234,567.50", 1.0),
        ("It is #### 72.5.", "#### 72.5", 1.0),
        ("#### -3", "#### -3", 1.0),
        ("#### -$3", "#### -3", 1.0),
        ("#### 0.5", "#### .5", 1.0),
        ("#### -0", "#### 0", 1.0),
        ("#### 0.1", "#### 0.10000000000000001", 0.0),
        ("#### 5", "no number there", 0.0),
        ("nor here", "no number there", 0.0),
        ("#### nan", "#### nan", 0.0),
        ("#### 1234", "$1,234.0", 1.0),
        ("#### 1", "1 1/2", 0.0),
        ("#### 12", "####12", 1.0),
        ("1234", "1234", 0.0),
    ],
)
def test_pairs(answer: str, reference: str, reward: float) -> None:
    assert gsm8k(answer, reference) == reward
    assert type(gsm8k(answer, reference)) is float


def test_very_long_number_is_a_number() -> None:
    digits = "9" * 20_000  # int() refuses these
    assert gsm8k(f"#### {digits}", f"#### {digits}") == 1.0
    assert gsm8k(f"#### {digits}", f"#### {digits[:-1]}8") == 0.0


def test_rewards_by_name() -> None:
    assert load_function(find_reward("gsm8k").target) is gsm8k
    assert not find_reward("gsm8k").pooled
    assert all(find_reward(name).pooled for name in ("math", "code", "mine:reward", "some.where.mine:reward"))


@pytest.mark.parametrize(
    "spec", ["gsm8", "", "mine:", ":reward", "mine.reward", "mine:reward()", "mine:a:b", "mine.:a"]
)
def test_rewards_that_are_none(spec: str) -> None:
    with pytest.raises(ValueError, match="known: code, gsm8k, math, or a function of your own as module:function"):
        find_reward(spec)


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1)])
def test_overlong_penalty_by_hand(tokens: int, penalty: float) -> None:
    """At most 20 tokens, a buffer of 4: from 16 on a quarter each."""
    assert overlong_penalty(tokens, max_tokens=20, buffer=4) == penalty
