r"""The reward `math` against pairs worked by hand."""

import logging

import pytest

from hybrid3d.rewards.final_answers import final_text
from hybrid3d.rewards.math_answers import math


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        # fractions and decimals
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\frac12"),
        (r"\boxed{1/2}", "0.5"),
        (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}"),
        (r"\boxed{\frac{1}{3}}", "0.333333"),
        (r"\boxed{3.141593}", r"\pi"),
        (r"\boxed{1,234.50}", "1234.5"),
        (r"\boxed{10^{3}}", "1000"),
        # sets, intervals, tuples
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{(0, 1]}", r"\left(0,1\right]"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}2/2\\2\end{pmatrix}"),
        # expressions
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{2i+1}", "1+2i"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{\text{east}}", r"\text{east}"),
        # where the answer stands
        (r"No: \boxed{3}. Wait, it is \boxed{4}.", "4"),
        ("half of that\n#### 72", "He has 5 left.\n#### 72"),
        ("#### $72", "72"),
        ("The answer is $\\frac{3}{4}$.", "0.75"),
        (r"Then \boxed{72}", r"so we get $\boxed{\frac{144}{2}}$ in all"),
    ],
)
def test_equal(answer: str, reference: str) -> None:
    assert math(answer, reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\boxed{0.3333}", r"\frac{1}{3}"),
        (r"\boxed{3.14159}", r"\pi"),
        (r"\boxed{0.51}", "0.5"),
        (r"\boxed{\frac{1}{2}}", "2"),
        (r"\boxed{\{1,2,3\}}", r"\{1,2\}"),
        (r"\boxed{[0,1]}", "(0,1]"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{x^2+2x}", "(x+1)^2"),
        (r"\boxed{\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{\text{west}}", r"\text{east}"),
        (r"No: \boxed{3}. Wait, it is \boxed{4}.", "3"),  # what it said first
        (r"4, or \boxed{3}", "4"),
        ("#### 71", "#### 72"),
        ("4\n#### ", "4"),
        # garbage
        ("", "4"),
        ("I do not know.", "4"),
        (r"\boxed{}", "4"),
        (r"4 \boxed{4", "4"),  # cut short
        (r"\boxed{\}}", "4"),
        ("$" * 1000, "4"),
        ("{" * 1000, "4"),
        (r"\frac" * 500, "4"),
        (r"\boxed{\frac{1}{0}}", "4"),
        (r"\boxed{nan}", "4"),
        ("\x00\ud800", "4"),
    ],
)
def test_unequal(answer: str, reference: str) -> None:
    assert math(answer, reference) == 0.0


@pytest.mark.parametrize("reference", ["", r"\boxed{}", "#### "])
def test_a_reference_that_says_nothing(reference: str) -> None:
    with pytest.raises(ValueError, match="the reference has no mathematical expression"):
        math(r"\boxed{4}", reference)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"\boxed{a} and \boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{1} #### 2", "1"),
        ("#### 1 #### 2 ", "2"),
        (r"\boxed{1", ""),
        ("3", None),
    ],
)
def test_final_text(text: str, final: str | None) -> None:
    assert final_text(text) == final


def test_it_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The library would say, in every process, that its time limits are off."""
    with caplog.at_level(logging.WARNING):
        math(r"\boxed{4}", "4")
    assert caplog.records == []
