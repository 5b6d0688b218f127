"""Figures of the sources that a reader feels: circles of files, docstrings that are no sentences."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"

CIRCLES, LARGEST = 6, 6
"""Circles of files that import each other, also within functions or for types alone. The aim is 3, of 4 files
at most; lower these numbers with them, and never raise them."""

HEADLESS_SHARE = 0.03

NO_HEAD = re.compile(
    r"(what|of|one|how|whether|where|those|which|as|that|who|whom|whose|whatever|whoever|wherever|than|if|in|on|with"
    r"|without|for|from|by|to|at|among|between|behind|beside|before|after|until|while|when|because|so|such|both|only"
    r"|also|not|no|and|or|but|same|here|there|within|beyond|under|over|about|like)\b",
    re.IGNORECASE,
)
"""First words of docstrings that are no sentence about what a function does or a class is."""


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the parsed modules of all packages, by name."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in SOURCES.rglob("*.py")
    }


def imports(module: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & trees().keys() - {module}


def circles() -> list[list[str]]:
    """Returns the groups of modules that reach each other, the largest first."""
    graph = {module: imports(module) for module in trees()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {frozenset(one for one in reach[module] if module in reach[one]) for module in graph}
    return sorted(map(sorted, filter(None, groups)), key=len, reverse=True)


def test_few_files_import_each_other_in_a_circle() -> None:
    found = circles()
    words = "\n".join(", ".join(circle) for circle in found)
    assert len(found) <= CIRCLES and all(len(circle) <= LARGEST for circle in found), words


def test_docstrings_have_a_head() -> None:
    """A function's begins with a verb ("Returns …"), a class's with a noun ("A …")."""
    documented, headless = 0, []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                documented += bool(text)
                if text and NO_HEAD.match(text):
                    headless.append(f"{module}.{getattr(node, 'name', '')}: {text.splitlines()[0]}")
    assert len(headless) <= HEADLESS_SHARE * documented, "\n".join(headless)
