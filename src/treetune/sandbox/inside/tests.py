"""Runs tests against an answer's code, which lives in another process and finds nothing of them.

On what was standard output it says line by line, in JSON, how many tests there are and how each went. The
answer's process is forked before the tests are read, and has neither that channel nor the tests' input.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import sys
import types

from treetune.sandbox.inside.peers import Ended, Peer, Remote

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from typing import Any

_MESSAGE = 300
_TEST_FILE = "test_answer.py"


# ---- the answer's process


def _be_the_answer(peer: Peer, prefix: str, code: str) -> None:
    printed = io.StringIO()

    def take() -> str:
        text = printed.getvalue()
        printed.seek(0)
        printed.truncate()
        return text

    sys.stdout = sys.stderr = printed
    peer.printed = take
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    try:
        peer.receive()
        try:
            exec(compile(prefix, "prefix.py", "exec", dont_inherit=True), names)
        except SyntaxError:
            code = prefix + code  # the beginning of what the answer goes on with
        peer.by_value = _classes(names)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), names)
        peer.by_value = {name: names[name] for name in peer.by_value if isinstance(names.get(name), type)}
        peer.names = names
        peer.send("ready", [name for name in names if not name.startswith("__")])
    except BaseException as error:
        peer.send("failed", f"{type(error).__name__}: {error}"[:_MESSAGE])
        return
    try:
        while True:
            peer.answer(*peer.receive()[1:])
    except Ended:
        return


def _classes(names: dict[str, Any]) -> dict[str, type]:
    """Classes that code of ours has made, other than stubs of what an answer is to fill in."""
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, type) and value.__module__ == names.get("__name__") and "__init__" in vars(value)
    }


# ---- the tests' process


class Names(dict):
    """The names of the tests: their own, then the answer's."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="__main__")
        self._peer = peer
        self.answers: frozenset[str] = frozenset()

    def __missing__(self, name: str) -> Any:
        if name in self.answers:
            return self._peer.ask("name", name)
        raise KeyError(name)


class Solution(types.ModuleType):
    """What tests import as the module `solution`. The answer's code begins when they first use it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = self.__dict__["_start"]()
        if name == "__all__":
            return sorted(answers)
        if name not in answers:
            raise AttributeError(f"the answer defines no {name}")
        return self.__dict__["_peer"].ask("name", name)


class Main(types.ModuleType):
    """The module that `unittest.main` looks for tests in."""

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_names"])

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_names"][name]
        except KeyError:
            raise AttributeError(name) from None


class Failed(Exception):
    """The answer's code did not come to where it could be tested."""


class Report:
    """What is told outside: how many tests there are, and of each whether it passed."""

    def __init__(self, descriptor: int, seconds: float) -> None:
        self._descriptor, self._seconds = descriptor, seconds
        signal.signal(signal.SIGALRM, self._stop)

    def begin(self) -> None:
        """A test begins, and with it its time."""
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def tell(self, **what: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        data = json.dumps(what).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def failed(self, error: Exception) -> None:
        said = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        self.tell(passed=False, message=said[:_MESSAGE])

    def _stop(self, *_: object) -> None:
        # Who is being waited for may never answer, and then no further test can be run.
        self.tell(passed=False, message=f"stopped after {self._seconds:g} s", stopped=True)
        os._exit(0)


def _test(peer: Peer, report: Report, prefix: str, order: dict[str, Any]) -> None:
    def start() -> frozenset[str]:
        if not names.answers:
            peer.send("start")
            kind, said = peer.receive()
            if kind != "ready":
                raise Failed(str(said))
            names.answers = frozenset(map(str, said))
        return names.answers

    names = Names(peer)
    sys.modules["__main__"] = main = Main("__main__")
    main.__dict__.update(_names=names)
    solution = Solution("solution")
    solution.__dict__.update(_peer=peer, _start=start)
    sys.modules["solution"] = solution
    # A prefix that is half a function belongs to the answer alone.
    with contextlib.suppress(SyntaxError):
        exec(compile(_without_stubs(prefix), "prefix.py", "exec", dont_inherit=True), names)
    peer.by_value = _classes(names)
    kind = order["kind"]
    if kind == "pytest":
        _pytest(order["tests"], report)
    elif kind == "calls":
        start()
        _calls(order, names, report)
    else:
        if kind == "functional":
            start()
        _units([order["tests"]] if isinstance(order["tests"], str) else order["tests"], names, report)


def _without_stubs(prefix: str) -> ast.Module:
    """Without the functions and classes that the answer is to fill in: here they'd hide the answer's."""
    tree = ast.parse(prefix)
    tree.body = [one for one in tree.body if not _is_stub(one)]
    return tree


def _is_stub(one: ast.stmt) -> bool:
    if isinstance(one, ast.ClassDef):
        methods = [inner for inner in one.body if isinstance(inner, ast.FunctionDef)]
        return all(map(_is_stub, methods))
    return isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and all(
        isinstance(inner, (ast.Pass, ast.Raise))
        or (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant))
        for inner in one.body
    )


def _units(texts: list[str], names: Names, report: Report) -> None:
    """Each text is a test; of a single one, each `assert` at its top level is, where it has any."""
    trees = [ast.parse(text) for text in texts]
    if len(trees) == 1:
        trees = _asserts(trees[0])
    holds = [any(isinstance(one, ast.Assert) for one in tree.body) for tree in trees]
    counts = [True] * len(trees) if len(texts) > 1 or not any(holds) else holds
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
        except Ended as error:
            report.failed(error)
            return
        except Exception as error:
            report.failed(error)
            if not is_test:
                return
            continue
        if is_test:
            report.tell(passed=True)


def _asserts(tree: ast.Module) -> list[ast.Module]:
    """Cut so that each assertion is alone; what stands between them is together."""
    cut: list[ast.Module] = []
    for one in tree.body:
        joins = not isinstance(one, ast.Assert) and cut and not isinstance(cut[-1].body[-1], ast.Assert)
        if joins:
            cut[-1].body.append(one)
        else:
            cut.append(ast.Module([one], []))
    if any(isinstance(part.body[0], ast.Assert) for part in cut):
        return cut
    return [tree]


def _calls(order: dict[str, Any], names: Names, report: Report) -> None:
    report.tell(tests=len(order["inputs"]))
    for args in order["inputs"]:
        report.begin()
        try:
            of = names["Solution"]() if "Solution" in names.answers else None
            function = names[order["function"]] if of is None else getattr(of, order["function"])
            report.tell(value=_as_json(function(*args)))
        except Ended as error:
            report.failed(error)
            return
        except Exception as error:
            report.failed(error)


def _as_json(value: Any) -> Any:
    """As JSON has it: sequences are lists, keys strings."""
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, Remote) or not isinstance(value, (type(None), bool, int, float, str)):
        return {"not JSON": type(value).__name__}
    return value


def _pytest(text: str, report: Report) -> None:
    import pytest

    class Plugin:
        def pytest_collection_finish(self, session: Any) -> None:
            begin_without_the_file()
            if not session.items:
                raise Failed("there are no tests")
            report.tell(tests=len(session.items))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failures.append(str(report.longrepr)[-_MESSAGE:])

        def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
            report.begin()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or (report.when == "setup" and not report.passed):
                outcomes[report.nodeid] = report
            if report.when == "teardown" and (report.failed or report.nodeid in outcomes):
                tell(report if report.failed else outcomes[report.nodeid])

    def tell(result: Any) -> None:
        skipped = result.skipped and not hasattr(result, "wasxfail")
        if result.passed or skipped:
            report.tell(passed=True)
        else:
            report.tell(passed=False, message=str(result.longrepr)[-_MESSAGE:])

    failures: list[str] = []
    outcomes: dict[str, Any] = {}
    with open(_TEST_FILE, "w", encoding="utf-8") as file:
        file.write(text)
    begin = sys.modules["solution"].__dict__["_start"]

    def begin_without_the_file() -> Any:
        if os.path.exists(_TEST_FILE):
            os.unlink(_TEST_FILE)
        return begin()

    sys.modules["solution"].__dict__["_start"] = begin_without_the_file
    options = ["-q", "--import-mode=importlib", "--capture=sys", "-c", os.devnull, "--rootdir=."]
    pytest.main([*options, "-p", "no:cacheprovider", _TEST_FILE], plugins=[Plugin()])
    if failures:
        raise Failed(failures[0])


def main(prefix: str, code: str, seconds: float) -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    to_answer, to_tests = os.pipe(), os.pipe()
    pid = os.fork()
    nothing = os.open(os.devnull, os.O_RDWR)
    if pid == 0:
        # Before a line of the answer runs, the tests' input and the channel of the verdict are gone.
        os.dup2(to_answer[0], 100)
        os.dup2(to_tests[1], 101)
        for place in (0, 1, 2):
            os.dup2(nothing, place)
        os.closerange(3, 100)
        _be_the_answer(Peer(100, 101, trusted=False), prefix, code)
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
        _test(Peer(to_tests[0], to_answer[1], trusted=True), report, prefix, order)
    except Exception as error:
        report.failed(error)
    os._exit(0)
