"""Joins an answer's code to the code that its problem begins with (the prefix), as models write it.

An answer may be the rest of the prefix's last function, all of that function again, or a whole program with
or without the prefix's imports. The prefix ``def double(x):`` may have any of these answers::

        return 2 * x                   the rest of the function

    return 2 * x                       the same, with its indentation cut off

    def double(x):                     the function again
        return 2 * x
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

_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
"""The errors that compiling a text may raise."""


_FUTURE_IMPORT = re.compile(r"^from __future__ import [\w ,]+\n", re.MULTILINE)


def join_program(prefix: str, code: str) -> str:
    """Returns the program of the prefix and an answer's code.

    Several candidates are tried, and the first that can be compiled is the program. If none can, it is the
    prefix and the unchanged code. The candidates depend on the code:

    * Code that is a program by itself is put after the prefix, or after the complete statements of an
      incomplete prefix.
    * Other code is the rest of a function. It continues at the prefix's end, with its own indentation or with
      that of the function's body. If the function is a stub, its final `return` or `raise` is removed first.
    """
    if not prefix.strip():
        return code
    if _can_be_compiled(code):
        # Imports from __future__ have to be first.
        future_imports = "".join(_FUTURE_IMPORT.findall(code))
        other_code = _FUTURE_IMPORT.sub("", code)
        candidates = [f"{future_imports}{part}\n{other_code}" for part in (prefix, complete_part(prefix))]
    else:
        candidates = list(_continuations(_without_stub_end(prefix), code))
    for candidate in candidates:
        if _can_be_compiled(candidate):
            return candidate
    return f"{prefix}\n{code}"


def _can_be_compiled(text: str) -> bool:
    try:
        compile(text, "solution.py", "exec", dont_inherit=True)
    except _COMPILE_ERRORS:
        return False
    return True


def _continuations(prefix: str, code: str) -> Iterator[str]:
    """Yields the ways in which code may continue a function that the prefix begins."""
    yield prefix + code  # in the middle of a line
    yield f"{prefix}\n{code}"
    indentation = _indentation_of_body(prefix)
    # The first line often has lost its indentation, because whitespace around an answer was removed.
    yield f"{prefix}\n{indentation}{code.lstrip()}"
    # Or all of the code has another indentation than the function's body.
    unindented_code = textwrap.dedent(code).strip("\n")
    yield f"{prefix}\n{textwrap.indent(unindented_code, indentation)}"


def _indentation_of_body(prefix: str) -> str:
    """Returns the indentation of the body of the prefix's last function: four spaces more than its head. For
    a prefix without a function it is four spaces."""
    for line in reversed(prefix.splitlines()):
        code_of_line = line.lstrip()
        if code_of_line.startswith(("def ", "async def ")):
            return line[: len(line) - len(code_of_line)] + "    "
    return "    "


def complete_part(prefix: str) -> str:
    """Returns the part of the prefix that can be parsed, without the head of an incomplete function."""
    lines = prefix.splitlines(keepends=True)
    # Only the last statement can be incomplete. So statements, which begin at the lines without indentation,
    # are removed from the end until the rest can be parsed.
    statement_starts = [number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()]
    for end in (len(lines), *reversed(statement_starts)):
        part = "".join(lines[:end])
        try:
            ast.parse(part)
        except _COMPILE_ERRORS:
            continue
        return part
    return ""


def _without_stub_end(prefix: str) -> str:
    """Returns the prefix without the `return` or `raise` at the end of its last function, if that is a stub.

    A stub is a function that is incomplete on purpose. The answer's code continues it, and after a `return`
    or `raise` would never run.
    """
    try:
        statements = ast.parse(prefix).body
    except _COMPILE_ERRORS:
        return prefix
    # The last function may be a method of the last class.
    while statements and isinstance(statements[-1], ast.ClassDef):
        statements = statements[-1].body
    function = statements[-1] if statements else None
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or not is_stub(function):
        return prefix
    end = function.body[-1]
    if not isinstance(end, (ast.Return, ast.Raise)):
        return prefix
    lines = prefix.splitlines(keepends=True)
    if len(function.body) > 1:
        return "".join(lines[: end.lineno - 1])
    indentation = " " * end.col_offset
    if not lines[end.lineno - 1].startswith(indentation):  # ``def f(): return 1``
        return prefix
    # The `return` or `raise` is the only statement of the body. A body needs one, so `pass` replaces it.
    return "".join(lines[: end.lineno - 1]) + f"{indentation}pass\n"


def is_stub(statement: ast.stmt) -> bool:
    """Returns whether a statement is a stub: a function or a class that is incomplete on purpose.

    A class is a stub if all its methods are stubs. A class without methods is a stub if it is empty and has
    no bases. So an exception, which has a base, and a dataclass, which has fields, are complete.

    A function that is a stub returns nothing that depends on its arguments, and changes nothing. Its body has
    only imports, a docstring, `pass`, `raise`, assignments to names, and `return` of a plain value. A plain
    value is a constant, a list, tuple or set of plain values, an empty dict, or a name with a plain value.
    Example::

        def longest(words):
            result = []
            return result
    """
    if isinstance(statement, ast.ClassDef):
        methods = [
            part for part in statement.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        if methods:
            return all(map(is_stub, methods))
        is_empty = True
        for part in statement.body:
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if not (is_text or isinstance(part, ast.Pass)):
                is_empty = False
        return is_empty and not statement.bases
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    has_arguments = any(ast.iter_child_nodes(statement.args))
    plain_names: set[str] = set()  # names whose value doesn't depend on the arguments
    for part in statement.body:
        if isinstance(part, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            if not all(isinstance(target, ast.Name) for target in targets):
                return False
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            # ``total += value`` computes something, so the name's value no longer counts as plain.
            is_plain = not isinstance(part, ast.AugAssign) and _is_plain(part.value, plain_names)
            if is_plain:
                plain_names |= names
            else:
                plain_names -= names
        elif isinstance(part, ast.Return):
            # A function without arguments that returns a constant is no stub: it gives the constant a name.
            if not has_arguments or not _is_plain(part.value, plain_names):
                return False
        elif isinstance(part, ast.Expr):
            if not isinstance(part.value, ast.Constant):
                return False
        elif not isinstance(part, (ast.Pass, ast.Raise, ast.Import, ast.ImportFrom)):
            return False
    return True


def _is_plain(value: ast.expr | None, plain_names: set[str]) -> bool:
    """Returns whether a value doesn't depend on a function's arguments."""
    if isinstance(value, ast.UnaryOp):  # ``-1``
        value = value.operand
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_plain(item, plain_names) for item in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys  # only the empty dictionary
    if isinstance(value, ast.Name):
        return value.id in plain_names
    return value is None or isinstance(value, ast.Constant)


# Imports that benchmarks of programs have made before an answer begins

_CUSTOMARY_MODULES = (
    "typing", "json", "sys", "io", "operator", "functools", "itertools", "statistics", "random", "math",
    "copy", "bisect", "heapq", "collections", "datetime", "re", "string",
)  # fmt: skip
"""The modules M for which LiveCodeBench runs ``from M import *`` and then ``import M`` before an answer. If
two modules define the same name, the last module counts in LiveCodeBench, and the first one here."""


def import_customary_names(code: str) -> dict[str, Any]:
    """Returns the values of names that a program uses without defining them, such as `List` or `math`.

    They come from the modules that benchmarks import before a program (`_CUSTOMARY_MODULES`).
    """
    try:
        tree = ast.parse(code)
    except _COMPILE_ERRORS:
        return {}
    used_names: set[str] = set()
    defined_names = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used_names.add(node.id)
            else:
                defined_names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined_names.add(node.name)
        elif isinstance(node, ast.arg):
            defined_names.add(node.arg)
        elif isinstance(node, ast.alias):
            defined_names.add((node.asname or node.name).partition(".")[0])
    missing_names = used_names - defined_names
    names: dict[str, Any] = {}
    # The modules themselves take precedence: `copy` is the module, and not the function of that name in it.
    for name in sorted(missing_names & set(_CUSTOMARY_MODULES)):
        names[name] = importlib.import_module(name)
    for module_name in _CUSTOMARY_MODULES:
        if missing_names <= names.keys():
            break
        module = importlib.import_module(module_name)
        public_names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in missing_names - names.keys():
            if name in public_names:
                names[name] = getattr(module, name)
    return names
