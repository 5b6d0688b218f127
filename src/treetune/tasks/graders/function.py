"""A plain Python function as a grader."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, Literal

from annotated_types import Gt

from treetune.config.imports import function_at
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


@Grader.register("function")
@dataclass(frozen=True, kw_only=True)
class FunctionGrader(Grader):
    """A function of your own as the reward: ``path: 'my_package.rewards:score'``.

    It is called as ``score(response, gold)`` with two texts; where its second parameter is called `problem`,
    it gets the whole `Problem` instead. One with verl's parameters (``data_source, solution_str,
    ground_truth, extra_info``) gets these by their names. `arguments` are given by their names as well.
    A coroutine function is awaited. It returns a number, a `Grade`, a dictionary with the number as
    ``score``, or None where the response holds no answer. What earns 1 or more counts as correct.

    The module is looked for like those of `imports`: among what is installed, in the working directory, in
    the folders of the configuration files. The function runs in the grader processes: one that hangs or
    crashes costs an answer its reward and not the run. What it raises is the outcome ``error``, but for
    `treetune.tasks.graders.base.Unavailable`: what it needs isn't there, and the answer is left out.

    One that waits for something outside, and computes nothing that could hang, is a ``service`` by its
    `isolation`: it is called in `concurrency` threads of the run's process. Broken connections, and what
    takes longer than the deadline, then leave the answer out as well. It alone finds keys and tokens in the
    environment: worker processes inherit none.
    """

    path: str
    """``package.module:function``."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    isolation: Literal["process", "service"] = "process"  # type: ignore[misc]  # a setting here
    """Where it is called: in worker processes, or in threads since it waits for a service."""
    deadline: Annotated[float, Gt(0)] | None = None
    """Seconds for one answer; None: the run's `grader_deadline`."""
    concurrency: Annotated[int, Gt(0)] = 16
    """Calls at a time, of a ``service``."""

    def __post_init__(self) -> None:
        _check_call(self.path, function_at(self.path), self.arguments)

    def prepare(self) -> None:
        function_at(self.path)

    def grade(self, response: str, problem: Problem) -> Grade:
        function = function_at(self.path)
        positional, named = _call(function, response, problem)
        result = function(*positional, **named, **self.arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if isinstance(result, Grade):
            return result
        if result is None:
            return Grade(reward=0.0, outcome="no_answer")
        reward = result.get("score") if isinstance(result, Mapping) else result
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(
                f"{self.path} should return a finite number, a Grade, a dictionary with a number as 'score',"
                f" or None, not {result!r}"
            )
        return Grade(reward=float(reward), outcome="ok")


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _call(function: Callable[..., Any], response: str, problem: Problem) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a reward function, by position and by name."""
    parameters = list(inspect.signature(function).parameters)
    if {"data_source", "solution_str", "ground_truth"} <= set(parameters):
        source = problem.data.get("data_source", problem.domain)
        named = {"data_source": source, "solution_str": response, "ground_truth": problem.gold}
        if "extra_info" in parameters:
            named["extra_info"] = problem.data.get("extra_info", dict(problem.data))
        return (), named
    takes_problem = parameters[1:2] == ["problem"]
    return (response, problem if takes_problem else problem.gold), {}


def _check_call(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that can't be called as it is going to be."""
    signature = inspect.signature(function)
    positional, named = _call(function, "response", Problem(id="", prompt="", gold="gold"))
    try:
        signature.bind(*positional, **named, **arguments)
    except TypeError as error:
        raise ValueError(
            f"path names {path}{signature}, which can't be called with a response and a gold answer"
            f"{' and the given arguments' if arguments else ''}: {error}"
        ) from error
