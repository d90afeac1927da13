"""What hybrid3d uses of the engines, read in its own sources.

Read are imports and what follows their names by dots, calls with their arguments, classes with an engine's class as a
base, attributes of what has an engine's class as annotation, and the tables of patches. What reading cannot find is
declared in `touched.py` or `hold.py` of their rooms (`declarations.py`).
"""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from hybrid3d.engines.declarations import Declarations
from hybrid3d.engines.signatures import PACKAGES, Call, Function, Kind, Subclass, Use, Uses, bound, call_of
from hybrid3d.engines.syntax import bindings, class_name, decorators_of, last_name, statements_in

SOURCES = Path(__file__).resolve().parent.parent
PLACES = ("patches.py", "train/**/*.py", "rollout/**/*.py", "weight_transfer/**/*.py")  # the only ones with engines
DECLARING = ("patches.py", "touched.py", "hold.py")


Meaning: TypeAlias = tuple[str, bool] | None
"""An engine's dotted name for which one here stands, and whether it is an object of that class; None for others."""


@dataclass
class _Owner:
    """A class here: its engine's base, empty without one; what it defines itself; what its attributes stand for."""

    base: str
    defined: frozenset[str]
    types: dict[str, Meaning] = field(default_factory=dict)


@dataclass
class _Scope:
    """What the names of a function stand for, the name of the object in it, and the class whose method it is."""

    names: ChainMap[str, Meaning]
    self_name: str = ""
    owner: _Owner | None = None


def read_uses(sources: Path = SOURCES) -> Uses:
    """Return what the files of hybrid3d use of the engines."""
    names: list[Use] = []
    subclasses: list[Subclass] = []
    optional: set[str] = set()
    chosen: set[str] = set()
    for file in (file for place in PLACES for file in sorted(sources.glob(place))):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        path = file.relative_to(sources).as_posix()
        reader = _Reader(path, tree)
        reader.visit(tree)
        names += reader.uses
        subclasses += reader.subclasses
        if "find_spec" in text:
            optional |= {*_asked_for(tree)}
        if file.name in DECLARING:
            declared = Declarations(path, tree, sources)
            names += declared.uses()
            optional |= {*declared.optional}
            chosen |= {*declared.chosen}
    names = [replace(one, is_optional=one.is_optional or _is_below(one.name, optional)) for one in names]
    kept = [one for one in names if one.by not in chosen]
    return Uses(tuple(kept), tuple(one for one in subclasses if one.name not in chosen))


def _is_below(name: str, owners: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{owner}.") for owner in owners)


def _asked_for(tree: ast.Module) -> Iterator[str]:
    """Yield the modules in engines for which the code asks by `find_spec`."""
    engines = tuple(f"{package}." for package in PACKAGES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) == "find_spec" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith(engines):
                yield str(name.value)


class _Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, path: str, tree: ast.Module):
        self.uses: list[Use] = []
        self.subclasses: list[Subclass] = []
        self._path = path
        self._classes = {node.name: node for node in statements_in(tree) if isinstance(node, ast.ClassDef)}
        self._scopes = [_Scope(ChainMap({}))]
        self._is_optional = False
        self._inner: set[int] = set()  # ids of attributes that are a part of a longer name

    @property
    def _scope(self) -> _Scope:
        return self._scopes[-1]

    def _add(self, name: str, node: ast.AST, kind: Kind = Kind.USED, call: Call | None = None) -> None:
        place = f"{self._path}:{getattr(node, 'lineno', 0)}"
        parts = name.split(".")
        dunder = next((n for n, part in enumerate(parts) if part.startswith("__") and part != "__init__"), len(parts))
        self.uses.append(Use(".".join(parts[:dunder]), place, kind, call, is_optional=self._is_optional))

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            if one.name.partition(".")[0] in PACKAGES:
                self._add(one.name, node)
                name = one.asname or one.name.partition(".")[0]
                self._scope.names[name] = (one.name if one.asname else name, False)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module or node.module.partition(".")[0] not in PACKAGES:
            return
        for one in node.names:
            self._add(f"{node.module}.{one.name}", node)
            self._scope.names[one.asname or one.name] = (f"{node.module}.{one.name}", False)

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers for name in _names_in(handler.type)}
        before = self._is_optional
        self._is_optional = before or not caught.isdisjoint({"ImportError", "ModuleNotFoundError"})
        self._visit_parts(node.body)
        self._is_optional = before
        self._visit_parts([*node.handlers, *node.orelse, *node.finalbody])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [self._chain(base) for base in node.bases]
        base = next((one[0] for one in bases if one is not None), None)
        owner = _Owner(base or "", self._defined(node))
        if base is not None:
            self.subclasses.append(Subclass(node.name, base, f"{self._path}:{node.lineno}", owner.defined))
            self._add(base, node, Kind.SUBCLASSED)
            self._overrides(node, base)
        self._visit_parts(node.decorator_list)
        self._visit_parts(node.bases)
        for statement in node.body:
            if isinstance(statement, Function):
                self.visit_FunctionDef(statement, owner)
            else:
                self.visit(statement)

    def _defined(self, node: ast.ClassDef) -> frozenset[str]:
        """Return the names that a class and its bases in this file define, or set on the object."""
        found: set[str] = set()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                found |= self._defined(self._classes[base.id])
        found |= {name for name, _, _ in bindings(node.body)}
        found |= {
            one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
        }
        return frozenset(found)

    def _overrides(self, node: ast.ClassDef, base: str) -> None:
        """Note each method of a class as one that may be in the place of its engine's base's."""
        for one in node.body:
            if isinstance(one, Function) and not one.name.startswith("__"):
                ours = one.args if "staticmethod" in decorators_of(one) else bound(one.args)
                place = f"{self._path}:{one.lineno}"
                self.uses.append(Use(f"{base}.{one.name}", place, Kind.OVERRIDDEN, ours=ours, by=node.name))

    def visit_FunctionDef(self, node: Function, owner: _Owner | None = None) -> None:
        self._visit_parts(node.decorator_list)
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
        parameters = [one for one in arguments if one is not None]
        names: dict[str, Meaning] = {
            one.id: None for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        }
        names |= {one.arg: self._object_of(one.annotation) for one in parameters}
        scope = _Scope(self._scope.names.new_child(names), self._scope.self_name, self._scope.owner)
        if owner is not None and node.args.args:
            scope.self_name, scope.owner = node.args.args[0].arg, owner
        self._scopes.append(scope)
        self._visit_parts([node.args, *([node.returns] if node.returns else []), *node.body])
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def _visit_parts(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _object_of(self, annotation: ast.expr | None) -> Meaning:
        """Return the engine's class that an annotation names, as an object of it."""
        name = class_name(annotation)
        if name is None or isinstance(annotation, ast.Subscript):
            return None
        first, _, rest = name.partition(".")
        found = self._scope.names.get(first)
        return None if found is None or found[1] else (f"{found[0]}.{rest}" if rest else found[0], True)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._assign(node.target, self._object_of(node.annotation))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._assign(one, self._chain(value))
            else:
                self._assign(target, self._chain(node.value))

    def _assign(self, target: ast.expr, value: Meaning) -> None:
        if isinstance(target, ast.Name) and len(self._scopes) > 1:
            self._scope.names[target.id] = value
        elif self._is_self(target) and self._scope.owner is not None:
            assert isinstance(target, ast.Attribute)
            self._scope.owner.types.setdefault(target.attr, value)

    def _is_self(self, node: ast.expr) -> bool:
        owner = node.value if isinstance(node, ast.Attribute) else None
        return isinstance(owner, ast.Name) and owner.id == self._scope.self_name != ""

    def _chain(self, node: ast.expr) -> Meaning:
        """Return the engine's dotted name that an expression stands for, and whether it is an object of that class."""
        if isinstance(node, ast.Name):
            return self._scope.names.get(node.id)
        if isinstance(node, ast.Call):
            made = self._chain(node.func)
            is_class = made is not None and not made[1] and made[0].rpartition(".")[2].lstrip("_")[:1].isupper()
            return (made[0], True) if made is not None and is_class else None
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._scope.owner
        if self._is_self(node) and owner is not None:
            if owner.types.get(node.attr) is not None:
                return owner.types[node.attr]
            return (f"{owner.base}.{node.attr}", False) if owner.base and node.attr not in owner.defined else None
        if _is_super(node.value) and owner is not None and owner.base:
            return f"{owner.base}.{node.attr}", False
        found = self._chain(node.value)
        return None if found is None else (f"{found[0]}.{node.attr}", False)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        found = self._chain(node)
        if found is not None and id(node) not in self._inner:
            self._add(found[0], node)
        part = node.value
        while isinstance(part, ast.Attribute):
            self._inner.add(id(part))
            part = part.value
        if found is None or not isinstance(part, ast.Name):
            self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and len(node.args) == 2:
            self._narrow(node.args[0], node.args[1])
        found = self._chain(node.func)
        if found is not None and not found[1]:
            owner = self._chain(node.func.value) if isinstance(node.func, ast.Attribute) else None
            of_super = isinstance(node.func, ast.Attribute) and _is_super(node.func.value)
            on_class = owner is not None and not owner[1] and not of_super
            name = found[0].removesuffix(".__init__")
            self._add(name, node, Kind.CALLED, call_of(node, on_class))
        self.generic_visit(node)

    def _narrow(self, value: ast.expr, kind: ast.expr) -> None:
        """Take an object of an engine's class for one of its subclass, about which the code asks."""
        if isinstance(value, ast.Name) and (self._scope.names.get(value.id) or ("", False))[1]:
            self._scope.names[value.id] = self._object_of(kind) or self._scope.names[value.id]


def _names_in(node: ast.expr | None) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node is not None else set()


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
