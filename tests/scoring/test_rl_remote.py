"""Values between the judge and an answer: plain ones arrive as they are, and nothing else can be said."""

import json
import math
import os
import threading
from collections import Counter, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.scoring.code.remote_values import MESSAGE_BYTES, Decoder, Encoder, Forfeit, Link

pytestmark = pytest.mark.processes

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False) | st.dates()
    | st.datetimes() | st.timedeltas() | st.builds(range, st.integers(), st.integers())
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
VALUES = st.recursive(
    HASHABLE | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=4)
    | st.sets(HASHABLE, max_size=4) | st.lists(inner).map(deque),
    max_leaves=20,
)  # fmt: skip
TAGS = st.sampled_from([*"ltdsfqabcirvnhkye", "range", "Decimal", "datetime", "int", "eval", "0x1f", "Exception"])
SAID = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | TAGS | st.text(max_size=3),
    lambda inner: st.builds(lambda tag, rest: [tag, *rest], TAGS, st.lists(inner)) | st.lists(inner)
    | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=20,
)  # fmt: skip
PLAIN = (
    type(None), bool, int, float, str, bytes, complex, list, tuple, dict, set, frozenset, deque, bytearray, range,
    Fraction, Decimal, date, datetime, timedelta,
)  # fmt: skip


def refuse(*_: object) -> Any:
    raise ValueError("not plain")


def sent(value: object) -> Any:
    return Decoder(refuse).decode(json.loads(json.dumps(Encoder(refuse).encode(value))))


def shape(value: Any) -> Any:
    """The types in a value, as far as they are in order."""
    return type(value), [shape(part) for part in value] if isinstance(value, list | tuple | dict | deque) else None


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_plain_values_arrive_as_they_are(value: object) -> None:
    arrived = sent(value)
    assert arrived == value
    assert shape(arrived) == shape(value)


@given(SAID)
@settings(max_examples=500, deadline=None)
def test_whatever_is_said_is_a_plain_value_or_a_forfeit(said: object) -> None:
    try:
        value = Decoder(refuse).decode(json.loads(json.dumps(said)))
    except Forfeit:
        return
    assert type(value) in PLAIN


def test_values_that_are_not_as_they_were() -> None:
    assert math.isnan(sent(math.nan))
    assert type(sent(Counter("aab"))) is dict
    assert type(sent(type("Own", (float,), {"__eq__": lambda *_: True})(1.5))) is float
    shared: list[object] = [1]
    first, second = sent([shared, shared])
    assert first is second
    shared.append(shared)
    assert sent(shared)[1] is not shared
    assert sent(shared)[1][1][0] == 1


@pytest.mark.parametrize("value", [object(), len, date, [object()], {1: object()}])
def test_values_that_are_not_plain_are_not_sent(value: object) -> None:
    with pytest.raises(ValueError, match="not plain"):
        sent(value)


def test_values_too_deep_or_too_long_are_not_sent() -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        sent(deep)
    with pytest.raises(ValueError, match=f"at most {MESSAGE_BYTES}"):
        Link(0, 1, list).ask("x" * MESSAGE_BYTES)


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b"\0\0\0\x02[]", b"\0\0\0\x05[", b"\0\0\0\x041234"]
)
def test_bytes_that_are_no_message_are_a_forfeit(data: bytes) -> None:
    there, here = os.pipe()
    asked, asks = os.pipe()
    os.write(here, data)
    os.close(here)
    with pytest.raises(Forfeit):
        Link(there, asks, list).ask("what")
    for end in (there, asked, asks):
        os.close(end)


def test_link_lets_both_sides_ask() -> None:
    """A question that is answered by questions, to any depth."""
    first, second = os.pipe(), os.pipe()

    def down(question: list[Any]) -> list[Any]:
        (number,) = question
        return [number] if number == 0 else [number + ends[number % 2].ask(number - 1)[0]]

    def serve() -> None:
        with pytest.raises(Forfeit):
            ends[1].serve()

    ends = [Link(first[0], second[1], down), Link(second[0], first[1], down)]
    other = threading.Thread(target=serve)
    other.start()
    assert ends[0].ask(9) == [45]
    os.close(second[1])
    other.join()
    for end in (*first, second[0]):
        os.close(end)
