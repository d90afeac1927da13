"""The answer's side of a judgement, inside the sandbox: it runs the program, and then does what the judge asks.

Everything here is within the program's reach. That matters to nobody: the judge takes nothing from it but values.
"""

from __future__ import annotations

import io
import operator
import sys
import types
from collections.abc import Callable

from hybrid3d.rewards.remote_values import Decoder, Encoder, Link, find_builtin, is_plain

TYPE_CHECKING = False  # as typing's, which takes 7 ms to import: a fifth of what this process needs to start
if TYPE_CHECKING:
    from typing import Any

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "delete": operator.delitem,
    "len": len,
    "str": str,
    "repr": repr,
    "iter": iter,
    "next": next,
    "isinstance": isinstance,
}


def main(orders: dict[str, Any]) -> None:
    """Run the program as a module, and answer until the judge ends."""
    printed = io.BytesIO()
    sys.stdout = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)
    program = types.ModuleType("program")
    sys.modules["__main__"] = sys.modules["program"] = program
    link = Answerer(program, printed, orders["incoming"], orders["outgoing"])
    exec(compile(orders["program"], "<program>", "exec"), program.__dict__)
    link.take_printed()  # what it printed by being loaded
    link.serve()


class Answerer(Link):
    """Does what the judge asks, and keeps the objects that have numbers."""

    def __init__(self, program: types.ModuleType, printed: io.BytesIO, incoming: int, outgoing: int):
        super().__init__(incoming, outgoing, self.answer)
        self._program, self._printed = program, printed
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}

    def answer(self, question: list[Any]) -> list[Any]:
        """`["value", value, arguments as they are now, what was printed]`, or `["error", types, parts, printed]`."""
        operation, arguments, named, in_place = question
        decoder = Decoder(self._object)
        try:
            target, *rest = decoder.decode(arguments)
            inside = {name: decoder.decode(value) for name, value in named.items()}
            if operation == "name":
                value = getattr(self._program, target)
            else:
                value = OPERATIONS[operation](target, *rest, **inside)
            is_new = operation == "call" and isinstance(target, type) and not is_plain(value)
            said = self._describe(value) if is_new else Encoder(self._describe).encode(value)
            after: list[Any] = []
            if in_place or value is None:
                encoder = Encoder(self._describe, decoder.containers)
                after = [encoder.encode_contents(container) for container in decoder.containers]
            return ["value", said, after, self.take_printed()]
        except Exception as error:
            kinds = self._kinds(type(error))
            try:
                told = Encoder(self._describe).encode((error.args, str(error), vars(error)))
            except Exception:
                told = Encoder(self._describe).encode(((str(error),), str(error), {}))
            return ["error", kinds, told, self.take_printed()]

    def take_printed(self) -> str:
        """What was printed since the last time."""
        text = self._printed.getvalue().decode(errors="replace")
        self._printed.seek(0)
        self._printed.truncate()
        return text

    def _describe(self, value: object) -> list[Any]:
        """A value that stays here: its number, and whether its truth is its own affair; or a class of errors."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["e", self._kinds(value)]
        return ["h", self._number(value), hasattr(value, "__bool__") or hasattr(value, "__len__")]

    def _number(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which also keeps its id from being used again
        return self._numbers[id(value)]

    def _kinds(self, error: type) -> list[Any]:
        """A class of errors and its bases: builtins by name, the program's own by number and name."""
        return [
            kind.__name__ if kind.__module__ == "builtins" else [self._number(kind), kind.__name__, kind.__module__]
            for kind in error.__mro__
        ]

    def _object(self, tag: str, said: list[Any]) -> object:
        """What the judge names: an object here, a builtin, elements to be iterated over, or a function of its own."""
        if tag == "h":
            return self._objects[said[0]]
        if tag == "n":
            return find_builtin(said[0])
        if tag == "y":
            return iter(Decoder(self._object).decode(said[0]))
        return self._callback(said[0])

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> Any:
            encoder = Encoder(self._describe)
            given = encoder.encode(arguments)  # before the named ones, as it is decoded: containers are numbered so
            inside = {name: encoder.encode(value) for name, value in named.items()}
            kind, said = self.ask(number, given, inside)
            value = Decoder(self._object).decode(said)
            if kind == "value":
                return value
            raise value[0](*value[1])

        return call
