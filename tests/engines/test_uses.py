"""What hybrid3d uses of engines, as it is read in sources; and sources' definitions as Python itself has them."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

import pytest

from hybrid3d.engines.signatures import Call, Kind, Uses, bound, difference, digest, misfits, refuses, text_of
from hybrid3d.engines.syntax import statements_in
from hybrid3d.engines.trees import UNKNOWN, Definition, Tree
from hybrid3d.engines.uses import read_uses

PYTHON = Path(inspect.__file__).parent


def read(folder: Path, code: str, file: str = "train/a.py", **files: str) -> Uses:
    """Return the uses in a package that has a file with this code, and others."""
    for name, text in {file: code, **{f"train/{name}.py": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return read_uses(folder)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import megatron.core.a", {"megatron.core.a"}),
        ("from vllm import a as b\nb.c.d = b.e", {"vllm.a", "vllm.a.c.d", "vllm.a.e"}),
        ("def f():\n    from vllm import a\n    a.b", {"vllm.a", "vllm.a.b"}),
        ("from vllm import A\ndef f(x: A, y: 'A | None'):\n    x.b.c\n    y.d", {"vllm.A", "vllm.A.b.c", "vllm.A.d"}),
        ("from vllm import A\ndef f():\n    x = A()\n    x.b", {"vllm.A", "vllm.A.b"}),
        (
            "from vllm import A\nclass B:\n    def f(self):\n        self.a = A(1)\n        self.a.b",
            {"vllm.A", "vllm.A.b"},
        ),
        ("from vllm import A\nA(1).b()", {"vllm.A", "vllm.A.b"}),
        ("from vllm import a\ndef f(a):\n    a.b", {"vllm.a"}),  # the parameter hides the module
        ("from vllm import a\ndef f():\n    for a in ():\n        a.b", {"vllm.a"}),
        ("from vllm import A, B\ndef f(x: A):\n    isinstance(x, B) and x.b", {"vllm.A", "vllm.B", "vllm.B.b"}),
        ("from vllm import A\nclass B(A):\n    def f(self):\n        self.b", {"vllm.A", "vllm.A.f", "vllm.A.b"}),
        (
            "from vllm import A\nclass B(A):\n    def f(self):\n        self.b = 1\n        self.b",
            {"vllm.A", "vllm.A.f"},
        ),
        ("from vllm import A\nA.b.__wrapped__.c", {"vllm.A", "vllm.A.b"}),
        ("import torch\ntorch.a", set()),
        ("from . import vllm\nvllm.a", set()),
    ],
)
def test_names_are_read(tmp_path: Path, code: str, names: set[str]) -> None:
    assert {use.name for use in read(tmp_path, code).names} == names


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("a(1, 2, b=3)", Call(2, ("b",))),
        ("a(1, *c)", Call(1, (), is_open=True)),
        ("a(1, **c)", Call(1, (), is_open=True)),
        ("a.b(1)", Call(1, (), on_class=True)),
    ],
)
def test_calls_are_read(tmp_path: Path, code: str, call: Call) -> None:
    uses = read(tmp_path, f"from vllm import a\n{code}")
    assert [use.call for use in uses.names if use.kind == Kind.CALLED] == [call]


def test_constructor_of_the_base_is_called(tmp_path: Path) -> None:
    code = "from vllm import A\nclass B(A):\n    def __init__(self):\n        super().__init__(1, c=2)"
    assert [(use.name, use.call) for use in read(tmp_path, code).names if use.call] == [("vllm.A", Call(1, ("c",)))]


def test_methods_of_a_subclass_and_of_its_other_bases(tmp_path: Path) -> None:
    code = """
    from vllm import A

    class Mixin:
        def g(self): ...

    class B(Mixin, A):
        h = 1

        def f(self, x, y=1): ...
    """
    uses = read(tmp_path, code)
    (subclass,) = uses.subclasses
    assert (subclass.name, subclass.base, subclass.methods) == ("B", "vllm.A", {"f", "g", "h"})
    (use,) = [use for use in uses.names if use.kind == Kind.OVERRIDDEN]
    assert (use.name, text_of(use.ours or bound(ast.arguments()))) == ("vllm.A.f", "(x, y=1)")


def test_absence_that_code_handles_is_optional(tmp_path: Path) -> None:
    code = """
    from importlib.util import find_spec
    try:
        from vllm import a
    except ImportError:
        from vllm import b
    c = find_spec("vllm.c")
    from vllm import c
    """
    uses = {use.name: use.is_optional for use in read(tmp_path, code).names}
    assert uses == {"vllm.a": True, "vllm.b": False, "vllm.c": True}


DECLARING = """
TOUCHED = {"vllm.A": "x y"}
SETTINGS = (("vllm.B", "train/a.py", "settings LIMITS"),)
CHOSEN = ("Old",)
OPTIONAL = ("vllm.A.y",)
"""


def test_declarations_are_read(tmp_path: Path) -> None:
    code = """
    from vllm import A

    LIMITS = {"low": {"nested": 1}}

    def settings():
        return dict(high=1) | {"other": dict(nested=2)} | make(**{"more": 3}, last=4)

    class Old(A):
        def f(self): ...
    """
    uses = read(tmp_path, code, touched=DECLARING)
    found = {use.name: use.is_optional for use in uses.names if use.kind == Kind.DECLARED}
    fields = ("low", "high", "other", "more", "last")
    assert found == {"vllm.A.x": False, "vllm.A.y": True, **{f"vllm.B.{name}": False for name in fields}}
    assert not [use for use in uses.names if use.kind == Kind.OVERRIDDEN]
    assert uses.subclasses == ()


PATCHES = """
from hybrid3d.patches import Patch
from hybrid3d.train import other

def wrap(original):
    def wrapped(a, b=1): ...
    return wrapped

def _patch(target, replacement=None, may_be_undefined=False):
    return Patch(f"megatron.core.{target}", "", "", "", replacement, may_be_undefined)

LATER = _patch("later")
TABLE = (
    _patch("one", wrap),
    _patch("two", lambda original: lambda c: None, may_be_undefined=True),
    Patch("vllm.three", "", "", "", other.wrap_elsewhere),
    Patch("vllm.four", "", "", "", lambda original: None),
    Patch("torch.five", "", "", ""),
)

def replace_later():
    def instead(*d): ...
    LATER.replace(instead)
"""


def test_targets_of_patches_and_what_replaces_them(tmp_path: Path) -> None:
    other = "def wrap_elsewhere(original):\n    def wrapped(e): ...\n    return wrapped"
    uses = read(tmp_path, PATCHES, "train/patches.py", other=other)
    found = {
        use.name: (use.ours and text_of(use.ours), use.may_be_undefined)
        for use in uses.names
        if use.kind == Kind.PATCHED
    }
    assert found == {
        "megatron.core.later": ("(*d)", False),
        "megatron.core.one": ("(a, b=1)", False),
        "megatron.core.two": ("(c)", True),
        "vllm.three": ("(e)", False),
        "vllm.four": (None, False),
        "torch.five": (None, False),
    }


def test_transformer_engine_is_used_through_megatron_only() -> None:
    """Its own names would need an entry in `installed.ENGINES`."""
    uses = read_uses()
    assert {use.name.partition(".")[0] for use in uses.names} == {"megatron", "vllm", "torch"}
    assert len({use.name for use in uses.names}) > 500


def real(name: str) -> object:
    """Return what Python has under a dotted name."""
    module, _, rest = name.partition(":")
    found: object = importlib.import_module(module)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


FUNCTIONS = [
    *("logging:Formatter", "logging:LogRecord.getMessage", "logging:basicConfig", "logging.config:fileConfig"),
    *("json:dumps", "json:JSONEncoder", "json.decoder:JSONDecoder.raw_decode", "email:message_from_string"),
    *(
        "concurrent.futures.thread:ThreadPoolExecutor",
        "concurrent.futures.thread:ThreadPoolExecutor.submit",
        "asyncio:wait_for",
    ),
    *(
        "importlib.metadata:version",
        "importlib.metadata:Distribution.from_name",
        "unittest.mock:patch",
        "asyncio:Queue",
    ),
    *("email.message:EmailMessage", "urllib.request:Request", "urllib.request:urlopen"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_that_python_has(name: str) -> None:
    """Through imports from other modules and inherited constructors; `inspect` imports the modules and asks Python."""
    tree = Tree(PYTHON, name.partition(":")[0].partition(".")[0])
    found = tree.find(name.replace(":", "."))
    assert isinstance(found, Definition)
    parameters = tree.parameters(found)
    assert parameters is not None
    value = real(name)
    expected = [*inspect.signature(value).parameters.values()]  # type: ignore[arg-type]
    if found.is_method and not inspect.ismethod(value):
        expected = expected[1:]
    ours = eval(f"lambda {text_of(parameters)[1:-1]}: 0", dict(vars(importlib.import_module(found.module.name))))
    here = inspect.signature(ours).parameters.values()
    assert [(one.name, one.kind, repr(one.default)) for one in here] == [
        (one.name, one.kind, repr(one.default)) for one in expected
    ]


@pytest.mark.parametrize("name", ["numbers.Integral", "numbers.Complex", "numbers.Real"])
def test_abstract_methods_are_those_that_python_has(name: str) -> None:
    package, _, kind = name.partition(".")
    tree = Tree(PYTHON, package)
    found = tree.find(name)
    assert isinstance(found, Definition)
    assert found.as_class is not None
    assert tree.abstract_methods(found.as_class).keys() == real(f"{package}:{kind}").__abstractmethods__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("logging.Logger.handlers", True),  # set in the constructor
        ("logging.handlers.RotatingFileHandler.baseFilename", True),  # in that of a base, in another module
        ("logging.Logger.nothing", False),
        ("logging.config.nothing", False),
        ("logging.nothing.Logger", False),
        ("concurrent.futures.ThreadPoolExecutor", None),  # its `__getattr__` gives it
        ("concurrent.futures.nothing", False),
        ("http.server.HTTPServer.nothing", None),  # a base is in another package
        ("asyncio.nothing", False),  # which imports all names of many modules
    ],
)
def test_attributes_and_names(name: str, found: bool | None) -> None:
    definition = Tree(PYTHON, name.partition(".")[0]).find(name)
    assert (definition is UNKNOWN) if found is None else (isinstance(definition, Definition) == found)
    assert definition is None or found is not False


def test_package_that_is_not_the_tree_s_is_unknown() -> None:
    assert Tree(PYTHON, "logging").find("json.dumps") is UNKNOWN


SIGNATURES = ("", "a", "a, b=1", "a, /, b", "a, *, c", "a, *b", "a, **k", "*a, c=1, **k")
CALLS = (*((n, names) for n in range(4) for names in ((), ("a",), ("b",), ("c",), ("b", "c"))),)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize(("positional", "keywords"), CALLS)
def test_call_fits_exactly_where_python_takes_it(signature: str, positional: int, keywords: tuple[str, ...]) -> None:
    function = eval(f"lambda {signature}: 0")
    try:
        function(*range(positional), **dict.fromkeys(keywords))
        takes = True
    except TypeError as error:
        takes = False
        if "multiple values" in str(error):
            return  # no call in hybrid3d's sources gives one parameter twice
    assert (misfits(parsed(signature), Call(positional, keywords)) == []) == takes


def parsed(signature: str) -> ast.arguments:
    node = ast.parse(f"lambda {signature}: 0", mode="eval").body
    assert isinstance(node, ast.Lambda)
    return node.args


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("a, b=1", "a, b=1", ""),
        ("state, b=1", "new_state, b=1", ""),
        ("*args, **kwargs", "a, b, *, c", ""),
        ("a, **_", "a, b=1", ""),
        ("a", "a, b", "has the parameter b"),
        ("a", "a, *, b", "has the parameter b"),
        ("a, b", "b, a", "has b where hybrid3d's has a"),
        ("a, b=1", "a, x, b=1", "has x where hybrid3d's has b"),
        ("a, *, b", "a", "has no parameter b, which hybrid3d's requires"),
        ("a, b", "a", "has no parameter b, which hybrid3d's requires"),
        ("a, *, b", "a, **kwargs", ""),
    ],
)
def test_replacement_takes_what_is_replaced(ours: str, theirs: str, said: str) -> None:
    found = refuses(parsed(ours), parsed(theirs))
    assert bool(found) == bool(said)
    assert said in "".join(found)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("(a, b=1)", "(a, b=2)", "has b=2 for b=1"),
        ("(a, b=1)", "(a)", "no longer has b"),
        ("(a)", "(a, *, b=1, **k)", "has b=1, which is new; has **k, which is new"),
        ("(a, b)", "(b, a)", "has its parameters in another order or kind: (b, a)"),
    ],
)
def test_difference_of_parameters_is_told(before: str, now: str, said: str) -> None:
    assert difference(before, now) == said


def test_digest_is_of_what_code_does() -> None:
    plain = "def f():\n    return 1"
    same = "def f():\n    'Says.'\n    # why\n    return (1)"
    assert digest(ast.parse(plain).body) == digest(ast.parse(same).body)
    assert digest(ast.parse(plain).body) != digest(ast.parse("def f():\n    return 2").body)
    assert digest(ast.parse(plain).body) != digest(ast.parse("def f():\n    return True").body)


STATEMENTS = """
import a
class Kind:
    x: int = 1
    def method(self):
        for n in range(3):
            with open(n) as file, open(n):
                self.y = [z for z in file]
        else:
            def inner():
                self.z = lambda: 1
        match n:
            case 1 if n:
                self.v = n
            case _:
                pass
        try:
            self.w = 1
        except* ValueError as error:
            raise
        finally:
            while n:
                n -= 1
if a:
    async def last(): await a
elif (b := a):
    del b
"""


def test_statements_come_in_the_order_of_ast_walk() -> None:
    tree = ast.parse(STATEMENTS)
    kinds = ast.Module | ast.stmt | ast.ExceptHandler | ast.match_case
    assert [*statements_in(tree)] == [node for node in ast.walk(tree) if isinstance(node, kinds)]
