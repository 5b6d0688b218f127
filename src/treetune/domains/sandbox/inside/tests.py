"""Runs tests against an answer's code, which runs in another process and can't read them.

The answer's process is forked before the tests are read. It has neither the tests' input nor the channel of
the verdict::

    process of the answer                        process of the tests
    ─────────────────────                        ────────────────────
    _run_answer                                  main: reads the tests from standard input
      waits for "start"                          Answer.names: sends "start" at the first use of a name
      runs the code, sends "ready" and names ──►   tests use the names through `Remote`
      Peer.answer: does what tests ask for  ◄──►   Peer.ask
                                                 Report: writes JSON lines to standard output

A line of the report is ``{"tests": 3}``, ``{"passed": true}``, ``{"passed": false, "message": "…"}`` or, of a
call, ``{"value": 3}``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import signal
import sys
import types

from treetune.domains.sandbox.inside.joining import (
    complete_part,
    import_customary_names,
    is_stub,
    join_program,
)
from treetune.domains.sandbox.inside.peers import Peer, PeerEnded

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ERROR_CHARACTERS = 300
"""The number of characters of an error that are reported."""
_TEST_FILE = "test_answer.py"


# ---- the answer's process


def _run_answer(peer: Peer, prefix: str, code: str, with_imports: bool) -> None:
    """Runs the answer's code when the tests first need it, and then does what they ask for."""
    sys.stdout = sys.stderr = peer.printed
    sys.modules["solution"] = module = types.ModuleType("solution")
    names = module.__dict__
    with contextlib.suppress(PeerEnded):
        peer.receive()  # "start"
        try:
            program = join_program(prefix, code)
            if with_imports:
                names.update(import_customary_names(program))
            # The problem's prefix is first run without the answer, as in the process of the tests. So both
            # processes find the same classes of the problem.
            exec(compile(complete_part(prefix), "prefix.py", "exec", dont_inherit=True), names)
            names_of_classes = list(_classes_of_problem(names))
            exec(compile(program, "solution.py", "exec", dont_inherit=True), names)
        except BaseException as error:
            peer.send("failed", f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
            return
        # Instances of these classes travel between the processes as copies, other objects as references. The
        # program contains the prefix, and has defined the classes again.
        peer.shared_classes = {
            name: names[name] for name in names_of_classes if isinstance(names.get(name), type)
        }
        peer.names = names
        peer.send("ready", [name for name in names if not name.startswith("__")])
        while True:  # until the tests' process ends, which raises PeerEnded
            peer.answer(*peer.receive()[1:])  # a message is ("ask", operation, arguments)


def _classes_of_problem(names: dict[str, Any]) -> dict[str, type]:
    """Returns the classes that the prefix defines, without stubs that an answer should complete.

    A class with a constructor, such as ``TreeNode``, belongs to the problem, and so does every exception.
    Any other class, such as ``Solution``, is a stub.
    """
    classes = {}
    for name, value in names.items():
        is_defined_here = isinstance(value, type) and value.__module__ == names.get("__name__")
        if is_defined_here and ("__init__" in vars(value) or issubclass(value, Exception)):
            classes[name] = value
    return classes


# ---- the tests' process


class Answer:
    """The answer in the tests' process. `module` is the module that tests import as `solution`.

    The answer's code runs when the tests first use a name that it defines.
    """

    def __init__(self, peer: Peer, tests: ast.AST) -> None:
        self._peer, self._tests = peer, tests
        self._names: set[str] | None = None
        """The names that the answer's code defines; None before it has run (see `names`)."""
        self.before_run: Callable[[], None] = lambda: None
        """A function that is called before the answer's code runs, for example to delete the tests."""
        self.module = types.ModuleType("solution")
        # Python calls a module's `__getattr__` for each name that the module lacks.
        self.module.__dict__["__getattr__"] = self.get

    def get(self, name: str) -> Any:
        """Returns the value of a name of the answer. Raises AttributeError if it has no such name."""
        if name == "__all__":  # ``from solution import *``
            return sorted(self.values_of_tested_names())
        if name not in self.names():
            raise AttributeError(f"the answer defines no {name}")
        return self._peer.ask("name", name)

    def names(self) -> set[str]:
        """Returns the names that the answer defines. The first call lets the answer's process run its code.

        Raises CannotBeTested if the code fails.
        """
        if self._names is None:
            self.before_run()
            self._peer.send("start")
            kind, content = self._peer.receive()  # ("ready", names) or ("failed", message)
            if kind != "ready":
                raise CannotBeTested(str(content))
            self._names = {name for name in map(str, content) if not name.startswith("__")}
        return self._names

    def values_of_tested_names(self) -> dict[str, Any]:
        """Returns the answer's values of the names that the tests use.

        * Names that only the answer has are left out, since Python's libraries could look for them, as for
          `load_tests`.
        * The names of Python's own functions and modules (`abs`, `math.isclose`) mean Python's. If they meant
          the answer's, an answer could decide how it is judged. There is one exception: if the only function
          that the answer defines for the tests has the name of a Python function, it is the tested one.
        """
        builtins = set(dir(sys.modules["builtins"]))
        tested_names = self._find_tested_names(builtins)
        self._use_libraries(tested_names)
        values = {name: getattr(self.module, name) for name in tested_names - builtins}
        named_like_builtins = tested_names & builtins
        if len(named_like_builtins) == 1 and not any(map(callable, values.values())):
            (name,) = named_like_builtins
            values[name] = self.get(name)
        return values

    def _find_tested_names(self, builtins: set[str]) -> set[str]:
        """Returns the answer's names that are in the tests, as names or as words in texts.

        Words in texts count because of tests such as ``getattr(solution, "add")``. The names of Python's
        functions (`builtins`) don't, since words such as "sum" and "all" often mean something else in a text.
        """
        nodes = list(ast.walk(self._tests))
        bare_names = {node.id for node in nodes if isinstance(node, ast.Name)}
        texts = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
        names_in_texts = set(re.findall(r"\w+", texts)) - builtins
        return (bare_names | names_in_texts) & self.names()

    def _use_libraries(self, tested_names: set[str]) -> None:
        """Gives names of libraries their libraries, where the tests use them as such.

        `math.isclose` in the tests means the library, even if the answer has a name `math`. Afterwards,
        `getattr` finds the library, and doesn't ask for the answer's value.
        """
        for node in ast.walk(self._tests):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            name = node.value.id
            library = "numpy" if name == "np" else name
            is_library = library == "numpy" or library in sys.stdlib_module_names
            if name not in tested_names or not is_library:
                continue
            with contextlib.suppress(ImportError):
                if hasattr(__import__(library), node.attr):
                    self.module.__dict__[name] = sys.modules[library]


class CannotBeTested(Exception):
    """The answer can't be tested: its code fails, or there are no tests. The message says why."""


class Report:
    """Writes the report (see the module's docstring), and ends the process if a test takes too long."""

    def __init__(self, descriptor: int, seconds: float) -> None:
        self._descriptor, self._seconds = descriptor, seconds
        signal.signal(signal.SIGALRM, self._stop)

    def start_clock(self) -> None:
        """Starts the clock of a test."""
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def write_line(self, **result: object) -> None:
        """Writes a line about a test, ``{"passed": true}`` or ``{"value": 3}``, and stops its clock."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        # The value of a call is written as JSON, where sequences become lists, and keys strings.
        data = json.dumps(result, default=lambda value: {"not JSON": type(value).__name__}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def write_failure(self, error: BaseException) -> None:
        """Writes that a test failed, and stops its clock."""
        message = str(error) if isinstance(error, CannotBeTested) else f"{type(error).__name__}: {error}"
        self.write_line(passed=False, message=message[:_ERROR_CHARACTERS])

    def _stop(self, *_: object) -> None:
        # The answer's process may never reply, and then no further test can be run.
        self.write_line(passed=False, message=f"stopped after {self._seconds:g} s", stopped=True)
        os._exit(0)


def _run_tests(peer: Peer, report: Report, prefix: str, order: dict[str, Any]) -> None:
    """Runs the tests of an order. The prefix is the code that the answer's problem begins with.

    The order's ``kind`` is ``pytest`` (the text of a test file) or ``calls`` (of a function with several
    inputs). The tests of any other kind are Python code with `assert`. ``functional`` tests use the answer's
    names without importing them.
    """
    kind, texts = order["kind"], order.get("tests", [])
    # Tests are parsed to find the names in them. This includes tests for pytest, though pytest reads the file
    # itself. For `calls` there is no code to parse.
    if isinstance(texts, str):
        trees = [ast.parse(texts)]
    else:
        trees = [ast.parse(text) for text in texts]
    # An incomplete function at the prefix's end is left out, since only the answer completes it.
    shared = ast.parse(complete_part(prefix))
    # A stub would hide the answer's function of the same name from the tests.
    shared.body = [statement for statement in shared.body if not is_stub(statement)]
    statements = list(shared.body)
    for tree in trees:
        statements += tree.body
    answer = Answer(peer, ast.Module(statements, []))
    sys.modules["solution"] = answer.module
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names = main.__dict__
    exec(compile(shared, "prefix.py", "exec", dont_inherit=True), names)
    # Instances of these classes travel between the processes as copies, other objects as references.
    peer.shared_classes = _classes_of_problem(names)
    if kind == "pytest":
        _run_pytest(texts, answer, report)
    elif kind == "calls":
        _call_function(order, answer, report)
    else:
        if kind == "functional":
            # `values_of_tested_names` returns the answer's values of the names that the tests use. A name
            # that is in `names` already keeps its value.
            names.update(answer.values_of_tested_names() | names)
        _run_code_tests(trees, names, report)


def _run_code_tests(trees: list[ast.Module], names: dict[str, Any], report: Report) -> None:
    """Runs tests, and reports each of them.

    Each text is a test. A single text with `assert` at its top level is divided: each `assert` is a test, and
    the statements between two of them are only run.
    """
    are_tests = [True] * len(trees)
    if len(trees) == 1 and any(isinstance(statement, ast.Assert) for statement in trees[0].body):
        statements = trees[0].body
        trees, are_tests = [], []
        for statement in statements:
            is_assert = isinstance(statement, ast.Assert)
            continues_group = bool(trees) and not is_assert and not are_tests[-1]
            if continues_group:  # neither this statement nor the one before it is an `assert`
                trees[-1].body.append(statement)
            else:
                trees.append(ast.Module([statement], []))
                are_tests.append(is_assert)
    if not any(tree.body for tree in trees):
        raise CannotBeTested("there are no tests")
    report.write_line(tests=sum(are_tests))
    for tree, is_test in zip(trees, are_tests):
        report.start_clock()
        try:
            exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
        # Here the tests themselves have raised SystemExit, as unittest does. (If the answer raises it, a
        # RuntimeError arrives.)
        except SystemExit as end:
            if end.code not in (None, 0, False):
                report.write_failure(CannotBeTested(f"the tests ended with {end.code}"))
                continue
        except (Exception, PeerEnded) as error:
            report.write_failure(error)
            if not is_test:
                return  # the following tests need these statements
            continue
        if is_test:
            report.write_line(passed=True)


def _call_function(order: dict[str, Any], answer: Answer, report: Report) -> None:
    """Reports the value of the answer's function for each input. If the answer has a class `Solution`, the
    function is its method."""
    report.write_line(tests=len(order["inputs"]))
    for args in order["inputs"]:
        report.start_clock()
        try:
            # Each input gets a new object, so that no call depends on earlier ones.
            owner = answer.get("Solution")() if "Solution" in answer.names() else answer.module
            function = getattr(owner, order["function"])
            report.write_line(value=function(*args))
        except (Exception, PeerEnded) as error:
            report.write_failure(error)


def _run_pytest(text: str, answer: Answer, report: Report) -> None:
    """Runs a test file by pytest, and reports each test."""
    import pytest

    collection_errors: list[str] = []
    outcomes: dict[str, Any] = {}  # for each test, the report of its call or, if there is none, of its setup
    # pytest calls a parameter of two hooks `report`, too.
    start_clock, write_line = report.start_clock, report.write_line

    class Plugin:
        def pytest_collection_finish(self, session: Any) -> None:
            answer.names()  # runs the answer's code, if the test file hasn't used a name of it so far
            if not session.items:
                raise CannotBeTested("there are no tests")
            write_line(tests=len(session.items))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                collection_errors.append(str(report.longrepr)[-_ERROR_CHARACTERS:])

        def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
            start_clock()

        def pytest_runtest_logreport(self, report: Any) -> None:
            # pytest reports the setup, the call and the teardown of a test separately. There is no call after
            # a setup that failed or skipped the test.
            if report.when == "call" or (report.when == "setup" and not report.passed):
                outcomes[report.nodeid] = report
            if report.when != "teardown" or not (report.failed or report.nodeid in outcomes):
                return
            # If the teardown failed, its report decides. If it passed, the report in `outcomes` decides.
            deciding_report = report if report.failed else outcomes[report.nodeid]
            # A skipped test counts as passed. An expected failure, which pytest also calls skipped, doesn't.
            was_skipped = deciding_report.skipped and not hasattr(deciding_report, "wasxfail")
            if deciding_report.passed or was_skipped:
                write_line(passed=True)
            else:
                write_line(passed=False, message=str(deciding_report.longrepr)[-_ERROR_CHARACTERS:])

    with open(_TEST_FILE, "w", encoding="utf-8") as file:
        file.write(text)
    # The answer's code must not read the tests. Therefore the test file is deleted before that code runs.
    answer.before_run = lambda: os.unlink(_TEST_FILE)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # verdicts don't depend on installed plugins
    options = ["-q", "--import-mode=importlib", "--capture=sys", "-c", os.devnull, "--rootdir=."]
    pytest.main([*options, "-p", "no:cacheprovider", _TEST_FILE], plugins=[Plugin()])
    if collection_errors:
        raise CannotBeTested(collection_errors[0])


def main(prefix: str, code: str, seconds: float, with_imports: bool) -> None:
    """Reads tests as JSON from standard input, and runs them against the code, each for at most `seconds`.

    With `with_imports`, the code gets the names that benchmarks import before a program.
    """
    # Answers may recurse deeply and print long numbers. The time of a test is the only limit.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    sys.set_int_max_str_digits(0)
    to_answer, to_tests = os.pipe(), os.pipe()
    null_device = os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        # Before the answer's code runs, the tests' input and the channel of the verdict are closed. The two
        # pipes become descriptors 100 and 101, so that all others from 3 to 99 can be closed at once.
        os.dup2(to_answer[0], 100)
        os.dup2(to_tests[1], 101)
        for standard_descriptor in (0, 1, 2):
            os.dup2(null_device, standard_descriptor)
        os.closerange(3, 100)
        _run_answer(Peer(100, 101, is_of_tests=False), prefix, code, with_imports)
        os._exit(0)
    os.close(to_answer[0])
    os.close(to_tests[1])
    order = json.load(sys.stdin)  # the tests and their kind; see `_run_tests`
    report = Report(os.dup(1), seconds)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)
    sys.stdout = sys.stderr = io.StringIO()
    # The answer may write to the current folder, so tests must not import from there.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != os.getcwd()]
    try:
        # `is_of_tests`: this process doesn't trust the answer's process.
        _run_tests(Peer(to_tests[0], to_answer[1], is_of_tests=True), report, prefix, order)
    except (Exception, PeerEnded) as error:
        report.write_failure(error)
    os._exit(0)
