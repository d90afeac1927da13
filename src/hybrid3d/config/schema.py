"""Reads YAML into frozen dataclasses. It is independent of the recipe, whose sections `recipe.py` defines.

A dataclass is a section and its fields are the keys. A field is a str, int, float, bool, Literal, a tuple of one of
these, a section, or a section or None; `Annotated[type, Rule(...)]` restricts its values. `dict[str, type]` maps names
of the user's own to values, a `Schedule` steps to settings by dotted key. All problems are collected, so that a file
can be fixed in one pass.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from hybrid3d.errors import UserMistake, escape_control_characters
from hybrid3d.storage.user_files import UnreadableFile, parse_yaml, read_text_file

T = TypeVar("T")

MAX_PROBLEMS = 50  # listed in one message
TYPE_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "a boolean",
    list: "a list",
    dict: "a section",
    NoneType: "nothing",
}


class RecipeError(UserMistake):
    """Raised for an invalid recipe; the message lists all problems, one per line."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        super().__init__(subject, self.problems)  # both, so that the error can be pickled

    def __str__(self) -> str:
        more = len(self.problems) - MAX_PROBLEMS
        lines = [*self.problems[:MAX_PROBLEMS], *([f"... and {more:,} more problems"] if more > 0 else [])]
        return "\n  ".join([f"{one_line(self.subject)}:", *lines])


@dataclass(frozen=True)
class Rule:
    """A condition on a value beyond its type.

    Attributes:
        is_satisfied: returns whether a value meets the condition.
        description: the condition in words, as it stands in messages and in `docs/recipe.md`.
    """

    is_satisfied: Callable[[Any], bool]
    description: str


def within(low: float, high: float) -> Rule:
    """Return the rule for a number from `low` to `high`, both included."""
    return Rule(lambda x: low <= x <= high, f"{_format_number(low)} to {_format_number(high)}")


def above(low: float, high: float) -> Rule:
    """Return the rule for a number greater than `low` and at most `high`."""
    return Rule(lambda x: low < x <= high, f"more than {_format_number(low)} and at most {_format_number(high)}")


def _format_number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _is_path(text: str) -> bool:
    lengths = [len(part.encode(errors="replace")) for part in text.split("/")]
    return max(lengths) <= MAX_NAME_BYTES and sum(lengths) + len(lengths) <= MAX_PATH_BYTES


MAX_NAME_BYTES = 200  # Linux allows 255; prefixes and suffixes are added to some names
MAX_PATH_BYTES = 2_000  # Linux allows 4,096


def _is_printable(text: str) -> bool:
    return escape_control_characters(text) == text and not set("\n\t") & set(text)


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)  # halves of characters


_NOT_EMPTY = Rule(lambda s: s.strip() != "", "not empty")
Name = Annotated[
    str,
    Rule(
        lambda s: re.fullmatch(r"\w[\w.-]*", s) is not None and len(s.encode()) <= MAX_NAME_BYTES,
        f"of letters, digits and . _ - only, at most {MAX_NAME_BYTES} bytes",
    ),
]
Text = Annotated[
    str, _NOT_EMPTY, Rule(lambda s: _is_printable(s) and len(s) <= 1_000, "of at most 1,000 printable characters")
]
FilePath = Annotated[
    str,
    _NOT_EMPTY,
    Rule(lambda s: _is_printable(s) and _is_path(s), f"of printable characters, at most {MAX_NAME_BYTES} bytes a name"),
]
# A text that ends an answer, such as a line break
StopText = Annotated[str, Rule(lambda s: 0 < len(s) <= 1_000 and _is_text(s), "of 1 to 1,000 characters")]
# For the model's config.json and for settings without a tighter bound. The bounds also refuse infinity and NaN.
Count = Annotated[int, Rule(lambda n: n >= 1, "1 or more")]
Positive = Annotated[float, above(0, 1e12)]
NonNegative = Annotated[float, within(0, 1e12)]
AboveOne = Annotated[float, above(1, 1e12)]
ClosedFraction = Annotated[float, within(0, 1)]
PositiveFraction = Annotated[float, above(0, 1)]
OpenFraction = Annotated[float, Rule(lambda x: 0 < x < 1, "more than 0 and less than 1")]
Decay = Annotated[float, Rule(lambda x: 0 <= x < 1, "at least 0 and less than 1")]

MAX_RANKS = 65_536
Ranks = Annotated[int, within(1, MAX_RANKS)]
Layers = Annotated[int, within(1, 10_000)]
Sequences = Annotated[int, within(1, 2**20)]
Tokens = Annotated[int, within(1, 2**24)]
TokensOrZero = Annotated[int, within(0, 2**24)]
Steps = Annotated[int, within(1, 10**9)]
StepsOrZero = Annotated[int, within(0, 10**9)]
TopK = Annotated[int, within(-1, 2**24)]
Repeats = Annotated[int, within(1, 10_000)]
Staleness = Annotated[int, within(0, 100)]
BatchesInFlight = Annotated[int, within(2, 101)]
RepeatsOrZero = Annotated[int, within(0, 10_000)]
MAX_PORT = 65_535
Port = Annotated[int, within(1, MAX_PORT)]
Processes = Annotated[int, within(1, 1_024)]
Seed = Annotated[int, within(0, 2**32 - 1)]  # the limit of NumPy's generators, which vLLM seeds too
Seconds = Annotated[float, within(0.001, 86_400)]
LearningRate = Annotated[float, within(0, 100)]
Coefficient = Annotated[float, within(0, 1_000)]
Reward = Annotated[float, within(-1_000_000, 1_000_000)]
# `_MAX_TEMP` of vLLM 0.32.0's sampling_params.py: it raises lower values to 0.01, while training would divide by them
Temperature = Annotated[float, within(0.01, 100), Rule(lambda x: True, "because vLLM raises lower values to 0.01")]
TemperatureOrZero = Annotated[
    float, Rule(lambda x: x == 0 or 0.01 <= x <= 100, "0 or 0.01 to 100, because vLLM raises lower values to 0.01")
]
Mebibytes = Annotated[float, within(0.01, 16_384)]
Gibibytes = Annotated[float, within(0.001, 16_384)]

Interval = Annotated[
    str, Rule(lambda s: re.fullmatch(r"always|never|every-[1-9]\d{0,8}", s) is not None, "always, never or every-N")
]
Schedule = dict[int, dict[str, Any]]
MAX_NAMED = 100  # values by names of the user's own
MAX_SCHEDULED = 1_000  # steps of a schedule, each of which is validated as a complete recipe

REQUIRED_UNLESS = "required unless"
"""Metadata key of a field: a pair (key, value). The field is required unless that key of its section has that value."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def is_due(interval: str, number: int) -> bool:
    """Return whether an `Interval` includes a step or a sync of this number; `every-N` includes the multiples of N."""
    if interval.startswith("every-"):
        return number % int(interval.removeprefix("every-")) == 0
    return interval == "always"


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read the mapping in a YAML file.

    Raises:
        RecipeError: the file is not readable, not YAML (with the line), or not a mapping.
    """
    try:
        raw = parse_yaml(read_text_file(path, "a recipe"))
    except UnreadableFile as error:
        raise RecipeError(str(path), [error.why]) from error
    except ValueError as error:
        raise RecipeError(str(path), [str(error)]) from error
    if not isinstance(raw, dict):
        raise RecipeError(str(path), [f"expected sections with keys, got {format_value(raw)}"])
    return raw


def flatten_settings(raw: object, path: str = "") -> dict[str, Any]:
    """Flatten nested sections to `section.key: value`; keys that are dotted already are kept.

    Raises:
        ValueError: `raw` is not a section, or a key is given twice, nested and dotted.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected sections with keys, got {format_value(raw)}")
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        key_path = join_keys(path, format_key(key))
        settings = flatten_settings(value, key_path) if isinstance(value, dict) else {key_path: value}
        duplicate = next((name for name in settings if name in flat), None)
        if duplicate is not None:
            raise ValueError(f"{duplicate} is given twice")
        flat |= settings
    return flat


def key_of(field_name: str) -> str:
    """Return the key in a recipe of a dataclass field: that of `async_` is `async`, which no field can be called."""
    return field_name.removesuffix("_")


def to_raw(recipe: Any) -> dict[str, Any]:
    """Return a recipe as `read_section` reads it."""

    def section(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key_of(name): list(value) if isinstance(value, tuple) else value for name, value in items}

    return dataclasses.asdict(recipe, dict_factory=section)


def read_section(kind: type[T], raw: object, path: str, problems: list[str]) -> T | None:
    """Return an instance of the dataclass `kind` read from `raw`, or None if it has problems, which are appended.

    Args:
        path: dotted name of the section, which messages put before its keys; empty for the recipe itself.
    """
    if not isinstance(raw, dict):
        problems.append(f"{path}: expected a section with keys, got {format_value(raw)}")
        return None
    before = len(problems)
    hints = get_type_hints(kind, include_extras=True)
    keys = [key_of(name) for name in hints]
    problems.extend(unknown_key_problem(key, keys, path) for key in raw if key not in keys)
    values = {}
    for field in dataclasses.fields(cast(Any, kind)):
        key, hint = key_of(field.name), hints[field.name]
        key_path = join_keys(path, key)
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        other, unless = field.metadata.get(REQUIRED_UNLESS, ("", None))
        if key in raw:
            values[field.name] = _read(hint, raw[key], key_path, problems)
        elif not has_default and section_type(hint):
            values[field.name] = _read(hint, {}, key_path, problems)  # reports each key that is missing in it
        elif not has_default or raw.get(other) != unless:
            problems.append(f"{key_path}: missing, expected {describe_type(hint)}")
    return kind(**values) if len(problems) == before else None


def _read(hint: Any, raw: object, path: str, problems: list[str]) -> object:
    """Return a field's value, a section or a scalar, or None if it has problems, which are appended."""
    if hint == Schedule:
        return _read_schedule(raw, path, problems)
    if get_origin(hint) is dict:
        return _read_named(get_args(hint)[1], raw, path, problems)
    if NoneType in get_args(hint):  # `Section | None` or `Scalar | None`
        if raw is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not NoneType)
    section = section_type(hint)
    if section is not None:
        return read_section(section, raw, path, problems)
    try:
        return read_value(hint, raw)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return None


def _read_named(hint: Any, raw: object, path: str, problems: list[str]) -> dict[str, Any]:
    if not isinstance(raw, dict) or len(raw) > MAX_NAMED:
        problems.append(f"{path}: expected a section of at most {MAX_NAMED} names, got {format_value(raw)}")
        return {}
    named: dict[str, Any] = {}
    for key, value in raw.items():
        key_path = join_keys(path, format_key(key))
        if not isinstance(key, str) or not re.fullmatch(r"\w[\w-]{0,99}", key):
            problems.append(f"{key_path}: expected a name of letters, digits and _ - only, at most 100 of them")
            continue
        named[key] = _read(hint, value, key_path, problems)
    return named


def _read_schedule(raw: object, path: str, problems: list[str]) -> Schedule:
    """Return the settings by dotted key of each step, ascending. Whether the keys exist is not checked here."""
    if not isinstance(raw, dict):
        problems.append(f"{path}: expected steps with settings, got {format_value(raw)}")
        return {}
    if len(raw) > MAX_SCHEDULED:
        problems.append(f"{path}: {len(raw):,} steps, at most {MAX_SCHEDULED:,}")
        return {}
    schedule: Schedule = {}
    for key, settings in raw.items():
        key_path = join_keys(path, format_key(key))
        if not re.fullmatch("[1-9][0-9]{0,8}", str(key)):
            problems.append(f"{key_path}: expected a step, 1 to 999,999,999, got {format_value(key)}")
            continue
        try:
            schedule[int(key)] = flatten_settings(settings)
        except ValueError as error:
            problems.append(f"{key_path}: {error}")
    return dict(sorted(schedule.items()))


def read_value(hint: Any, raw: object) -> Any:
    """Return `raw` as the scalar type `hint`.

    Raises:
        ValueError: the value does not fit; with what is expected, the value and its type.
    """
    kind, rules = _split(hint)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list) or len(set(map(str, raw))) < len(raw):
            raise ValueError(f"expected {describe_type(hint)}, got {format_value(raw)}")
        return tuple(read_value(get_args(kind)[0], value) for value in raw)
    value = _to_float(raw) if kind is float else raw
    if get_origin(kind) is Literal:
        valid, suggestion = value in get_args(kind), did_you_mean(raw, get_args(kind))
    else:  # compares types with `is`, because isinstance(True, int) is true
        valid, suggestion = type(value) is kind and all(rule.is_satisfied(value) for rule in rules), ""
    if valid:
        return value
    raise ValueError(f"expected {describe_type(hint)}, got {format_value(raw)}{suggestion}")


def _to_float(raw: object) -> object:
    """Convert integers, and strings such as "1e-4": YAML 1.1 requires a dot in a float and reads it as a string."""
    if type(raw) is int or (isinstance(raw, str) and _NUMBER.fullmatch(raw)):
        try:
            return float(cast(Any, raw))
        except OverflowError:  # the integer is too large for a float; the rules refuse infinity
            return math.inf
    return raw


def _split(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    if get_origin(hint) is Annotated:
        kind, *rules = get_args(hint)
        return kind, tuple(rules)
    return hint, ()


def section_type(hint: Any) -> type[Any] | None:
    """Return the dataclass in a hint `Section` or `Section | None`, or None for a scalar hint."""
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def describe_type(hint: Any) -> str:
    """Describe in words what a scalar hint accepts."""
    kind, rules = _split(hint)
    if get_origin(kind) is dict:
        return f"names of your own, each with {describe_type(get_args(kind)[1])}"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list without repetitions, each {describe_type(get_args(kind)[0])}"
    return ", ".join([TYPE_NAMES[kind], *(rule.description for rule in rules)])


def format_value(value: object) -> str:
    """Return a value for a message, with the name of its type."""
    name = TYPE_NAMES.get(type(value), type(value).__name__)
    return name if value is None or isinstance(value, dict) else f"{reprlib.repr(value)} ({name})"


def format_key(key: object) -> str:
    """Return a key for a message: verbatim if it is short and printable, otherwise its repr."""
    text = str(key) if not isinstance(key, float | int) else repr(key)
    return text if len(text) <= 100 and text.isprintable() else reprlib.repr(text)


def one_line(text: str) -> str:
    """Return a text for a message, as its repr if it has characters that are not printable."""
    return text if text.isprintable() else repr(text)


def unknown_key_problem(key: object, known: Sequence[str], path: str) -> str:
    """Return the message that a section has no such key."""
    where = f"keys of {path}" if path else "sections"
    suggestion = did_you_mean(key, known)
    return f"{join_keys(path, format_key(key))}: unknown key{suggestion}; known {where}: {', '.join(known)}"


def did_you_mean(word: object, known: Sequence[str]) -> str:
    """Return a suggestion of the known word that is most like this one; empty if none is."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def join_keys(path: str, key: str) -> str:
    """Return the dotted name of a key in the section `path`."""
    return f"{path}.{key}" if path else key
