"""Reads answers as values without Python's `eval`, for libraries that would use it.

`read_literal` replaces `eval` in a library, and `read_formula` replaces the only function of sympy that turns
text into an expression. Each walks the syntax tree of the text and computes the value of each part. Only
sympy's own functions and classes of formulas can be called; there are no attributes, no subscripts, no
comprehensions and no lambdas. So nothing that a model wrote is executed as Python::

    read_literal("[1, 2 + 3]")             [1, 5]
    read_literal("__import__('os')")       raises NotAPlainValue

`refuse_code` is a second barrier: in a process that has called it, Python executes no code that is not from a
library's file.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import os
import sys
import types
from functools import cache

TYPE_CHECKING = False  # not from `typing`, whose import takes as long as all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType
    from typing import Any


class NotAPlainValue(ValueError):
    """A text that is more than a value."""


_BINARY_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.MatMult: operator.matmul, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip

_UNARY_OPERATIONS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class _ValueReader:
    """Makes values of syntax trees. `read` knows constants, containers, arithmetic and comparisons."""

    def read(self, node: ast.AST) -> Any:
        """Returns the value of a syntax tree, as Python would compute it.

        Raises NotAPlainValue for anything but a plain value.
        """
        if isinstance(node, ast.Expression):
            return self.read(node.body)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List):
            return self._read_all(node.elts)
        if isinstance(node, ast.Tuple):
            return tuple(self._read_all(node.elts))
        if isinstance(node, ast.Set):
            return set(self._read_all(node.elts))
        if isinstance(node, ast.Dict):
            written_keys = [key for key in node.keys if key is not None]  # ``**other`` has the key None
            if len(written_keys) == len(node.keys):
                return dict(zip(self._read_all(written_keys), self._read_all(node.values)))
        if isinstance(node, ast.UnaryOp):
            return _UNARY_OPERATIONS[type(node.op)](self.read(node.operand))
        if isinstance(node, ast.BinOp):
            left = self.read(node.left)
            right = self.read(node.right)
            # After a text, `%` formats values, which could call their methods.
            if isinstance(left, (str, bytes)) and isinstance(node.op, ast.Mod):
                raise NotAPlainValue("a text with values to fill in is not a plain value")
            return _BINARY_OPERATIONS[type(node.op)](left, right)
        if isinstance(node, ast.BoolOp):
            # As in Python, the first part that decides is the value, and the parts after it are not read.
            stops_at = isinstance(node.op, ast.Or)
            for part in node.values:
                value = self.read(part)
                if bool(value) is stops_at:
                    break
            return value
        if isinstance(node, ast.Compare):
            left = self.read(node.left)
            result: Any = True
            for kind, part in zip(node.ops, node.comparators):
                if type(kind) not in _COMPARISONS:
                    raise NotAPlainValue(f"{type(kind).__name__} is not a comparison of values")
                right = self.read(part)
                result = _COMPARISONS[type(kind)](left, right)
                # In 1 < x < 3, as in Python, the parts after a false comparison are not read. Only then a
                # result has to be true or false: sympy's ``x < 3`` is neither.
                if len(node.ops) > 1 and not result:
                    break
                left = right
            return result
        raise NotAPlainValue(f"{type(node).__name__} is not allowed in a value")

    def _read_all(self, nodes: list[ast.expr]) -> list[Any]:
        return [self.read(node) for node in nodes]


def read_literal(text: Any, *scopes: Any) -> Any:
    """Returns the value of a text of constants, containers and arithmetic, as `eval` would.

    `scopes` are the globals and locals that callers give to `eval`. They are ignored, because the text may
    contain no names. Raises NotAPlainValue for a text with anything else in it, and SyntaxError for a text
    that isn't Python.
    """
    if not isinstance(text, str):
        raise NotAPlainValue(f"a {type(text).__name__} is not read as a value")
    # `eval` ignores spaces and tabs before the text, too. `ast.parse` would take them for an indentation.
    return _ValueReader().read(ast.parse(text.lstrip(" \t"), mode="eval"))


# Formulas

_SYMPY_FUNCTIONS = (
    "sqrt", "cbrt", "root", "real_root", "diff", "integrate", "expand", "simplify", "factor", "together",
    "apart", "cancel", "collect", "powsimp", "radsimp", "ratsimp", "trigsimp", "logcombine", "expand_log",
    "expand_trig", "nsimplify", "summation", "product", "limit",
)  # fmt: skip
"""Functions of sympy that take formulas and return formulas. Apart from these, a formula can call only
classes of formulas."""

_PYTHON_FUNCTIONS = (abs, round, pow, divmod, sum, len, sorted)


class _FormulaReader(_ValueReader):
    """Reads what sympy's parser makes of a formula, such as ``Integer (2 )*Symbol ('x' )``."""

    def __init__(self, local_names: Mapping[str, Any], global_names: Mapping[str, Any]) -> None:
        import sympy

        self._names = (local_names, global_names)
        # The base classes of formulas: a formula may contain and call their subclasses.
        self._formula_classes = (sympy.Basic, sympy.MatrixBase)
        # The functions of sympy that a formula may call.
        self._functions = [getattr(sympy, name) for name in _SYMPY_FUNCTIONS]

    def read(self, node: ast.AST) -> Any:
        """Returns the value of a syntax tree, which may also have names and calls of mathematics."""
        if isinstance(node, ast.Name):
            return self._value_of_name(node.id)
        if isinstance(node, ast.Call):
            function = self.read(node.func)
            if not self._may_be_called(function):
                raise NotAPlainValue("a formula may only call functions of mathematics")
            arguments = self._read_all(node.args)
            kwargs = {keyword.arg: self.read(keyword.value) for keyword in node.keywords}
            if None in kwargs:  # ``f(**other)``, which Python parses as a keyword without a name
                raise NotAPlainValue("the arguments of a function have to be written out")
            return function(*arguments, **kwargs)  # type: ignore[arg-type]  # no key is None
        return super().read(node)

    def _value_of_name(self, name: str) -> Any:
        """Returns the value of a name that the parser gave the formula, local ones first."""
        for names in self._names:
            if name in names:
                value = names[name]
                value_classes = (*self._formula_classes, int, float, complex)
                if self._may_be_called(value) or isinstance(value, value_classes):
                    return value
                raise NotAPlainValue(f"{name!r} is not a name of mathematics")
        raise NameError(f"name {name!r} is not defined")

    def _may_be_called(self, value: Any) -> bool:
        """Returns whether a value is a class of formulas, or a function that is listed above."""
        if isinstance(value, type):
            return issubclass(value, self._formula_classes)
        return any(value is function for function in (*self._functions, *_PYTHON_FUNCTIONS))


def read_formula(code: Any, local_names: Mapping[str, Any], global_names: Mapping[str, Any]) -> Any:
    """Returns the expression that sympy's parser has written as Python; `code` is text or a syntax tree.

    Raises NotAPlainValue for anything but a formula.
    """
    tree = ast.parse(code.strip(), mode="eval") if isinstance(code, str) else code
    if not isinstance(tree, ast.Expression):
        raise NotAPlainValue(f"a {type(code).__name__} is not a formula")
    return _FormulaReader(local_names, global_names).read(tree)


# Replacing functions of libraries


def replace_eval_and_exec(package: str) -> None:
    """Makes all modules of a package, and sympy, read texts without executing them.

    The modules get `read_literal` in place of `eval`, and an `exec` that refuses. sympy gets `read_formula`.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            module.__dict__["eval"] = read_literal
            module.__dict__["exec"] = _refuse_to_execute
    if "sympy" in sys.modules:
        _replace_eval_in_sympy()


def _refuse_to_execute(*arguments: Any, **kwargs: Any) -> None:
    raise NotAPlainValue("no code is executed while answers are scored")


def _replace_eval_in_sympy() -> None:
    """Makes sympy's parser read formulas by `read_formula`, and never execute a text."""
    from sympy.parsing import sympy_parser

    # Gives the parser its names as a default. Without them it would import all names of sympy for each text.
    # That changes the reference counts of all these objects, so a forked process would copy half of its
    # memory.
    parameters = inspect.signature(sympy_parser.parse_expr).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    defaults["global_dict"] = _names_of_formulas()
    sympy_parser.parse_expr.__defaults__ = tuple(
        default for default in defaults.values() if default is not inspect.Parameter.empty
    )

    # The parser compiles its syntax tree, and calls `eval_expr` with the code. With `keep_tree` as `compile`,
    # `eval_expr` gets the tree instead of the code.
    def keep_tree(tree: Any, *options: Any) -> Any:
        return tree

    def eval_expr(code: Any, local_dict: Mapping[str, Any], global_dict: Mapping[str, Any]) -> Any:
        return read_formula(code, local_dict, global_dict)

    for name, replacement in (("exec", _refuse_to_execute), ("compile", keep_tree), ("eval_expr", eval_expr)):
        sympy_parser.__dict__[name] = replacement


@cache
def _names_of_formulas() -> dict[str, Any]:
    """Returns the names that sympy's parser gives a formula by default."""
    import sympy

    names = {name: getattr(sympy, name) for name in sympy.__all__}
    names |= {
        name: value for name, value in vars(builtins).items() if isinstance(value, types.BuiltinFunctionType)
    }
    return names | {"max": sympy.Max, "min": sympy.Min}


# The second barrier

_FILES_THAT_GENERATE_CODE = ("collections/__init__.py", "dataclasses.py", "sympy/polys/monomials.py")
"""Files of libraries that generate functions as text and execute them. The text holds only the libraries' own
names and numbers."""

_REFUSED_EVENTS = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg",
    "subprocess.Popen", "socket.__new__", "pickle.find_class", "ctypes.dlopen", "ctypes.dlsym",
    "code.__new__", "function.__new__", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink",
    "shutil.rmtree", "signal.pthread_kill", "setopencodehook", "sys.setprofile", "sys.settrace",
)  # fmt: skip


def refuse_code() -> list[str]:
    """Makes Python refuse to execute code that was compiled from text, and to do what no scorer does.

    This holds for the rest of the process, and can't be undone.

    Returns:
        A list to which each refused event is added.
    """
    refused: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            allowed = _is_of_a_library(arguments[0])
        elif event == "open":
            allowed = _only_reads(arguments)
        else:
            allowed = event not in _REFUSED_EVENTS
        if not allowed:
            refused.append(event)
            raise NotAPlainValue(f"{event}: an answer is only read")

    sys.addaudithook(hook)
    return refused


def _is_of_a_library(code: CodeType) -> bool:
    """Returns whether code is from a library's file, or generated by one of `_FILES_THAT_GENERATE_CODE`."""
    if os.path.isabs(code.co_filename):  # code that was compiled from text has a name such as "<string>"
        return True
    frame = sys._getframe(2)  # the caller of `exec`: frames 0 and 1 are this function and the hook
    return frame.f_code.co_filename.endswith(_FILES_THAT_GENERATE_CODE)


def _only_reads(arguments: tuple[Any, ...]) -> bool:
    """Returns whether a file is only opened to be read.

    `arguments` are those of Python's audit event "open": the path, the mode and the flags. A call of `open`
    has a mode, such as "rb". For a call of `os.open`, the mode is None, and only the flags tell.
    """
    _, mode, flags = arguments
    writing_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    has_writing_mode = isinstance(mode, str) and bool(set(mode) & set("wax+"))
    return not has_writing_mode and not (flags or 0) & writing_flags
