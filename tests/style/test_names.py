"""Promise of the package's names: a name of a class or of a type alias means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "treetune"


def test_two_classes_or_aliases_never_share_a_name() -> None:
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in type_names(node):
                modules[name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}


def type_names(node: ast.AST) -> Iterator[str]:
    """Yields the names of types that a statement defines. Each module may have type variables of its own."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        yield ast.unparse(node.target)
    if isinstance(node, ast.Assign) and not is_type_variable(node.value):
        for target in node.targets:
            # Types are written in CamelCase, constants and variables are not.
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"
