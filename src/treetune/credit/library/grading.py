"""The grader of continuations: a function of the user, or one of this package's graders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from treetune.config.build import build
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

RewardFunction = Callable[..., Any]
"""A function ``(prompt, text) -> reward``, or ``(prompt, text, problem) -> reward``."""


def open_grading(grader: Grader | GraderPool | Mapping[str, Any] | RewardFunction | None) -> GraderPool:
    """Returns the pool that grades continuations. The caller closes it if it is a new one.

    Args:
        grader: A function, a `Grader`, the configuration of a grader, such as ``{"type": "math"}``, or a
            pool, which is returned as it is. None is for credit that samples nothing.

    Raises:
        ConfigError: The configuration is wrong.
        ValueError: `grader` is none of these.
    """
    if isinstance(grader, GraderPool):
        return grader
    if isinstance(grader, Mapping):
        grader = build(Grader, dict(grader), key=("grader",))
    if isinstance(grader, Grader):
        return GraderPool(grader)
    if grader is None:
        return FunctionPool(_no_grader)
    if not callable(grader):
        raise ValueError(
            f"grader is of the type {type(grader).__name__}: give a function (prompt, text) -> reward, or a"
            " grader of treetune such as {'type': 'math'}"
        )
    return FunctionPool(grader)


def _no_grader(prompt: str, text: str) -> float:
    raise AssertionError("a credit without continuations grades nothing")


class _FunctionGrader(Grader):
    """The grader of a `FunctionPool`, for code that asks a pool for its grader. It grades nothing, since the
    pool itself calls the function."""

    isolation = "inline"


class FunctionPool(GraderPool):
    """Grades by calling a function, one call after the other, in the thread that assigns credit.

    An exception of the function ends the call: in another trainer's loop, a reward function that fails should
    not lower values silently. For functions that may hang, or that are slow, use the grader ``function``,
    which calls them in processes.
    """

    def __init__(self, function: RewardFunction) -> None:
        super().__init__(_FunctionGrader())
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._takes_problem = _takes_problem_too(function)

    @override
    def submit(
        self, response: str, problem: Problem, *, decided: bool = False, follows_prompt: bool = True
    ) -> Future[Grade]:
        """Grades the response by the user's function at once, and returns a future that is done."""
        # `decided` says whether the reward is known without the grade, and `follows_prompt` whether the
        # response comes directly after the prompt. Both are for graders of treetune. The user's function
        # takes neither, and is called for every response.
        arguments = (problem.prompt, response, problem) if self._takes_problem else (problem.prompt, response)
        try:
            result = self._function(*arguments)
        except Exception as error:
            raise RuntimeError(
                f"the grader {self._name} raised {type(error).__name__} on a continuation of the group"
                f" {problem.id!r}: {error}"
            ) from error
        future: Future[Grade] = Future()
        future.set_result(self._grade(result, problem))
        return future

    def _grade(self, result: Any, problem: Problem) -> Grade:
        """Returns what the user's function returned, a grade or a reward, as a grade. Raises ValueError if it
        is neither."""
        if isinstance(result, Grade):
            return result
        try:
            reward = float(result)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise ValueError(
                f"the grader {self._name} returned {result!r} on a continuation of the group {problem.id!r}:"
                " return a finite number, 0.0 for a wrong answer"
            )
        return Grade(reward=reward, outcome="ok")


def _takes_problem_too(function: RewardFunction) -> bool:
    """Returns whether the function gets the problem as well, after prompt and text."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    try:
        signature.bind("prompt", "text", None)
    except TypeError:
        return False
    # The function can be called with three arguments, and perhaps with two as well.
    parameters = list(signature.parameters.values())
    if len(parameters) < 3:
        return True  # its `*args` takes the problem
    # A third parameter with a default may be a setting of the function, so it doesn't get the problem.
    return parameters[2].default is inspect.Parameter.empty
