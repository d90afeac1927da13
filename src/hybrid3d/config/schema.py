"""YAML into frozen dataclasses. Knows no recipe: `config.py` says what is in one.

A dataclass is a section, and a field of it a key. A field is a str, int, float, bool, Literal, a section, or a section
or None; `Annotated[type, Rule(...)]` narrows it. A `Schedule` has settings by step, by their dotted keys. All problems
are collected, so that a user mends a file once.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from hybrid3d.errors import UserMistake, visible
from hybrid3d.storage.user_files import UnreadableFile, parse_yaml, read_text_file

T = TypeVar("T")


MAX_PROBLEMS = 50  # that a message lists


class RecipeError(UserMistake):
    """What is wrong with a recipe: all of it, a problem a line."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        super().__init__(subject, self.problems)  # both, so that the error can be pickled

    def __str__(self) -> str:
        more = len(self.problems) - MAX_PROBLEMS
        told = [*self.problems[:MAX_PROBLEMS], *([f"... and {more:,} more problems"] if more > 0 else [])]
        return "\n  ".join([f"{_one_line(self.subject)}:", *told])


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy beyond its type; `says` is how a message puts it."""

    holds: Callable[[Any], bool]
    says: str


def within(low: float, high: float) -> Rule:
    """A number from `low` to `high`, both allowed."""
    return Rule(lambda x: low <= x <= high, f"{_plain(low)} to {_plain(high)}")


def above(low: float, high: float) -> Rule:
    """A number above `low`, and `high` at most."""
    return Rule(lambda x: low < x <= high, f"more than {_plain(low)} and at most {_plain(high)}")


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _is_path(text: str) -> bool:
    parts = [len(part.encode(errors="replace")) for part in text.split("/")]
    return max(parts) <= MAX_NAME_BYTES and sum(parts) + len(parts) <= MAX_PATH_BYTES


MAX_NAME_BYTES = 200  # Linux allows 255; a name of ours gets a prefix or a suffix here and there
MAX_PATH_BYTES = 2_000  # Linux allows 4,096


def _is_printable(text: str) -> bool:
    return visible(text) == text and not set("\n\t") & set(text)


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
Verified = Annotated[
    str, Rule(lambda s: re.fullmatch(r"always|never|every-[1-9]\d{0,8}", s) is not None, "always, never or every-N")
]
# Of a model's config.json; of a recipe, what has no bound of its own. The bounds refuse infinity and NaN, too.
Count = Annotated[int, Rule(lambda n: n >= 1, "1 or more")]
Positive = Annotated[float, above(0, 1e12)]
NonNegative = Annotated[float, within(0, 1e12)]
AboveOne = Annotated[float, above(1, 1e12)]
Share = Annotated[float, within(0, 1)]
Fraction = Annotated[float, Rule(lambda x: 0 < x < 1, "more than 0 and less than 1")]
Decay = Annotated[float, Rule(lambda x: 0 <= x < 1, "at least 0 and less than 1")]

MAX_RANKS = 65_536
Ranks = Annotated[int, within(1, MAX_RANKS)]
Layers = Annotated[int, within(1, 10_000)]
Sequences = Annotated[int, within(1, 2**20)]
Tokens = Annotated[int, within(1, 2**24)]
ExtraTokens = Annotated[int, within(0, 2**24)]
Steps = Annotated[int, within(1, 10**9)]
ExtraSteps = Annotated[int, within(0, 10**9)]
Times = Annotated[int, within(1, 10_000)]
ExtraTimes = Annotated[int, within(0, 10_000)]
Processes = Annotated[int, within(1, 1_024)]
Seed = Annotated[int, within(0, 2**32 - 1)]  # NumPy's generators, which vLLM seeds too, take no more
Seconds = Annotated[float, within(0.001, 86_400)]
LearningRate = Annotated[float, within(0, 100)]
Coefficient = Annotated[float, within(0, 1_000)]
Reward = Annotated[float, within(-1_000_000, 1_000_000)]
# `_MAX_TEMP` of vLLM 0.32.0's sampling_params.py; training would divide by what was asked for
Temperature = Annotated[float, within(0.01, 100), Rule(lambda x: True, "as vLLM takes a lower one for 0.01")]
Mebibytes = Annotated[float, within(0.01, 16_384)]
Gibibytes = Annotated[float, within(0.001, 16_384)]

Schedule = dict[int, dict[str, Any]]
MAX_SCHEDULED = 1_000  # steps of a schedule: each is checked like a recipe of its own

NEEDED_UNLESS = "needed unless"
"""In a field's metadata, a key and its value: a section without the field is complete only with that value."""

_TYPE_WORDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "a boolean",
    list: "a list",
    dict: "a section",
    NoneType: "nothing",
}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. RecipeError: not readable, not YAML (with the line), or no mapping."""
    try:
        raw = parse(read_text_file(path, "a recipe"))
    except UnreadableFile as error:
        raise RecipeError(str(path), [error.why]) from error
    except ValueError as error:
        raise RecipeError(str(path), [str(error)]) from error
    if not isinstance(raw, dict):
        raise RecipeError(str(path), [f"expected sections with keys, got {_shown(raw)}"])
    return raw


def dotted(raw: object, path: str = "") -> dict[str, Any]:
    """Settings in sections as `section.key: value`; keys that are dotted already stay so.

    Raises:
        ValueError: no section, or a key stands twice, nested and dotted.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected sections with keys, got {_shown(raw)}")
    found: dict[str, Any] = {}
    for key, value in raw.items():
        here = _join(path, _key(key))
        settings = dotted(value, here) if isinstance(value, dict) else {here: value}
        twice = next((name for name in settings if name in found), None)
        if twice is not None:
            raise ValueError(f"{twice} stands twice")
        found |= settings
    return found


def with_settings(raw: Mapping[Any, Any], settings: Mapping[str, object], problems: list[str]) -> dict[Any, Any]:
    """A copy of a recipe's sections in which each `section.key` has another value."""
    changed = copy.deepcopy(dict(raw))
    for key, value in settings.items():
        try:
            _set(changed, key.split("."), value)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return changed


def parse(text: str) -> object:
    """YAML to Python; ValueError says what is wrong and on which line."""
    return parse_yaml(text)


def apply_overrides(raw: dict[Any, Any], overrides: Iterable[str], problems: list[str]) -> None:
    """Set each `section.key=value` in `raw`, values being YAML. A key that nothing knows shows when `raw` is read."""
    for override in overrides:
        try:
            _apply_override(raw, override)
        except ValueError as error:
            said = override if len(override) <= 200 else f"{override[:200]}..."
            problems.append(f"override {said!r}: {error}")


def _apply_override(raw: dict[Any, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError("expected section.key=value")
    _set(raw, keys, parse(text))


def _set(raw: dict[Any, Any], keys: Sequence[str], value: object) -> None:
    here = raw
    *sections, key = keys
    for name in sections:
        if here.get(name) is None:  # absent, or `rollout: null`
            here[name] = {}
        if not isinstance(here[name], dict):
            raise ValueError(f"{name} is no section, it is {_shown(here[name])}")
        here = here[name]
    here[key] = value


def read_section(kind: type[T], raw: object, path: str, problems: list[str]) -> T | None:
    """An instance of the dataclass `kind` from `raw`; None when `problems` has grown. `path` stands before the keys."""
    if not isinstance(raw, dict):
        problems.append(f"{path}: expected a section with keys, got {_shown(raw)}")
        return None
    before = len(problems)
    hints = get_type_hints(kind, include_extras=True)
    problems.extend(_unknown(key, list(hints), path) for key in raw if key not in hints)
    values = {}
    for field in dataclasses.fields(cast(Any, kind)):
        here, hint = _join(path, field.name), hints[field.name]
        if field.name in raw:
            values[field.name] = _read(hint, raw[field.name], here, problems)
        elif field.metadata and raw.get(field.metadata[NEEDED_UNLESS][0]) != field.metadata[NEEDED_UNLESS][1]:
            problems.append(f"{here}: missing, expected {expected(hint)}")
        elif field.default_factory is not dataclasses.MISSING:
            continue
        elif field.default is dataclasses.MISSING and section_of(hint):
            values[field.name] = _read(hint, {}, here, problems)  # names each key that is missing in it
        elif field.default is dataclasses.MISSING:
            problems.append(f"{here}: missing, expected {expected(hint)}")
    return kind(**values) if len(problems) == before else None


def _read(hint: Any, raw: object, path: str, problems: list[str]) -> object:
    """A field's value, section or scalar; None when `problems` has grown."""
    if hint == Schedule:
        return _read_schedule(raw, path, problems)
    section = section_of(hint)
    if section is not None:
        optional = NoneType in get_args(hint)
        return None if optional and raw is None else read_section(section, raw, path, problems)
    if NoneType in get_args(hint):  # `Scalar | None`
        if raw is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not NoneType)
    try:
        return read_value(hint, raw)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return None


def _read_schedule(raw: object, path: str, problems: list[str]) -> Schedule:
    """By step, ascending, settings by their dotted keys. Whether these exist, who knows the recipe must say."""
    if not isinstance(raw, dict):
        problems.append(f"{path}: expected steps with settings, got {_shown(raw)}")
        return {}
    if len(raw) > MAX_SCHEDULED:
        problems.append(f"{path}: {len(raw):,} steps, at most {MAX_SCHEDULED:,}")
        return {}
    found: Schedule = {}
    for key, settings in raw.items():
        here = _join(path, _key(key))
        if not re.fullmatch("[1-9][0-9]{0,8}", str(key)):
            problems.append(f"{here}: expected a step, 1 to 999,999,999, got {_shown(key)}")
            continue
        try:
            found[int(key)] = dotted(settings)
        except ValueError as error:
            problems.append(f"{here}: {error}")
    return dict(sorted(found.items()))


def read_value(hint: Any, raw: object) -> Any:
    """`raw` as the scalar type `hint` wants it, or ValueError: what is expected, what is there, of which type."""
    kind, rules = _split(hint)
    value = _number(raw) if kind is float else raw
    if get_origin(kind) is Literal:
        valid, near = value in get_args(kind), _near(raw, get_args(kind))
    else:  # `is`, because to isinstance True is an int
        valid, near = type(value) is kind and all(rule.holds(value) for rule in rules), ""
    if not valid:
        raise ValueError(f"expected {expected(hint)}, got {_shown(raw)}{near}")
    return value


def _number(raw: object) -> object:
    """Integers as floats, and "1e-4" too: YAML 1.1 wants a dot in a float and leaves this one a string."""
    if type(raw) is int or (isinstance(raw, str) and _NUMBER.fullmatch(raw)):
        try:
            return float(cast(Any, raw))
        except OverflowError:  # an integer past the floats: the rules refuse infinity
            return math.inf
    return raw


def _split(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    """A scalar hint as its plain type and its rules."""
    if get_origin(hint) is Annotated:
        kind, *rules = get_args(hint)
        return kind, tuple(rules)
    return hint, ()


def section_of(hint: Any) -> type[Any] | None:
    """The dataclass in a hint `Section` or `Section | None`."""
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def expected(hint: Any) -> str:
    """What a scalar hint accepts, in words."""
    kind, rules = _split(hint)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return ", ".join([_TYPE_WORDS[kind], *(rule.says for rule in rules)])


def _shown(value: object) -> str:
    word = _TYPE_WORDS.get(type(value), type(value).__name__)
    return word if value is None or isinstance(value, dict) else f"{reprlib.repr(value)} ({word})"


def shortened(value: object) -> str:
    """A value for a message: as Python writes it, without its middle where it is long."""
    return reprlib.repr(value)


def _key(key: object) -> str:
    """A key for a message, as it stands where that is possible."""
    text = str(key) if not isinstance(key, float | int) else repr(key)
    return text if len(text) <= 100 and text.isprintable() else reprlib.repr(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _unknown(key: object, known: Sequence[str], path: str) -> str:
    where = f"keys of {path}" if path else "sections"
    return f"{_join(path, _key(key))}: unknown key{_near(key, known)}; known {where}: {', '.join(known)}"


def _near(word: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
