"""Proves from its source that a library's scorer only compares an answer: it executes nothing of the answer,
and keeps nothing of it.

If a scorer is proven to do so, its answers may be scored one after the other in the same process (`scoring`).
The proof has lists of harmless functions, and gives up at everything else. Then each answer gets a separate
process. The proof succeeds if

* each function that is called is either a function of the library itself, of which the same is proven, or one
  of the functions below, which only compute values. `eval`, imports, files and classes of the library are not
  among the latter;
* nothing that outlives the call is changed. Objects that outlive it are called lasting here: the data set's
  object, data of modules, and every name that may stand for a part of them. The answer and its problem are
  not lasting, since they are made anew for each call.

Example: ``return answer.strip() == entry["answer"]`` is proven, and ``self.seen.append(answer)`` is not.

The library's own source is assumed to be honest: it is pinned by its hash, and no model wrote it.
"""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import sys
import textwrap
import types

TYPE_CHECKING = False  # not from `typing`, whose import takes as long as all of this
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, NoReturn

    FunctionNode = ast.FunctionDef | ast.Lambda

_SCALAR_FUNCTIONS = frozenset({
    "abs", "bool", "chr", "complex", "float", "hash", "int", "isinstance", "issubclass", "len", "ord", "repr",
    "round", "str",
})  # fmt: skip
"""Functions of Python whose values hold no part of their arguments."""

_CONTAINER_FUNCTIONS = frozenset({
    "all", "any", "dict", "divmod", "enumerate", "filter", "frozenset", "list", "map", "max", "min", "pow",
    "range", "reversed", "set", "slice", "sorted", "sum", "tuple", "zip",
})  # fmt: skip
"""Functions of Python whose values may hold parts of their arguments."""

_READING_METHODS = frozenset({
    "adjusted", "as_integer_ratio", "bit_count", "bit_length", "capitalize", "casefold", "center", "copy",
    "count", "difference", "encode", "end", "endswith", "expandtabs", "find", "findall", "finditer",
    "fullmatch", "get", "group", "groups", "index", "intersection", "is_finite", "is_nan", "is_zero",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isdisjoint", "isidentifier", "islower",
    "isnumeric", "isspace", "issubset", "issuperset", "istitle", "isupper", "items", "join", "keys",
    "ljust", "lower", "lstrip", "match", "partition", "quantize", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "search", "span", "split",
    "splitlines", "start", "startswith", "strip", "swapcase", "symmetric_difference", "title",
    "translate", "union", "upper", "values", "zfill",
})  # fmt: skip
"""Methods of texts, numbers, containers, patterns and matches that change nothing. `format` is missing
because its template may read attributes."""

_CHANGING_METHODS = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
})  # fmt: skip
"""Methods of containers that change them."""

_HARMLESS_OF_MODULES = {
    "re": {"compile", "escape", "findall", "finditer", "fullmatch", "match", "search", "split", "sub"},
    "json": {"dumps", "loads"},
    "math": {
        "ceil", "comb", "cos", "exp", "factorial", "floor", "fsum", "gcd", "hypot", "isclose", "isfinite",
        "isinf", "isnan", "isqrt", "lcm", "log", "log10", "log2", "pow", "prod", "sin", "sqrt", "tan",
    },
    "collections": {"Counter", "deque"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "itertools": {"chain", "combinations", "permutations", "product"},
    "numpy": {"allclose", "array_equal", "isclose", "round"},
}  # fmt: skip
"""Functions of modules that change nothing."""

_COVERED_STATEMENTS = (
    ast.AnnAssign, ast.Assert, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Expr,
    ast.For, ast.FunctionDef, ast.If, ast.Pass, ast.Raise, ast.Return, ast.Try, ast.While,
)  # fmt: skip


class NotProven(Exception):
    """The proof failed. The message names the expression and the reason."""


def prove_only_compares(method: Any, package: str, harmless: Collection[Any] = ()) -> None:
    """Proves that a bound method only compares.

    The method's object is of the library `package`. A method that only compares executes nothing of an
    answer, and keeps nothing of the answer in an object that outlives the call. The method may also call the
    `harmless` functions. Raises NotProven at the first doubt.
    """
    if not inspect.ismethod(method):
        raise NotProven(f"{method!r} is not a method")
    self_position = 0  # `self`, the data set's object, outlives the call
    _Proof(package, harmless).examine(method.__func__, type(method.__self__), frozenset({self_position}))


class _Proof:
    """Examines functions, and keeps the result for each function, since they may call each other in
    circles."""

    def __init__(self, package: str, harmless: Collection[Any]) -> None:
        self.package = package
        self.harmless = harmless
        self._returns_lasting: dict[tuple[types.CodeType, type | None, frozenset[int]], bool] = {}
        """The results of `examine`, by the function's code, the class of its `self`, and the positions of
        lasting parameters."""

    def is_package_function(self, value: Any) -> bool:
        return isinstance(value, types.FunctionType) and self.is_package_module(value.__module__)

    def is_package_module(self, name: str) -> bool:
        return name.partition(".")[0] == self.package

    def examine(self, function: Any, owner: type | None, lasting: frozenset[int]) -> bool:
        """Proves that a function only compares.

        Lasting objects outlive the call, such as the data set and what it contains: the function must not
        change them.

        Args:
            owner: The class of the function's `self`; None for a plain function.
            lasting: The positions of parameters that may be lasting objects or parts of them.

        Returns:
            Whether its result may be a lasting object or a part of one.
        """
        key = (function.__code__, owner, lasting)
        if key in self._returns_lasting:
            return self._returns_lasting[key]
        self._returns_lasting[key] = True  # the safe answer if the function calls itself
        # A function that is made within another one may use names that the proof doesn't see. Python also
        # makes a closure for a method that calls ``super()``. It has only the name ``__class__``, and is
        # allowed.
        if function.__closure__ and function.__code__.co_freevars != ("__class__",):
            raise NotProven(f"{function.__qualname__} is made within another function")
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, SyntaxError) as error:
            raise NotProven(f"{function.__qualname__} has no source: {error}") from error
        if not isinstance(tree, ast.FunctionDef):
            raise NotProven(f"{function.__qualname__} is not a plain function")
        body = _Body(self, function, owner, tree, lasting)
        self._returns_lasting[key] = body.check()
        return self._returns_lasting[key]


class _Body:
    """Checks one function: which of its names may be parts of lasting things, and what it does with them."""

    def __init__(
        self, proof: _Proof, function: Any, owner: type | None, tree: ast.FunctionDef, lasting: frozenset[int]
    ) -> None:
        self._proof = proof
        self._globals = function.__globals__
        self._owner = owner
        self._tree = tree
        self._name = function.__qualname__
        parameters = _parameter_names(tree)
        self._self_name = parameters[0] if owner is not None and parameters else None
        # A lasting object outlives the call, such as the data set. The function must not change it.
        self._lasting = {name for position, name in enumerate(parameters) if position in lasting}
        """Names that may stand for lasting objects or for parts of them."""
        # The value of a default is made once, and every call gets the same object: it is lasting. For a
        # parameter without a default, `default` is the class `inspect.Parameter.empty`. The function can't
        # change a class.
        for name, parameter in inspect.signature(function).parameters.items():
            if not isinstance(parameter.default, (type, *_IMMUTABLE_TYPES)):
                self._lasting.add(name)
        self._locals = set(parameters)
        self._inner_functions: set[str] = set()
        """Names of the functions that are defined within this one."""
        self._bindings: list[tuple[str, ast.expr]] = []
        """Pairs of a name and an expression, whose value the name's object is or may hold. Both ``x = y`` and
        ``x.append(y)`` give ``("x", y)``."""
        self._whole_values: dict[str, list[ast.expr]] = {}
        """For each name, the expressions whose whole value it gets, as by ``x = xs``."""
        self._names_of_parts: set[str] = set()
        """Names that get a part of a value, as by ``for x in xs``."""
        self._called_expressions: set[int] = set()
        """The `id` of each expression that is called."""

    def check(self) -> bool:
        """Returns whether the function's result may be a part of lasting things: those that outlive the call.

        Raises NotProven unless the function only compares.
        """
        nodes: list[ast.AST] = []
        for statement in self._tree.body:
            nodes += ast.walk(statement)
        for node in nodes:
            self._collect(node)
        for name in self._locals:
            # `_locals` also has the names that inner functions bind. The outer function may use such a name
            # for an object of its module. The proof would then take this object for a local one. A plain
            # value, such as a text, is allowed: nothing can change it.
            global_value = self._globals.get(name)  # None, a plain value, if the module has no such name
            if not isinstance(global_value, _IMMUTABLE_TYPES):
                raise NotProven(f"{self._name}: {name!r} is a name of its module, too")
        self._spread_lasting()
        for node in nodes:
            self._check_node(node)
        returns = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        return any(map(self._may_be_lasting, returns))

    def _give_up(self, node: ast.AST, reason: str) -> NoReturn:
        raise NotProven(f"{self._name}: {ast.unparse(node)[:80]!r} {reason}")

    # Names

    def _collect(self, node: ast.AST) -> None:
        """Notes the names that a node defines or binds, and the expressions that it calls."""
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):  # ``def inner(x): …``, ``lambda x: …``
            self._collect_inner_function(node)
        elif isinstance(node, ast.ExceptHandler) and node.name:  # ``except ValueError as error``
            self._locals.add(node.name)
            self._names_of_parts.add(node.name)  # the function hasn't made the error itself
            self._lasting.add(node.name)  # the error may hold what lasts: ``raise ValueError(self.seen)``
        elif isinstance(node, ast.Assign):  # ``x = y = value``
            for target in node.targets:
                self._note_binding(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._note_binding(node.target, node.value)  # ``x: int = value``, ``(x := value)``
        elif isinstance(node, ast.AugAssign):  # ``x += value``: x keeps its parts, and gets more
            if isinstance(node.target, ast.Name):
                self._locals.add(node.target.id)
            self._note_part(node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):  # ``for x in values``
            self._note_binding(node.target, node.iter, is_part=True)
        elif isinstance(node, ast.Call):
            self._called_expressions.add(id(node.func))
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING_METHODS:
                for argument in _argument_nodes(node):  # ``holder.append(argument)``
                    self._note_part(node.func.value, argument)

    def _collect_inner_function(self, node: FunctionNode) -> None:
        """Notes the names that a function within the examined one defines: its parameters, and its own name
        unless it is a lambda."""
        parameters = _parameter_names(node)
        self._locals.update(parameters)
        # The calls of an inner function aren't followed. So its arguments may be anything, also lasting.
        self._lasting.update(parameters)
        self._names_of_parts.update(parameters)
        if isinstance(node, ast.FunctionDef):
            self._locals.add(node.name)
            self._inner_functions.add(node.name)
            self._lasting.add(node.name)  # it may return what the outer function's names stand for

    def _note_binding(self, target: ast.expr, value: ast.expr, is_part: bool = False) -> None:
        """Notes that the target of an assignment gets a value or, if `is_part`, a part of the value."""
        if isinstance(target, ast.Name):  # ``x = value``
            self._locals.add(target.id)
            self._bindings.append((target.id, value))
            if is_part:
                self._names_of_parts.add(target.id)
            else:
                self._whole_values.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):  # ``x, y = value``
            for element in target.elts:
                self._note_binding(element, value, is_part=True)
        elif isinstance(target, ast.Starred):  # ``*ys`` of ``x, *ys = value``
            self._note_binding(target.value, value, is_part=True)
        else:  # an attribute or an item: ``holder.x = value``, ``holder[0] = value``
            self._note_part(target, value)

    def _note_part(self, holder: ast.expr, value: ast.expr) -> None:
        """Notes that the object that `holder` names gets a value as a part.

        For ``x.y[0] = value``, this is the object of the name ``x``.
        """
        while isinstance(holder, (ast.Subscript, ast.Attribute)):
            holder = holder.value
        if isinstance(holder, ast.Name):
            self._bindings.append((holder.id, value))

    def _spread_lasting(self) -> None:
        """Finds all names that may be parts of lasting things, until a pass finds no further name.

        Lasting things outlive the call, such as the data set's object.
        """
        count = -1
        while count != len(self._lasting):
            count = len(self._lasting)
            for name, value in self._bindings:
                if self._may_be_lasting(value):
                    self._lasting.add(name)

    def _may_be_lasting(self, node: ast.AST) -> bool:
        """Returns whether the value may be, or hold, a part of a lasting thing.

        A lasting thing outlives the call, such as the data set's object: the function must not change it.
        """
        if isinstance(node, (ast.Constant, ast.Compare, ast.JoinedStr)):
            return False  # a number, a text or a truth value, which nothing can change
        if isinstance(node, ast.Name):
            if node.id in self._locals:
                return node.id in self._lasting
            if node.id == "super":
                return True  # ``super()`` gives access to `self`
            return not isinstance(self._globals.get(node.id), _IMMUTABLE_TYPES)
        if isinstance(node, ast.Call):
            return self._result_may_be_lasting(node)
        return self._has_lasting_child(node)

    def _result_may_be_lasting(self, call: ast.Call) -> bool:
        """Returns whether a call may return a lasting thing or a part of one.

        A lasting thing outlives the call of the examined function, such as the data set's object.
        """
        function = call.func
        if isinstance(function, ast.Name) and function.id not in self._locals:
            if function.id in self._globals:
                value = self._globals[function.id]
                if self._proof.is_package_function(value):
                    return self._examine_call(call, value, owner=None)
                if _is_harmless_library_function(value):
                    return self._has_lasting_argument(call)  # it may return a part of its arguments
                return True  # any other function may return anything
            if function.id in _SCALAR_FUNCTIONS:
                return False
        if self._names_harmless_library_function(function):
            return self._has_lasting_argument(call)
        if self._is_method_of_self(function):
            return self._examine_method(call, inspect.getattr_static(self._owner, function.attr, None))  # type: ignore[attr-defined]
        return self._has_lasting_child(call)

    def _has_lasting_child(self, node: ast.AST) -> bool:
        """Returns whether a part of an expression may be lasting. The expression may then hold it, as
        ``[x, y]`` holds ``x``."""
        return any(self._may_be_lasting(child) for child in ast.iter_child_nodes(node))

    def _names_harmless_library_function(self, function: ast.expr) -> bool:
        """Returns whether an expression such as ``json.loads`` names a library's function that changes
        nothing."""
        if not isinstance(function, ast.Attribute):
            return False
        module = self._find_module(function.value)
        return module is not None and function.attr in _HARMLESS_OF_MODULES.get(module.__name__, ())

    def _is_method_of_self(self, function: ast.expr) -> bool:
        """Returns whether an expression is ``self.name``."""
        if self._self_name is None or not isinstance(function, ast.Attribute):
            return False
        return isinstance(function.value, ast.Name) and function.value.id == self._self_name

    def _has_lasting_argument(self, call: ast.Call) -> bool:
        return any(self._may_be_lasting(argument) for argument in _argument_nodes(call))

    def _is_fresh(self, node: ast.expr) -> bool:
        """Returns whether a name stands for a container that this call made, whatever its parts are."""
        if not isinstance(node, ast.Name):
            return False
        if node.id in self._names_of_parts or node.id in _parameter_names(self._tree):
            return False
        values = self._whole_values.get(node.id, [])
        return bool(values) and all(map(_is_made_here, values))

    def _may_change(self, node: ast.expr) -> bool:
        """Returns whether the function is allowed to change the value."""
        return self._is_fresh(node) or not self._may_be_lasting(node)

    # Statements and expressions

    def _check_node(self, node: ast.AST) -> None:
        """Raises NotProven unless a node does nothing but compute values and change new containers.

        New containers are those that this call made. In the messages, "what lasts" means objects that outlive
        the call, such as the data set's object.
        """
        if isinstance(node, ast.stmt) and not isinstance(node, _COVERED_STATEMENTS):
            self._give_up(node, "is a statement that the proof doesn't cover")
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            self._give_up(node, "is decorated")
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom)):
            self._give_up(node, "continues later")
        if isinstance(node, ast.Attribute):
            self._check_attribute(node)
        if isinstance(node, ast.Subscript):
            is_read = isinstance(node.ctx, ast.Load)
            if not is_read and not self._may_change(node.value):
                self._give_up(node, "changes what lasts")
        # ``xs += ys`` changes a list that other names may stand for, too.
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and not self._may_change(node.target)
        ):
            self._give_up(node, "may change what lasts")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self._locals:
            self._check_global(node)
        if isinstance(node, ast.Call):
            self._check_call(node)

    def _check_attribute(self, node: ast.Attribute) -> None:
        """Raises NotProven unless an attribute is only read. (What is proven is that the scorer's code only
        compares.) A method may not be passed on without being called, because the function that gets it could
        call it with any arguments."""
        if not isinstance(node.ctx, ast.Load):
            self._give_up(node, "is an attribute that is set")
        if node.attr.startswith("__"):
            self._give_up(node, "is not needed for a comparison")
        module = self._find_module(node.value)
        if module is not None:
            self._check_module_attribute(node, getattr(module, node.attr, None), module.__name__)
        if id(node) in self._called_expressions:
            return  # `_check_call` checks it
        if node.attr in _CHANGING_METHODS:
            self._give_up(node, "may be called by others")
        if isinstance(node.value, ast.Name) and node.value.id == self._self_name and self._owner is not None:
            # This code reads an attribute of `self` without calling it. If the attribute is a method, it is
            # passed on; if it is a property, its function runs.
            value = inspect.getattr_static(self._owner, node.attr, None)
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                self._give_up(node, "may be called by others")

    def _check_module_attribute(self, node: ast.Attribute, value: Any, module_name: str) -> None:
        """Raises NotProven unless the `value` of a module's attribute is harmless.

        Harmless values are: a function of the library, after it is examined; a function that is listed in
        `_HARMLESS_OF_MODULES`; a class of errors; and a value that can't be changed.
        """
        if self._proof.is_package_function(value):
            self._examine_function(value)
        elif node.attr not in _HARMLESS_OF_MODULES.get(module_name, ()):
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if not is_error and not isinstance(value, (*_IMMUTABLE_TYPES, enum.Enum)):
                self._give_up(node, "is not known to be harmless")

    def _examine_function(self, function: types.FunctionType) -> None:
        self._proof.examine(function, owner=None, lasting=_all_parameters(function))

    def _find_module(self, node: ast.expr) -> types.ModuleType | None:
        """Returns the module that a global name stands for; None for any other expression."""
        if not isinstance(node, ast.Name) or node.id in self._locals:
            return None
        value = self._globals.get(node.id)
        return value if isinstance(value, types.ModuleType) else None

    def _check_global(self, node: ast.Name) -> None:
        """Raises NotProven unless a global name stands for something harmless.

        Global names are the names of the function's module and of Python itself.
        """
        if node.id not in self._globals:  # a name of Python itself
            value = getattr(builtins, node.id, None)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            # These three are harmless only with the arguments that `_check_call` allows.
            is_checked_call = id(node) in self._called_expressions and node.id in ("super", "print", "next")
            is_harmless_function = node.id in _SCALAR_FUNCTIONS | _CONTAINER_FUNCTIONS
            if not (is_error or is_checked_call or is_harmless_function):
                self._give_up(node, "is not known to be harmless")
            return
        value = self._globals[node.id]
        if isinstance(value, types.ModuleType):
            module_name = value.__name__
            if module_name not in _HARMLESS_OF_MODULES and not self._proof.is_package_module(module_name):
                self._give_up(node, "is a module that isn't known to be harmless")
        elif self._proof.is_package_function(value):
            if id(node) not in self._called_expressions:  # a call is examined with its arguments
                self._examine_function(value)
        elif any(value is function for function in self._proof.harmless):
            pass  # identity, because `in` would call `__eq__` of an unknown object
        elif callable(value) and not (_is_harmless_library_function(value) or _is_harmless_class(value)):
            self._give_up(node, "is not known to be harmless")

    def _check_call(self, node: ast.Call) -> None:
        """Raises NotProven unless the called function computes values, or only changes new containers.

        New containers are those that the examined function made. In the messages, "what lasts" means objects
        that outlive the call, such as the data set's object.
        """
        self._check_callbacks(node)
        function = node.func
        if isinstance(function, ast.Name):
            self._check_call_of_name(node, function.id)
        elif isinstance(function, ast.Attribute):
            self._check_call_of_method(node, function)
        else:
            self._give_up(node, "calls what is computed")

    def _check_call_of_name(self, node: ast.Call, name: str) -> None:
        if name == "print" and node.keywords:  # `file` may be an object that lasts
            self._give_up(node, "may print into something")
        # `next` moves its iterator on, which is a change.
        if name == "next" and not (node.args and self._may_change(node.args[0])):
            self._give_up(node, "changes what lasts")
        if name in self._locals:
            if name not in self._inner_functions:
                self._give_up(node, "calls a function that it was given")
            return  # the body of an inner function is checked with the function around it
        global_value = self._globals.get(name)
        # `_check_global` has checked any other function.
        if self._proof.is_package_function(global_value):
            self._examine_call(node, global_value, owner=None)

    def _check_call_of_method(self, node: ast.Call, function: ast.Attribute) -> None:
        receiver = function.value
        if self._is_method_of_self(function):
            self._examine_method(node, inspect.getattr_static(self._owner, function.attr, None))
        elif _is_super(receiver):
            self._check_super(node, function.attr)
        elif self._find_module(receiver) is not None:
            pass  # `_check_attribute` has checked it
        elif function.attr in _CHANGING_METHODS:
            if not self._may_change(receiver):
                self._give_up(node, "changes what lasts")
        elif function.attr not in _READING_METHODS and not _is_harmless_format(function):
            self._give_up(node, "calls a method that is not known to be harmless")

    def _check_callbacks(self, node: ast.Call) -> None:
        """Checks the functions that a call passes on as arguments, such as ``str.lower`` in
        ``sorted(words, key=str.lower)``: the function that gets them calls them."""
        callbacks = [keyword.value for keyword in node.keywords if keyword.arg in ("key", "default_factory")]
        if isinstance(node.func, ast.Name) and node.func.id in ("map", "filter"):
            callbacks += node.args[:1]
        for callback in callbacks:
            if not self._is_harmless_callback(callback):
                self._give_up(callback, "is called by others")

    def _is_harmless_callback(self, callback: ast.expr) -> bool:
        """Returns whether the function in an argument is harmless, whatever it is called with.

        The examined source has no call of this function, so the proof knows nothing of its arguments.
        """
        if isinstance(callback, ast.Attribute):
            return callback.attr in _READING_METHODS  # such as `str.lower`, which changes nothing
        if isinstance(callback, ast.Name):
            # A variable may hold any function. A function that is defined within the examined one is examined
            # with it, and `_check_global` examines a global one.
            is_variable = callback.id in self._locals - self._inner_functions
            return not is_variable
        # The body of a lambda is examined with the function around it. A constant, as in `key=None`, is not
        # called.
        return isinstance(callback, (ast.Lambda, ast.Constant))

    def _check_super(self, node: ast.Call, name: str) -> None:
        """Examines the method that ``super().name()`` calls.

        Python searches the classes of `self` that come, in the order of inheritance, after the class with the
        examined function. It calls the method `name` of the first class that has one.
        """
        assert self._owner is not None
        defining_class = self._name.rpartition(".")[0]  # "Sudoku" of "Sudoku.score_answer"
        classes = list(self._owner.__mro__)
        defining_index = [kind.__qualname__ for kind in classes].index(defining_class)
        for kind in classes[defining_index + 1 :]:
            if name in vars(kind):
                self._examine_method(node, vars(kind)[name])
                return
        self._give_up(node, "calls a method that no parent class has")

    def _examine_method(self, node: ast.Call, method: Any) -> bool:
        """Examines a method of `self._owner` as the call `node` uses it.

        Returns whether the method's result may be a lasting object or a part of one. A lasting object
        outlives the call.
        """
        is_static = isinstance(method, staticmethod)
        function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
        if not isinstance(function, types.FunctionType):
            self._give_up(node, "calls something that is not a method of the class")
        return self._examine_call(node, function, None if is_static else self._owner)

    def _examine_call(self, node: ast.Call, function: Any, owner: type | None) -> bool:
        """Examines a function as the call `node` uses it.

        Returns whether the result may be a lasting object or a part of one. A lasting object outlives the
        call.
        """
        if self._has_lasting_argument(node):
            # All parameters count as lasting, also those whose arguments aren't. This keeps the proof simple.
            lasting = _all_parameters(function)
        else:
            lasting = frozenset() if owner is None else frozenset({0})  # `self` always lasts
        return self._proof.examine(function, owner, lasting)


_IMMUTABLE_TYPES = (str, bytes, int, float, complex, bool, type(None))
"""Types whose values can't be changed."""


def _parameter_names(function: FunctionNode) -> list[str]:
    """Returns the names of all parameters; those of ``*args`` and ``**kwargs`` come last."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for collecting_parameter in (arguments.vararg, arguments.kwarg):
        if collecting_parameter is not None:
            parameters.append(collecting_parameter)
    return [parameter.arg for parameter in parameters]


def _is_harmless_format(function: ast.Attribute) -> bool:
    """Returns whether an expression is the harmless `format` of a text in the source: ``"{} of {}".format``.

    A field of the text that reads an attribute or an element of its argument, or that converts or formats it,
    may execute code: ``"{0.name}"``, ``"{0[1]}"``, ``"{0!r}"``, ``"{0:5}"``. So a text with one of the
    characters of such fields isn't harmless.
    """
    template = function.value.value if isinstance(function.value, ast.Constant) else None
    if function.attr != "format" or not isinstance(template, str):
        return False
    return not any(character in template for character in ".[!:")


def _all_parameters(function: types.FunctionType) -> frozenset[int]:
    """Returns the positions of all parameters, in the order of `_parameter_names`."""
    return frozenset(range(len(inspect.signature(function).parameters)))


def _argument_nodes(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_super(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == "super" and not node.args  # type: ignore[attr-defined]


def _is_made_here(node: ast.expr) -> bool:
    """Returns whether an expression makes a new value each time it is evaluated, or one that can't be
    changed, such as a constant."""
    kinds_of_new_values = (
        ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.BinOp,
        ast.UnaryOp, ast.Compare, ast.JoinedStr,
    )  # fmt: skip
    if isinstance(node, kinds_of_new_values):
        return True
    making_functions = {"list", "dict", "set", "sorted"} | _SCALAR_FUNCTIONS
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in making_functions


def _is_harmless_library_function(value: Any) -> bool:
    """Returns whether a value is a function of a library that changes nothing, such as `math.sqrt`."""
    for module, names in _HARMLESS_OF_MODULES.items():
        loaded = sys.modules.get(module)
        if loaded is not None and any(getattr(loaded, name, None) is value for name in names):
            return True
    return False


def _is_harmless_class(value: Any) -> bool:
    """Returns whether a value is a class of errors, or an enumeration, whose call returns an existing
    member."""
    if not isinstance(value, type):
        return False
    # The call of an `enum.Flag` may make a new member, which its class then keeps.
    is_enumeration = issubclass(value, enum.Enum) and not issubclass(value, enum.Flag)
    return is_enumeration or issubclass(value, Exception)
