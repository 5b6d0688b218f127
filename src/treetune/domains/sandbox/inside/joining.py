"""Puts an answer's code and the code that a problem begins with (its prefix) together, as models write it.

An answer may be the rest of the prefix's last function, all of that function again, or whole programs with or
without the prefix's imports.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import textwrap

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_ERRORS = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
"""What compiling a text raises."""


_FUTURE = re.compile(r"^from __future__ import [\w ,]+\n", re.MULTILINE)


def joined(prefix: str, code: str) -> str:
    """Returns the program that an answer is with its problem's prefix: the first of these that can be
    compiled, or the prefix with the code as it stands behind it.

    * A program of its own goes behind the prefix, or behind the whole statements of one that breaks off.
    * The rest of a function goes on where the prefix ends, with its lines indented as they are, or as far as
      the function's body is. What a stub returns or raises in its place is left out.
    """
    if not prefix.strip():
        return code
    if _can_be_compiled(code):
        future = "".join(_FUTURE.findall(code))  # has to come before all else
        rest = _FUTURE.sub("", code)
        candidates = [f"{future}{part}\n{rest}" for part in (prefix, whole_part(prefix))]
    else:
        candidates = list(_continued(_without_stub_end(prefix), code))
    for candidate in candidates:
        if _can_be_compiled(candidate):
            return candidate
    return f"{prefix}\n{code}"


def _can_be_compiled(text: str) -> bool:
    try:
        compile(text, "solution.py", "exec", dont_inherit=True)
    except _ERRORS:
        return False
    return True


def _continued(prefix: str, code: str) -> Iterator[str]:
    yield prefix + code
    yield f"{prefix}\n{code}"
    indentation = _indentation_of_body(prefix)
    # The first line often loses its indentation, where whitespace around an answer is cut off.
    yield f"{prefix}\n{indentation}{code.lstrip()}"
    lines = textwrap.dedent(code).strip("\n")
    yield f"{prefix}\n{textwrap.indent(lines, indentation)}"


def _indentation_of_body(prefix: str) -> str:
    """Returns the indentation of what goes on behind the last line that says something."""
    lines = [line for line in prefix.splitlines() if line.strip()]
    header = next((line for line in reversed(lines) if line.lstrip().startswith(("def ", "async def "))), "")
    return header[: len(header) - len(header.lstrip())] + "    "


def whole_part(prefix: str) -> str:
    """Returns the prefix up to where it can be parsed: without the head of a function that breaks off."""
    lines = prefix.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()]
    for end in (len(lines), *reversed(starts)):
        part = "".join(lines[:end])
        try:
            ast.parse(part)
        except _ERRORS:
            continue
        return part
    return ""


def _without_stub_end(prefix: str) -> str:
    """Returns the prefix without what the stub at its end returns or raises: nothing behind it would run."""
    try:
        body = ast.parse(prefix).body
    except _ERRORS:
        return prefix
    while body and isinstance(body[-1], (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        last = body[-1]
        if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)):
            end = last.body[-1]
            if is_stub(last) and isinstance(end, (ast.Return, ast.Raise)) and len(last.body) > 1:
                return "".join(prefix.splitlines(keepends=True)[: end.lineno - 1])
            if is_stub(last) and isinstance(end, (ast.Return, ast.Raise)):
                head = prefix.splitlines(keepends=True)[: end.lineno]
                indentation = " " * end.col_offset
                head[-1] = head[-1][: end.col_offset] + "pass\n"
                return "".join(head) if head[-1].startswith(indentation) else prefix
            return prefix
        body = last.body
    return prefix


def is_stub(statement: ast.stmt) -> bool:
    """Returns whether a function, or each method of a class, is there to be filled in: it computes nothing of
    its arguments that it returns, and changes nothing.

    Such a body has imports, a docstring, `pass`, `raise`, assignments to names, and `return` of a constant,
    of an empty container, or of a name that was given one.
    """
    if isinstance(statement, ast.ClassDef):
        methods = [inner for inner in statement.body if isinstance(inner, ast.FunctionDef)]
        return all(map(is_stub, methods))
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    has_arguments = any(ast.iter_child_nodes(statement.args))
    plain_names: set[str] = set()
    for inner in statement.body:
        if isinstance(inner, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            if not all(isinstance(target, ast.Name) for target in targets):
                return False
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            is_plain = not isinstance(inner, ast.AugAssign) and _is_plain(inner.value, plain_names)
            plain_names = plain_names | names if is_plain else plain_names - names
        elif isinstance(inner, ast.Return):
            # A function without arguments that returns a constant is one: it names that constant.
            if not has_arguments or not _is_plain(inner.value, plain_names):
                return False
        elif isinstance(inner, ast.Expr):
            if not isinstance(inner.value, ast.Constant):
                return False
        elif not isinstance(inner, (ast.Pass, ast.Raise, ast.Import, ast.ImportFrom)):
            return False
    return True


def _is_plain(value: ast.expr | None, plain_names: set[str]) -> bool:
    """Returns whether a value is the same whatever a function is called with."""
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_plain(inner, plain_names) for inner in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Name):
        return value.id in plain_names
    return value is None or isinstance(value, ast.Constant)


# Imports that benchmarks of programs have made before an answer begins

_CUSTOMARY = (
    "typing", "json", "sys", "io", "operator", "functools", "itertools", "statistics", "random", "math",
    "copy", "bisect", "heapq", "collections", "datetime", "re", "string",
)  # fmt: skip
"""LiveCodeBench runs ``from M import *`` and then ``import M`` of these before an answer; of a name that two
have, here the first counts, as there the last."""


def customary_names(code: str) -> dict[str, Any]:
    """Returns the values of names that a program uses without defining them, such as `List` or `math`.

    They are those that the imports give which benchmarks make for a program.
    """
    try:
        tree = ast.parse(code)
    except _ERRORS:
        return {}
    used: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    missing = used - defined
    names: dict[str, Any] = {}
    for name in sorted(missing & set(_CUSTOMARY)):
        names[name] = importlib.import_module(name)
    for module_name in _CUSTOMARY:
        if missing <= names.keys():
            break
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in missing - names.keys():
            if name in public:
                names[name] = getattr(module, name)
    return names
