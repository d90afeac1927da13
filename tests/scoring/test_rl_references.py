"""References of the reward `code`: every format judges as it is meant to, and those that test nothing are refused."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.launch.preflight import check_data_references
from hybrid3d.rl.data import DataError, Example, PromptData
from hybrid3d.scoring.code.reward import check_reference, code

pytestmark = pytest.mark.processes

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
CHECK = "METADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert True\n"
CASE = (
    "import unittest\n\nclass TestAdd(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n        with self.assertRaises(TypeError):\n            add(1, None)\n"
)
FORMATS = {
    "asserts": "assert add(1, 2) == 3",
    "tests": {"tests": "assert add(1, 2) == 3"},
    "tests as a list": {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def add(a, b):\n    '''Adds.'''\n",
        "entry_point": "add",
        "canonical_solution": "    return a + b",
        "test": CHECK,
    },
    "humaneval, called in the tests": {"tests": CHECK + "\ncheck(add)"},
    "humaneval, called as tests": {"tests": CHECK, "entry_point": "add"},
    "mbpp": {
        "task_id": 2,
        "text": "Add two numbers.",
        "code": ADD,
        "test_list": ["assert add(1, 2)==3", "assert add(2, 3)==5"],
        "test_setup_code": "three = 3",
        "challenge_test_list": ["assert add(0, 3)==three"],
    },
    "mbpp, sanitized": {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]},
    "mbpp's list": ["assert add(1, 2)==3", "assert add(2, 3)==5"],
    "unittest": {"tests": CASE},
    "unittest, with main": {"tests": CASE + "\nif __name__ == '__main__':\n    unittest.main()\n"},
    "unittest, main alone": {"tests": CASE + "\nunittest.main()\n"},
    "unittest, with a runner": {
        "tests": CASE + "\nunittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(TestAdd))\n"
    },
    "pytest": {"tests": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"},
    "if and raise": {"tests": "if add(1, 2) != 3:\n    raise SystemExit(1)"},
    "a script that exits": {"tests": "import sys\nassert add(1, 2) == 3\nsys.exit(0)"},
    "a module that nobody imported": {"tests": "assert math.isclose(add(1, 2), 3)"},
    "borrowed names": {"tests": "assert Counter([add(1, 2)]) == Counter({3: 1})"},
}


@pytest.mark.parametrize("reference", FORMATS.values(), ids=FORMATS)
def test_formats(reference: object) -> None:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    check_reference(text)
    assert code(ADD, text) == 1.0
    assert code(WRONG, text) == code("", text) == 0.0


POINT = "class Point:\n    def __init__(self, x, y=0):\n        self.x, self.y = x, y\n"
HONEST = {
    "an entry point that is a method": (
        {"test": CHECK, "entry_point": "Solution().add"},
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "an entry point named as a builtin": ({"test": CHECK, "entry_point": "sum"}, "def sum(a, b): return a + b"),
    "mbpp's function named as a builtin": (
        {"test_list": ["assert sum(1, 2) == 3"], "code": "def sum(a, b):\n    return a + b"},
        "def sum(a, b): return a + b",
    ),
    "a function named as a builtin": (
        {"test_list": ["assert sum(1, 2) == 3"], "entry_point": "sum"},
        "def sum(a, b): return a + b",
    ),
    "objects": ("p = Point(1)\np.y = 2\nassert (p.x, p.y) == (1, 2) and isinstance(p, Point)", POINT),
    "objects as arguments": (
        "assert total([Point(1, 2), Point(3)]) == 6",
        POINT + "def total(points): return sum(p.x + p.y for p in points)",
    ),
    "a linked list": (
        "node, seen = chain(3), []\nwhile node:\n    seen.append(node.x)\n    node = node.y\nassert seen == [1, 2, 3]",
        POINT + "def chain(n, k=1): return Point(k, chain(n, k + 1)) if k <= n else None",
    ),
    "what is compared must be plain": ("assert Point(1).x == 1 and len(str(Point(2).x)) == 1", POINT),
    "in place": ("a = [[3], 1]\nturn(a)\nassert a == [1, [3]]", "def turn(a): a.reverse()"),
    "in place, and a result": ("a = [3, 1]\nturn(a)\nassert a == [1, 3]", "def turn(a):\n    a.sort()\n    return a"),
    "in place, of parts": (
        "row = [1, 2]\na = {'row': row, 'set': {1}}\nturn(a)\n"
        "assert row == [2, 1] and a == {'row': [2, 1], 'set': {1, 5}}",
        "def turn(a):\n    a['row'].reverse()\n    a['set'].add(5)",
    ),
    "a function as an argument": (
        "assert fold(lambda a, b: a * b, [1, 2, 3]) == 6 and fold(max, [1, 5, 2]) == 5",
        "import functools\ndef fold(f, xs): return functools.reduce(f, xs)",
    ),
    "a decorator": (
        "calls = []\n@twice\ndef double(x):\n    calls.append(x)\n    return 2 * x\n"
        "assert double(3) == 12\nassert calls == [3, 6]",
        "def twice(f): return lambda x: f(f(x))",
    ),
    "an error of a function that is given": (
        "def fails(): raise ValueError('no')\nassert safely(fails) == 'no'",
        "def safely(f):\n    try: return f()\n    except ValueError as error: return str(error)",
    ),
    "generators": (
        "assert list(count(3)) == [0, 1, 2]\ng = count(2)\nassert next(g) == 0 and next(g, 9) == 1 and next(g, 9) == 9",
        "def count(n): yield from range(n)",
    ),
    "an iterator as an argument": ("assert first(iter('ab')) == 'a'", "def first(it): return next(it)"),
    "errors of its own": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        with self.assertRaises(Broke) as caught: spend()\n"
        "        self.assertEqual(str(caught.exception), 'no')",
        "class Base(Exception): pass\nclass Broke(Base): pass\ndef spend(): raise Broke('no')",
    ),
    "errors by their base": (
        "try:\n    spend()\n    assert False\nexcept Base as error:\n    assert error.args == (3,)",
        "class Base(Exception): pass\nclass Broke(Base): pass\ndef spend(): raise Broke(3)",
    ),
    "errors of its own assertions": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        with self.assertRaisesRegex(AssertionError, 'no'): spend()",
        "def spend(): assert False, 'no'",
    ),
    "errors of builtins": (
        "try:\n    spend()\nexcept KeyError:\n    pass\nelse:\n    assert spend() is None and False",
        "def spend(): return {}[1]",
    ),
    "subclasses of plain types": (
        "assert letters('aab') == {'a': 2, 'b': 1} and pair() == (1, 2)",
        "from collections import Counter, namedtuple\ndef letters(text): return Counter(text)\n"
        "def pair(): return namedtuple('Pair', 'x y')(1, 2)",
    ),
    "values of the library": (
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date\n"
        "from collections import deque\nassert values() == [Fraction(1, 3), Decimal('0.1'), date(2024, 2, 29), "
        "deque([1]), range(3), 2j, b'\\xff', bytearray(b'a'), frozenset({1}), 10 ** 5000, int]\n",
        "import collections, datetime, decimal, fractions\ndef values(): return [fractions.Fraction(1, 3), "
        "decimal.Decimal('0.1'), datetime.date(2024, 2, 29), collections.deque([1]), range(3), 2j, b'\\xff', "
        "bytearray(b'a'), frozenset({1}), 10 ** 5000, int]",
    ),
    "not a number": ("assert str(worst()) == 'nan'", "def worst(): return float('nan')"),
    "a list that contains itself": (
        "a = ring()\nassert a[0] is a",
        "def ring():\n    a = []\n    a.append(a)\n    return a",
    ),
    "constants": ("assert LIMIT == 3 and NAMES['a'] == [1]", "LIMIT, NAMES = 3, {'a': [1]}"),
    "state": (
        "bump()\nbump()\nassert count() == 2",
        "n = 0\ndef bump():\n    global n\n    n += 1\ndef count(): return n",
    ),
    "a type of the builtins": ("assert text(3) == '3' and text('a') == 'a'", "text = str"),
    "all names of the solution": ("from solution import *\nassert half(4) == 2", "def half(x): return x / 2"),
    "much": ("assert sum(numbers(10 ** 5)) == 4999950000", "def numbers(n): return list(range(n))"),
    "printing": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    greet()\n"
        "assert out.getvalue() == 'hello\\n'",
        "print('loaded')\ndef greet(): print('hello')",
    ),
    "printing bytes, and around a function that is given": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    wrapped(lambda: inner())\nassert out.getvalue() == 'before\\ninner\\nafter\\n'",
        "import sys\ndef inner(): sys.stdout.buffer.write(b'inner\\n')\n"
        "def wrapped(f):\n    print('before')\n    f()\n    print('after')",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reference", "program"), HONEST.values(), ids=HONEST)
def test_references_accept_what_tests_may_do(reference: str | dict[str, object], program: str) -> None:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    check_reference(text)
    assert code(program, text) == 1.0


EMPTY = {
    "#### 43": "no",
    "pass": "nothing that the answer defines",
    "1/2": "nothing that the answer defines",
    "assert True": "nothing that the answer defines",
    "assert 1 + 1 == 2": "nothing that the answer defines",
    "add(1, 2)": "no assertion that is run",
    "add(1, 2) == 3": "no assertion that is run",
    '{"stdin_stdout": [["3\\n", ""], ["4\\n", "\\n"]]}': "prints nothing passes all",
    "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n    add(1, 2)\n    self.assertTrue(True)":
    "no assertion that is run",
    "add(1, 2)\nassert True": "no assertion that is run",
    "assert (add(1, 2) == 3, 'it adds')": "no assertion that is run",
    "def run():\n    assert add(1, 2) == 3": "no assertion that is run",
    "class Tests:\n    def test_add(self):\n        assert add(1, 2) == 3": "no assertion that is run",
    "def test_add(fixture):\n    assert add(1, 2) == 3": "no assertion that is run",
    json.dumps({"tests": "# x"}): "nothing that the answer defines",
    json.dumps({"test": CHECK}): "nothing calls it: name the candidate in entry_point",
    json.dumps({"tests": CHECK}): "nothing calls it: name the candidate in entry_point",
    json.dumps({"test": CHECK, "entry_point": "no name"}): "entry_point 'no name' is not a Python expression",
    json.dumps({"test": "def check(candidate):\n    pass", "entry_point": "add"}): "no assertion that is run",
    json.dumps({"test": CHECK + "    assert poly(candidate(1, 2))", "entry_point": "add"}): "use poly, which neither",
    json.dumps(["assert sum(10, 15) == 6"]): "must be named in entry_point",
    json.dumps({"test_list": []}): "needs tests, or stdin_stdout",
    json.dumps({"stdin_stdout": [["1", 2]]}): "needs tests, or stdin_stdout",
    "import numpy as np\nassert np.allclose(add(1, 2), 3)": "import numpy, and the sandbox has",
    "Natalia sold 48/2 = 24 clips. #### 72": "not Python",
    "assert add(1, 2) ==": "not Python",
    "assert add(1, 2) == '\0'": "null bytes",
    "assert " + "(" * 500 + "add" + ")" * 500: "not Python",
    "[" * 100000: "not Python",
}  # fmt: skip


@pytest.mark.parametrize(("reference", "reason"), EMPTY.items())
def test_references_that_test_nothing(reference: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_reference(reference)
    with pytest.raises((ValueError, SyntaxError, MemoryError, RecursionError)):
        code(ADD, reference)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("values = [add]\nassert len(values) == 1", "its tests made 0 requests to the answer"),
        ("assert add(object(), 1) == 3", "cannot be judged: the tests pass a object to the answer"),
    ],
)
def test_references_that_turn_out_to_test_nothing(reference: str, reason: str) -> None:
    check_reference(reference)
    with pytest.raises(ValueError, match=reason):
        code(ADD, reference)


def test_assertion_that_is_not_reached_is_not_paid() -> None:
    """That may be the answer's doing, as where it returns nothing to loop over."""
    assert code("def primes(n): return []", "for p in primes(10): assert p in (2, 3, 5, 7)") == 0.0


def test_thousands_of_references_are_checked_in_no_time() -> None:
    references = [json.dumps(FORMATS["mbpp"]), json.dumps(FORMATS["humaneval"]), json.dumps(FORMATS["unittest"])]
    began = time.process_time()
    for _ in range(1000):
        for reference in references:
            check_reference(reference)
    assert time.process_time() - began < 5


# ---- before ranks start


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["reward.name=code"])


def data(*references: str) -> PromptData:
    examples = (Example(2 * row, "question", reference, (1,)) for row, reference in enumerate(references))
    return PromptData(tuple(examples), seed=1)


def test_data_with_references_that_test_nothing_is_refused(recipe: Recipe) -> None:
    right, wrong = data(*["assert f(1) == 2"] * 9), data("assert f(1) == 2", *["#### 43"] * 4, "pass")
    check_data_references(recipe, right, {"eval": right})
    for train, held_out, path in ((wrong, right, recipe.data.train), (right, wrong, recipe.data.eval)):
        with pytest.raises(DataError) as refused:
            check_data_references(recipe, train, {"eval": replace(held_out, path=recipe.data.eval)})
        first, *rows = str(refused.value).splitlines()
        assert first == (
            f"{path}: reward.name=code cannot use 5 of 6 references in column 'answer': fix or remove these rows"
        )
        assert [row.split(":")[0] for row in rows] == [*[f"  row {n} (from 0)" for n in (2, 4, 6)], "  ..."]


def test_reference_check_covers_only_what_the_reward_judges(recipe: Recipe) -> None:
    right, wrong = data("assert f(1) == 2"), data("#### 43")
    check_data_references(replace(recipe, reward=replace(recipe.reward, name="gsm8k")), wrong, {"eval": wrong})
    check_data_references(replace(recipe, reward=replace(recipe.reward, model="judge")), wrong, {"eval": right})
    sft = replace(recipe, algorithm=replace(recipe.algorithm, name="sft"), rollout=None)
    check_data_references(sft, wrong, {"eval": wrong})
