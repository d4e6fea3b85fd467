"""Small changes of a source file, each of which a test should notice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPOKEN = {"log", "_log", "logging", "described", "Field", "option"}  # words, not behaviour


@dataclass(frozen=True, order=True)
class Mutation:
    """Bytes of a file that are replaced."""

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """The changed file."""
        assert source[self.start : self.stop] == self.before.encode()
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"


class Finder(ast.NodeVisitor):
    """Collects the mutations of one file; what only people read is left alone."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.found: list[Mutation] = []
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._at(node.lineno, node.col_offset)
        return start, self._at(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.AST, start: int, stop: int, after: str) -> None:
        before = self.source[start:stop].decode()
        line = self.source[:start].count(b"\n") + 1
        del node
        self.found.append(Mutation(self.path, line, start, stop, before, after))

    def _between(self, left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        """Replace an operator, which has no place of its own in the tree."""
        start, stop = self._span(left)[1], self._span(right)[0]
        words = before.split()
        pattern = r"\s+".join(map(re.escape, words)) if before.isalpha() or len(words) > 1 else None
        found = re.search((pattern or re.escape(before)).encode(), self.source[start:stop])
        if found is not None:
            self._add(left, start + found.start(), start + found.end(), after)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pair = ARITHMETIC.get(type(node.op))
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if pair is not None and not is_text:
            self._between(node.left, node.right, *pair)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, before, after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, self._span(node)[0], self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        pair = ARITHMETIC.get(type(node.op))
        if pair is not None:
            self._between(node.target, node.value, f"{pair[0]}=", f"{pair[1]}=")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, *self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, *self._span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, *self._span(node), repr(node.value * 2 + 1))

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        """The other branch, where no operator in the condition is changed to give it."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            start, stop = self._span(test)
            self._add(test, start, stop, f"(not ({self.source[start:stop].decode()}))")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        while isinstance(name, ast.Attribute):
            name = name.value
        if isinstance(name, ast.Name) and name.id in SPOKEN:
            return
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self._add(node, *self._span(node.func), CALLS[node.func.id])
        if isinstance(node.func, ast.Name) and node.func.id == "zip":  # `strict` is an assertion
            node.keywords = [each for each in node.keywords if each.arg != "strict"]
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
        for part in (*defaults, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...


def find_mutations(path: str, source: bytes) -> Iterator[Mutation]:
    """All mutations of a file that still parse, in their order."""
    finder = Finder(path, source)
    finder.visit(ast.parse(source))
    for mutation in sorted(set(finder.found)):
        try:
            ast.parse(mutation.apply(source))
        except SyntaxError:
            continue
        yield mutation


class Place(NamedTuple):
    """Where a mutation is."""

    lines: range  # of its statement, without those of the statements inside
    names: frozenset[str] | None  # what it gives another value at import; None in functions
    function: str  # the outermost around it, if there is one


def place_of(mutation: Mutation, source: bytes) -> Place:
    """A default is evaluated at import, and named after its function."""
    names: set[str] | None = set()
    body: list[ast.stmt] = ast.parse(source).body
    lines, owner, function = range(mutation.line, mutation.line + 1), "", ""
    while holders := [node for node in body if _first(node) <= mutation.line <= _last(node)]:
        node = holders[0]
        body = _inside(node)
        lines = range(_first(node), (_first(body[0]) if body else _last(node) + 1))
        if mutation.line not in lines and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names, function = None, function or node.name
        if names is not None:
            names = {owner if name == "__init__" else name for name in _defined(node)}
        owner = node.name if isinstance(node, ast.ClassDef) else owner
    return Place(lines, None if names is None else frozenset(names), function)


def made_by(function: str, source: bytes) -> frozenset[str]:
    """Names of a module that it makes by a function, at import."""
    made = [x for x in ast.parse(source).body if isinstance(x, ast.Assign | ast.AnnAssign)]
    calls = [node for node in made if function and f"{function}(" in ast.unparse(node)]
    return frozenset(name for node in calls for name in _defined(node))


def _first(node: ast.stmt) -> int:
    return node.lineno


def _last(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _inside(node: ast.stmt) -> list[ast.stmt]:
    """Statements of a compound statement, in their order."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            found += child.body
    return found


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Assign():
            names = (each for target in node.targets for each in ast.walk(target))
            yield from (each.id for each in names if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            yield name
        case _:
            pass
