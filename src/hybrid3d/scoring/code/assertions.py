"""Finds the assertions in the tests of a reference, and instruments the tests so that those that run are counted."""

from __future__ import annotations

import ast
import builtins


def is_assertion(node: ast.AST) -> bool:
    """Return whether a node can detect a wrong answer.

    Such nodes are an `assert` whose test is not constant, an assertion method of unittest, `if ...: raise ...`, and an
    `except` clause for a specific type of error.
    """
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant) and not (isinstance(node.test, ast.Tuple) and node.test.elts)
    if isinstance(node, ast.If):
        return any(isinstance(inner, ast.Raise) for inner in [*node.body, *node.orelse])
    if isinstance(node, ast.ExceptHandler):
        kinds = {inner.id for inner in ast.walk(node.type) if isinstance(inner, ast.Name)} if node.type else set()
        return bool(kinds) and not kinds & {"BaseException", "Exception", "AssertionError", "ImportError"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        constant = all(isinstance(argument, ast.Constant) for argument in arguments)
        is_assert = node.func.attr.startswith("assert") and not constant
        return is_assert or node.func.attr.startswith("fail")
    return False


class AssertionCounter(ast.NodeTransformer):
    """Rewrites tests so that they count their assertions, and mark calls whose result they do not use."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        return self._count_test(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        return self._count_test(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        counts = is_assertion(node)
        self.generic_visit(node)
        if counts:
            node.body.insert(0, ast.Expr(_call("count", ast.Constant(True))))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
            node.value = _call("call_in_place", call.func, *call.args, keywords=call.keywords)
        return node

    def _count_test(self, node: ast.Assert | ast.If) -> ast.AST:
        if is_assertion(node):
            node.test = _call("count", node.test)
        return node


def _call(method: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    judge = ast.Name("__judge__", ast.Load())
    return ast.Call(ast.Attribute(judge, method, ast.Load()), list(arguments), keywords or [])
