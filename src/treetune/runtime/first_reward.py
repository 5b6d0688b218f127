"""Tries a user's reward function on the first row, for `treetune check`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from treetune.config.errors import ConfigIssue
from treetune.domains.graders.function import FunctionGrader
from treetune.exceptions import ConfigError
from treetune.findings import missing_requirements
from treetune.tasks.base import Task
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

MOST_EXAMPLE_PROBLEMS = 8
"""The number of problems that are searched for one whose grader is a function of the user."""

ANSWER_FORMS = ("\\boxed{{{gold}}}", "#### {gold}", "<answer>{gold}</answer>")
"""Forms in which reward functions often look for an answer. A function that looks for one of them finds no
answer in the bare reference answer."""


def describe_first_reward(task: Task, deadline: float) -> Iterator[str]:
    """Grades a reference answer with the user's function, and yields its reward as a line for people.

    The answer is that of the first problem which such a function grades. Yields nothing if there is none
    among the task's first problems, or if no problem can be made at once.

    Args:
        task: The task that is trained on.
        deadline: Seconds for the answer, unless the grader has its own deadline.

    Raises:
        ConfigError: The function raises an exception or takes too long.
    """
    graders = task.grader.parts()
    has_function = any(isinstance(grader, FunctionGrader) for grader in graders)
    asks_service = any(grader.isolation == "service" for grader in graders)  # a call may cost money
    if not has_function or asks_service or missing_requirements(graders):
        return
    for problem in task.examples(MOST_EXAMPLE_PROBLEMS):
        grader = task.grader.of(problem)
        if isinstance(grader, FunctionGrader):
            yield from _try_function(grader.path, task, problem, deadline)
            return


def _try_function(path: str, task: Task, problem: Problem, deadline: float) -> Iterator[str]:
    """Yields the reward that a function gives the reference answer of a problem.

    If the function returns None for the bare answer, it also gets the answer in common forms, and the task's
    demonstration. Yields a warning if it returns None for all of them.

    Args:
        path: The function's file or module and its name, for messages: ``rewards.py:score``.
    """
    responses = _responses_with_the_answer(task, problem)
    with GraderPool(task.grader, workers=1, deadline=deadline) as pool:
        grade = pool.submit(problem.gold, problem).result()
        _refuse_failure(grade, path, problem)
        if grade.outcome != "no_answer":
            yield f"{path} gives the reference answer of {problem.id} the reward {grade.reward:g}"
            return
        for response in responses:
            grade = pool.submit(response, problem).result()
            if grade.outcome == "ok":
                yield (
                    f"{path} finds no answer (None) in the bare reference answer of {problem.id}, and gives"
                    f" {response!r:.80} the reward {grade.reward:g}"
                )
                return
    tried = ", ".join(f"{response!r:.40}" for response in [problem.gold, *responses])
    yield (
        f"warning: {path} returned None (no answer) for the reference answer of {problem.id} in every form"
        f" that was tried: {tried}. If it returns None for all answers of the first iteration, the run ends"
        " there with an error. Return a number for every response that contains an answer; `treetune"
        " score_responses` tries the function on responses of your own"
    )


def _responses_with_the_answer(task: Task, problem: Problem) -> list[str]:
    """Returns responses that contain the reference answer: in common forms, and the demonstration."""
    responses = [form.format(gold=problem.gold) for form in ANSWER_FORMS]
    with contextlib.suppress(ValueError):  # the task has no demonstrations
        responses.append(task.demonstration(problem, 0))
    return responses


def _refuse_failure(grade: Grade, path: str, problem: Problem) -> None:
    """Raises ConfigError if the function raised an exception or took too long.

    Args:
        path: The function's file or module and its name, for the message: ``rewards.py:score``.
    """
    if grade.outcome in ("error", "timeout"):
        issue = ConfigIssue(
            f"{path} can't grade the reference answer of {problem.id} as a response"
            f" ({grade.outcome}): {grade.message}",
            "task.grader",
            remedy="fix the function; `treetune score_responses` tries it on answers of your own",
        )
        raise ConfigError([issue])
