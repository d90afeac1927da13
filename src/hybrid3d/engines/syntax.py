"""What statements of Python's syntax bind and say: names, types, decorators, fields."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence

from hybrid3d.engines.signatures import Function


def bases_of(node: ast.AST | None) -> set[str]:
    """Return the last names of a class's bases."""
    return {last_name(base) for base in getattr(node, "bases", ())}


def fields_of(lineage: Sequence[ast.ClassDef]) -> ast.arguments:
    """Return the parameters of a class whose constructor is made of its fields, from its bases and itself, in order."""
    fields: dict[str, tuple[bool, ast.expr | None]] = {}
    is_dict = any("TypedDict" in bases_of(one) for one in lineage)
    for one in lineage:
        fields |= _own_fields(one, is_dict)
    plain = {name: default for name, (only, default) in fields.items() if not only}
    named = {name: default for name, (only, default) in fields.items() if only}
    defaults = [default for default in plain.values() if default is not None]
    arguments = [ast.arg(name) for name in plain]
    return ast.arguments([], arguments, None, [ast.arg(name) for name in named], [*named.values()], None, defaults)


def _own_fields(node: ast.ClassDef, is_dict: bool) -> dict[str, tuple[bool, ast.expr | None]]:
    """Return the fields of a class's body: whether each is given by name only, and its default."""
    options_of_class = (k for d in node.decorator_list if isinstance(d, ast.Call) for k in d.keywords)
    only = is_dict or any(
        keyword.arg == "kw_only" and _is(keyword.value, True) for keyword in (*node.keywords, *options_of_class)
    )
    fields: dict[str, tuple[bool, ast.expr | None]] = {}
    for _, statement, _ in bindings(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = ast.unparse(statement.annotation)
        if "ClassVar" in annotation:
            continue
        if annotation.endswith("KW_ONLY"):
            only = True
            continue
        options = _field_options(statement.value)
        if options is None:
            default = ast.Constant(...) if is_dict else statement.value
            fields[statement.target.id] = only, default
        elif not _is(options.get("init"), False):
            default = options.get("default") or options.get("default_factory")
            fields[statement.target.id] = only or _is(options.get("kw_only"), True), default
    return fields


def _field_options(value: ast.expr | None) -> dict[str, ast.expr] | None:
    """Return the arguments of `field(...)` or `Field(...)`; None for another default."""
    if not isinstance(value, ast.Call) or last_name(value.func).lower() != "field":
        return None
    options = {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg is not None}
    return options | ({"default": value.args[0]} if value.args else {})


def _is(value: ast.expr | None, constant: bool | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def class_name(annotation: ast.expr | None) -> str | None:
    """Return the dotted name of the one class of an annotation or a base, without None; None if it has several."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return class_name(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(annotation, ast.BinOp):
        sides = [class_name(side) for side in (annotation.left, annotation.right) if not _is(side, None)]
        return sides[0] if len(sides) == 1 else None
    if isinstance(annotation, ast.Subscript):
        kind = class_name(annotation.value)
        if kind is not None and kind.rpartition(".")[2] in ("Optional", "ClassVar", "Final"):
            return class_name(annotation.slice)
        return kind
    if isinstance(annotation, ast.Attribute):
        owner = class_name(annotation.value)
        return None if owner is None else f"{owner}.{annotation.attr}"
    return annotation.id if isinstance(annotation, ast.Name) else None


def last_name(node: ast.expr) -> str:
    """Return the name of a class or function without its module; empty if it has none."""
    return (class_name(node) or "").rpartition(".")[2]


def decorators_of(node: ast.AST | None) -> set[str]:
    """Return the last names of a statement's decorators."""
    found = getattr(node, "decorator_list", [])
    called = [one.func if isinstance(one, ast.Call) else one for one in found]
    return {last_name(one) for one in called}


def definitions_first(nodes: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that bind a name: definitions first, then imports, then values such as None."""

    def rank(node: ast.stmt) -> int:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return 3 if decorators_of(node) & {"overload", "setter", "deleter"} else 0
        return 1 if isinstance(node, ast.Import | ast.ImportFrom) else 2

    return sorted(nodes, key=rank)


def bindings(body: Sequence[ast.stmt], is_typing: bool = False) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Yield each name that statements bind, outside of functions, and whether that is for type checkers only."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node, is_typing
        elif isinstance(node, ast.Import):
            yield from ((one.asname or one.name.partition(".")[0], node, is_typing) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, node, is_typing) for one in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
                yield from ((name, node, is_typing) for name in names if not isinstance(target, ast.Attribute))
        else:
            only = isinstance(node, ast.If) and (class_name(node.test) or "").endswith("TYPE_CHECKING")
            yield from bindings(getattr(node, "body", []), is_typing or only)
            for handler in getattr(node, "handlers", []):
                yield from bindings(handler.body, is_typing)
            for part in ("orelse", "finalbody"):
                yield from bindings(getattr(node, part, []), is_typing)


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a module or statement and their parts that have statements, in the order of `ast.walk`.

    It visits no expression, of which there are ten times as many.
    """
    found = deque([node])
    while found:
        node = found.popleft()
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            found.extend(getattr(node, name, ()))


Member = tuple[ast.stmt, ast.expr | None]
"""The statement that gives a class or its objects an attribute, and the attribute's type."""


def members_of(kind: ast.ClassDef) -> dict[str, Member]:
    """Return what a class itself defines, by name: in its body, or else where its methods set it first."""
    found: dict[str, Member] = {}
    for method in kind.body:
        if isinstance(method, Function) and method.args.args:
            for name, member in _set_in(method, method.args.args[0].arg):
                found.setdefault(name, member)
    in_body: dict[str, list[ast.stmt]] = {}
    for name, node, _ in bindings(kind.body):
        in_body.setdefault(name, []).append(node)
    for name, nodes in in_body.items():
        node = definitions_first(nodes)[0]
        found[name] = node, getattr(node, "annotation", None) or getattr(node, "returns", None)  # of a property
    return found


def _set_in(method: Function, owner: str) -> Iterator[tuple[str, Member]]:
    given = method.args
    types = {one.arg: one.annotation for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    for node in statements_in(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for one in ast.walk(target):
                if not isinstance(one, ast.Attribute) or not isinstance(one.ctx, ast.Store):
                    continue
                if isinstance(one.value, ast.Name) and one.value.id == owner:
                    yield one.attr, (node, getattr(node, "annotation", None) or _type_of(node.value, types))


def _type_of(value: ast.expr | None, types: dict[str, ast.expr | None]) -> ast.expr | None:
    """Return the type of a parameter, or what a call calls: a class, or a function that may say what it returns."""
    if isinstance(value, ast.Name):
        return types.get(value.id)
    return value.func if isinstance(value, ast.Call) else None
