r"""The reward `math` against pairs worked by hand, and what it reads against another reader of LaTeX."""

import random
import time
from pathlib import Path

import pytest
import sympy
from latex2sympy2_extended import latex2sympy

from hybrid3d.config import load_recipe
from hybrid3d.launch.preflight import check_data_references
from hybrid3d.rl.data import DataError, Example, PromptData
from hybrid3d.scoring.functions import final_text, last_formula
from hybrid3d.scoring.math.answers import math, read_reference
from hybrid3d.scoring.math.kinds import Expression
from hybrid3d.scoring.math.values import read_values
from math_pairs import RIGHT, WRONG, pairs


@pytest.mark.parametrize(("answer", "reference"), pairs(RIGHT))
def test_equal(answer: str, reference: str) -> None:
    assert math(answer, reference) == 1.0


@pytest.mark.parametrize(("answer", "reference"), pairs(WRONG))
def test_unequal(answer: str, reference: str) -> None:
    assert math(answer, reference) == 0.0


def test_right_answers_stay_right_when_swapped_and_equal_themselves() -> None:
    for answer, reference in pairs(RIGHT):
        inside = answer.removeprefix(r"\boxed{").removesuffix("}")
        assert math(rf"\boxed{{{reference}}}", rf"\boxed{{{inside}}}") == 1.0, (answer, reference)
        assert math(answer, answer) == 1.0, answer


def test_wrong_answers_stay_wrong_when_swapped() -> None:
    """Where it can be a reference at all."""
    for answer, reference in pairs(WRONG):
        if refusal(answer) is None:
            assert math(rf"\boxed{{{reference}}}", answer) == 0.0, (answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        # the last box, or boxes that belong together
        (r"No: \boxed{3}. Wait, it is \boxed{4}.", "4", 1),
        (r"No: \boxed{3}. Wait, it is \boxed{4}.", "3", 0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1,2", 1),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "2", 1),  # something stands between them
        (r"\boxed{1}, \boxed{2}", "2", 0),
        (r"\boxed{1} \text{ or } \boxed{2}", "2", 0),
        (r"\boxed{4}, \boxed{4}", "4", 1),
        (r"\[\boxed{4}\]", "4", 1),
        (r"\boxed {5}", "5", 1),
        (r"\boxed 5", "5", 1),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}", 0),  # TeX puts a box around \frac alone
        (r"so \fbox{4}.", "4", 1),
        (r"\boxed{\boxed{4}}", "4", 1),
        (r"\boxed{\boxed{4}5}", "4", 0),
        (r"\boxed{4}" + "\n<eos>", "4", 1),
        (r"4, or \boxed{3}", "4", 0),
        (r"\boxed{4} #### 5", "4", 1),
        (r"Then \boxed{72}", r"so we get $\boxed{\frac{144}{2}}$ in all", 1),
        # after ####
        ("half of that\n#### 72", "He has 5 left.\n#### 72", 1),
        ("#### $72", "72", 1),
        ("#### 4\n", "4", 1),
        ("#### 71", "#### 72", 0),
        ("4\n#### ", "4", 0),
        ("#### 4 or 5", "4", 0),
        ("#### 4\n5", "4", 0),
        ("#### 1 2 3 4", "4", 0),
        ("#### 4$ $5", "4", 0),
        # after "the answer is"
        ("The answer is: 4.", "4", 1),
        ("The answer is $\\frac{3}{4}$.", "0.75", 1),
        ("The final answer is $5$. I hope it is correct. $4$", "5", 1),
        ("The final answer is $5$. I hope it is correct. $4$", "4", 0),
        ("final answer is 4, or final answer is 5", "5", 0),
        ("final answer is 4, or final answer is 5", "4", 0),
        ("Answer: 4. Answer: 5", "4", 0),
        ("The answer is $4$, because $x=3$.", "3", 0),
        ("The answer is $4$ or $5$.", "4", 0),
        # the last formula
        ("so x = 4", "4", 1),
        (r"\(4\)", "4", 1),
        ("It is 4 apples.", "4", 1),
        ("$3$ no, $4$", "4", 1),
        ("$4$ or $5$", "5", 0),
        ("$4$, $5$", "5", 0),
        ("$4$ or $5$", "4, 5", 1),
        ("4 or 5", "5", 0),
        ("4\n5\n6", "4", 0),
        ("1 2 3 4 5 6 7 8 9", "3", 0),
        ("1 2 3 4 5 6 7 8 9", "9", 0),
    ],
)
def test_math_finds_where_the_answer_stands(answer: str, reference: str, reward: float) -> None:
    assert math(answer, reference) == reward


GARBAGE = [
    *("", " ", "I do not know.", r"\boxed{}", r"4 \boxed{4", r"\boxed{\}}", "$" * 1000, "{" * 1000, r"\frac" * 500),
    *(r"\boxed{\frac{1}{0}}", r"\boxed{nan}", "\x00\ud800", r"\boxed{4\x00}", r"\boxed{4" + "\ud800}", r"\boxed{4️}"),
]


@pytest.mark.parametrize("answer", GARBAGE)
def test_garbage(answer: str) -> None:
    assert math(answer, "4") == 0.0


SLOW = [
    *("(" * 5000, "{" * 2000, "|" * 1000, "1," * 2000 + "1", "1" * 4999, r"\pm" * 1000 + "4"),
    r"\text{" * 50 + "}" * 50,
    *(r"9^{9^{9^{9}}}", r"10^{10^{10}}", r"2^{0.123456789}", r"5^{\frac{1}{10^{300}}}", r"10^{9999}" * 400),
    *(r"(x+y+z+w)^{5000}", r"(x+1)^{9999}", r"x^{x^{x^{x^{x}}}}", r"e^{e^{e^{e^{9}}}}", r"x^{10000}<1"),
    *(r"(10^9)!", "2000!" * 300, r"\binom{2000}{1000}" * 200, r"\binom{10^9}{10^8}", r"5!!!!!!!!!", r"((((9!)!)!)!)!"),
    *(r"\sqrt{" * 30 + "2" + "}" * 30, r"\frac{1}{" * 39 + "2" + "}" * 39, "x_{" * 30 + "1" + "}" * 30),
    *(r"\cup".join(["(1,2)"] * 500), r"\{" + "1," * 1000 + r"1\}", "x<" * 500 + "1", r"\sin(10^{9999})"),
    *(r"\sqrt[10000]{2}", r"\sqrt[0]{2}", r"\log_1 2", r"\log_0 2", r"0^{0}", r"\tan 90^\circ"),
    r"\lfloor 10^{9000}\pi \rfloor",
    *(r"(x+1)^{10000}<0", "".join(f"(x+{n})" for n in range(200)) + "<0", r"(x+1)^{1000}\%", r"(x+y)^{1000}<1"),
    r"\max(" + ",".join(f"x_{{{n}}}" for n in range(58)) + ")",
    r"\max(" + ",".join(rf"\sqrt{{{n}}}" for n in range(2, 100)) + ")",
    "+".join(rf"\max(x_{{{n}}},y,z,a,b,c,d,f)" for n in range(100)),
    *("+".join(rf"\sqrt{{{n}}}" for n in range(2, 200)), r"\max(" + "x,y,z," * 20 + "x)", "1:" * 500 + "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "reference",
    [
        r"\sqrt{2}+x",
        *(pytest.param(other, marks=pytest.mark.further) for other in ("7", r"(x+1)^2+\sin x", r"(-\infty,3)")),
    ],
)
def test_math_ends_soon_on_slow_formulas(reference: str) -> None:
    """In a call: a limit of seconds ends the worker, which is counted as a failure of the reward."""
    for formula in SLOW:
        start = time.process_time()
        assert math(rf"\boxed{{{formula}}}", reference) == 0.0, formula[:80]
        assert time.process_time() - start < 4, formula[:80]


@pytest.mark.parametrize("formula", [r"(x+1)^{10000}<0", r"\max(" + ",".join(f"x_{{{n}}}" for n in range(58)) + ")"])
def test_reference_takes_no_longer(formula: str) -> None:
    """References are read before ranks start, where nothing limits their time."""
    start = time.process_time()
    read_reference(formula)
    assert math(r"\boxed{x<3}", formula) == 0.0
    assert time.process_time() - start < 4


def test_changed_formulas_raise_nothing_and_references_only_what_they_promise() -> None:
    chance = random.Random(0)
    formulas = [text for pair in pairs(RIGHT + WRONG) for text in pair]
    pieces = [*"0123456789+-*/^_{}()[]|,.:;=<>!%' xei\\$&~", *r"\frac \text{ \cup \{ \} \pm \in".split(), ""]
    for _ in range(1500):
        formula = chance.choice(formulas)
        for _ in range(chance.randint(1, 4)):
            place = chance.randint(0, len(formula))
            formula = formula[:place] + chance.choice(pieces) + formula[place + chance.randint(0, 2) :]
        assert math(formula, chance.choice(["4", "x^2", "(1,2)", r"\text{odd}"])) in (0.0, 1.0)
        assert "no mathematical expression" in (refusal(formula) or "no mathematical expression")


def refusal(reference: str) -> str | None:
    try:
        read_reference(reference)
    except ValueError as error:
        return str(error)
    return None


READ = r"""
\frac{3}{4}+\frac{1}{6}
2\cdot 3^{4}-5
-\frac{7}{8}
\sqrt{50}-\sqrt{8}
\sqrt[3]{54}
\frac{1+\sqrt{5}}{2}
\frac{\pi}{4}+2\pi
(2+3)(4-7)
\frac{2}{\sqrt{3}-1}
\frac{x^2-4}{x+2}
x^{3}-3x^{2}y+3xy^{2}-y^{3}
\frac{a+b}{a-b}
\sin{x}\cos{x}
\sin^{2}{x}
\tan{\frac{\pi}{3}}
\log_{2}{10}
\ln{5}
\log{50}
\binom{10}{3}
7!
|3-8|
\lfloor 7.9 \rfloor
\lceil 7.1 \rceil
2^{\frac{1}{2}}
3x(x+1)
\frac{\frac{1}{2}}{\frac{3}{4}}
e^{2}
0.125
12.5\times 4
n(n-1)(n-2)/6
\alpha+2\beta
x_{1}x_{2}
\arcsin{\frac{1}{2}}
\sqrt{x^{2}+y^{2}}
"""


@pytest.mark.parametrize("formula", READ.strip().splitlines())
def test_formulas_are_read_as_another_reader_reads_them(formula: str) -> None:
    (value,) = read_values(formula)
    assert isinstance(value, Expression)
    theirs = latex2sympy(formula).doit()
    point = {str(symbol): sympy.Rational(3 * n + 5, 7) for n, symbol in enumerate(sorted(theirs.free_symbols, key=str))}
    assert {str(symbol) for symbol in value.value.free_symbols} == point.keys()
    ours, others = (each.subs({s: point[str(s)] for s in each.free_symbols}) for each in (value.value, theirs))
    assert abs(sympy.N(ours - others, 30)) < 1e-25


UNREADABLE = [
    *("", " ", r"\boxed{}", "#### ", "$$", r"\frac{1}{", r"\frac{1}", "3+", "{", "}", "(1,2", "1,,2", "?", "..."),
    *("x=", "=4", r"(1,2)=(1,3)", "x=4=5", r"4=5=\foo 1", "1,2)", "5|", r"3^", r"\ldots"),
    *(
        r"\text{}",
        "4=5",
        "1/0",
        r"\sqrt",
        "He has five apples left over.",
        "He has 5, 6 or 7 apples left over.",
        "He has | apples and others, of which there are many left over",
        "See the figure above for the answer to this question",
    ),
    *("\x00", "1" * 6000),
]


@pytest.mark.parametrize("reference", UNREADABLE)
def test_reference_that_says_nothing(reference: str) -> None:
    for check in (read_reference, lambda text: math(r"\boxed{4}", text), lambda text: math(text, text)):
        with pytest.raises(ValueError, match="the reference has no mathematical expression"):
            check(reference)


WHOLE = [
    *(r"\text{Evelyn}", "Evelyn", r"\text{June 20}", r"\angle ABC", r"\int_0^1 x\,dx", r"x \equiv 3 \pmod{5}"),
    *(r"A \cup B", r"\mathbb{Z}^+", r"\{z: |z|=1\}", r"\det A = 5", r"m \mid n", r"\gcd(a,b) = 1", "_5C_2", "{}_5C_2"),
    *(
        r"(1,2,\ldots,n)",
        r"1,2,\ldots,n",
        r"\{1,2,\dots,n\}",
        r"\forall n \geq 1",
        r"n \in \mathbb{Z}^{+}",
        "1, 2, ..., n",
    ),
    r"\left\{\begin{array}{ll} x & x>0 \\ -x & x\leq 0\end{array}\right.",
    *(
        r"P(A \mid B)=\frac12",
        r"x\to 0^+",
        r"a_1 < a_2 = a_3",
        r"4\text{ m}=400\text{ cm}",
        r"\mathbf{a}\times\mathbf{b}=0",
    ),
]


@pytest.mark.parametrize("reference", WHOLE)
def test_text_and_a_formula_that_cannot_be_computed_equal_themselves(reference: str) -> None:
    read_reference(reference)
    assert math(rf"\boxed{{ {reference} }}", reference) == 1.0
    assert math(r"\boxed{4}", reference) == 0.0


def test_rows_with_unreadable_reference_are_told_before_ranks_start() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["reward.name=math"])
    answers = ["4", r"\frac{1}{", r"\text{odd}", "3+"]
    examples = tuple(Example(row, "1+1?", answer, (1,)) for row, answer in enumerate(answers))
    with pytest.raises(DataError, match=r"(?s)reward.name=math cannot use 2 of 4 references.*row 1 .*row 3 "):
        check_data_references(recipe, PromptData(examples, seed=1), {})


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"\boxed{a} and so \boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed{a} and \boxed{b}", "a, b"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{1} #### 2", "1"),
        ("#### 1 #### 2 ", "2"),
        (r"\boxed{1", ""),
        ("3", None),
    ],
)
def test_final_text(text: str, final: str | None) -> None:
    assert final_text(text) == final


@pytest.mark.parametrize("repeated", [r"\boxed{", r"\boxed{ "])
def test_final_text_of_repeated_boxes_takes_no_time(repeated: str) -> None:
    """Policies that degenerate repeat themselves, up to the longest answer that they may give."""
    began = time.monotonic()
    assert final_text(repeated * 10_000) == ""
    assert time.monotonic() - began < 2


def test_last_formula() -> None:
    assert last_formula("") is last_formula(" \n ") is None
    assert last_formula("so $x=1$\nand $y=2$") == "$y=2$"
    assert last_formula("it is (2, 3).") == "(2, 3)"
