"""Runs tests against an answer's code, which lives in another process and finds nothing of them.

On what was standard output it says line by line, in JSON, how many tests there are and how each went. The
answer's process is forked before the tests are read, and has neither that channel nor the tests' input.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import signal
import sys
import types

from treetune.domains.sandbox.inside.joining import customary_names, is_stub, joined, whole_part
from treetune.domains.sandbox.inside.peers import Ended, Peer

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from typing import Any

_MESSAGE = 300
_TEST_FILE = "test_answer.py"


# ---- the answer's process


def _be_the_answer(peer: Peer, prefix: str, code: str, with_imports: bool) -> None:
    sys.stdout = sys.stderr = peer.printed
    sys.modules["solution"] = module = types.ModuleType("solution")
    names = module.__dict__
    with contextlib.suppress(Ended):
        peer.receive()
        try:
            whole = joined(prefix, code)
            if with_imports:
                names.update(customary_names(whole))
            exec(compile(whole_part(prefix), "prefix.py", "exec", dont_inherit=True), names)
            peer.by_value = _classes(names)
            exec(compile(whole, "solution.py", "exec", dont_inherit=True), names)
        except BaseException as error:
            peer.send("failed", f"{type(error).__name__}: {error}"[:_MESSAGE])
            return
        peer.by_value = {name: names[name] for name in peer.by_value if isinstance(names.get(name), type)}
        peer.names = names
        peer.send("ready", [name for name in names if not name.startswith("__")])
        while True:
            peer.answer(*peer.receive()[1:])


def _classes(names: dict[str, Any]) -> dict[str, type]:
    """Classes that code of ours has made, other than stubs of what an answer is to fill in."""
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, type)
        and value.__module__ == names.get("__name__")
        and ("__init__" in vars(value) or issubclass(value, Exception))
    }


# ---- the tests' process


class Answer:
    """The object that tests import as the module `solution`. The answer's code begins when they first use
    it."""

    def __init__(self, peer: Peer, tests: ast.AST) -> None:
        self._peer, self._tests = peer, tests
        self._names: set[str] | None = None
        self.before = lambda: None
        self.module = types.ModuleType("solution")
        self.module.__dict__["__getattr__"] = self.get

    def get(self, name: str) -> Any:
        if name == "__all__":
            return sorted(self.meant())
        if name not in self.names():
            raise AttributeError(f"the answer defines no {name}")
        return self._peer.ask("name", name)

    def names(self) -> set[str]:
        if self._names is None:
            self.before()
            self._peer.send("start")
            kind, content = self._peer.receive()  # ("ready", names) or ("failed", message)
            if kind != "ready":
                raise Failed(str(content))
            self._names = {name for name in map(str, content) if not name.startswith("__")}
        return self._names

    def meant(self) -> dict[str, Any]:
        """Returns what the tests mean by the bare names in them.

        These are names of the answer that stand in the tests; others could be names that Python's libraries
        look for, such as `load_tests`. Python's own functions and modules (`abs`, `math.isclose`) are
        Python's, or else an answer could decide how it is judged. There is one exception: where the only
        function that the answer defines for the tests has the name of one of Python's, it is what is tested.
        """
        nodes = list(ast.walk(self._tests))
        builtins = set(dir(sys.modules["builtins"]))
        quoted = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
        bare_names = {node.id for node in nodes if isinstance(node, ast.Name)}
        quoted_names = set(re.findall(r"\w+", quoted)) - builtins
        tested_names = (bare_names | quoted_names) & self.names()
        # `math.isclose` in the tests means the library, even if the answer has a name `math`.
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = node.value.id
                library = {"np": "numpy"}.get(name, name)
                if name not in tested_names or library not in (*sys.stdlib_module_names, "numpy"):
                    continue
                with contextlib.suppress(ImportError):
                    if hasattr(__import__(library), node.attr):
                        self.module.__dict__[name] = sys.modules[library]
        values = {name: getattr(self.module, name) for name in tested_names - builtins}
        named_like_builtins = tested_names & builtins
        if len(named_like_builtins) == 1 and not any(map(callable, values.values())):
            values |= {name: self.get(name) for name in named_like_builtins}
        return values


class Failed(Exception):
    """The answer's code did not come to where it could be tested."""


class Report:
    """The report to the outside: how many tests there are, and of each whether it passed."""

    def __init__(self, descriptor: int, seconds: float) -> None:
        self._descriptor, self._seconds = descriptor, seconds
        signal.signal(signal.SIGALRM, self._stop)

    def begin(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def tell(self, **result: object) -> None:
        """Writes a line about a test, ``{"passed": true}`` or ``{"value": 3}``, and stops its clock."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        # What a call returned is written as JSON: sequences become lists, and keys strings.
        data = json.dumps(result, default=lambda value: {"not JSON": type(value).__name__}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def failed(self, error: BaseException) -> None:
        message = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        self.tell(passed=False, message=message[:_MESSAGE])

    def _stop(self, *_: object) -> None:
        # Who is being waited for may never answer, and then no further test can be run.
        self.tell(passed=False, message=f"stopped after {self._seconds:g} s", stopped=True)
        os._exit(0)


def _test(peer: Peer, report: Report, prefix: str, order: dict[str, Any]) -> None:
    kind, texts = order["kind"], order.get("tests", [])
    trees = [ast.parse(text) for text in ([texts] if isinstance(texts, str) else texts)]
    shared = ast.parse(whole_part(prefix))  # half a function belongs to the answer alone
    # What the answer is to fill in would hide the answer's here.
    shared.body = [statement for statement in shared.body if not is_stub(statement)]
    answer = Answer(peer, ast.Module([*shared.body, *(one for tree in trees for one in tree.body)], []))
    sys.modules["solution"] = answer.module
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    names = main.__dict__
    exec(compile(shared, "prefix.py", "exec", dont_inherit=True), names)
    peer.by_value = _classes(names)
    if kind == "pytest":
        _pytest(texts, answer, report)
    elif kind == "calls":
        _calls(order, answer, report)
    else:
        if kind == "functional":
            names.update(answer.meant() | names)
        _units(trees, names, report)


def _units(trees: list[ast.Module], names: dict[str, Any], report: Report) -> None:
    """Each text is a test; of a single one, each `assert` at its top level is, where it has any."""
    counts = [True] * len(trees)
    if len(trees) == 1 and any(isinstance(one, ast.Assert) for one in trees[0].body):
        # Each is alone, and what stands between them is together.
        runs = itertools.groupby(trees[0].body, lambda one: isinstance(one, ast.Assert) and one)
        trees = [ast.Module(list(run), []) for _, run in runs]
        counts = [isinstance(tree.body[0], ast.Assert) for tree in trees]
    if not any(isinstance(one, ast.stmt) for tree in trees for one in tree.body):
        raise Failed("there are no tests")
    report.tell(tests=sum(counts))
    for tree, is_test in zip(trees, counts):
        report.begin()
        try:
            exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
        except SystemExit as end:  # of the tests' own, such as unittest's: what the answer raises is another
            if end.code not in (None, 0, False):
                report.failed(Failed(f"the tests ended with {end.code}"))
                continue
        except (Exception, Ended) as error:
            report.failed(error)
            if not is_test:
                return
            continue
        if is_test:
            report.tell(passed=True)


def _calls(order: dict[str, Any], answer: Answer, report: Report) -> None:
    report.tell(tests=len(order["inputs"]))
    for args in order["inputs"]:
        report.begin()
        try:
            of = answer.get("Solution")() if "Solution" in answer.names() else answer.module
            report.tell(value=getattr(of, order["function"])(*args))
        except (Exception, Ended) as error:
            report.failed(error)


def _pytest(text: str, answer: Answer, report: Report) -> None:
    import pytest

    failures: list[str] = []
    outcomes: dict[str, Any] = {}
    begin, tell = report.begin, report.tell

    class Plugin:
        def pytest_collection_finish(self, session: Any) -> None:
            answer.names()
            if not session.items:
                raise Failed("there are no tests")
            tell(tests=len(session.items))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failures.append(str(report.longrepr)[-_MESSAGE:])

        def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
            begin()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or (report.when == "setup" and not report.passed):
                outcomes[report.nodeid] = report
            if report.when == "teardown" and (report.failed or report.nodeid in outcomes):
                last = report if report.failed else outcomes[report.nodeid]
                passed = last.passed or (last.skipped and not hasattr(last, "wasxfail"))
                tell(passed=passed, **({} if passed else {"message": str(last.longrepr)[-_MESSAGE:]}))

    with open(_TEST_FILE, "w", encoding="utf-8") as file:
        file.write(text)
    answer.before = lambda: os.unlink(_TEST_FILE)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no verdict depends on what else is installed
    options = ["-q", "--import-mode=importlib", "--capture=sys", "-c", os.devnull, "--rootdir=."]
    pytest.main([*options, "-p", "no:cacheprovider", _TEST_FILE], plugins=[Plugin()])
    if failures:
        raise Failed(failures[0])


def main(prefix: str, code: str, seconds: float, with_imports: bool) -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    sys.set_int_max_str_digits(0)
    to_answer, to_tests = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        # Before a line of the answer runs, the tests' input and the channel of the verdict are gone.
        os.dup2(to_answer[0], 100)
        os.dup2(to_tests[1], 101)
        for place in (0, 1, 2):
            os.dup2(nothing, place)
        os.closerange(3, 100)
        _be_the_answer(Peer(100, 101, guarded=False), prefix, code, with_imports)
        os._exit(0)
    os.close(to_answer[0])
    os.close(to_tests[1])
    order = json.load(sys.stdin)
    report = Report(os.dup(1), seconds)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.stdout = sys.stderr = io.StringIO()
    # What the answer may write there is nothing that its tests import.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != os.getcwd()]
    try:
        _test(Peer(to_tests[0], to_answer[1], guarded=True), report, prefix, order)
    except (Exception, Ended) as error:
        report.failed(error)
    os._exit(0)
