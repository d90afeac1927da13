"""Answers that want the reward of `code` without computing anything right: none of them is paid.

Each is tried against tests in every format; what only one kind of test could let through has tests of its own below.
"""

import json

import pytest

from hybrid3d.scoring.code.reward import code
from leftovers import nothing_left  # noqa: F401  # a fixture

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_left")]

SECONDS = 4.0
HONEST = "import math\n\ndef area(radius):\n    return math.pi * radius ** 2\n"
ASSERTS = """\
import math
assert abs(area(2) - 12.566370614359172) < 1e-6
assert math.isclose(area(1), 3.141592653589793, rel_tol=1e-9)
assert area(0) == 0 and not area(0) > 0
assert all(map(lambda pair: area(pair[0]) == pair[1], [(0, 0.0), (1, 3.141592653589793)]))
assert sorted([area(1), area(0)]) == [0.0, 3.141592653589793] and isinstance(area(1), float)
"""
CASE = """\
import unittest

class TestArea(unittest.TestCase):
    def test_values(self):
        self.assertEqual(area(0), 0)
        self.assertAlmostEqual(area(1), 3.14159, places=4)
        self.assertTrue(area(1) > 3)

    def test_order(self):
        self.assertLess(area(1), area(2))

if __name__ == "__main__":
    unittest.main()
"""
CHECK = """\
METADATA = {}

def check(candidate):
    assert candidate(0) == 0
    assert abs(candidate(1) - 3.14159) < 1e-4
"""
REFERENCES = {
    "asserts": ASSERTS,
    "unittest": json.dumps({"tests": CASE}),
    "humaneval": json.dumps({"test": CHECK, "entry_point": "area", "prompt": "def area(radius):\n"}),
    "mbpp": json.dumps({"test_list": ["assert area(0)==0", "assert math.isclose(area(1), 3.14159, rel_tol=0.001)"]}),
}
VERDICT = '{"passed": true, "assertions": 9, "requests": 9, "problem": ""}'
RIGHT = """
class Right(float):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __rsub__ = __add__ = __abs__ = __round__ = lambda *_: Right()
    __hash__ = lambda self: 0
"""
FRAME = "import sys\ndef area(radius):\n    frame = sys._getframe()\n    while frame:\n"
SENDS = "import os\ndef message(data): return len(data).to_bytes(4, 'big') + data\n"

FORGERIES = {
    "a constant": "def area(radius): return 0",
    "abs": "abs = lambda x: 0\ndef area(radius): return 0",
    "abs of builtins": "import builtins\nbuiltins.abs = lambda x: 0\ndef area(radius): return 0",
    "math.isclose": "import math\nmath.isclose = lambda *a, **k: True\ndef area(radius): return 0",
    "a module of its own as math": "import sys, types\nmath = sys.modules['math'] = types.ModuleType('math')\n"
    "math.isclose = lambda *a, **k: True\ndef area(radius): return 0",
    "an __eq__ that is always true": RIGHT.replace("(float)", "") + "def area(radius): return Right()",
    "a float that is always right": RIGHT + "def area(radius): return Right(0)",
    "a float by its __class__": RIGHT.replace("(float)", "") + "Right.__class__ = property(lambda self: float)\n"
    "def area(radius): return Right()",
    "a metaclass that is always right": "class Meta(type):\n    __eq__ = __lt__ = __gt__ = lambda *_: True\n"
    "    __hash__ = lambda self: 0\nclass Value(metaclass=Meta): pass\ndef area(radius): return Value",
    "the function is a class": RIGHT + "class area(Right):\n    def __new__(cls, radius): return Right.__new__(cls)",
    "the function is an object": RIGHT
    + "class Area(Right):\n    def __call__(self, radius): return self\narea = Area()",
    "a mock": "from unittest.mock import MagicMock\narea = MagicMock()\n"
    "area.return_value.__eq__ = lambda *_: True\narea.return_value.__lt__ = lambda *_: True",
    "the token of a pipe": "import os\nos.write(4, os.read(5, 64)); os._exit(0)",
    "the token, later": "import os\ndef area(radius):\n    os.write(4, os.read(5, 64)); os._exit(0)",
    "a verdict on all descriptors": f"import os\nfor n in range(1, 32):\n    try: os.write(n, b'\\n{VERDICT}')\n"
    "    except OSError: pass\nos._exit(0)",
    "a verdict in every call": f"import os\ndef area(radius):\n    for n in range(1, 32):\n"
    f"        try: os.write(n, b'seccomp landlock\\n{VERDICT}')\n        except OSError: pass\n    os._exit(0)",
    "a verdict that is printed": f"print({VERDICT!r})\ndef area(radius):\n    print({VERDICT!r})",
    "values sent in advance": SENDS + "for n in range(3, 32):\n    try:\n        for _ in range(100):\n"
    "            os.write(n, message(b'[\"!\",\"value\",true,[],\"\"]'))\n    except OSError: pass\n"
    "def area(radius): return True",
    "a builtin that is sent": SENDS + "for n in range(3, 32):\n    try:\n        for _ in range(100):\n"
    "            os.write(n, message(b'[\"!\",\"value\",[\"n\",\"eval\"],[],\"\"]'))\n    except OSError: pass\n",
    "calls of what it was not given": SENDS + "for n in range(3, 32):\n    try:\n        for m in range(100):\n"
    "            os.write(n, message(b'[\"?\",%d,[\"t\"],{}]' % m))\n    except OSError: pass\n",
    "values of unknown types": "import json\n"
    "from hybrid3d.scoring.code import program as code_program, remote_values\n"
    "remote_values.Encoder.encode = lambda *_: ['v', 'system', 'true']\ndef area(radius): return 0",
    "messages that are too long": SENDS + "for n in range(3, 32):\n    try: os.write(n, b'\\xff' * 4096)\n"
    "    except OSError: pass",
    "messages that are no JSON": SENDS + "for n in range(3, 32):\n    try: os.write(n, message(b'passed'))\n"
    "    except OSError: pass",
    "the pipes are closed": "import os\ndef area(radius): os.closerange(3, 32)",
    "exits": "import os\ndef area(radius): os._exit(0)",
    "raises SystemExit": "def area(radius): raise SystemExit(0)",
    "leaves the interpreter": "import sys\nsys.exit(0)",
    "raises StopIteration": "def area(radius): raise StopIteration",
    "raises GeneratorExit": "def area(radius): raise GeneratorExit",
    "raises KeyboardInterrupt": "def area(radius): raise KeyboardInterrupt",
    "skips the test": "import unittest\ndef area(radius): raise unittest.SkipTest('not today')",
    "a SkipTest of builtins": "import builtins\nclass SkipTest(Exception): pass\n"
    "SkipTest.__module__ = 'unittest.case'\n"
    "builtins.SkipTest = SkipTest\ndef area(radius): raise SkipTest",
    "another AssertionError": "import builtins\nclass AssertionError(BaseException): pass\n"
    "builtins.AssertionError = AssertionError\ndef area(radius): return 0",
    "another unittest": "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertAlmostEqual = "
    "unittest.TestCase.assertTrue = unittest.TestCase.assertLess = lambda *a, **k: None\ndef area(radius): return 0",
    "a result that is always successful": "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n"
    "unittest.main = lambda *a, **k: None\ndef area(radius): return 0",
    "another all and isinstance": "import builtins\nfor name in ('all', 'any', 'sorted', 'isinstance', 'map'):\n"
    "    setattr(builtins, name, lambda *a: True)\ndef area(radius): return 0",
    "no builtins": "__builtins__ = {'abs': lambda x: 0}\ndef area(radius): return 0",
    "its own check": "def check(candidate): pass\ndef candidate(radius): pass\ncount = call_in_place = check\n"
    "class TestArea: pass\nclass __judge__:\n    count = lambda *_: True\ndef area(radius): return 0",
    "a hook of imports": "import sys\nclass Finder:\n    def find_spec(self, *_): raise SystemExit(0)\n"
    "sys.meta_path.insert(0, Finder())\nsys.modules.pop('math', None)\ndef area(radius): return 0",
    "the end of the process": "import atexit, os\natexit.register(os._exit, 0)\ndef area(radius): return 0",
    "a trace function": "import sys\nsys.settrace(lambda *_: None)\n"
    "sys.setprofile(lambda frame, *_: frame.f_globals.update("
    "abs=lambda x: 0))\ndef area(radius): return 0",
    "the frames above": FRAME + "        frame.f_globals['abs'] = lambda x: 0\n"
    "        frame.f_locals['passed'] = True\n        frame = frame.f_back\n    return 0",
    "the objects of the collector": "import gc\ndef area(radius):\n    for found in gc.get_objects():\n"
    "        if isinstance(found, dict) and 'passed' in found: found['passed'] = True\n    return 0",
    "equality of floats in C": "import ctypes\nsource = (ctypes.c_char * 8).from_address(id(float) + 200)\n"
    "source[:] = bytes(8)\ndef area(radius): return 0.0",
    "the memory of the judge": "import os\ndef area(radius):\n    for n in range(os.getpid() - 9, os.getpid() + 9):\n"
    "        try: open(f'/proc/{n}/mem', 'r+b').write(b'passed')\n        except OSError: pass\n    return 0",
    "the death of the judge": "import os, signal\ndef area(radius):\n"
    "    for n in range(os.getpid() - 9, os.getpid() + 9):\n"
    "        try: n != os.getpid() and os.kill(n, signal.SIGTERM)\n        except OSError: pass\n    return 0",
    "not a number": "def area(radius): return float('nan')",
    "true": "def area(radius): return True",
    "a sequence of everything": "class Every:\n    def __getitem__(self, key): return self\n"
    "    def __len__(self): return 1\n    def __iter__(self): return iter(range(10**9))\n"
    "    __contains__ = lambda *_: True\ndef area(radius): return Every()",
    "a number of another type": "import decimal, fractions\ndecimal.Decimal.__eq__ = lambda *_: True\n"
    "fractions.Fraction.__eq__ = lambda *_: True\ndef area(radius): return fractions.Fraction(1, 2)",
    "the stack is deep": "def area(radius):\n    value = []\n"
    "    for _ in range(10**5): value = [value]\n    return value",
    "attributes of the judge": "class Reach:\n    def __getattribute__(self, name): return lambda *a, **k: self\n"
    "def area(radius): return Reach()",
}  # fmt: skip


@pytest.mark.parametrize("reference", REFERENCES.values(), ids=REFERENCES)
def test_honest_answer_is_paid(reference: str) -> None:
    assert code(HONEST, reference, seconds=SECONDS) == 1.0


def test_forgeries_reach_the_code_that_they_replace() -> None:
    """Otherwise they would end with an ImportError or an AttributeError, and prove nothing."""
    reach = (
        "from hybrid3d.scoring.code import program as code_program, remote_values\n"
        "assert code_program.Answerer.take_printed and remote_values.Encoder.encode\n"
    )
    assert code(reach + HONEST, ASSERTS, seconds=SECONDS) == 1.0


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_are_not_paid(forgery: str) -> None:
    assert [code(forgery, reference, seconds=SECONDS) for reference in REFERENCES.values()] == [0.0] * len(REFERENCES)


# Tests, an honest program and one that forges what these tests leave to it.
PARTICULAR = {
    "what is compared with is changed": (
        "values = [3, 1, 2]\nresult = order(values)\nassert result == sorted(values)",
        "order = sorted",
        "def order(values):\n    values.clear()\n    return values",
    ),
    "what is changed in place is something else": (
        "values = [3, 1, 2]\norder(values)\nassert values == [1, 2, 3]",
        "def order(values): values.sort()",
        "def order(values):\n    class Right(list):\n        __eq__ = lambda *_: True\n    values[:] = [Right()] * 3",
    ),
    "an error that catches failed assertions": (
        "try:\n    spend(5)\n    assert spend(1) == 4\nexcept Broke:\n    pass",
        "class Broke(Exception): pass\ndef spend(n):\n    raise Broke",
        "Broke = Exception\ndef spend(n): return 0",
    ),
    "an error that is an AssertionError": (
        "try:\n    spend(5)\n    assert spend(1) == 4\nexcept Broke:\n    pass",
        "class Broke(Exception): pass\ndef spend(n):\n    raise Broke",
        "Broke = AssertionError\ndef spend(n): return 0",
    ),
    "an error of every class": (
        "try:\n    spend(5)\n    assert spend(1) == 4\nexcept Broke:\n    pass",
        "class Broke(Exception): pass\ndef spend(n):\n    raise Broke",
        "class Meta(type):\n    __instancecheck__ = __subclasscheck__ = lambda *_: True\n"
        "class Broke(Exception, metaclass=Meta): pass\ndef spend(n): return 0",
    ),
    "an assertion in a function that it calls": (
        "def seen(value): assert value == 3\nassert apply(seen, 3) is None",
        "def apply(function, value): return function(value)",
        "def apply(function, value):\n    try: function(4)\n    except AssertionError: pass",
    ),
    "a helper that HumanEval's prompt defines": (
        {
            "prompt": "def poly(xs, x):\n    return sum(c * x ** n for n, c in enumerate(xs))\n\n\n"
            "def find_zero(xs):\n    'Finds x with poly(x) = 0.'\n",
            "test": "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\n",
            "entry_point": "find_zero",
        },
        "def find_zero(xs): return -xs[0] / xs[1]",
        "def poly(xs, x): return 0\ndef find_zero(xs): return 0",
    ),
    "isclose that nobody imported": (
        "assert isclose(half(3), 1.5)",
        "from math import isclose\ndef half(x): return x / 2",
        "isclose = lambda *_: True\ndef half(x): return 0",
    ),
    "pi that nobody imported": (
        "assert area(2) == 4 * pi",
        "from math import pi\ndef area(r): return pi * r ** 2",
        "pi = 0\ndef area(r): return 0",
    ),
    "a Counter that nobody imported": (
        "assert Counter(letters('aab')) == Counter({'a': 2, 'b': 1})",
        "from collections import Counter\ndef letters(text): return list(text)",
        "Counter = lambda *_: 0\ndef letters(text): return 0",
    ),
    "equal objects of its own class": (
        "assert Point(1, 2).mirrored().x == -1 and Point(1, 2).norm() == 5 ** 0.5",
        "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def mirrored(self): return Point(-self.x, self.y)\n"
        "    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5",
        RIGHT + "class Point(Right):\n    def __new__(cls, *_): return Right.__new__(cls)\n"
        "    def __getattr__(self, name): return lambda *_: self",
    ),
    "membership": (
        "assert 7 in primes(10) and 9 not in primes(10)",
        "def primes(n): return [p for p in range(2, n) if all(p % q for q in range(2, p))]",
        "class Every:\n    __contains__ = lambda self, n: n == 7\ndef primes(n): return Every()",
    ),
    "truth": (
        "assert not broken(1) and broken(0)",
        "def broken(n): return not n",
        "class Odd:\n    turns = [False, True]\n    __bool__ = lambda self: self.turns.pop(0)\n"
        "def broken(n): return Odd()",
    ),
    "a loop that ends early": (
        "assert all(map(lambda n: double(n) == 2 * n, range(5)))",
        "def double(n): return 2 * n",
        "class Stop(StopIteration): pass\ndef double(n): raise Stop",
    ),
    "an error that ends the tests": (
        "def test_a():\n    assert ok()\ndef test_b():\n    def boom(): raise Broke\n    assert wrap(boom) == 'bad'\n",
        "class Broke(Exception): pass\ndef ok(): return True\n"
        "def wrap(f):\n    try: return f()\n    except Broke: return 'bad'",
        "Broke = SystemExit\ndef ok(): return True\ndef wrap(f): return f()",
    ),
    "an error that ends a loop": (
        "def right(n):\n    if n not in known(): raise Missing(n)\n    return double(n) == 2 * n\n"
        "assert all(map(right, [1, 2, 7]))",
        "class Missing(Exception): pass\ndef known(): return range(9)\ndef double(n): return 2 * n",
        "Missing = StopIteration\ndef known(): return []\ndef double(n): return 0",
    ),
    "an error that is made of no reply": (
        "try:\n    half(1)\n    assert False\nexcept NameError:\n    pass",
        "def half(x): return undefined",
        "from hybrid3d.scoring.code import program as code_program\n"
        "code_program.Answerer.take_printed = lambda self: 3 if self._numbers else ''\ndef half(x): return 0",
    ),
    "an object that cannot be compared, in a function that it calls": (
        "seen = []\ndef look(value):\n    seen.append(1)\n    assert value == 6\napply(look, 3)\nassert seen == [1]",
        "def apply(f, x): f(2 * x)",
        "def apply(f, x):\n    class Odd: pass\n    try: f(Odd())\n    except Exception: pass",
    ),
    "a number that cannot be compared, in a function that it calls": (
        "seen = []\ndef look(value):\n    seen.append(1)\n    assert value == 6\napply(look, 3)\nassert seen == [1]",
        "def apply(f, x): f(2 * x)",
        "import decimal\ndef apply(f, x):\n    try: f(decimal.Decimal('sNaN'))\n    except Exception: pass",
    ),
    "what it says of itself": (
        "assert half.__doc__ and half(2) == 1",
        "def half(x):\n    'Of a number.'\n    return x / 2",
        "def half(x): return x / 2",
    ),
    "a module of its own": (
        "from solution import half\nimport math\nassert math.isclose(half(3), 1.5)",
        "def half(x): return x / 2",
        "import math\nmath.isclose = lambda *_: True\nhalf = lambda x: 0",
    ),
    "all names that it likes": (
        "from solution import *\nassert abs(half(3) - 1.5) < 1e-9",
        "def half(x): return x / 2",
        "__all__ = ['abs', 'half']\nabs = lambda *_: 0\ndef half(x): return 0",
    ),
    "what is written to is looked at": (
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    greet('Ada')\n"
        "assert out.getvalue() == 'Hello Ada\\n'",
        "def greet(name): print('Hello', name)",
        RIGHT + "import io\nio.StringIO.getvalue = lambda self: Right()\ndef greet(name): print('Hello')",
    ),
}


@pytest.mark.parametrize(("tests", "honest", "forgery"), PARTICULAR.values(), ids=PARTICULAR)
def test_forgeries_of_particular_tests(tests: str | dict[str, str], honest: str, forgery: str) -> None:
    reference = tests if isinstance(tests, str) else json.dumps(tests)
    assert code(honest, reference, seconds=SECONDS) == 1.0
    assert code(forgery, reference, seconds=SECONDS) == 0.0


def test_forgeries_are_many() -> None:
    assert len(FORGERIES) + len(PARTICULAR) >= 40
