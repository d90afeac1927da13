"""Runs the reference's tests, in a sandboxed process separate from the program's (`program.py`).

The functions and objects that the answer defines are `Remote` proxies here: calling one sends a message, and the result
is rebuilt from this process's own types. So every comparison happens here, in code that the answer cannot reach. An
operation in which the answer would decide the verdict, such as `==` of its own objects, is a TypeError.
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

from hybrid3d.scoring.code.assertions import AssertionCounter
from hybrid3d.scoring.code.remote_values import Decoder, Encoder, Forfeit, Link, builtin_name, find_builtin, take_all

TYPE_CHECKING = False  # as typing's, which takes 7 ms to import: a fifth of what this process needs to start
if TYPE_CHECKING:
    from typing import Any, NoReturn

ANSWER_MODULES = ("solution", "program")  # module names under which tests may import the answer
FORWARDED_DUNDERS = ("__name__", "__dict__")  # other dunder attributes of the answer's objects are refused
LOOP_ENDING_ERRORS = (StopIteration, StopAsyncIteration)  # would end the tests' loops, so an answer cannot raise them
TEXT = "remote text"  # key in an error's `__dict__`; not a valid attribute name, so it collides with none


class UnsendableValue(Exception):
    """The tests pass a value to the answer that cannot be sent to its process, so the reference cannot be judged."""


class Judge(Link):
    """Sends the tests' requests to the answer's process, and counts requests and assertions."""

    def __init__(self, incoming: int, outgoing: int):
        super().__init__(incoming, outgoing, self._serve_callback)
        self.requests = self.assertions = 0  # requests sent to the answer, assertions that were run
        self.forfeited = False  # whether the answer's process ended or sent an invalid message
        self.failed = False  # whether an assertion failed in a callback, where the answer may have caught the error
        self.problem = ""  # why the reference cannot be judged
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[int, type[Exception]] = {}
        self._callables: list[Callable[..., Any]] = []

    def request(
        self, operation: str, *arguments: object, named: Mapping[str, object] | None = None, in_place: bool = False
    ) -> Any:
        """Let the answer perform an operation; returns its result or raises its error.

        Changes that the answer makes to mutable arguments are applied here only if the result is None or `in_place` is
        true: a test that uses the result may compare it with an argument, which the answer must not change.

        Raises:
            Forfeit: the answer's process ended or sent an invalid message.
            UnsendableValue: an argument cannot be sent.
        """
        if self.forfeited:
            raise Forfeit("the answer has forfeited")
        self.requests += 1
        encoder = Encoder(self._describe)
        try:
            positional = encoder.encode(arguments)  # before the keyword ones: the decoder numbers containers likewise
            keywords = {key: encoder.encode(value) for key, value in (named or {}).items()}
            match self.ask(operation, positional, keywords, in_place):
                case ["value", value, list(after), str(printed)]:
                    return self._accept(value, after, printed, encoder.containers, in_place)
                case ["error", list(kinds), encoded, str(printed)]:
                    self._print(printed)
                    error = self._error(kinds, Decoder(self._object).decode(encoded))
                case _:
                    raise Forfeit("the reply has an invalid format")
        except Forfeit:
            self.forfeited = True
            raise
        except UnsendableValue as reason:
            self.problem = self.problem or str(reason)
            raise UnsendableValue(str(reason)) from None
        raise error

    def _accept(self, encoded: Any, after: list[Any], printed: str, containers: list[Any], in_place: bool) -> Any:
        """Decode the result of a request, and update the arguments' mutable containers if the call may change them."""
        self._print(printed)
        value = Decoder(self._object).decode(encoded)
        if in_place or value is None:
            decoder = Decoder(self._object, containers)
            if len(after) != len(containers):
                raise Forfeit(f"{len(after)} of {len(containers)} containers among the arguments came back")
            for container, contents in zip(containers, after, strict=True):
                decoder.replace(container, contents)
        return value

    def look_up(self, name: str) -> Any:
        """Return what the answer defines under a name; counts as a request only if it is a plain value.

        Names such as `__all__` are refused: `from solution import *` would import whatever the answer lists there.

        Raises:
            AttributeError: the answer does not define the name.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.request("name", name)
        self.requests -= type(value) is Remote or any(value is error for error in self._errors.values())
        return value

    def count(self, value: Any) -> Any:
        self.assertions += 1
        return value

    def call_in_place(self, function: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """Call a function whose result the tests do not use, and which may therefore change its arguments."""
        if type(function) is Remote:
            return self.request("call", function, *arguments, named=named, in_place=True)
        return function(*arguments, **named)

    def _print(self, printed: str) -> None:
        """Print what the answer printed if the tests capture it, that is, have replaced sys.stdout."""
        if printed and sys.stdout is not sys.__stdout__:
            sys.stdout.write(printed)

    def _describe(self, value: object) -> list[Any]:
        """Encode a value that is not plain: a reference to an object, a builtin, an iterator or a callback."""
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
            f"the tests pass a {type(value).__name__} to the answer, which cannot be sent to another process"
        )

    def _object(self, tag: str, encoded: list[Any]) -> object:
        """Decode a value that is not plain: one of the answer's objects, an error class, or a builtin type."""
        if tag == "h" and type(encoded[0]) is int:
            return self._remotes.setdefault(encoded[0], Remote(self, encoded[0], encoded[1] is True))
        if tag == "e":
            kind = self._error_class(encoded[0])
        elif tag == "n" and isinstance(builtin := find_builtin(encoded[0]), type):
            kind = builtin
        else:
            raise Forfeit("the value has an invalid format")
        # `except` with a class that the answer supplies must not catch a failed assertion, and raising such a class
        # must not end the tests (SystemExit) or one of their loops (StopIteration).
        ends = issubclass(kind, LOOP_ENDING_ERRORS) or (
            issubclass(kind, BaseException) and not issubclass(kind, Exception)
        )
        return _UncatchableError if ends or kind in (Exception, AssertionError) else kind

    def _error_class(self, kinds: list[Any]) -> type[Exception]:
        """Return the error class for an encoded method resolution order, the most derived class first."""
        error_class: type[Exception] = Exception
        for kind in reversed(kinds):
            if isinstance(kind, str):
                builtin = vars(builtins).get(kind)
                if isinstance(builtin, type) and issubclass(builtin, error_class):
                    error_class = error_class if issubclass(builtin, LOOP_ENDING_ERRORS) else builtin
                continue
            number, name, module = kind
            if number not in self._errors:
                library_class = _library_error_class(module, name, error_class)
                self._errors[number] = library_class or _make_error_class(str(name), error_class)
            error_class = self._errors[number]
        return error_class

    def _error(self, kinds: list[Any], contents: Any) -> Exception:
        """Rebuild an error that the answer raised, of a builtin class, a class of the library, or one made for it."""
        if kinds[:1] == ["StopIteration"]:
            return _RemoteStopIteration()
        try:
            args, text, attributes = contents
            kind = self._error_class(kinds)
            try:
                error = kind(*args)
            except TypeError:  # its `__init__` takes other arguments than `args`, as that of JSONDecodeError
                error = kind.__new__(kind, *args)
            vars(error).update({name: value for name, value in attributes.items() if not name.startswith("__")})
            vars(error)[TEXT] = text
            return error
        except Exception:  # it cannot be built this way, such as UnicodeDecodeError
            return RuntimeError(str(kinds[:1]))

    def _serve_callback(self, question: list[Any]) -> list[Any]:
        """Call a function of the tests that they have passed to the answer."""
        decoder = Decoder(self._object)
        match question:
            case [int(number), arguments, dict(named)] if 0 <= number < len(self._callables):
                positional = decoder.decode(arguments)
                keywords = {name: decoder.decode(value) for name, value in named.items()}
            case _:
                raise Forfeit("the answer calls a function that was not passed to it")
        try:
            value = self._callables[number](*positional, **keywords)
            return ["value", Encoder(self._describe).encode(value)]
        except Exception as error:
            self.failed |= isinstance(error, AssertionError | _ComparisonRefused)
            remote = self._errors.values()  # the tests may raise the answer's error classes, too
            kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins" or kind in remote)
            return ["error", Encoder(self._describe).encode((kind, (str(error),)))]


def _library_error_class(module: Any, name: Any, base: type) -> Any:
    """Return an imported error class of the standard library, or None; never one of unittest, which acts on them."""
    if not isinstance(module, str) or not isinstance(name, str) or module.split(".")[0] not in sys.stdlib_module_names:
        return None
    kind = getattr(sys.modules.get(module), name, None)
    known = isinstance(kind, type) and issubclass(kind, base) and not module.startswith("unittest")
    return kind if known else None


def _make_error_class(name: str, base: type[Exception]) -> type[Exception]:
    """Create a class for the answer's own errors, whose `str()` is the text that the answer sent."""

    def text(self: Exception) -> Any:
        return vars(self)[TEXT] if TEXT in vars(self) else base.__str__(self)

    return type(name, (base,), {"__str__": text})


class _UncatchableError(Exception):
    """Replaces Exception, AssertionError and non-Exception classes that the answer supplies for `except` or `raise`."""


class _ComparisonRefused(TypeError):
    """The tests tried to compare an object of the answer."""


class _RemoteStopIteration(RuntimeError):
    """Replaces a StopIteration that the answer raised, which would silently end a loop of the tests."""


def _forwarded(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: self.remote_judge.request(operation, self, *arguments)


# A proxy of an object in the answer's process. Calls, indexing, iteration and attribute access are requests. It is true
# unless its class defines `__bool__` or `__len__`: then its truth value is an error. Comparing it is always an error,
# because the answer would decide the verdict. This is a comment because `__doc__` is forwarded to the answer.
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

    __setattr__ = _forwarded("set")
    __getitem__ = _forwarded("item")
    __setitem__ = _forwarded("put")
    __delitem__ = _forwarded("delete")
    __len__ = _forwarded("len")
    __str__ = _forwarded("str")
    __repr__ = _forwarded("repr")
    __iter__ = _forwarded("iter")

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
        raise _ComparisonRefused("an object of the answer cannot be compared: compare its plain values")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__


def main(orders: dict[str, Any]) -> None:
    judge = Judge(orders["incoming"], orders["outgoing"])
    try:
        run(judge, orders["tests"])
        passed = True
    except SystemExit as error:  # raised by the tests: an answer that exits has forfeited
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
    """Run the tests as a script, then the tests that unittest and pytest would find in it. A failure raises."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    names["__judge__"] = judge
    names |= {name: importlib.import_module(name) for name in tests["modules"]}
    names |= {name: getattr(importlib.import_module(place), name) for name, place in tests["library_names"].items()}
    for name, name_in_answer in tests["names"].items():
        try:
            names[name] = judge.look_up(name_in_answer)
        except Exception:  # the tests raise a NameError where they use it
            continue
    for name in ANSWER_MODULES:  # as in `from solution import add`
        answer = sys.modules[name] = types.ModuleType(name)
        vars(answer)["__getattr__"] = judge.look_up
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


def _count_unittest(judge: Judge) -> None:
    """Patch unittest to count assertions, and to ignore `main`, which would end the process before `_run_unittest`."""
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
