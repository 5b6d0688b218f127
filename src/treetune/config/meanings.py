"""What the keys of a part mean, in the words that its class has for them.

A key is explained by the text literal below its field or, where there is none, by the sentences of the
class's docstring that name it in backticks. The class itself is asked before those that it builds on.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path

_ABBREVIATION = re.compile(r"(?:\b(?:al|dr|eq|sec|e\.g|i\.e|vs|cf|fig|no)\.)$", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z\s])")


def docstring(part: type) -> str:
    """The class's own docstring, or "" where it has none. (A dataclass's signature is no docstring.)"""
    text = inspect.cleandoc(part.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{part.__name__}(") else text


def summary(part: type) -> str:
    """The first sentence of what a part is."""
    for one in part.__mro__[:-1]:
        if found := sentences(docstring(one)):
            return found[0]
    return ""


def meaning(part: type, key: str) -> str:
    """What a key of a part means, or "" where nothing explains it."""
    name = re.compile(rf"(?<!`)`{re.escape(key)}`(?!`)")
    for one in part.__mro__[:-1]:
        if found := _field_texts(one).get(key):
            return found
        if named := [sentence for sentence in sentences(docstring(one)) if name.search(sentence)]:
            return " ".join(named)
    return ""


def sentences(text: str) -> list[str]:
    """The sentences of a docstring, each in one line; code and lists are passed over."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text)):
        joined = True
        for piece in _END.split(" ".join(paragraph.split())):
            if found and not joined and _ABBREVIATION.search(found[-1]):
                found[-1] += f" {piece}"
            elif piece:
                found.append(piece)
            joined = False
    return found


def _field_texts(part: type) -> dict[str, str]:
    return _texts_of_file(inspect.getsourcefile(part) or "").get(part.__qualname__, {})


@functools.cache
def _texts_of_file(file: str) -> dict[str, dict[str, str]]:
    """For every class of a file the texts that stand below its fields."""
    if not Path(file).is_file():
        return {}
    found: dict[str, dict[str, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = _texts_of_class(node)
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(Path(file).read_text(encoding="utf-8")).body, "")
    return found


def _texts_of_class(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts
