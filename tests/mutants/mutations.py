"""What a mutant is: one small fault in one function, with a name that outlives moved lines.

Pure: source text in, mutated source text out.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOGS = ("log", "logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """name: file, qualified function, operator, hash of its statement, and, where that is not
    enough, which one. start and end: the bytes of the source that `after` stands for."""

    name: str
    file: str
    operator: str
    first_line: int
    last_line: int
    start: int
    end: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


@dataclass(frozen=True)
class _Place:
    function: str
    statement: ast.stmt


def mutants_of(source: str, file: str) -> list[Mutant]:
    """All there can be, in the order of the source; module level and class bodies have none."""
    starts = _line_starts(source)
    times: Counter[str] = Counter()
    found = []
    for place, node, operator, after in _faults(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        plain = f"{file}::{place.function}::{operator}::{_hash(place.statement)}"
        times[plain] += 1
        name = plain if times[plain] == 1 else f"{plain}::{times[plain]}"
        lines = (place.statement.lineno, node.end_lineno or node.lineno)
        before = ast.unparse(node)
        found.append(Mutant(name, file, operator, *lines, start, end, before, after))
    return found


def mutants_in(package: Path, folder: str) -> list[Mutant]:
    """All of a folder, or of the package's own modules where it is empty."""
    pattern = "*.py" if not folder else f"{folder}/**/*.py"
    return [
        mutant
        for path in sorted(package.glob(pattern))
        for mutant in mutants_of(path.read_text(), path.relative_to(package).as_posix())
    ]


def drawn(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """So many of them. Each mutant has its own lot, so that a change of the source changes the
    draw for the statements that it touches, and not for the others."""
    return sorted(mutants, key=lambda mutant: _lot(f"{seed} {mutant.name}"))[:count]


def _lot(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(statement: ast.stmt) -> str:
    """Of what the statement says, without the statements in it."""
    bare = copy.copy(statement)
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        if hasattr(bare, field):
            setattr(bare, field, [])
    return _lot(ast.dump(bare))[:8]


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


Fault = tuple[_Place, ast.expr | ast.stmt, str, str]


def _faults(module: ast.Module) -> Iterator[Fault]:
    yield from _in_body(module.body, (), inside=False)


def _in_body(body: list[ast.stmt], scope: tuple[str, ...], *, inside: bool) -> Iterator[Fault]:
    for statement in body:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            function = inside or isinstance(statement, FUNCTIONS)
            yield from _in_body(statement.body, (*scope, statement.name), inside=function)
            continue
        if inside and not _is_talk(statement):
            place = _Place(".".join(scope), statement)
            yield from _of_statement(place)
            for expression in _expressions(statement):
                yield from _of_expression(place, expression)
        for inner in _bodies(statement):
            yield from _in_body(inner, scope, inside=inside)


def _is_talk(statement: ast.stmt) -> bool:
    """A docstring, an assertion, or a call that only logs."""
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        root = value.func.value
        return isinstance(root, ast.Name) and root.id in LOGS
    return isinstance(value, ast.Constant)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        yield getattr(statement, field, [])
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Those of the statement itself, but for annotations."""
    for field, value in ast.iter_fields(statement):
        if field == "annotation":
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.expr):
                yield one
            elif isinstance(one, ast.withitem):
                yield one.context_expr


def _of_statement(place: _Place) -> Iterator[Fault]:
    statement = place.statement
    if isinstance(statement, ast.If):
        yield place, statement.test, "branches swapped", f"(not ({ast.unparse(statement.test)}))"
    elif isinstance(statement, ast.Return) and statement.value is not None:
        if not (isinstance(statement.value, ast.Constant) and statement.value.value is None):
            yield place, statement, "return None", "return None"
    elif _may_go(statement):
        yield place, statement, "statement removed", "pass"


def _may_go(statement: ast.stmt) -> bool:
    """Without it the rest still has its names."""
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, (ast.Name, ast.Tuple)) for target in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, (ast.AugAssign, ast.Raise, ast.Delete))


def _of_expression(place: _Place, expression: ast.expr) -> Iterator[Fault]:
    if isinstance(expression, ast.JoinedStr):
        return  # words, and without true positions before Python 3.12
    for operator, changed in _changes(expression):
        yield place, expression, operator, f"({ast.unparse(ast.fix_missing_locations(changed))})"
    for child in ast.iter_child_nodes(expression):
        if isinstance(child, ast.expr):
            yield from _of_expression(place, child)
        elif isinstance(child, ast.keyword):
            yield from _of_expression(place, child.value)
        elif isinstance(child, ast.comprehension):
            for one in (child.iter, *child.ifs):
                yield from _of_expression(place, one)


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind = type(node.ops[0])
        yield "comparison negated", ast.Compare(node.left, [NEGATED[kind]()], node.comparators)
        if kind in BOUNDARY:
            yield "boundary moved", ast.Compare(node.left, [BOUNDARY[kind]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield "constant", ast.Constant(node.value + 1)
