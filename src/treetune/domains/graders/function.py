"""A grader that calls a Python function of the user."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import shutil
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from typing_extensions import override

from treetune.config import folders
from treetune.config.imports import function_at
from treetune.contracts import Finding
from treetune.domains import foreign
from treetune.tasks.graders.base import RETURNED_NONE, Grader
from treetune.vocabulary import Grade, Problem, Transcript

NO_ROW: foreign.GradedRow = {"data": {}, "messages": (), "transcript": ("", (), ())} | dict.fromkeys(
    ("prompt", "gold", "domain"), ""
)
NO_STATE = foreign.verifiers_state(NO_ROW)
"""The row and state with which a function's parameters are checked before there is a problem."""


@Grader.register("function")
@dataclass(frozen=True, kw_only=True)
class FunctionGrader(Grader):
    """Takes the reward from a function: ``path: 'my_package.rewards:score'``, or ``'folder/file.py:score'``.

    The function is called as ``score(response, gold)`` with two texts. If its second parameter is called
    `problem`, it gets the whole `Problem` instead. A function with the parameters of verl, TRL or verifiers
    gets the arguments of these libraries (`foreign.py`), and a function of whole batches gets a batch of one
    answer. Instead of a function, the path may name an object of verifiers: a rubric, a function
    `load_environment` that makes an environment with a rubric, or a class of tasks. These give the weighted
    sum of their rewards. `arguments` are further keyword arguments. A coroutine function is awaited.

    The function returns a number, a `Grade`, a dictionary with the number as ``score``, or None if the
    response contains no answer. For an answer of several turns it may also return a list with a number for
    each turn. An answer is correct if its reward is 1 or more. Other numbers in the dictionary are metrics,
    ``rewards/…``. For an answer of several turns, `response` is the last turn's text, and
    `problem.transcript` is the whole answer.

    The module is searched like those of `imports`: among installed packages, in the working directory, and in
    the folders of the configuration files and of their imports. The function runs in the grader processes. So
    if it hangs or crashes, only the answer that it was grading loses its reward. If it raises an exception,
    the outcome is ``error``. If it raises `treetune.Unavailable`, because something that it needs is missing,
    the answer is left out instead.

    A function that waits for an external service, and computes nothing that could hang, should have the
    `isolation` ``service``. Then it is called in `concurrency` threads of the run's process, and an answer is
    also left out if a connection breaks or the deadline passes. Only such a function finds keys and tokens in
    the environment variables, since worker processes don't inherit them.
    """

    path: str
    """``package.module:function``, or ``folder/file.py:function``."""
    python: str | None = None
    """Another Python that runs the function, such as ``/path/to/venv/bin/python``; null: the one that runs
    treetune. Each grader process starts a process of it. Treetune needn't be installed there. The problem's
    `data` has to be JSON."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keyword arguments of each call."""
    reads_turns: ClassVar[bool] = True
    isolation: Literal["process", "service"] = "process"  # type: ignore[misc]  # a setting here
    """The place where the function is called. ``process``: in grader processes. ``service``: in threads of
    the run's process."""
    deadline: Annotated[float, Gt(0)] | None = None
    """Seconds for one answer; null: the run's `grader_deadline`."""
    concurrency: Annotated[int, Gt(0)] = 16
    """The most calls at the same time, if the isolation is ``service``."""

    def __post_init__(self) -> None:
        if self.python is None:
            _check_call(self.path, _load_function(self.path), self.arguments)
        elif self.isolation == "service":
            raise ValueError("isolation is 'service', and another python runs in processes: leave one out")
        elif shutil.which(self.python) is None:
            raise ValueError(f"python is {self.python!r}, which can't be run: give the path of a Python")

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from super().check(experiment)
        if self.python is None and _never_returns_a_value(_load_function(self.path)):
            yield Finding(
                f"{self.path} has no `return` with a value, so that it returns None for every answer, and"
                " none earns anything",
                "path",
                "return a number for every answer (0.0 for a wrong one; None only for a response without an"
                " answer), or name another function",
            )

    @override
    def prepare(self) -> None:
        if self.python is None:
            _load_function(self.path)
        else:
            _start_python(self.python, self.path)

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        messages = [vars(message) for message in problem.messages]
        transcript = problem.transcript
        if transcript is None:
            # An answer of one turn has no transcript. It gets one here: a single turn, which earned 0.
            single_turn = [{"role": "assistant", "content": response}]
            transcript = Transcript(response, [single_turn], [0.0])
        elif not messages:
            # An answer of several turns is graded as a conversation, which begins with the prompt.
            messages = [{"role": "user", "content": problem.prompt}]
        # Plain values (`foreign.GradedRow`), which another Python can read as JSON.
        row: dict[str, Any] = {
            "prompt": problem.prompt,
            "gold": problem.gold,
            "domain": problem.domain,
            "data": dict(problem.data),
            "messages": messages,
            "transcript": transcript,
        }
        if self.python is not None:
            result = self._ask_other_python(response, row)
        else:
            row["problem"] = problem
            result = foreign.grade_answer(_load_function(self.path), self.path, response, row, self.arguments)
        if isinstance(result, Grade):
            return result
        rewards, numbers = result
        if not rewards:
            return Grade(reward=0.0, outcome="no_answer", message=RETURNED_NONE)
        return Grade(reward=sum(rewards), outcome="ok", numbers=numbers, step_rewards=tuple(rewards))

    def _ask_other_python(self, response: str, row: Mapping[str, Any]) -> Any:
        """Grades an answer in the process of `python`. Raises RuntimeError if the function raised, if it
        returned something that can't be written as JSON or read as a `Grade`, or if the process has ended."""
        process = _start_python(self.python, self.path)
        assert process.stdin is not None and process.stdout is not None
        request = json.dumps([response, row, self.arguments])
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:  # the process has ended before this answer
            line = ""
        if not line:
            _start_python.cache_clear()  # the next answer starts another process
            raise RuntimeError(f"{self.python} ended with exit code {process.wait()}")
        reply = json.loads(line)
        if isinstance(reply, str):  # the error that the function raised
            raise RuntimeError(reply)
        if isinstance(reply, dict):  # the fields of a `Grade`
            try:
                return Grade(**{**reply, "step_rewards": tuple(reply.get("step_rewards", ()))})
            except TypeError as error:  # the object has other fields than a `Grade`
                raise RuntimeError(f"{self.path} returned an object that isn't a Grade: {error}") from error
        return reply


@functools.cache
def _load_function(path: str) -> Any:
    """Returns the function, rubric or environment that a path names. Raises ValueError if it can't be
    loaded."""
    module_or_file = path.rpartition(":")[0]
    if module_or_file.endswith(".py"):
        try:
            function: Any = foreign.file_function(path, folders.import_folders())
        except (Exception, SystemExit) as error:  # executing the user's file may raise anything
            raise ValueError(f"path is {path!r}, which can't be loaded: {error}") from error
        # Notes the name of the file's module, so that grader processes can import it under the same name.
        file = foreign.find_file(path, folders.import_folders())
        folders.add_configured_module(foreign.name_in_process(file))
    else:
        function = function_at(path)
    # `load_environment` is verifiers' name for a function that makes an environment with its rubric.
    return function() if path.endswith(":load_environment") else function


@functools.cache
def _start_python(python: str, path: str) -> subprocess.Popen[str]:
    """Returns a process of another Python that has loaded the function. It ends with the present process."""
    process = subprocess.Popen(
        [python, foreign.__file__, path, *folders.import_folders()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline():  # it writes "ready", and nothing if it fails
        raise ValueError(f"{python} can't load {path!r} (exit code {process.wait()}): its log says why")
    return process


def _check_call(path: str, function: Any, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if the function can't be called with the arguments that it will get."""
    if not inspect.isroutine(function):
        return  # an object of the library `verifiers`, which calls its reward functions itself
    signature = inspect.signature(function)
    in_order, by_name = foreign.call_arguments(signature.parameters, "response", NO_ROW, NO_STATE)
    # A function without positional arguments takes columns of the problem's row by name. `NO_ROW` has fewer
    # columns than a real row. So `bind_partial` lets arguments of such a function be missing.
    bind = signature.bind if in_order else signature.bind_partial
    try:
        bind(*in_order, **by_name, **arguments)
    except TypeError as error:
        raise ValueError(
            f"path names {path}{signature}, which can't be called with a response and a gold answer"
            f"{' and the given arguments' if arguments else ''}: {error}"
        ) from error


def _never_returns_a_value(function: Any) -> bool:
    """Returns whether a function always returns None: it has neither a `return` with a value nor a `raise`.

    Returns False if its source can't be read.
    """
    if not inspect.isfunction(function):
        return False
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        [definition] = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    nodes: list[ast.AST] = list(definition.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue  # a `return` in it is not the function's
        if isinstance(node, ast.Raise | ast.Yield | ast.YieldFrom):
            return False  # a stub that isn't implemented yet raises, and a generator returns an iterator
        if isinstance(node, ast.Return) and not _is_none(node.value):
            return False
        nodes += ast.iter_child_nodes(node)
    return True


def _is_none(value: ast.expr | None) -> bool:
    """Returns whether a `return` statement returns None: it has no value, or the value ``None``."""
    return value is None or (isinstance(value, ast.Constant) and value.value is None)
