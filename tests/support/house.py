"""Counts of the sources that a reader has to take in: files, lines, functions, classes, circles of files."""

from __future__ import annotations

import ast
import collections
import re
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
LOOP = "treetune.runtime.loop"

NO_HEAD = re.compile(
    r"(what|of|one|how|whether|where|those|which|as|that|who|whom|whose|whatever|whoever|wherever|than|if|in|on|with"
    r"|without|for|from|by|to|at|among|between|behind|beside|before|after|until|while|when|because|so|such|both|only"
    r"|also|not|no|and|or|but|same|here|there|within|beyond|under|over|about|like)\b",
    re.IGNORECASE,
)
"""First words of docstrings that are no sentence about what a function does or a class is."""


@cache
def paths() -> dict[str, Path]:
    """Returns the files of all packages, by the module's name."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(SOURCES.rglob("*.py"))
    }


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the parsed modules of all packages, by name."""
    return {name: ast.parse(path.read_text()) for name, path in paths().items()}


@cache
def imports(module: str) -> frozenset[str]:
    """Returns the modules of ours that a module imports, also within functions and for types alone."""
    names: set[str] = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names & trees().keys() - {module})


def reached(start: str) -> set[str]:
    """Returns the modules that importing one brings in, lazily imported ones included."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports(waiting.pop()) - seen
        seen |= new
        waiting += new
    return seen


def circles() -> list[list[str]]:
    """Returns the groups of modules that reach each other, the largest first."""
    reach = {module: reached(module) for module in trees()}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in reach}
    return sorted(map(sorted, filter(None, groups)), key=len, reverse=True)


def headless() -> tuple[list[str], int]:
    """Returns the docstrings without a head, with their places, and the number of all docstrings."""
    documented, found = 0, []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                documented += bool(text)
                if text and NO_HEAD.match(text):
                    found.append(f"{module}.{getattr(node, 'name', '')}: {text.splitlines()[0]}")
    return found, documented


def code_lines(module: str) -> int:
    """Returns how many lines are neither blank, comment, docstring nor import."""
    rows, idle = paths()[module].read_text().splitlines(), set[int]()
    for node in ast.walk(trees()[module]):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (text and isinstance(node.value.value, str)):
            idle |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {number for number, row in enumerate(rows, 1) if not row.strip() or row.strip().startswith("#")}
    return len(rows) - len(idle | empty)


def counts(package: str | None = None) -> dict[str, int]:
    """Returns the figures of one package, or of all; a few of them only make sense for all."""
    modules = [name for name in trees() if package is None or name.partition(".")[0] == package]
    nodes = [node for name in modules for node in ast.walk(trees()[name])]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    result = {
        "files": len(modules),
        "lines": sum(len(paths()[name].read_text().splitlines()) for name in modules),
        "lines of code": sum(map(code_lines, modules)),
        "functions": len(functions),
        "functions of at most 3 lines": sum((f.end_lineno or 0) - f.lineno < 3 for f in functions),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
    }
    if package is None:
        importers = collections.Counter(name for module in trees() for name in imports(module))
        result["modules that one other imports"] = sum(importers[name] == 1 for name in trees())
        result["code behind the loop"] = sum(map(code_lines, reached(LOOP) | {LOOP}))
    return result
