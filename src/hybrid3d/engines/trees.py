"""Finds what a dotted name is in an engine's source files, in a folder or a wheel. Nothing of them is imported."""

from __future__ import annotations

import ast
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from hybrid3d.engines.signatures import Function, bound
from hybrid3d.engines.syntax import (
    Member,
    bases_of,
    bindings,
    class_name,
    decorators_of,
    definitions_first,
    fields_of,
    last_name,
    members_of,
)

FIELD_DECORATORS = {"dataclass", "config"}  # `config` is vLLM's, which makes a dataclass
FIELD_BASES = {"NamedTuple", "TypedDict", "Struct", "BaseModel"}  # `Struct` is msgspec's
EMPTY_BASES = {"object", "ABC", "Generic", "Protocol"}  # that have neither a constructor nor attributes
MAX_FILE_BYTES = 16 << 20  # larger ones are not read
MAX_STEPS = 64  # of imports from imports, which may go in circles
MAX_STARS = 4  # of imports of all names, in each of which a name is looked for
NO_PARAMETERS = ast.arguments([], [], None, [], [], None, [])


class Unknown(Enum):
    """What reading cannot find out: a name comes from outside of the tree, or belongs to a value without a type."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed file.

    Attributes:
        names: the statements that bind each name outside of functions, in order; `*` has imports of all names.
        is_lazy: it has a `__getattr__`, which gives the names that it imports for type checkers.
    """

    name: str
    is_package: bool
    text: str
    names: dict[str, list[ast.stmt]]
    is_lazy: bool

    @cached_property
    def stars(self) -> list[str]:
        """The modules all of whose names it imports."""
        return [self.absolute(node) for node in self.names.get("*", []) if isinstance(node, ast.ImportFrom)]

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the module from which a statement here imports."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


@dataclass(frozen=True, eq=False)
class Class:
    """A class, and the module that defines it."""

    module: Module
    node: ast.ClassDef


@dataclass(frozen=True, eq=False)
class Definition:
    """What a name is: the module itself, or what a statement binds, perhaps in the body of the class that owns it."""

    module: Module
    node: ast.stmt | None
    owner: ast.ClassDef | None = None

    @property
    def as_class(self) -> Class | None:
        return Class(self.module, self.node) if isinstance(self.node, ast.ClassDef) else None

    @property
    def is_method(self) -> bool:
        """Whether the first parameter is the object or the class."""
        is_function = isinstance(self.node, Function) and self.owner is not None
        return is_function and "staticmethod" not in decorators_of(self.node)


Found = Definition | Unknown | None
"""What a name is; None where there is no such name."""


class Tree:
    """The source files of a package, the name at the top, in a folder that has the package's folder, or in a wheel."""

    def __init__(self, place: Path, package: str):
        self.place, self.package = place, package
        self.unreadable: dict[str, str] = {}  # files that cannot be read or parsed, and why
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self._files = set(self._wheel.namelist()) if self._wheel else set[str]()
        self._modules: dict[str, Module | None] = {}
        self._members: dict[ast.ClassDef, dict[str, Member]] = {}

    def text(self, path: str) -> str | None:
        """Return the text of a file; None if there is none, or it cannot be read."""
        try:
            if self._wheel is not None:
                if path not in self._files or self._wheel.getinfo(path).file_size > MAX_FILE_BYTES:
                    return None
                return self._wheel.read(path).decode("utf-8", "replace")
            file = self.place / path
            if not os.path.isfile(file) or file.stat().st_size > MAX_FILE_BYTES:
                return None
            return file.read_text(encoding="utf-8", errors="replace")
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            self.unreadable[path] = str(error)
            return None

    def folders(self, pattern: str) -> list[str]:
        """Return the names of the folders at the top that begin like this."""
        names = {name.partition("/")[0] for name in self._files if "/" in name}
        if self._wheel is None:
            names = {path.name for path in self.place.glob(f"{pattern}*") if path.is_dir()}
        return sorted(name for name in names if name.startswith(pattern))

    def module(self, name: str) -> Module | None:
        """Return a module; one without names for a folder without `__init__.py`, None if there is neither."""
        if name not in self._modules:
            self._modules[name] = self._read(name) if f"{name}.".startswith(f"{self.package}.") else None
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True), (f"{path}.pyi", False)):
            text = self.text(file)
            if text is not None:
                return self._parse(name, file, text, is_package)
        in_wheel = any(file.startswith(f"{path}/") for file in self._files)
        is_folder = (self.place / path).is_dir() if self._wheel is None else in_wheel
        return Module(name, True, "", {}, False) if is_folder else None

    def _parse(self, name: str, file: str, text: str, is_package: bool) -> Module | None:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.unreadable[file] = f"{type(error).__name__}: {error}"
            return None
        names: dict[str, list[ast.stmt]] = {}
        is_lazy = any(bound_name == "__getattr__" for bound_name, _, _ in bindings(body))
        for bound_name, node, is_typing in bindings(body):
            if is_lazy or not is_typing:
                names.setdefault(bound_name, []).append(node)
        return Module(name, is_package, text, names, is_lazy)

    def find(self, dotted: str) -> Found:
        """Return what a name is: a module, or something in one."""
        return self._find(dotted.split("."), 0)

    def _find(self, parts: Sequence[str], steps: int) -> Found:
        if steps > MAX_STEPS:
            return None
        for n in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:n]))
            if module is not None:
                return self._in_module(module, parts[n:], steps)
        return None if parts[0] == self.package else UNKNOWN

    def _in_module(self, module: Module, path: Sequence[str], steps: int) -> Found:
        if not path:
            return Definition(module, None)
        for node in definitions_first(module.names.get(path[0], [])):
            found = self._at(module, node, path, steps)
            if found is not None:
                return found
        for star in module.stars if steps < MAX_STARS else ():
            of_star = self.module(star)
            found = None if of_star is None else self._in_module(of_star, path, steps + 1)
            if isinstance(found, Definition):
                return found
        is_named = module.is_lazy and any(f"{quote}{path[0]}{quote}" in module.text for quote in "\"'")
        return UNKNOWN if is_named else None  # its `__getattr__` may give it

    def _at(self, module: Module, node: ast.stmt, path: Sequence[str], steps: int) -> Found:
        """Follow a path whose first name this statement of a module binds."""
        rest = path[1:]
        if isinstance(node, ast.ImportFrom | ast.Import):
            return self._find([*_imported(module, node, path[0]).split("."), *rest], steps + 1)
        if isinstance(node, ast.ClassDef) and rest:
            return self._in_class(Class(module, node), rest, steps)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id != path[0]:
            found = self._in_module(module, [node.value.id, *rest], steps + 1)
            if found is not None:
                return found
        if not rest:
            return Definition(module, node)
        return self._typed(module, getattr(node, "annotation", None), rest, steps)

    def _typed(self, module: Module, annotation: ast.expr | None, path: Sequence[str], steps: int) -> Found:
        """Follow a path from a value of this type, or from what a function of this name returns."""
        name = class_name(annotation)
        kind = self._in_module(module, name.split("."), steps + 1) if name and steps < MAX_STEPS else None
        if not isinstance(kind, Definition):
            return UNKNOWN
        if isinstance(kind.node, Function):
            return self._typed(kind.module, kind.node.returns, path, steps + 1)
        if kind.as_class is None:
            return UNKNOWN
        found = self._in_class(kind.as_class, path, steps + 1)
        return UNKNOWN if found is None and "ABC" in bases_of(kind.node) else found  # it may be of a subclass

    def _in_class(self, kind: Class, path: Sequence[str], steps: int) -> Found:
        is_known = True
        for one in self.lineage(kind, steps):
            found = self._own(one, path, steps) if isinstance(one, Class) else None
            if found is not None:
                return found
            is_known = is_known and one is not UNKNOWN
        return None if is_known else UNKNOWN

    def _own(self, kind: Class, path: Sequence[str], steps: int) -> Found:
        """Follow a path whose first name a class itself defines."""
        if kind.node not in self._members:
            self._members[kind.node] = members_of(kind.node)
        if path[0] not in self._members[kind.node]:
            return None
        node, kind_of_node = self._members[kind.node][path[0]]
        if len(path) > 1:
            return self._typed(kind.module, kind_of_node, path[1:], steps)
        return Definition(kind.module, node, kind.node)

    def lineage(self, kind: Class, steps: int = 0) -> Iterator[Class | Unknown]:
        """Yield a class and its bases, depth first; UNKNOWN for a base from outside of the tree."""
        yield kind
        for base in kind.node.bases:
            if last_name(base) in EMPTY_BASES:
                continue
            name = class_name(base)
            found = self._in_module(kind.module, name.split("."), steps + 1) if name and steps < MAX_STEPS else None
            if isinstance(found, Definition) and found.as_class is not None:
                yield from self.lineage(found.as_class, steps + 1)
            else:
                yield UNKNOWN

    def parameters(self, found: Definition) -> ast.arguments | None:
        """Return the parameters of a function, of a method without its object, or of a class's constructor.

        None for what is no function, or where they are not in the tree.
        """
        if decorators_of(found.node) & {"property", "cached_property"}:
            return None
        if isinstance(found.node, Function):
            return bound(found.node.args) if found.is_method else found.node.args
        return None if found.as_class is None else self._constructor(found.as_class)

    def _constructor(self, kind: Class) -> ast.arguments | None:
        lineage = [*self.lineage(kind)]
        classes = [one.node for one in lineage if isinstance(one, Class)]
        is_record = any(bases_of(node) & FIELD_BASES for node in classes)
        with_fields = [node for node in classes if is_record or decorators_of(node) & FIELD_DECORATORS]
        for one in lineage:
            if not isinstance(one, Class):
                return None
            for name in ("__init__", "__new__"):
                made = self._own(one, [name], 0)
                if isinstance(made, Definition) and isinstance(made.node, Function):
                    return bound(made.node.args)
            if one.node in with_fields:
                return fields_of(with_fields[::-1])
        return NO_PARAMETERS

    def abstract_methods(self, kind: Class) -> dict[str, str]:
        """Return the abstract methods that a class still has, and the class that declares each."""
        found: dict[str, str] = {}
        for one in reversed([one for one in self.lineage(kind) if isinstance(one, Class)]):
            for name, node, _ in bindings(one.node.body):
                if any(decorator.startswith("abstract") for decorator in decorators_of(node)):
                    found[name] = f"{one.module.name}.{one.node.name}"
                else:
                    found.pop(name, None)
        return found


def _imported(module: Module, node: ast.ImportFrom | ast.Import, name: str) -> str:
    """Return the dotted name that a statement binds to this one."""
    alias = next(one for one in node.names if name == (one.asname or one.name.partition(".")[0]) or name == one.asname)
    if isinstance(node, ast.ImportFrom):
        return f"{module.absolute(node)}.{alias.name}"
    return alias.name if alias.asname else alias.name.partition(".")[0]
