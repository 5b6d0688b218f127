"""Find in Python's source all that could run a text, load a pickle, start a shell or import a module by
data.

References count, not calls: `run = eval` is found in its line, under whichever name it is called later.
Names are followed through imports, their renamings and simple assignments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

RUNS = {
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "runpy.run_path",
    "runpy.run_module", "code.interact", "code.InteractiveInterpreter", "code.InteractiveConsole",
    "codeop.compile_command", "timeit.timeit", "timeit.repeat", "timeit.Timer", "types.FunctionType",
    "types.CodeType", "ast.literal_eval", "importlib.reload", "importlib.util.spec_from_file_location",
    "importlib.util.module_from_spec", "importlib.machinery.SourceFileLoader", "logging.config.dictConfig",
    "logging.config.fileConfig", "ctypes.CDLL", "ctypes.cdll", "ctypes.PyDLL", "jinja2.Template",
    "sympy.sympify", "sympy.S", "sympy.parse_expr", "sympy.lambdify", "sympy.parsing.parse_expr",
    "numexpr.evaluate", "pandas.eval",
}  # fmt: skip
"""Functions that run a text, or make something of it that can be run."""

RUNS_BY_NAME = {
    "sympify",
    "parse_expr",
    "lambdify",
    "literal_eval",
    "unsafe_load",
    "full_load",
    "read_pickle",
}
"""Names that run text in every module that has them."""

UNPICKLE = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle",
}  # fmt: skip
"""Modules whose loading makes objects of bytes."""
WRITES = {"dump", "dumps", "HIGHEST_PROTOCOL", "PicklingError", "PickleError", "UnpicklingError"}

SHELLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn",
    "asyncio.create_subprocess_shell",
}  # fmt: skip

_UNSAFE_MODULES = {"builtins", "os", "subprocess", "sys", "importlib", "operator", *UNPICKLE}
_SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "BaseLoader"}


def find_text_that_runs(source: str) -> set[str]:
    """Return the full names of all references of a module that could run a text."""
    return set(_Finder(ast.parse(source)).find())


class _Finder:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._full_names: dict[str, str] = {}
        """The full names of local names: ``np`` is ``numpy``, ``run`` is ``builtins.eval``."""
        self._collect_imports()
        self._collect_assignments()

    def find(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                yield from self._of_reference(node)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from filter(_runs, (f"{node.module}.{alias.name}" for alias in node.names))
                if any(alias.name == "*" for alias in node.names):
                    yield f"{node.module}.*"
            elif isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Subscript):
                yield from self._of_subscript(node)

    def _collect_imports(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self._full_names[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    self._full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _collect_assignments(self) -> None:
        count = -1
        while count != len(self._full_names):  # until no name is new: one may be bound to another
            count = len(self._full_names)
            for node in ast.walk(self._tree):
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    value = self._full_name(node.value)
                    is_module = value in _UNSAFE_MODULES or value in {"numpy", "torch", "yaml", "pandas"}
                    for target in targets:
                        if isinstance(target, ast.Name) and value is not None and (is_module or _runs(value)):
                            self._full_names.setdefault(target.id, value)

    def _full_name(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            if node.id in self._full_names:
                return self._full_names[node.id]
            if node.id == "__builtins__":
                return "builtins"
            return f"builtins.{node.id}" if f"builtins.{node.id}" in RUNS else None
        if isinstance(node, ast.Attribute):
            parent = self._full_name(node.value)
            return None if parent is None else f"{parent}.{node.attr}"
        if isinstance(node, ast.Call) and self._is_import(node) and _is_text(node.args[0]):
            return str(node.args[0].value)  # type: ignore[attr-defined]
        return None

    def _is_import(self, node: ast.Call) -> bool:
        return bool(node.args) and self._full_name(node.func) in (
            "importlib.import_module", "builtins.__import__",
        )  # fmt: skip

    def _of_reference(self, node: ast.Name | ast.Attribute) -> Iterator[str]:
        full_name = self._full_name(node)
        if full_name is not None and _runs(full_name):
            yield full_name
        elif isinstance(node, ast.Attribute) and node.attr in RUNS_BY_NAME:
            yield f"?.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in ("__builtins__", "__loader__"):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in ("__globals__", "__builtins__", "exec_module"):
            yield f"?.{node.attr}"

    def _of_call(self, node: ast.Call) -> Iterator[str]:
        full_name = self._full_name(node.func) or ""
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else full_name.rpartition(".")[2]
        if name == "eval" and (node.args or node.keywords) and full_name != "builtins.eval":
            yield "?.eval"  # of a table; torch's `eval`, which only sets a mode, has no argument
        if None in named and full_name in ("numpy.load", "torch.load", "yaml.load", "subprocess.run"):
            yield f"{full_name}(**…)"
        if "allow_pickle" in named and not _is(named["allow_pickle"], False):
            yield f"{name}(allow_pickle)"
        if full_name == "torch.load" and not _is(named.get("weights_only"), True):
            yield "torch.load"
        if full_name in ("yaml.load", "yaml.load_all"):
            loader = named.get("Loader", node.args[1] if len(node.args) > 1 else None)
            if not isinstance(loader, (ast.Name, ast.Attribute)) or _last(loader) not in _SAFE_LOADERS:
                yield full_name
        if "shell" in named and not _is(named["shell"], False):
            yield f"{name}(shell)"
        if full_name == "importlib.import_module" and not (node.args and _is_text(node.args[0])):
            yield "importlib.import_module"
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "vars") and node.args:
            module = self._full_name(node.args[0]) or ""
            if module in _UNSAFE_MODULES:
                attribute = node.args[1] if len(node.args) > 1 else None
                if not _is_text(attribute) or _runs(f"{module}.{attribute.value}"):  # type: ignore[union-attr]
                    yield f"{node.func.id}({module})"
        if name in ("format", "format_map") and isinstance(node.func, ast.Attribute):
            template = node.func.value
            if not isinstance(template, (ast.Constant, ast.JoinedStr)):
                yield f"?.{name}"

    def _of_subscript(self, node: ast.Subscript) -> Iterator[str]:
        """Yield a name that is looked up in a module's dictionary."""
        value = node.value
        if isinstance(value, ast.Attribute) and value.attr == "__dict__":
            module = self._full_name(value.value) or ""
            if module in _UNSAFE_MODULES:
                yield f"{module}.__dict__"
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "globals":
            key = node.slice
            if not _is_text(key) or f"builtins.{key.value}" in RUNS:  # type: ignore[attr-defined]
                yield "globals()"


def _runs(full_name: str) -> bool:
    module, _, name = full_name.rpartition(".")
    root = full_name.partition(".")[0]
    if root in UNPICKLE:
        return bool(module) and name not in WRITES
    return full_name in RUNS | SHELLS or name in RUNS_BY_NAME


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
