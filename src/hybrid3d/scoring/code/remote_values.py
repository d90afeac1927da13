"""Implements calls between two processes that do not trust each other, over a pair of pipes.

Messages are JSON that encodes plain values only: None, booleans, numbers, text, bytes, Python's containers of plain
values, and a few value types of the standard library. The receiver rebuilds them from its own types. All other objects
stay in their process and are referred to by number. Nothing that is received is run, imported or unpickled.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

TYPE_CHECKING = False  # as typing's, which takes 7 ms to import: a fifth of what this process needs to start
if TYPE_CHECKING:
    from typing import Any

MESSAGE_BYTES = 8 * 2**20
MAX_DEPTH = 200  # of nested containers
MAX_ITERATOR_ELEMENTS = 10**6  # elements of an iterator that is sent as a value
CONTAINERS: dict[Any, str] = {list: "l", tuple: "t", dict: "d", set: "s", frozenset: "f", deque: "q", bytearray: "a"}
MUTABLE = (list, dict, set, deque, bytearray)
# Value types of the standard library: the module, and the plain arguments that construct an equal value.
VALUES: dict[str, tuple[str, Callable[[Any], tuple[object, ...]]]] = {
    "range": ("builtins", lambda value: (value.start, value.stop, value.step)),
    "complex": ("builtins", lambda value: (value.real, value.imag)),
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "date": ("datetime", lambda value: (value.year, value.month, value.day)),
    "datetime": (
        "datetime",
        lambda value: (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond),
    ),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
}
PLAIN_TYPES = (type(None), bool, int, float, str, bytes, *CONTAINERS)  # whose instances are sent as values


class Forfeit(BaseException):
    """The other side has ended or sent an invalid message. Not an Exception, so that tests do not catch it."""


class Encoder:
    """Encodes values for JSON.

    Mutable containers are numbered in the order in which they occur, so that shared and recursive containers are
    rebuilt as such; `containers` have been numbered already. `other` encodes a value that is not plain.
    """

    def __init__(self, other: Callable[[object], list[Any]], containers: Sequence[object] = ()):
        self._other = other
        self.containers = list(containers)
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else ["i", hex(value)]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if kind not in CONTAINERS:
            return self._encode_other(value, kind, depth)
        if kind in MUTABLE:
            if (number := self._numbers.get(id(value))) is not None:
                return ["r", number]
            self._numbers[id(value)] = len(self.containers)
            self.containers.append(value)
        return self.encode_contents(value, depth)

    def encode_contents(self, value: Any, depth: int = 0) -> list[Any]:
        """Encode the contents of a container, even if the container has been numbered already."""
        if depth >= MAX_DEPTH:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep cannot be sent")
        kind = type(value)
        if kind is bytearray:
            return ["a", value.decode("latin-1")]
        inner = (part for pair in dict.items(value) for part in pair) if kind is dict else value
        return [CONTAINERS[kind], *[self.encode(part, depth + 1) for part in inner]]

    def _encode_other(self, value: Any, kind: type, depth: int) -> Any:
        if isinstance(value, type):
            if name := builtin_name(value):
                return ["n", name]
            return self._other(value)
        module, arguments = VALUES.get(kind.__name__, ("", None))
        if arguments is not None and kind.__module__ == module and getattr(value, "tzinfo", None) is None:
            return ["v", kind.__name__, *[self.encode(part, depth + 1) for part in arguments(value)]]
        for base in (bool, int, float, str, bytes, *CONTAINERS):  # an instance of a subclass is sent as the plain value
            if isinstance(value, base):
                return self.encode(_plain(value, base), depth)
        return self._other(value)


def _plain(value: Any, base: type) -> Any:
    """Convert an instance of a subclass to the base class, without calling the subclass's methods."""
    if base is dict:
        return dict(dict.items(value))
    if base in (int, float, str):
        return getattr(base, f"__{base.__name__}__")(value)
    return base(base.__iter__(value)) if base is not bytes else bytes(memoryview(value))  # type: ignore[attr-defined]


class Decoder:
    """Decodes what an `Encoder` has encoded; anything else is a Forfeit.

    `other` decodes a value that is not plain, from its tag and contents; `containers` have been numbered already.
    """

    def __init__(self, other: Callable[[str, list[Any]], object], containers: Sequence[Any] = ()):
        self._other = other
        self.containers = list(containers)

    def decode(self, encoded: Any, depth: int = 0) -> Any:
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        if type(encoded) is not list or not encoded or type(encoded[0]) is not str or depth > MAX_DEPTH:
            raise Forfeit("the value has an invalid format")
        try:
            return self._decode_tagged(encoded[0], encoded[1:], depth)
        except Exception as error:
            raise Forfeit(f"the value has an invalid format: {error}") from None

    def replace(self, container: Any, encoded: Any) -> None:
        """Replace the contents of a numbered container with those that the other side sent."""
        if type(encoded) is not list or not encoded or encoded[0] != CONTAINERS[type(container)]:
            raise Forfeit(f"an argument of type {type(container).__name__} came back as another type")
        if type(container) is bytearray:
            container[:] = self.decode(["b", *encoded[1:]])
            return
        parts = [self.decode(part, 1) for part in encoded[1:]]
        try:
            container.clear()
            if type(container) is dict:
                container.update(zip(parts[::2], parts[1::2], strict=True))
            else:
                container.update(parts) if type(container) is set else container.extend(parts)
        except Exception as error:
            raise Forfeit(f"the value has an invalid format: {error}") from None

    def _decode_tagged(self, tag: str, inner: list[Any], depth: int) -> Any:
        match tag:
            case "l" | "s" | "q":
                container: Any = {"l": list, "s": set, "q": deque}[tag]()
                self.containers.append(container)
                parts = (self.decode(part, depth + 1) for part in inner)
                container.update(parts) if tag == "s" else container.extend(parts)
                return container
            case "d":
                mapping: dict[Any, Any] = {}
                self.containers.append(mapping)
                for index in range(0, len(inner), 2):
                    key = self.decode(inner[index], depth + 1)
                    mapping[key] = self.decode(inner[index + 1], depth + 1)
                return mapping
            case "t" | "f":
                items = [self.decode(part, depth + 1) for part in inner]
                return tuple(items) if tag == "t" else frozenset(items)
            case "a":
                self.containers.append(array := bytearray(_text(inner[0]), "latin-1"))
                return array
            case "b":
                return _text(inner[0]).encode("latin-1")
            case "i":
                return int(_text(inner[0]), 16)
            case "r":
                return self.containers[range(len(self.containers))[inner[0]]]
            case "v":
                kind = getattr(importlib.import_module(VALUES[inner[0]][0]), inner[0])
                value = kind(*[self.decode(part, depth + 1) for part in inner[1:]])
                if getattr(value, "is_snan", bool)():
                    raise ValueError("a signalling NaN cannot be compared")
                return value
        return self._other(tag, inner)


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def builtin_name(value: object) -> str:
    """Return the name of a builtin; "" if the value is no builtin."""
    name = getattr(value, "__name__", "")
    return name if isinstance(name, str) and vars(builtins).get(name) is value else ""


def find_builtin(name: object) -> Any:
    """Return a builtin type or function by name. ValueError: there is none, or it is not allowed."""
    found = getattr(builtins, _text(name), None)
    if not callable(found) or name in ("eval", "exec", "compile", "open", "input", "__import__", "breakpoint"):
        raise ValueError(f"no builtin {name!r} can be sent")
    return found


def take_all(iterator: Iterator[object]) -> list[object]:
    """Return the remaining elements of an iterator. ValueError: more than `MAX_ITERATOR_ELEMENTS`."""
    found = list(islice(iterator, MAX_ITERATOR_ELEMENTS + 1))
    if len(found) > MAX_ITERATOR_ELEMENTS:
        raise ValueError(f"an iterator of more than {MAX_ITERATOR_ELEMENTS} elements cannot be sent")
    return found


class Link:
    """Sends and receives messages at one end of the pipes, whose file descriptors it gets.

    A message is its length in 4 bytes, big-endian, and JSON: `["?", ...]` is a request, `["!", ...]` a reply. `serve`
    returns the reply to a request of the other side, also while this side waits for a reply.
    """

    def __init__(self, incoming: int, outgoing: int, serve: Callable[[list[Any]], list[Any]]):
        self._incoming, self._outgoing, self._serve = incoming, outgoing, serve

    def ask(self, *question: object) -> list[Any]:
        """Send a request and return the other side's reply. Forfeit: it has ended or sent an invalid message."""
        self._send(["?", *question])
        while (answer := self._next())[0] != "!":
            pass
        return answer[1:]

    def serve(self) -> None:
        """Serve requests until the other side ends, which raises Forfeit."""
        while True:
            if self._next()[0] != "?":
                raise Forfeit("a reply without a request")

    def _next(self) -> list[Any]:
        """Return the next message; a request has been replied to already."""
        message = self._receive()
        if message[0] == "?":
            self._send(["!", *self._serve(message[1:])])
        return message

    def _send(self, message: list[Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes, at most {MESSAGE_BYTES}")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._outgoing, view) :]
        except OSError as error:
            raise Forfeit(f"the other side has ended: {error}") from None

    def _receive(self) -> list[Any]:
        size = int.from_bytes(self._read(4), "big")
        if size > MESSAGE_BYTES:
            raise Forfeit(f"a message of {size} bytes, at most {MESSAGE_BYTES}")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Forfeit(f"the message is not JSON: {error}") from None
        if type(message) is not list or not message or message[0] not in ("?", "!"):
            raise Forfeit("the message has an invalid format")
        return message

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self._incoming, min(size, 2**20))
            except OSError as error:
                raise Forfeit(f"the other side has ended: {error}") from None
            if not part:
                raise Forfeit("the other side has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
