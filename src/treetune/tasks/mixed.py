"""Tasks whose problems belong to domains, and tasks that consist of several tasks.

Code that works for every task calls `task_of` for the task of a problem, and `parts_of` for all of them::

    sampling = task_of(context.task, problem).adjust_sampling(self.sampling)
"""

from __future__ import annotations

from collections.abc import Sequence

from treetune.tasks.base import Task
from treetune.vocabulary import Problem


class TaskWithDomains(Task):
    """A task whose problems belong to domains (`Problem.domain`). Metrics are also reported for each
    domain."""

    def domain_names(self) -> Sequence[str] | None:
        """Returns the names of the domains.

        Empty if the task has no domains, and None if the names are known only once the rows are read.
        """
        raise NotImplementedError


class MixedTask(TaskWithDomains):
    """A task that consists of several tasks, each with its own grader, prompts, steps and demonstrations.

    A sub-class overrides `of`, `parts`, `domain_names` and `problems`.
    """

    def of(self, problem: Problem) -> Task:
        """Returns the task that a problem belongs to."""
        raise NotImplementedError

    def parts(self) -> Sequence[Task]:
        """Returns all tasks that `of` may return."""
        raise NotImplementedError

    def trained_parts(self) -> Sequence[Task]:
        """Returns the tasks from which training draws problems. The other parts are only evaluated."""
        return self.parts()


def task_of(task: Task, problem: Problem) -> Task:
    """Returns the task that a problem belongs to: in a mixture the task of its domain, or else `task` itself.

    Callers that need the steps, the demonstration or the sampling of a problem ask the returned task.
    """
    return task.of(problem) if isinstance(task, MixedTask) else task


def parts_of(task: Task) -> Sequence[Task]:
    """Returns all tasks that `task_of` may return."""
    return task.parts() if isinstance(task, MixedTask) else (task,)


def trained_parts_of(task: Task) -> Sequence[Task]:
    """Returns those of `parts_of` from which training draws problems."""
    return task.trained_parts() if isinstance(task, MixedTask) else (task,)
