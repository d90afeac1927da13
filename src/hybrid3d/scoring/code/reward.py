"""Implements the reward `code`: 1 if the answer, a Python program, passes the reference's tests in a sandbox.

A reference is parsed before it is run: to find the names that the answer must define, and to refuse a reference that
every answer would pass, or none.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from hybrid3d.scoring.code import sandbox
from hybrid3d.scoring.code.assertions import is_assertion
from hybrid3d.scoring.code.judge import ANSWER_MODULES
from hybrid3d.scoring.code.sandbox import Tests

_OPENING_FENCE = re.compile(r"^```([^\n`]*)\n", re.MULTILINE)
_CLOSING_FENCE = re.compile(r"^```[ \t]*\r?$", re.MULTILINE)
ENTRY_PREFIX = "_answer_"  # prefix of the name under which an entry point is called, so that it shadows no builtin
# Names that tests often use because the program they were written for had imported them. The judge provides them: an
# answer that defined them could decide comparisons.
LIBRARY_NAMES = {
    **dict.fromkeys(("fabs", "inf", "isclose", "isinf", "isnan", "nan", "pi", "sqrt"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("Any", "Callable", "Dict", "Iterable", "List", "Optional", "Set", "Tuple", "Union"), "typing"),
    "deepcopy": "copy", "Decimal": "decimal", "Fraction": "fractions",
}  # fmt: skip
_PREDEFINED_NAMES = {*dir(builtins), "__name__", "__file__", "__doc__", "__builtins__"}


def code(answer: str, reference: str, prompt: str = "", *, seconds: float = 8.0) -> float:
    """Return 1.0 if all tests pass, else 0.0. All tests together may take at most `seconds`.

    The program is the answer's last fenced block of Python, or the whole answer. The reference is JSON with
    `stdin_stdout` (pairs of text), `tests` (source with assertions), `test` and `entry_point` (a row of HumanEval) or
    `test_list` (a row of MBPP); or the source of the tests. Printed output is compared in this process; tests run in
    one sandboxed process and the program in another: see `sandbox.judge`.

    Raises:
        ValueError: the reference has another format, tests nothing, or cannot be judged.
        SyntaxError: the tests of the reference are not Python.
    """
    program, deadline = extract_program(answer), time.monotonic() + seconds
    tests = read_tests(reference)
    if isinstance(tests, Tests):
        return float(_passes(program, tests, seconds))
    for stdin, expected in tests:
        seconds_left = deadline - time.monotonic()
        outcome = sandbox.run(program, stdin=stdin, seconds=seconds_left) if seconds_left > 0 else None
        if outcome is None or not outcome.finished or not same_output(outcome.output, expected):
            return 0.0
    return 1.0


def _passes(program: str, tests: Tests, seconds: float) -> bool:
    verdict = sandbox.judge(program, tests, seconds=seconds)
    if verdict.problem:
        raise ValueError(f"the reference cannot be judged: {verdict.problem}")
    if verdict.passed and not verdict.requests:
        raise ValueError("the reference tests nothing: its tests made 0 requests to the answer")
    return verdict.passed and verdict.assertions > 0  # assertions in a loop over an empty result are not run


def extract_program(answer: str) -> str:
    """Return the last fenced block marked as Python, else the last one without a language, else the whole answer."""
    fences = list(_fenced_blocks(answer))
    for languages in (("python", "py", "python3"), ("",)):
        if sources := [source for language, source in fences if language in languages]:
            return sources[-1]
    return answer


def _fenced_blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block; the search ends at a fence that is never closed."""
    end = 0
    while (opening := _OPENING_FENCE.search(answer, end)) and (closing := _CLOSING_FENCE.search(answer, opening.end())):
        yield (opening.group(1).split() or [""])[0].lower(), answer[opening.end() : closing.start()]
        end = closing.end()


def same_output(printed: bytes, expected: str) -> bool:
    """Compare two texts, ignoring white space at the ends of lines and of the text."""
    return _lines(printed.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def check_reference(reference: str) -> None:
    """Check that a reference tests the answer and can be passed. ValueError: it does not; says why."""
    try:
        read_tests(reference)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}; this is {reference[:80]!r}") from None


def read_tests(reference: str) -> Tests | list[tuple[str, str]]:
    """Return the reference's tests, or its pairs of input and output.

    Raises:
        ValueError: it has neither, or its tests do not test the answer.
        SyntaxError: its tests are not Python.
    """
    try:
        read = json.loads(reference)
    except (ValueError, RecursionError):
        read = {"tests": reference}
    if isinstance(read, list) and read and all(isinstance(line, str) for line in read):
        read = {"test_list": read}
    if isinstance(read, dict):
        if source := _source(read):
            return _tests(source, read)
        pairs = read.get("stdin_stdout")
        if isinstance(pairs, list) and pairs and all(_is_pair(pair) for pair in pairs):
            if not any(expected.strip() for _, expected in pairs):
                raise ValueError(f"a program that prints nothing passes all pairs of stdin_stdout: {reference[:80]!r}")
            return [cast(tuple[str, str], tuple(pair)) for pair in pairs]
    raise ValueError(
        f"a reference for code needs tests, or stdin_stdout with pairs of text; this is {reference[:80]!r}"
    )


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _source(read: Mapping[str, Any]) -> str:
    """Return the tests of a reference in JSON: `tests`, MBPP's lists (before `test`, which needs numpy) or `test`."""
    tests = _text(read.get("tests"))
    if not tests and (listed := _text(read.get("test_list"))):
        before = [_text(read.get(key)) for key in ("test_imports", "test_setup_code")]
        tests = "\n".join([*before, listed, _text(read.get("challenge_test_list"))])
    tests = tests or _text(read.get("test"))
    return tests if tests.strip() else ""


def _text(value: object) -> str:
    """Return a text, or the joined lines of a list of texts; "" if it is neither."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else ""


def _tests(source: str, read: Mapping[str, Any]) -> Tests:
    tree = ast.parse(source)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    sources, names = [source], dict[str, str]()
    entry = read.get("entry_point")
    takes_candidate = "check" in _functions(tree) and "check" not in called
    if takes_candidate and not isinstance(entry, str):
        raise ValueError("the tests define check(candidate), and nothing calls it: name the candidate in entry_point")
    if isinstance(entry, str):
        expression, entries = _entry_point(entry)
        if takes_candidate:
            sources.append(f"check({expression})")
            names = {ENTRY_PREFIX + name: name for name in entries}
    used, defined = _global_names(sources[0])
    free, unbound = used - defined - _PREDEFINED_NAMES, set[str]()
    if isinstance(entry, str):
        unbound = free - entries - LIBRARY_NAMES.keys()
        free = free & (entries | LIBRARY_NAMES.keys()) | (set() if takes_candidate else entries)
        if unbound and (prompt := _definitions(_text(read.get("prompt")), entries)).body:
            _check_imports(prompt)
            sources.insert(0, ast.unparse(prompt))
            unbound -= _global_names(sources[0])[1]
    else:
        # The functions of the row's own solution that the tests call may have the name of a builtin
        free |= _functions(_parse_or_empty(_text(read.get("code")))).keys() & called
    modules = {name for name in free | unbound if name in sys.stdlib_module_names and _is_module(name, tree)}
    if unbound - modules:
        raise ValueError(
            f"the tests use {', '.join(sorted(unbound - modules))}, which neither they nor the prompt define, "
            f"beside the entry point {entry}: give the row's prompt, or remove entry_point"
        )
    free -= modules
    tests_others = free - LIBRARY_NAMES.keys() or takes_candidate  # else the answer defines these
    library_names = {name: LIBRARY_NAMES[name] for name in free & LIBRARY_NAMES.keys() if tests_others}
    names |= {name: name for name in free - library_names.keys()}
    _check_imports(tree)
    if not names and not _imports_answer(tree):
        raise ValueError(
            f"the tests use nothing that the answer defines: {_excerpt(source)} (a function with the name of a "
            "builtin must be named in entry_point)"
        )
    functions = tuple(
        name
        for name, function in _functions(tree).items()
        if name.startswith("test") and name not in called and _needs_no_arguments(function)
    )
    if not any(_assertions(tree, {*functions, "check"} if takes_candidate else {*functions})):
        raise ValueError(f"the tests have no assertion that is run: {_excerpt(source)}")
    return Tests(tuple(sources), names, tuple(sorted(modules)), library_names, functions)


def _excerpt(source: str) -> str:
    return repr(source.strip()[:80])


def _entry_point(entry: str) -> tuple[str, set[str]]:
    """Return the entry point with prefixed names, and the names in it: it may be `add`, or `Solution().add`."""
    try:
        tree = ast.parse(entry.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"entry_point {entry[:80]!r} is not a Python expression") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names = {node.id for node in found}
    for node in found:
        node.id = ENTRY_PREFIX + node.id
    return ast.unparse(tree), names


def _global_names(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that a source reads, and the names that it defines."""
    top = symtable.symtable(source, "<tests>", "exec")
    used, defined, tables = set[str](), set[str](), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
                if symbol.is_referenced():
                    used.add(symbol.get_name())
    return used, defined


def _definitions(prompt: str, entries: set[str]) -> ast.Module:
    """Return what a HumanEval prompt defines besides the function that the answer must define."""
    tree = _parse_or_empty(prompt)
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in entries]
    return tree


def _parse_or_empty(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _needs_no_arguments(function: ast.FunctionDef) -> bool:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    return positional == len(arguments.defaults) and None not in arguments.kw_defaults


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _is_module(name: str, tree: ast.Module) -> bool:
    """Return whether a name is only used to read attributes, as `math` in `math.isclose`."""
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    owners = {id(node.value) for node in read}
    return all(id(node) in owners for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def _check_imports(tree: ast.Module) -> None:
    for node in _outside_try(tree):
        for module in (name.partition(".")[0] for name in _imported_modules(node)):
            if module not in sys.stdlib_module_names and module not in ANSWER_MODULES:
                raise ValueError(f"the tests import {module}, and the sandbox has only Python's standard library")


def _outside_try(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that is not within a `try`: an import in a `try` may be expected to fail."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Try):
            yield child
            yield from _outside_try(child)


def _imports_answer(tree: ast.Module) -> bool:
    return any(name in ANSWER_MODULES for node in ast.walk(tree) for name in _imported_modules(node))


def _imported_modules(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _assertions(tree: ast.Module, called: set[str]) -> Iterator[ast.AST]:
    """Yield the assertions, except those within functions that nothing calls and classes that nothing runs."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name not in read | called:
            continue
        if isinstance(statement, ast.ClassDef) and not statement.bases and statement.name not in read:
            continue
        yield from (node for node in ast.walk(statement) if is_assertion(node))
