"""What files of a room say about its engine: `patches.py` the targets of patches, others what else is touched.

`touched.py`, or `hold.py`, has these constants, of literals, which are read and never imported:

- `TOUCHED`: by an engine's class or module, the attributes that are used of objects without a type.
- `SETTINGS`: an engine's class, a file or folder here, and what there makes dicts of its fields: functions, constants.
- `CHOSEN`: the classes of hybrid3d that are used with some versions of the engine only.
- `OPTIONAL`: the engine's names without which the code works too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid3d.engines.signatures import PACKAGES, Function, Kind, Use
from hybrid3d.engines.syntax import class_name, statements_in

PATCH = ("target", "package", "reason", "test", "replacement", "may_be_undefined")  # the arguments of `Patch`


class Declarations:
    """The constants and patches of one file."""

    def __init__(self, path: str, tree: ast.Module, sources: Path):
        self._path, self._tree, self._sources = path, tree, sources
        self._constants: dict[str, Any] = {
            target.id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in ("TOUCHED", "SETTINGS", "CHOSEN", "OPTIONAL")
        }
        self.chosen: Sequence[str] = self._constants.get("CHOSEN", ())
        self.optional: Sequence[str] = self._constants.get("OPTIONAL", ())

    def uses(self) -> Iterator[Use]:
        """Yield what the file declares, and the targets of its patches."""
        for owner, names in self._constants.get("TOUCHED", {}).items():
            for name in names.split():
                yield Use(f"{owner}.{name}", f"{self._path}: TOUCHED", Kind.DECLARED)
        for owner, where, functions in self._constants.get("SETTINGS", ()):
            for place, name in _keys(self._sources, where, functions.split()):
                yield Use(f"{owner}.{name}", place, Kind.DECLARED)
        yield from self._patches()

    def _patches(self) -> Iterator[Use]:
        helpers = {"Patch": ("", PATCH)} | {
            node.name: (prefix, tuple(one.arg for one in node.args.args))
            for node in self._tree.body
            if isinstance(node, ast.FunctionDef) and (prefix := _prefix(node)) is not None
        }
        names = {id(node.value): node.targets[0] for node in self._tree.body if isinstance(node, ast.Assign)}
        for node in ast.walk(self._tree):
            helper = helpers.get(class_name(node.func) or "") if isinstance(node, ast.Call) else None
            if helper is None or not isinstance(node, ast.Call):
                continue
            prefix, parameters = helper
            given = dict(zip(parameters, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
            target, flag, name = given.get("target"), given.get("may_be_undefined"), names.get(id(node))
            full = f"{prefix}{target.value!s}" if isinstance(target, ast.Constant) else ""
            if not full.startswith((*PACKAGES, "torch")):
                continue
            may_be_undefined = isinstance(flag, ast.Constant) and flag.value is True
            ours = self._made_by(given.get("replacement")) or self._replacing(class_name(name) or "")
            yield Use(full, f"{self._path}:{node.lineno}", Kind.PATCHED, ours=ours, may_be_undefined=may_be_undefined)

    def _made_by(self, factory: ast.expr | None) -> ast.arguments | None:
        """Return the parameters of what a patch's `replacement` returns, which is called with the original."""
        if isinstance(factory, ast.Lambda):
            return self._parameters(factory.body)
        function = self._function(factory)
        if function is None:
            return None
        inner = {node.name: node for node in function.body if isinstance(node, Function)}
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        names = [value.id for value in returned if isinstance(value, ast.Name) and value.id in inner]
        return inner[names[-1]].args if names else None

    def _replacing(self, patch: str) -> ast.arguments | None:
        """Return the parameters of what a patch of this name is replaced by, by its methods."""
        methods = (f"{patch}.replace", f"{patch}.replaced")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and node.args and class_name(node.func) in methods:
                return self._parameters(node.args[0])
        return None

    def _parameters(self, value: ast.expr) -> ast.arguments | None:
        if isinstance(value, ast.Lambda):
            return value.args
        function = self._function(value)
        return None if function is None else function.args

    def _function(self, value: ast.expr | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return a function of this file, or of a module next to it."""
        module, _, name = (class_name(value) or "").rpartition(".")
        file = (self._sources / self._path).with_name(f"{module}.py")
        tree = ast.parse(file.read_text(encoding="utf-8")) if module and file.is_file() else self._tree
        found = [node for node in statements_in(tree) if isinstance(node, Function) and node.name == name]
        return found[0] if len(found) == 1 else None


def _prefix(node: ast.FunctionDef) -> str | None:
    """Return what a function that makes patches sets before their targets; None if it makes none."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and class_name(one.func) == "Patch" and isinstance(one.args[0], ast.JoinedStr):
            first = one.args[0].values[0]
            return str(first.value) if isinstance(first, ast.Constant) else ""
    return None


def _keys(sources: Path, where: str, functions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of dicts that functions or constants of these names make, each with its place."""
    path = sources / where
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        relative = file.relative_to(sources).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_function = isinstance(node, Function) and node.name in functions
            is_constant = isinstance(node, ast.Assign) and (class_name(node.targets[0]) or "") in functions
            is_argument = isinstance(node, ast.keyword) and isinstance(node.value, ast.Lambda) and node.arg in functions
            if is_function or is_constant or is_argument:
                yield from ((f"{relative}:{line}", key) for line, key in _dict_keys(node))


def _dict_keys(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the keys of the outermost dicts in code: displays, `dict(...)`, and arguments of calls that have a `**`."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield key.lineno, str(key.value)
            elif key is None:
                yield from _dict_keys(value)
    elif isinstance(node, ast.Call) and (
        class_name(node.func) == "dict" or any(keyword.arg is None for keyword in node.keywords)
    ):
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield keyword.lineno, keyword.arg
            else:
                yield from _dict_keys(keyword.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _dict_keys(child)
