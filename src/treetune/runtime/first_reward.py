"""Tries a user's reward function on the first row, for `treetune check`."""

from __future__ import annotations

from collections.abc import Iterator

from treetune.config.errors import ConfigIssue
from treetune.domains.graders.function import FunctionGrader
from treetune.exceptions import ConfigError
from treetune.findings import missing_requirements
from treetune.tasks.base import Task
from treetune.tasks.graders.pool import GraderPool


def describe_first_reward(task: Task, deadline: float) -> Iterator[str]:
    """Grades the reference answer of the first problem, and yields its reward as a line for people.

    Yields nothing if no function of the user grades; if one asks a service, where a call may cost money; if
    something is missing that a grader needs; and if the task can't make a problem at once.

    Args:
        task: The task that is trained on.
        deadline: Seconds for the answer, unless the grader has its own deadline.

    Raises:
        ConfigError: The function raises an exception or takes too long.
    """
    graders = task.grader.parts()
    functions = [grader for grader in graders if isinstance(grader, FunctionGrader)]
    asks_service = any(grader.isolation == "service" for grader in graders)
    if not functions or asks_service or missing_requirements(graders):
        return
    problem = next(iter(task.examples(1)), None)
    if problem is None:
        return
    with GraderPool(task.grader, workers=1, deadline=deadline) as pool:
        grade = pool.submit(problem.gold, problem).result()
    if grade.outcome in ("error", "timeout"):
        issue = ConfigIssue(
            f"{functions[0].path} can't grade the reference answer of {problem.id} as a response"
            f" ({grade.outcome}): {grade.message}",
            "task.grader",
            remedy="fix the function; `treetune score_responses` tries it on answers of your own",
        )
        raise ConfigError([issue])
    reward = "None, which means no answer" if grade.outcome == "no_answer" else f"{grade.reward:g}"
    yield f"{functions[0].path} gives the reference answer of {problem.id} the reward {reward}"
