"""The messages between the process of an answer and the process of its tests.

An answer is a program that a model has written. It may be malicious.

Data is copied as plain data: a list arrives as a list, and never as a subclass. Any other object remains in
its process, and the other process has a `Remote` for it::

    process of the tests                        process of the answer
    ────────────────────                        ─────────────────────
    Remote.__call__
      └ Peer.ask ── ["ask", "call", args] ────► Peer.answer: calls the object
          │ ◄── ["ask", "getattr", args] ────────  └ may ask for operations on objects of the tests
          │     Peer.answer ── ["gives", …] ─────►
          │ ◄── ["gives", result, printed, changed arguments] ──┘ or ["raises", error, …]

The tests may do anything with the answer's objects, since this can only harm the answer. The answer may only
use an object of the tests in the ways that `_check_operation` lists for its type.
"""

from __future__ import annotations

import builtins
import collections
import functools
import io
import json
import operator
import os
import sys
import types
from _thread import RLock

TYPE_CHECKING = False  # not from `typing`, whose import takes as long as all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_JSON_TYPES = (type(None), bool, str, int, float)
"""The types of values that JSON has."""
_MOST_NESTED_CONTAINERS = 200
"""The greatest number of nested containers in a sent value."""
_LONGEST_MESSAGE_BYTES = 1 << 28
"""The greatest number of bytes of a message. A longer one could exhaust the memory of the tests' process."""
_ORDER_OPERATIONS = ("lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_CONTAINER_OPERATIONS = ("contains", "getitem", "setitem", "delitem")
_NUMBER_OPERATIONS = ("int", "float", "hash", "len", "bool")
_TEXT_ATTRIBUTES = ("__name__", "__qualname__", "__doc__")


_FROM_OPERATOR = (*_ORDER_OPERATIONS, *_ARITHMETIC, *_CONTAINER_OPERATIONS, "eq", "neg")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in _FROM_OPERATOR},
    **{
        function.__name__: function
        for function in (int, float, hash, len, bool, iter, next, str, repr, getattr, setattr)
    },
    # "radd" and the like, for which the object is the right operand
    **{f"r{name}": lambda right, left, name=name: _OPERATIONS[name](left, right) for name in _ARITHMETIC},
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "enter": lambda context: context.__enter__(),
    "exit": lambda context, error: context.__exit__(type(error) if error else None, error, None),
    "call": lambda function, /, *args, **named: function(*args, **named),
}


class PeerEnded(BaseException):
    """The other process has ended, or sends messages that can't be read. Tests can't expect this error."""


class Remote:
    # An object of the other process. `_knows_test_data` is True if it is the result of arithmetic with data
    # of this process: its class got that data, and could return any number that the tests expect.
    # (It has no docstring, since `__doc__` is that of the object.)

    __slots__ = ("_knows_test_data", "_number", "_peer")
    __doc__ = property(lambda self: self._peer.ask("getattr", self, "__doc__"))

    def __init__(self, peer: Peer, number: int) -> None:
        for name, value in (("_peer", peer), ("_number", number), ("_knows_test_data", False)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in (*_TEXT_ATTRIBUTES, "__dict__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)

    # Two objects of the other process are compared there, by their own class. An object of the other process
    # never equals data of this process: otherwise an answer could return an object that equals everything.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return NotImplemented
        return self._peer.ask("eq", self, other) is True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        suppresses_error = self._peer.ask("exit", self, error) is True
        # `is_of_tests` is False in the answer's process, which trusts the context managers of the tests.
        if not suppresses_error or error is None or not self._peer.is_of_tests:
            return suppresses_error
        # An answer's context manager, which was asked above, may suppress only an error that the test itself
        # raises by `raise` in the block. Otherwise it could hide a failed assertion or another failure of the
        # test.
        import opcode

        code = trace.tb_frame.f_code.co_code
        is_in_test_itself = trace.tb_next is None
        is_raise_statement = code[trace.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
        return is_in_test_itself and is_raise_statement and not isinstance(error, AssertionError)

    def __reduce__(self) -> Any:
        raise TypeError("an object of another process can't be copied")


def _make_forwarding_method(operation: str) -> Callable[..., Any]:
    """Returns a method that asks the other process for the operation."""

    def method(self: Remote, *args: Any) -> Any:
        if self._knows_test_data and operation in _NUMBER_OPERATIONS:
            # In ``float(x - 3)``, where ``x`` is an object of the other process, `self` is the result of
            # ``x - 3``. The class of ``x`` has computed it and knows the 3. So it could return just the
            # number that the tests expect.
            raise TypeError(
                "the result of another process's arithmetic with data of this process is not a number"
            )
        return self._peer.ask(operation, self, *args)

    return method


def _make_method_among_remotes(operation: str) -> Callable[..., Any]:
    """Returns a method for an order (such as ``<``) or for arithmetic.

    A remote stands for an object of the other process. A remote and data of this process have no order: an
    object that is less than every number would pass ``abs(f(x) - 3) < 1e-6``. Arithmetic of a remote and data
    may give another remote, but not data: the answer's class could return just the data that the tests
    expect.
    """

    def method(self: Remote, other: Any) -> Any:
        are_both_remote = isinstance(other, Remote)
        if not are_both_remote and operation in _ORDER_OPERATIONS:
            return NotImplemented  # Python then raises TypeError: they have no order
        result = self._peer.ask(operation, self, other)
        # Whether data of this process went into the result, directly or in an earlier operation.
        knows_test_data = not are_both_remote or self._knows_test_data or other._knows_test_data
        if not knows_test_data:
            return result
        if not isinstance(result, Remote):
            return NotImplemented  # the result is data, which the answer's class may have chosen
        object.__setattr__(result, "_knows_test_data", True)
        return result

    return method


_OTHER_OPERATIONS = ("neg", "iter", "next", "str", "repr", "enter", "instancecheck")
for _method in (*_CONTAINER_OPERATIONS, *_NUMBER_OPERATIONS, *_OTHER_OPERATIONS):
    setattr(Remote, f"__{_method}__", _make_forwarding_method(_method))
for _method in (*_ORDER_OPERATIONS, *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC)):
    setattr(Remote, f"__{_method}__", _make_method_among_remotes(_method))


class Peer:
    """The present process's end of the pipes, by which it asks the other process and answers it.

    `is_of_tests` is True in the process of the tests, which doesn't trust the other process.
    """

    def __init__(self, read_fd: int, write_fd: int, is_of_tests: bool) -> None:
        self._read = os.fdopen(read_fd, "rb")
        self._write = os.fdopen(write_fd, "wb")
        self._asking_lock = RLock()
        """Held by `ask` from a request to its reply, since several threads of the answer may ask at once. The
        thread that holds it may ask again, while it answers a request of the other process."""
        self._objects: dict[int, Any] = {}
        """Objects of this process that the other one has a `Remote` for, by their numbers."""
        self._numbers: dict[int, int] = {}
        """The number of each such object, by its `id`."""
        self._remotes: dict[int, Remote] = {}
        """Objects of the other process, by their numbers there."""
        self._error_classes: dict[int, type[Exception]] = {}
        """Classes of this process that stand for classes of errors of the other process, by the numbers that
        the latter have there."""
        self.is_of_tests = is_of_tests
        """Whether this is the process of the tests, which doesn't trust the process of the answer."""
        self.shared_classes: dict[str, type] = {}
        """Classes that both processes have, by their names. Their instances are copied as data, too."""
        self.names: dict[str, Any] = {}
        """The values that the other process may request by name."""
        self.printed = io.StringIO()
        """The text that the answer has printed and that hasn't been sent yet."""

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an operation of the other process, or raises what it raises."""
        with self._asking_lock:
            named_arguments = [[name, value] for name, value in kwargs.items()]
            self.send("ask", operation, self.encode([list(args), named_arguments]))
            # Before it answers, the other process may itself ask for operations of this process.
            while (message := self.receive())[0] == "ask":
                self.answer(*message[1:])
            kind, encoded, printed_text, changed_contents = message
            if printed_text:
                sys.stdout.write(str(printed_text))  # an answer could send something else than a text
            # `changed_contents` has the indices of changed arguments, and their new contents. Only a call may
            # change its arguments. Changes that an answer sends for another operation are ignored.
            if operation == "call":
                for index, content in changed_contents:
                    _replace_content(args[index], self.decode(content), self.shared_classes)
            if kind == "gives":
                return self.decode(encoded)
            raise self.decode(encoded)

    def answer(self, operation: str, encoded_arguments: Any) -> None:
        """Executes an operation for the other process.

        Sends the result or the error, the printed text, and the arguments that have changed.
        """
        changed_contents = []
        try:
            args, kwargs = self.decode(encoded_arguments)
            contents_before = self._encode_mutable(operation, args)
            if self.is_of_tests:  # the tests' process doesn't trust the answer's, which asks here
                _check_operation(operation, args, self)
            function = self.names.__getitem__ if operation == "name" else _OPERATIONS[operation]
            result = function(*args, **dict(kwargs))
            is_new_instance = operation == "call" and type(result) is args[0]
            if is_new_instance and args[0].__module__ == "solution" and isinstance(result, (list, dict, set)):
                # `args[0]` is a class of the answer's program, such as a subclass of list. Its instance has
                # methods and a state. `keep` makes `encode` send a reference to it, and not a copy.
                self.keep(result)
            kind, encoded = "gives", self.encode(result)
            for index, content in self._encode_mutable(operation, args).items():
                if content != contents_before[index]:
                    changed_contents.append([index, content])
        except PeerEnded:
            raise
        except BaseException as error:
            kind, encoded = "raises", self.encode(error)
        self.send(kind, encoded, self.printed.getvalue(), changed_contents)
        self.printed.seek(0)
        self.printed.truncate()

    def _encode_mutable(self, operation: str, args: list[Any]) -> dict[int, Any]:
        """Returns the encoded contents of the arguments that a call may change, by their indices. The
        contents before and after the call show which of them it has changed."""
        if operation != "call":
            return {}
        kinds = (list, dict, set, collections.deque, *self.shared_classes.values())
        return {index: self.encode(arg) for index, arg in enumerate(args) if isinstance(arg, kinds)}

    def send(self, *message: Any) -> None:
        """Sends a message to the other process. Raises PeerEnded if that has ended."""
        try:
            self._write.write(json.dumps(message).encode() + b"\n")
            self._write.flush()
        except OSError as error:
            raise PeerEnded(str(error)) from None

    def receive(self) -> Any:
        """Returns the next message of the other process. Raises PeerEnded if there is none that can be
        read."""
        try:
            # At the pipe's end the line is empty. A line that is longer than the limit is cut off. Neither is
            # JSON.
            return json.loads(self._read.readline(_LONGEST_MESSAGE_BYTES))
        except (ValueError, RecursionError):
            raise PeerEnded("the process of the answer's code has ended") from None

    def keep(self, value: Any) -> int:
        """Keeps an object for the other process, and returns its number.

        It is never removed, so no later object can get its `id`.
        """
        number = self._numbers.setdefault(id(value), len(self._numbers) + 1)
        self._objects[number] = value
        return number

    def has_kept(self, value: Any) -> bool:
        """Returns whether the other process has this very object."""
        return self._objects.get(self._numbers.get(id(value), 0)) is value

    def decode(self, message: Any) -> Any:
        """Returns the value of a message.

        Its parts are plain data of exactly the built-in types, exceptions, remotes, and instances of
        `shared_classes`.

        The message ``[{"tuple": [1, {"object": 0}]}, [["Node", [["next", null]]]]]`` is a tuple of 1 and of
        the first instance in the table, a ``Node`` whose ``next`` is None.
        """
        encoded, table = message
        # All instances are made before any of them gets its attributes, since they may refer to each other.
        instances: list[Any] = [object.__new__(self.shared_classes[name]) for name, _ in table]
        for instance, (_, attributes) in zip(instances, table):
            _set_attributes(instance, {key: self._decode(value, instances) for key, value in attributes})
        return self._decode(encoded, instances)

    def _decode(self, encoded: Any, instances: list[Any]) -> Any:
        """Returns one value of a message. An object with one key is a value that JSON doesn't have, and the
        key is its kind::

            {"tuple": [1, 2]}                            a container of `_CONTAINER_KINDS`: its encoded parts
            {"record": ["Point", "x y", [1, 2]]}         a named tuple: class, fields, encoded parts
            {"built": ["fractions", "Fraction", [1, 3]]} module, class, plain arguments of its constructor
            {"array": [[1, 2], "int64"]}                 a NumPy array: encoded list, dtype
            {"object": 0}                                the row of an instance in the message's table
            {"yours": 7}                                 the number of an object of the process that decodes
            {"remote": 7}                                the number of an object of the process that encoded
            {"class": [3, "NoMove", ["ValueError"]]}     the arguments of `_class_of_error`
            {"error": [[3, …], ["no"], {}]}              the arguments of `_make_error`
            {"library": ["math", "sqrt"]}                module and name; "" is the module itself
        """
        if isinstance(encoded, _JSON_TYPES):
            return encoded
        if isinstance(encoded, list):
            return [self._decode(item, instances) for item in encoded]
        ((kind, value),) = encoded.items()
        if kind in _CONTAINER_KINDS:
            _, make_container = _CONTAINER_KINDS[kind]
            return make_container(self._decode(value, instances))
        if kind == "record":
            class_name, field_names, encoded_parts = value
            make_record = _record_class(class_name, field_names)
            return make_record(*self._decode(encoded_parts, instances))
        if kind == "built" and (value[0], value[1]) in _CONSTRUCTOR_ARGUMENTS:  # no other class is called
            module, class_name, arguments = value
            return getattr(__import__(module), class_name)(*arguments)
        if kind == "array":
            encoded_list, dtype = value
            return __import__("numpy").array(self._decode(encoded_list, instances), dtype=str(dtype))
        if kind == "object":
            return instances[value]
        if kind == "yours":
            return self._objects[value]
        if kind == "class":
            return self._class_of_error(*value)
        if kind == "error":
            return self._make_error(*value)
        if kind == "remote":
            return self._remotes.setdefault(int(value), Remote(self, int(value)))
        # An answer must not choose any function of the library for the tests to use.
        if kind == "library" and (not self.is_of_tests or value in _PATHS_OF_DATA_TYPES):
            module, path = value
            library_object = __import__(module)
            for name in path.split(".") if path else ():
                library_object = getattr(library_object, name)
            return library_object
        raise PeerEnded(f"a value of the kind {kind!r}")

    def _class_of_error(self, number: int, name: Any, bases: list[str]) -> type[Exception]:
        """Returns the class of an error of the other process, if this process has it. If not, returns a class
        of the same name with the first of its built-in `bases`.

        Args:
            number: The number of the class in the process that has it.
            name: The name of a class of the other process; None for a class of this process.
            bases: The names of the class's built-in base classes.
        """
        if name is None:  # a class of this process that the other process gives back
            returned_class = self._objects[number]
            if issubclass(returned_class, Exception):
                return returned_class
            # Any other class, such as SystemExit, is replaced by a subclass of `Exception` below.
        shared_class = self.shared_classes.get(name, object)  # `object` if the processes don't share it
        if issubclass(shared_class, Exception):
            return shared_class
        base_classes = [getattr(builtins, base_name, object) for base_name in bases]
        errors = [base_class for base_class in base_classes if issubclass(base_class, BaseException)]
        base: Any = errors[0] if errors else Exception
        if not issubclass(base, Exception):
            base = RuntimeError  # an answer that raises SystemExit has failed, and its tests continue
        # Instead of `AssertionError` and `Exception` a sub-class is returned. Otherwise a test that catches
        # the answer's errors would also catch its own failed assertions.
        if base.__name__ == name and base not in (Exception, AssertionError):
            return base
        return self._error_classes.setdefault(number, type(str(name), (base,), {}))

    def _make_error(self, described_class: Any, args: list[Any], attributes: dict[str, Any]) -> Exception:
        """Returns an error of the other process, with its arguments and plain attributes."""
        kind = self._class_of_error(*described_class)
        try:
            # The `__init__` of any other class may have other parameters than `args`.
            error = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
        except TypeError:  # such as UnicodeDecodeError, which needs arguments that weren't sent
            return RuntimeError(f"{kind.__name__}: {args}")
        _set_attributes(error, attributes)
        return error

    def encode(self, value: Any) -> Any:
        """Returns a value in JSON's types, and a table of the instances of `shared_classes` in the value.

        `decode` has an example. The instances have a table, because some, such as those of a linked list, are
        nested deeper than a parser of JSON can read.
        """
        table = _InstanceTable()
        encoded = self._encode_part(value, table)
        # The table grows while its instances are encoded.
        rows = []
        for instance in table.instances:
            attributes = map(list, vars(instance).items())
            rows.append([type(instance).__name__, self._encode_parts(attributes, table)])
        return [encoded, rows]

    def _encode_parts(self, values: Any, table: _InstanceTable, depth: int = 0) -> list[Any]:
        return [self._encode_part(item, table, depth + 1) for item in values]

    def _encode_part(self, value: Any, table: _InstanceTable, depth: int = 0) -> Any:
        """Returns the form of the value in a message. `_decode` lists the forms."""
        kind = type(value)
        if kind in _JSON_TYPES:
            return value
        if depth > _MOST_NESTED_CONTAINERS:
            raise RecursionError("a value that is too deep, or holds itself")
        if kind is Remote:
            return {"yours": value._number}
        if isinstance(value, BaseException):
            return self._encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"class": self._describe_class(value)}
        # Lists, dictionaries and sets are copied below. But if the other process already has a reference to
        # this object, it gets the reference again. `answer` makes such references to instances of an answer's
        # subclasses of list, dict and set.
        if isinstance(value, (list, dict, set)) and self.has_kept(value):
            return {"remote": self.keep(value)}
        if self.shared_classes.get(kind.__name__) is kind:
            return {"object": table.row_of(value)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):  # a named tuple
            parts = self._encode_parts(value, table, depth)
            return {"record": [kind.__name__, " ".join(kind._fields), parts]}
        for name, (container, _) in _CONTAINER_KINDS.items():
            if isinstance(value, container):
                items = map(list, value.items()) if isinstance(value, dict) else value
                parts = self._encode_parts(items, table, depth)
                return parts if name == "list" else {name: parts}  # JSON has lists itself
        if (kind.__module__, kind.__name__) in _CONSTRUCTOR_ARGUMENTS:
            arguments = _CONSTRUCTOR_ARGUMENTS[kind.__module__, kind.__name__](value)
            return {"built": [kind.__module__, kind.__name__, arguments]}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            # NumPy's numbers have an empty shape, and become Python's numbers.
            items = self._encode_part(value.tolist(), table)
            return {"array": [items, str(value.dtype)]} if getattr(value, "shape", None) else items
        # Instances of subclasses of numbers and strings, such as members of an enumeration, become the plain
        # value. A subclass may define its own conversion, so the base's is called: `int.__int__`.
        for simple in (int, float, str):
            if isinstance(value, simple):
                convert = getattr(simple, f"__{simple.__name__}__")
                return convert(value)
        return self._encode_reference(value)

    def _encode_error(self, error: BaseException) -> Any:
        """Returns an error's class, arguments and attributes. Attributes of other types than JSON's are left
        out, and such arguments become their `repr`."""
        attributes = {key: item for key, item in vars(error).items() if type(item) in _JSON_TYPES}
        args = [arg if type(arg) in _JSON_TYPES else repr(arg) for arg in error.args]
        return {"error": [self._describe_class(type(error)), args, attributes]}

    def _encode_reference(self, value: Any) -> Any:
        """Returns the path of an object of the standard library, or the number of an object that stays in
        this process."""
        # The process of the tests (`is_of_tests`) may name anything of the standard library, since the answer
        # can import it anyway. The process of the answer may name only types of data: see `_decode`.
        path = _path_in_library(value)
        if path is not None and (self.is_of_tests or path in _PATHS_OF_DATA_TYPES):
            return {"library": path}
        if self.is_of_tests and isinstance(value, _NEVER_GIVEN_TYPES):
            raise TypeError(f"tests give no {type(value).__name__} away")
        return {"remote": self.keep(value)}

    def _describe_class(self, kind: type) -> Any:
        """Returns the arguments of `_class_of_error` for a class of errors: its number, name and built-in
        bases. For a class of the other process, the number is enough."""
        for number, error_class in self._error_classes.items():
            if error_class is kind:
                return [number, None, []]
        bases = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]
        return [self.keep(kind), kind.__name__, bases]


class _InstanceTable:
    """The instances of shared classes in a message, each once, in the order in which they were met."""

    def __init__(self) -> None:
        self.instances: list[Any] = []
        self._rows: dict[int, int] = {}
        """The row of each instance, by its `id`."""

    def row_of(self, instance: Any) -> int:
        """Returns the row of an instance. A new instance gets the next row."""
        if id(instance) not in self._rows:
            self._rows[id(instance)] = len(self.instances)
            self.instances.append(instance)
        return self._rows[id(instance)]


def _path_in_library(value: Any) -> list[str] | None:
    """Returns the module and name of an object of the standard library, such as ["math", "sqrt"], or None."""
    if isinstance(value, types.ModuleType):
        return [value.__name__, ""] if value.__name__ in sys.stdlib_module_names else None
    if not isinstance(value, _TYPES_WITH_PATHS):
        return None
    module = getattr(value, "__objclass__", value).__module__  # `str.lower` has no module, and its class has
    if module not in sys.stdlib_module_names:
        return None
    # Any object may claim this module and name, so the object with this name is looked up.
    library_object: Any = sys.modules.get(module)
    for part in value.__qualname__.split("."):  # "str.lower"
        library_object = getattr(library_object, part, None)
    return [module, value.__qualname__] if library_object is value else None


def _set_attributes(instance: Any, attributes: dict[str, Any]) -> None:
    """Sets attributes that the other process has sent, without calling a `__setattr__` of the class."""
    for name, value in attributes.items():
        if not callable(getattr(type(instance), name, None)):  # a value must not replace a method
            instance.__dict__[name] = value


def _replace_content(target: Any, source: Any, shared_classes: dict[str, type]) -> None:
    """Replaces the content of a mutable value by that of another.

    `shared_classes` are those that both processes have. Their instances are sent as copies.
    """
    if isinstance(target, (list, collections.deque)):
        target.clear()
        target.extend(source)
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(source)
    # Both values must be of the same class, and both processes must have this class.
    elif shared_classes.get(type(target).__name__) is type(target) is type(source):
        target.__dict__.update(source.__dict__)


_TYPES_WITH_PATHS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_DATA_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_PATHS_OF_DATA_TYPES = [["builtins", kind.__name__] for kind in _DATA_TYPES]
_record_class: Callable[..., Any] = functools.cache(collections.namedtuple)
"""A function that returns the class of a named tuple, from its name and its fields in one text. For the same
name and fields it always returns the same class, so that records compare equal."""

_CONTAINER_KINDS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (collections.deque, collections.deque),
    "counter": (collections.Counter, lambda pairs: collections.Counter(dict(pairs))),
    "ordered": (collections.OrderedDict, collections.OrderedDict),
    "dict": (dict, dict),
    "bytes": (bytes, bytes),
    "bytearray": (bytearray, bytearray),
}
"""For each kind of container in a message: the class, and the function that makes a container of the list of
its parts. A subclass comes before its base, as `Counter` before `dict`, since the first class that fits is
taken."""

_CONSTRUCTOR_ARGUMENTS: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("builtins", "complex"): lambda number: [number.real, number.imag],
    ("builtins", "range"): lambda numbers: [numbers.start, numbers.stop, numbers.step],
    ("fractions", "Fraction"): lambda fraction: [fraction.numerator, fraction.denominator],
    ("decimal", "Decimal"): lambda decimal: [str(decimal)],
    ("datetime", "date"): lambda date: [date.year, date.month, date.day],
    ("datetime", "timedelta"): lambda delta: [delta.days, delta.seconds, delta.microseconds],
    ("datetime", "datetime"): lambda moment: [*moment.timetuple()[:6], moment.microsecond],
    ("pathlib", "PosixPath"): lambda path: [str(path)],
}
"""For each class, by its module and name: the function that returns the arguments with which the class makes
a copy of an object. The classes are imported when they are used."""


# ---- how an answer may use objects of the tests

_FILE_METHODS = ("read", "readline", "readlines", "write", "writelines", "seek", "tell", "getvalue", "close")
_NEVER_GIVEN_TYPES = (
    types.FrameType, types.CodeType, types.TracebackType, types.CellType, types.ModuleType, property,
    types.MappingProxyType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType,
)  # fmt: skip


def _check_operation(operation: str, args: list[Any], peer: Peer) -> None:
    """Raises AttributeError or TypeError if the answer requests an operation that isn't allowed for the type
    of the object, which is the first of `args`.

    Instances of classes that the tests define allow every operation. Other objects allow the operations that
    are listed here for their type. An object's frame, code, globals and class are never allowed, since they
    give access to everything.
    """
    target, kind = args[0], type(args[0])
    # `has_kept` says whether the answer's process was given this very object.
    if operation not in _OPERATIONS or not peer.has_kept(target):
        raise AttributeError("nothing that the tests have given away")
    is_class = isinstance(target, type)
    allowed_names: tuple[str, ...] = ()
    """Attributes that are always allowed."""
    allows_attributes = False
    """Whether the object's own attributes are allowed, and those of classes that the tests define."""
    if is_class:
        allows_attributes = _is_class_of_tests(target)
        allowed_names = _TEXT_ATTRIBUTES  # the class's names and docstring
        allowed_operations = ["instancecheck", "call", "getattr"] if allows_attributes else ["instancecheck"]
    elif _is_class_of_tests(kind):
        allows_attributes, allowed_operations = True, list(_OPERATIONS)
        allowed_names = ("name", "value") if hasattr(kind, "__members__") else ()  # of an enumeration
    elif kind is types.SimpleNamespace:
        allows_attributes, allowed_operations = True, ["getattr", "setattr"]
    elif any(base.__module__ == "unittest.mock" for base in kind.__mro__):
        # An answer may use a mock, but can't change it, such as its `return_value`.
        allows_attributes = True
        allowed_operations = [name for name in _OPERATIONS if not name.startswith(("set", "del"))]
    elif callable(target):
        allowed_operations, allowed_names = ["call", "getattr"], _TEXT_ATTRIBUTES
    else:
        # any other object; names of a file's methods are allowed, in case it is a file
        allowed_operations = ["iter", "next", "len", "contains", "getitem", "getattr"]
        allowed_names = _FILE_METHODS
        if isinstance(target, types.GeneratorType):
            allowed_names = ("send", "throw", "close")
    if hasattr(kind, "__enter__"):
        allowed_operations += ["enter", "exit"]
    if operation not in (*allowed_operations, "eq", "hash", "bool", "str", "repr"):
        raise TypeError(f"an answer can't use {operation} on a {kind.__name__} of the tests")
    if operation in ("getattr", "setattr") and args[1] not in allowed_names:
        name = str(args[1])
        looked_up_class = target if is_class else kind
        owner = next((base for base in looked_up_class.__mro__ if name in vars(base)), None)
        if owner is None:
            # No class has the name, so it is an attribute of the instance itself. If the object is a class,
            # only its metaclass can have the name, and gives the answer nothing.
            is_allowed = allows_attributes and not is_class
        else:
            is_allowed = allows_attributes and _is_class_of_tests(owner)
        replaces_method = operation == "setattr" and callable(getattr(kind, name, None))
        if name.startswith("_") or not is_allowed or replaces_method:
            raise AttributeError(f"a {kind.__name__} of the tests has no {name} for an answer")


def _is_class_of_tests(kind: type) -> bool:
    return kind.__module__ in ("__main__", "test_answer")
