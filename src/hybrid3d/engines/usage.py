"""What a use of an engine's name is."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from hybrid3d.engines.signatures import Call

PACKAGES = ("megatron", "vllm", "transformer_engine")  # the names at the top of the engines' modules

# How a name is used, in the order in which a report names them
PATCHED, OVERRIDDEN, SUBCLASSED, CALLED, DECLARED, USED = KINDS = (
    *("patched", "overridden", "subclassed", "called", "declared", "used"),
)


@dataclass(frozen=True, eq=False)
class Use:
    """One use of an engine's name.

    Attributes:
        name: dotted, from its module on.
        place: the file and line here.
        kind: how it is used.
        call: how it is called, if it is.
        ours: the parameters of the function that replaces it, if they are known.
        is_optional: this code works without it too.
        by: the class whose method overrides it.
        may_be_undefined: the module of the name must use it, and need not define it.
    """

    name: str
    place: str
    kind: str
    call: Call | None = None
    ours: ast.arguments | None = None
    is_optional: bool = False
    may_be_undefined: bool = False
    by: str = ""


@dataclass(frozen=True, eq=False)
class Subclass:
    """A class here with an engine's class as a base.

    Attributes:
        methods: the names that it and its other bases in the file define.
    """

    name: str
    base: str
    place: str
    methods: frozenset[str]


@dataclass(frozen=True, eq=False)
class Uses:
    """All uses, and the classes with bases of engines."""

    names: tuple[Use, ...]
    subclasses: tuple[Subclass, ...]
