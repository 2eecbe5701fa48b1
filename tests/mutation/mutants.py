"""Mutants: small changes of the code under test, made by cosmic-ray's operators.

Left out are changes that cannot change behaviour, or that only fail to import: those of type
annotations, and `==` for `is` or the reverse (the same for enums and small integers).
"""

import ast
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import parso
from cosmic_ray.ast import Visitor, ast_nodes
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

_NEED_ARGUMENTS = ("VariableReplacer", "VariableInserter")
_SAME_FOR_OUR_TYPES = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path
    operator: str
    occurrence: int  # of the operator's positions in the file
    line: int
    function: str  # the one it is in, as Class.name; "" outside of any
    was: str  # the line before and after, without indentation
    now: str
    code: str  # the whole file, mutated


def sample(paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of the files, no two of one kind at one place in the code."""
    places: list[list[tuple[Path, str, int]]] = []
    for path in paths:
        places.extend(_places(path))
    chooser = random.Random(seed)
    chooser.shuffle(places)
    mutants: list[Mutant] = []
    for alternatives in places:
        if len(mutants) == count:
            break
        chooser.shuffle(alternatives)
        made = (_mutant(*alternative) for alternative in alternatives)
        mutants.extend(next(([mutant] for mutant in made if mutant is not None), []))
    return mutants


def _places(path: Path) -> Iterator[list[tuple[Path, str, int]]]:
    """The mutations of a file, in lists of those of one kind of operator at one position."""
    nodes = list(ast_nodes(parso.parse(path.read_text())))
    found: dict[tuple[tuple[int, int], str], list[tuple[Path, str, int]]] = {}
    for name, operator in _operators():
        occurrence = 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if node.parent is None or node.parent.type != "parameters":  # `*` is no product
                    family = name.partition("_")[0]
                    found.setdefault((start, family), []).append((path, name, occurrence))
                occurrence += 1
    yield from (found[place] for place in sorted(found))


def _operators() -> Iterator[tuple[str, Operator]]:
    provider = OperatorProvider()
    for name in provider:
        if name not in _NEED_ARGUMENTS and not name.endswith(_SAME_FOR_OUR_TYPES):
            yield name, provider[name]()


class _Mutation(Visitor):  # type: ignore[misc]
    """Applies one occurrence of an operator, and notes where."""

    def __init__(self, operator: Operator, occurrence: int) -> None:
        self._operator = operator
        self._left = occurrence
        self.line = 0

    def visit(self, node: parso.tree.NodeOrLeaf) -> parso.tree.NodeOrLeaf | None:
        for index, (start, _) in enumerate(list(self._operator.mutation_positions(node))):
            if self._left == 0:
                self.line = start[0]
                node = self._operator.mutate(node, index)
            self._left -= 1
            if node is None:
                break
        return node


def _mutant(path: Path, name: str, occurrence: int) -> Mutant | None:
    source = path.read_text()
    mutation = _Mutation(OperatorProvider()[name](), occurrence)
    code = mutation.walk(parso.parse(source)).get_code()
    try:
        if _behaviour(code) == _behaviour(source):
            return None
    except SyntaxError:
        return None
    was, now = (text.splitlines()[mutation.line - 1].strip() for text in (source, code))
    function = _function_at(source, mutation.line)
    return Mutant(path, name, occurrence, mutation.line, function, was, now, code)


@lru_cache(maxsize=32)
def _behaviour(code: str) -> str:
    """The syntax tree without type annotations and positions."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def _function_at(source: str, line: int) -> str:
    """The names of the classes and functions around a line, joined by dots."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def statement_lines(path: Path, line: int) -> range:
    """The lines of the statement at `line`: of a compound one its head alone."""
    found = [range(line, line + 1)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            found.append(range(node.lineno, last + 1))
    return min((lines for lines in found[1:] if line in lines), key=len, default=found[0])
