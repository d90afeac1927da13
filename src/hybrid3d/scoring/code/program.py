"""Runs the answer's program in its sandboxed process, and then serves the judge's requests (`judge.py`).

The program can reach and change everything in this process. This is safe, because the judge accepts only plain values
from it.
"""

from __future__ import annotations

import io
import operator
import sys
import types
from collections.abc import Callable

from hybrid3d.scoring.code.remote_values import PLAIN_TYPES, Decoder, Encoder, Link, find_builtin

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
    """Run the program as a module, and serve requests until the judge ends."""
    printed = io.BytesIO()
    sys.stdout = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)
    program = types.ModuleType("program")
    sys.modules["__main__"] = sys.modules["program"] = program
    link = Answerer(program, printed, orders["incoming"], orders["outgoing"])
    exec(compile(orders["program"], "<program>", "exec"), program.__dict__)
    link.take_printed()  # discards what it printed while it was loaded
    link.serve()


class Answerer(Link):
    """Performs the operations that the judge requests, and keeps the objects that it has numbered."""

    def __init__(self, program: types.ModuleType, printed: io.BytesIO, incoming: int, outgoing: int):
        super().__init__(incoming, outgoing, self.answer)
        self._program, self._printed = program, printed
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}

    def answer(self, question: list[Any]) -> list[Any]:
        """Return `["value", value, arguments after the call, printed]`, or `["error", types, contents, printed]`."""
        operation, arguments, named, in_place = question
        decoder = Decoder(self._object)
        try:
            target, *rest = decoder.decode(arguments)
            keywords = {name: decoder.decode(value) for name, value in named.items()}
            is_name = operation == "name"
            value = getattr(self._program, target) if is_name else OPERATIONS[operation](target, *rest, **keywords)
            is_new = operation == "call" and isinstance(target, type) and type(value) not in PLAIN_TYPES
            encoded = self._describe(value) if is_new else Encoder(self._describe).encode(value)
            after: list[Any] = []
            if in_place or value is None:
                encoder = Encoder(self._describe, decoder.containers)
                after = [encoder.encode_contents(container) for container in decoder.containers]
            return ["value", encoded, after, self.take_printed()]
        except Exception as error:
            kinds = self._kinds(type(error))
            try:
                contents = Encoder(self._describe).encode((error.args, str(error), vars(error)))
            except Exception:
                contents = Encoder(self._describe).encode(((str(error),), str(error), {}))
            return ["error", kinds, contents, self.take_printed()]

    def take_printed(self) -> str:
        text = self._printed.getvalue().decode(errors="replace")
        self._printed.seek(0)
        self._printed.truncate()
        return text

    def _describe(self, value: object) -> list[Any]:
        """Encode a value that stays here by its number, and whether it defines its truth value; or an error class."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["e", self._kinds(value)]
        return ["h", self._number(value), hasattr(value, "__bool__") or hasattr(value, "__len__")]

    def _number(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # keeps it alive, so that its id is not reused
        return self._numbers[id(value)]

    def _kinds(self, error: type) -> list[Any]:
        """Encode an error class and its bases: builtins by name, others by number, name and module."""
        return [
            kind.__name__ if kind.__module__ == "builtins" else [self._number(kind), kind.__name__, kind.__module__]
            for kind in error.__mro__
        ]

    def _object(self, tag: str, encoded: list[Any]) -> object:
        """Decode a value that is not plain: an object here, a builtin, an iterator, or a callback into the tests."""
        if tag == "h":
            return self._objects[encoded[0]]
        if tag == "n":
            return find_builtin(encoded[0])
        if tag == "y":
            return iter(Decoder(self._object).decode(encoded[0]))
        return self._callback(encoded[0])

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> Any:
            encoder = Encoder(self._describe)
            positional = encoder.encode(arguments)  # before the keyword ones: the decoder numbers containers likewise
            keywords = {name: encoder.encode(value) for name, value in named.items()}
            kind, encoded = self.ask(number, positional, keywords)
            value = Decoder(self._object).decode(encoded)
            if kind == "value":
                return value
            raise value[0](*value[1])

        return call
