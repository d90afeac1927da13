"""Uses of an engine's names, and parameters as syntax: as text, as a digest, and whether a call or function fits."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

IGNORED = {"ctx", "type_comment", "kind", "lineno", "col_offset", "end_lineno", "end_col_offset", "type_params"}


@dataclass(frozen=True)
class Call:
    """How hybrid3d calls something.

    Attributes:
        positional: the number of positional arguments.
        is_open: it has arguments beside these and the keywords, by `*` or `**`.
        on_class: a method is called by its class's name, so that the first argument may be the object.
    """

    positional: int
    keywords: tuple[str, ...]
    is_open: bool = False
    on_class: bool = False


PACKAGES = ("megatron", "vllm", "transformer_engine")  # the names at the top of the engines' modules


class Kind(StrEnum):
    """How a name is used, in the order in which a report names them."""

    PATCHED = "patched"
    OVERRIDDEN = "overridden"
    SUBCLASSED = "subclassed"
    CALLED = "called"
    DECLARED = "declared"
    USED = "used"


@dataclass(frozen=True, eq=False)
class Use:
    """One use of an engine's name.

    Attributes:
        name: dotted, from its module on.
        place: the file and line here.
        ours: the parameters of the function that replaces it, if they are known.
        is_optional: this code works without it too.
        by: the class whose method overrides it.
        may_be_undefined: the module of the name must use it, and need not define it.
    """

    name: str
    place: str
    kind: Kind
    call: Call | None = None
    ours: ast.arguments | None = None
    is_optional: bool = False
    may_be_undefined: bool = False
    by: str = ""


@dataclass(frozen=True, eq=False)
class Subclass:
    """A class here with an engine's class as a base, and the methods that it and its other bases in the file define."""

    name: str
    base: str
    place: str
    methods: frozenset[str]


@dataclass(frozen=True, eq=False)
class Uses:
    """All uses, and the classes with bases of engines."""

    names: tuple[Use, ...]
    subclasses: tuple[Subclass, ...]


def call_of(node: ast.Call, on_class: bool = False) -> Call:
    """Return how an expression calls."""
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    return Call(len(plain), keywords, len(plain) + len(keywords) < len(node.args) + len(node.keywords), on_class)


def text_of(parameters: ast.arguments) -> str:
    """Return parameters as text, with defaults and without annotations."""

    def plain(field: Any) -> Any:
        if isinstance(field, list):
            return [plain(one) for one in field]
        return ast.arg(field.arg) if isinstance(field, ast.arg) else field

    fields = {name: plain(field) for name, field in ast.iter_fields(parameters)}
    return f"({ast.unparse(ast.arguments(**fields))})"


def difference(before: str, now: str) -> str:
    """Return in which parameters two texts of them differ."""
    old, new = _by_name(before), _by_name(now)
    found = [f"no longer has {name}" for name in old if name not in new]
    found += [f"has {text}, which is new" for name, text in new.items() if name not in old]
    found += [f"has {new[name]} for {old[name]}" for name in old if name in new and old[name] != new[name]]
    return "; ".join(found) or f"has its parameters in another order or kind: {now}"


def _by_name(text: str) -> dict[str, str]:
    """Return each parameter of a text by name, with its default."""
    (function,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    named = zip([*positional, *given.kwonlyargs], defaults, strict=True)
    found = {one.arg: one.arg if default is None else f"{one.arg}={ast.unparse(default)}" for one, default in named}
    stars = ((given.vararg, "*"), (given.kwarg, "**"))
    return found | {f"{star}{one.arg}": f"{star}{one.arg}" for one, star in stars if one is not None}


def bound(parameters: ast.arguments) -> ast.arguments:
    """Return the parameters of a method without the first one, the object."""
    fields, rest = dict(ast.iter_fields(parameters)), _positional(parameters)[1:]
    first = "posonlyargs" if parameters.posonlyargs else "args"
    fields[first] = fields[first][1:]
    return ast.arguments(**fields | {"defaults": parameters.defaults[-len(rest) :] if rest else []})


def misfits(parameters: ast.arguments, call: Call) -> list[str]:
    """Return why parameters do not take a call; nothing if they do."""
    positional = _positional(parameters)
    only = len(parameters.posonlyargs)
    found = []
    if call.positional > len(positional) and parameters.vararg is None:
        found.append(f"takes {len(positional)} positional arguments, {call.positional} are given")
    named = {*positional[only:], *(one.arg for one in parameters.kwonlyargs)}
    if parameters.kwarg is None:
        found += [f"has no parameter {name}" for name in call.keywords if name not in named]
    if not call.is_open:
        given = {*positional[: call.positional], *call.keywords}
        found += [f"requires {name}, which is not given" for name in _required(parameters) if name not in given]
    return found


def refuses(ours: ast.arguments, theirs: ast.arguments) -> list[str]:
    """Return which calls that `theirs` takes `ours` does not: of a function of hybrid3d in the place of an engine's.

    A parameter may have another name at the same place, where neither name has another place.
    """
    places, given = _positional(ours), _positional(theirs)
    named = [one.arg for one in theirs.kwonlyargs]
    found = [
        f"has {name} where hybrid3d's has {place}"
        for place, name in zip(places, given, strict=False)
        if place != name and (name in places or place in (*given, *named))
    ]
    others = [*(given[len(places) :] if ours.vararg is None else ()), *named]
    refused = [name for name in others if not _takes_keyword(ours, name)]
    found += [f"has the parameter {name}, which hybrid3d's does not take" for name in refused]
    if theirs.vararg is None and theirs.kwarg is None:
        covered = {*places[: len(given)], *given, *named}
        found += [
            f"has no parameter {name}, which hybrid3d's requires" for name in _required(ours) if name not in covered
        ]
    return found


def _positional(parameters: ast.arguments) -> list[str]:
    return [one.arg for one in (*parameters.posonlyargs, *parameters.args)]


def _takes_keyword(parameters: ast.arguments, name: str) -> bool:
    named = (one.arg for one in (*parameters.args, *parameters.kwonlyargs))
    return parameters.kwarg is not None or name in named


def _required(parameters: ast.arguments) -> Iterator[str]:
    positional = _positional(parameters)
    yield from positional[: len(positional) - len(parameters.defaults)]
    for one, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        if default is None:
            yield one.arg


def digest(nodes: Sequence[ast.AST]) -> str:
    """Return a digest of code without docstrings and comments, which does not depend on the version of Python."""
    parts = (part for node in _without_docstring([*nodes]) for part in _parts(node))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, ast.AST):
        yield type(value).__name__
        for name in value._fields:
            field = getattr(value, name, None)
            if name in IGNORED or field is None or field == []:
                continue
            yield f" {name}("
            yield from _parts(_without_docstring(field) if name == "body" and isinstance(field, list) else field)
            yield ")"
    elif isinstance(value, list):
        for one in value:
            yield from _parts(one)
            yield ","
    else:
        yield repr(value)


def _without_docstring(body: list[Any]) -> list[Any]:
    """Return statements without texts that stand alone."""
    return [
        one
        for one in body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str))
    ]
