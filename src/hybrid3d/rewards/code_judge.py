"""The judge's side of a judgement, inside a sandbox of its own: it runs the reference's tests.

What the answer defines is in another process. Its functions and objects are `Remote` here: to call one is a message,
and what comes back is a value made of this process's own types, so every comparison is made here, by code that the
answer cannot reach. What would ask the answer for the verdict, such as `==` of an object of its own, is a TypeError.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView

from hybrid3d.rewards.code_assertions import AssertionCounter
from hybrid3d.rewards.remote_values import Decoder, Encoder, Forfeit, Link, builtin_name, find_builtin, take_all

TYPE_CHECKING = False  # as typing's, which takes 7 ms to import: a fifth of what this process needs to start
if TYPE_CHECKING:
    from typing import Any, NoReturn

ANSWER_MODULES = ("solution", "program")  # what tests may import the answer as
FORWARDED_DUNDERS = ("__name__", "__dict__")  # of attributes with two underscores, those that the answer is asked for
LOOP_ENDING_ERRORS = (StopIteration, StopAsyncIteration)  # end a loop, so an answer cannot raise them
TEXT = "remote text"  # of an error: no name that an attribute can have


class UnsendableValue(Exception):
    """The tests give the answer something that cannot be sent to it, so the reference cannot be judged."""


class Judge(Link):
    """Asks the answer, and counts what the tests compare.

    Attributes:
        requests: how often the answer was asked for something.
        assertions: how many assertions were run.
        forfeited: the answer's process ended, or sent what is no message.
        failed: an assertion failed in a function that the answer called, and so may have caught the error.
        problem: why the reference cannot be judged, or "".
    """

    def __init__(self, incoming: int, outgoing: int):
        super().__init__(incoming, outgoing, self._serve_callback)
        self.requests = self.assertions = 0
        self.forfeited = self.failed = False
        self.problem = ""
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[int, type[Exception]] = {}
        self._callables: list[Callable[..., Any]] = []

    def request(
        self, operation: str, *arguments: object, named: Mapping[str, object] | None = None, in_place: bool = False
    ) -> Any:
        """What the answer makes of an operation; raises what it raises.

        The arguments stay as they are, unless the result is None or `in_place`: then they become what the answer made
        of them. A test that uses a result compares it with something, which an answer could otherwise change.
        """
        if self.forfeited:
            raise Forfeit("the answer has forfeited")
        self.requests += 1
        encoder = Encoder(self._describe)
        try:
            said = encoder.encode(arguments), {key: encoder.encode(value) for key, value in (named or {}).items()}
            question = [operation, *said, in_place]
            match self.ask(*question):
                case ["value", value, list(after), str(printed)]:
                    return self._accept(value, after, printed, encoder.containers, in_place)
                case ["error", list(kinds), told, str(printed)]:
                    self._print(printed)
                    error = self._error(kinds, Decoder(self._object).decode(told))
                case _:
                    raise Forfeit("this is no answer")
        except Forfeit:
            self.forfeited = True
            raise
        except UnsendableValue as reason:
            self.problem = self.problem or str(reason)
            raise UnsendableValue(str(reason)) from None
        raise error

    def _accept(self, said: Any, after: list[Any], printed: str, given: list[Any], in_place: bool) -> Any:
        self._print(printed)
        value = Decoder(self._object).decode(said)
        if in_place or value is None:
            decoder = Decoder(self._object, given)
            if len(after) != len(given):
                raise Forfeit("not all arguments came back")
            for container, contents in zip(given, after, strict=True):
                decoder.replace(container, contents)
        return value

    def look_up(self, name: str) -> Any:
        """What the answer defines by a name; AttributeError where there is nothing. A constant counts as asked for.

        Names such as `__all__` are refused: `from solution import *` would take whatever names the answer puts there.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.request("name", name)
        self.requests -= type(value) is Remote or any(value is error for error in self._errors.values())
        return value

    def count(self, value: Any) -> Any:
        """The same value, which an assertion is about to test."""
        self.assertions += 1
        return value

    def call_in_place(self, function: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """A call whose result the tests do not use, and which may therefore change what it is given."""
        if type(function) is Remote:
            return self.request("call", function, *arguments, named=named, in_place=True)
        return function(*arguments, **named)

    def _print(self, printed: str) -> None:
        """Print what the answer printed, for tests that look at it: they have replaced sys.stdout."""
        if printed and sys.stdout is not sys.__stdout__:
            sys.stdout.write(printed)

    def _describe(self, value: object) -> list[Any]:
        """How the answer is told of a value that is not plain."""
        if type(value) is Remote:
            return ["h", value.remote_number]
        for number, error in self._errors.items():
            if value is error:
                return ["h", number]
        if isinstance(value, types.BuiltinFunctionType) and (name := builtin_name(value)):
            return ["n", name]
        if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
            return ["y", Encoder(self._describe).encode(take_all(iter(value)))]
        if callable(value):
            self._callables.append(value)
            return ["k", len(self._callables) - 1]
        raise UnsendableValue(
            f"the tests give the answer a {type(value).__name__}, which cannot be sent to another process"
        )

    def _object(self, tag: str, said: list[Any]) -> object:
        """What the answer has named: an object of its own, a class of errors, or a builtin type."""
        if tag == "h" and type(said[0]) is int:
            return self._remotes.setdefault(said[0], Remote(self, said[0], said[1] is True))
        if tag == "e":
            kind = self._error_class(said[0])
        elif tag == "n" and isinstance(builtin := find_builtin(said[0]), type):
            kind = builtin
        else:
            raise Forfeit("this is no value")
        # A handler of what the answer calls its errors must not catch a failed assertion, nor may the tests leave by
        # raising one of them: SystemExit ends them, StopIteration a loop.
        leaves = issubclass(kind, LOOP_ENDING_ERRORS) or (
            issubclass(kind, BaseException) and not issubclass(kind, Exception)
        )
        return _UncatchableError if leaves or kind in (Exception, AssertionError) else kind

    def _error_class(self, kinds: list[Any]) -> type[Exception]:
        """The class of errors whose own names and bases are told, the most derived first."""
        found: type[Exception] = Exception
        for kind in reversed(kinds):
            if isinstance(kind, str):
                builtin = vars(builtins).get(kind)
                if (
                    isinstance(builtin, type)
                    and issubclass(builtin, found)
                    and not issubclass(builtin, LOOP_ENDING_ERRORS)
                ):
                    found = builtin
                continue
            number, name, module = kind
            if number not in self._errors:
                self._errors[number] = _library_error_class(module, name, found) or _make_error_class(str(name), found)
            found = self._errors[number]
        return found

    def _error(self, kinds: list[Any], told: Any) -> Exception:
        """What the answer raised: of a builtin class, of the library's, or of one made for it."""
        if kinds[:1] == ["StopIteration"]:
            return _RemoteStopIteration()
        try:
            args, text, attributes = told
            kind = self._error_class(kinds)
            try:
                error = kind(*args)
            except TypeError:  # its `__init__` takes others, as that of JSONDecodeError
                error = kind.__new__(kind, *args)
            vars(error).update({name: value for name, value in attributes.items() if not name.startswith("__")})
            vars(error)[TEXT] = text
            return error
        except Exception:  # one that must be made otherwise, such as UnicodeDecodeError
            return RuntimeError(str(kinds[:1]))

    def _serve_callback(self, question: list[Any]) -> list[Any]:
        """Call a function of the tests that they have given the answer."""
        decoder = Decoder(self._object)
        match question:
            case [int(number), arguments, dict(named)] if 0 <= number < len(self._callables):
                positional = decoder.decode(arguments)
                inside = {name: decoder.decode(value) for name, value in named.items()}
            case _:
                raise Forfeit("the answer asks for what it was not given")
        try:
            value = self._callables[number](*positional, **inside)
            return ["value", Encoder(self._describe).encode(value)]
        except Exception as error:
            self.failed |= isinstance(error, AssertionError | _ComparisonRefused)
            own = self._errors.values()  # which the tests may raise, too
            kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins" or kind in own)
            return ["error", Encoder(self._describe).encode((kind, (str(error),)))]


def _library_error_class(module: Any, name: Any, base: type) -> Any:
    """A class of errors of the library that the tests can name; but none that unittest acts upon."""
    if not isinstance(module, str) or not isinstance(name, str) or module.split(".")[0] not in sys.stdlib_module_names:
        return None
    kind = getattr(sys.modules.get(module), name, None)
    known = isinstance(kind, type) and issubclass(kind, base) and not module.startswith("unittest")
    return kind if known else None


def _make_error_class(name: str, base: type[Exception]) -> type[Exception]:
    """A class for errors of one of the answer's own, whose text is what the answer said that it is."""

    def text(self: Exception) -> Any:
        return vars(self)[TEXT] if TEXT in vars(self) else base.__str__(self)

    return type(name, (base,), {"__str__": text})


class _UncatchableError(Exception):
    """What stands for Exception, AssertionError and what is no Exception where the answer gives them a name."""


class _ComparisonRefused(TypeError):
    """The tests would have compared an object of the answer's."""


class _RemoteStopIteration(RuntimeError):
    """The answer raised StopIteration: as such it would end a loop of the tests unseen."""


# An object in the answer's process. It can be called, indexed and iterated over, and has attributes: all of these are
# requests. It is true, unless its class says what its truth is, and equal to nothing: comparing it would ask the answer
# for the verdict. This is a comment because its `__doc__` is the answer's.
class Remote:
    __slots__ = ("remote_judge", "remote_number", "remote_sized")
    __doc__ = property(lambda self: self.remote_judge.request("get", self, "__doc__"))

    def __init__(self, judge: Judge, number: int, sized: bool):
        object.__setattr__(self, "remote_judge", judge)
        object.__setattr__(self, "remote_number", number)
        object.__setattr__(self, "remote_sized", sized)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self.remote_judge.request("call", self, *arguments, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in FORWARDED_DUNDERS:
            raise AttributeError(name)
        return self.remote_judge.request("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self.remote_judge.request("set", self, name, value)

    def __getitem__(self, key: object) -> Any:
        return self.remote_judge.request("item", self, key)

    def __setitem__(self, key: object, value: object) -> None:
        self.remote_judge.request("put", self, key, value)

    def __delitem__(self, key: object) -> None:
        self.remote_judge.request("delete", self, key)

    def __len__(self) -> int:
        return self.remote_judge.request("len", self)  # type: ignore[no-any-return]  # len() checks it

    def __str__(self) -> str:
        return self.remote_judge.request("str", self)  # type: ignore[no-any-return]  # str() checks it

    def __repr__(self) -> str:
        return self.remote_judge.request("repr", self)  # type: ignore[no-any-return]  # repr() checks it

    def __iter__(self) -> Iterator[Any]:
        return self.remote_judge.request("iter", self)  # type: ignore[no-any-return]  # iter() checks it

    def __next__(self) -> Any:
        try:
            return self.remote_judge.request("next", self)
        except _RemoteStopIteration:
            raise StopIteration from None

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and self.remote_judge.request("isinstance", value, self) is True

    def __bool__(self) -> bool:
        return True if not self.remote_sized else self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise _ComparisonRefused("an object of the answer cannot be compared: compare the plain values that it has")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__


def main(orders: dict[str, Any]) -> None:
    """Run the tests and report the verdict."""
    judge = Judge(orders["incoming"], orders["outgoing"])
    try:
        run(judge, orders["tests"])
        passed = True
    except SystemExit as error:  # the tests' own: an answer that exits has forfeited
        passed = not error.code
    except BaseException:
        passed = False
    verdict = {
        "passed": passed and not judge.failed and not judge.forfeited,
        "assertions": judge.assertions,
        "requests": judge.requests,
        "problem": judge.problem,
    }
    os.write(orders["report"], json.dumps(verdict).encode())
    os._exit(0)


def run(judge: Judge, tests: dict[str, Any]) -> None:
    """Run the tests as a script would be, and what unittest and pytest would find in it. They raise where they fail."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    names["__judge__"] = judge
    names |= {name: importlib.import_module(name) for name in tests["modules"]}
    names |= {name: getattr(importlib.import_module(place), name) for name, place in tests["library_names"].items()}
    for own, theirs in tests["names"].items():
        try:
            names[own] = judge.look_up(theirs)
        except Exception:  # where the tests use it they will find that it is not there
            continue
    for name in ANSWER_MODULES:
        sys.modules[name] = _AnswerModule(judge, name)
    uses_unittest = any("unittest" in source for source in tests["sources"])
    if uses_unittest:
        _count_unittest(judge)
    for source in tests["sources"]:
        tree = ast.fix_missing_locations(AssertionCounter().visit(ast.parse(source)))
        exec(compile(tree, "<tests>", "exec"), names)
    for name in tests["functions"]:
        names[name]()
    if uses_unittest:
        _run_unittest(module)


class _AnswerModule(types.ModuleType):
    """What `from solution import add` finds."""

    def __init__(self, judge: Judge, name: str):
        super().__init__(name)
        self.__dict__["__getattr__"] = judge.look_up


def _count_unittest(judge: Judge) -> None:
    """Make its assertions count, and its `main` leave the tests to `_run_unittest`: it ends the process."""
    import unittest

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: judge.count(method)(*arguments, **named)

    for name, method in vars(unittest.TestCase).copy().items():
        if name.startswith(("assert", "fail")) and isinstance(method, types.FunctionType):
            setattr(unittest.TestCase, name, counted(method))
    unittest.main = lambda *_, **__: None  # type: ignore[assignment]


def _run_unittest(module: types.ModuleType) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    if not result.wasSuccessful():
        raise AssertionError("a test of unittest failed")
