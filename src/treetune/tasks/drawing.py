"""Draws the problems of an iteration."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from treetune.seeds import derived_random
from treetune.vocabulary import Metrics, Problem

T = TypeVar("T")

Replacement = Literal["between_iterations", "epochs"]


def nothing_recorded(iteration: int) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class DrawingContext:
    """The data that a `DrawingRule` may read: the iteration, the seed, and results of earlier iterations."""

    seed: int
    iteration: int
    replacement: Replacement = "between_iterations"
    recorded: Callable[[int], Metrics] = nothing_recorded
    """Reads the rollout metrics of an earlier iteration. They are the same on all ranks. Collective."""
    pass_rates: Callable[[int], Mapping[str, float]] = nothing_recorded
    """Reads the share of right answers to each problem of an earlier iteration, by the problem's id. Empty
    unless the rule sets `reads_pass_rates`. Collective."""


class DrawingRule:
    """Chooses the problems of each iteration. This rule draws all problems equally often. A task that is to
    prefer some problems returns a sub-class of it from `Task.drawing_rule`."""

    reads_pass_rates: bool = False
    """Whether `draw` reads the pass rates of single problems in earlier iterations."""

    def draw(self, problems: Sequence[Problem], count: int, drawing: DrawingContext) -> list[Problem]:
        """Draws an iteration's problems from all training problems. See `draw_problems`."""
        return draw_problems(problems, count, drawing.seed, drawing.iteration, drawing.replacement)

    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: DrawingContext
    ) -> list[Problem]:
        """Returns the problems that the iteration has not `taken` yet, in the order in which it may take
        them. See `further_problems`."""
        return further_problems(problems, taken, drawing.seed, drawing.iteration)

    def metrics(self, problems: Sequence[Problem], drawing: DrawingContext) -> Metrics:
        """Returns metrics about the drawing of problems."""
        return {}


def draw_problems(
    problems: Sequence[T],
    count: int,
    seed: int,
    iteration: int,
    replacement: Replacement = "between_iterations",
) -> list[T]:
    """Draws `count` different problems for an iteration (from 0). The result depends only on the arguments.

    ``between_iterations`` shuffles all problems anew for each iteration, and takes the first `count`. A
    problem may come again in the next iteration. VinePPO draws like this.

    ``epochs`` shuffles all problems once for each epoch, and gives each iteration the next `count` of them.
    Every problem comes once before any problem comes again. ReST-EM and DPO draw like this.

    Raises ValueError if there are no problems, or if `count` is below 1 or above their number.
    """
    if not problems:
        raise ValueError("there are no problems to draw from")
    if not 1 <= count <= len(problems):
        raise ValueError(
            f"problems_per_iteration is {count}, but the split has {len(problems)} problems: "
            f"choose between 1 and {len(problems)}"
        )
    assert iteration >= 0
    if replacement == "between_iterations":
        generator = derived_random(seed, iteration, "problems")
        # `sample` is a shuffle of which only the first `count` elements are drawn.
        indices = generator.sample(range(len(problems)), count)
    else:
        # Each iteration takes one slice. The slices of earlier iterations are computed again, so that nothing
        # has to be stored.
        counts = [count] * (iteration + 1)
        indices = slice_of_epochs(
            len(problems), counts, lambda epoch: derived_random(seed, epoch, "problems of an epoch")
        )
    return [problems[index] for index in indices]


def further_problems(
    problems: Sequence[Problem], taken: Sequence[Problem], seed: int, iteration: int
) -> list[Problem]:
    """Returns the problems that are not `taken`, shuffled for this iteration.

    A rollout takes further problems if it needs more than were drawn for the iteration. Further problems do
    not count as drawn: with the replacement ``epochs``, such a problem is still drawn once in its epoch.
    """
    taken_ids = {problem.id for problem in taken}
    other_problems = [problem for problem in problems if problem.id not in taken_ids]
    derived_random(seed, iteration, "further problems").shuffle(other_problems)
    return other_problems


def slice_of_epochs(
    size: int, counts: Sequence[int], generator_of: Callable[[int], random.Random]
) -> list[int]:
    """Returns the last of several consecutive slices of a long sequence of indices.

    The sequence consists of shuffles of `range(size)`, one after the other.

    A slice may begin in one shuffle and end in the next one, but must not contain an index twice. So the next
    shuffle is changed: first come the indices that the slice still needs, and then all others.

    Example: the shuffles ``2 0 1`` and ``1 0 2`` are cut into slices of 2. The second slice begins with the 1
    of the first shuffle, so the 1 of the second shuffle moves after its 0: ``2 0``, ``1 0``, ``1 2``.

    Args:
        size: The number of indices in each shuffle.
        counts: The lengths of all slices up to the returned one, each at most `size`.
        generator_of: Returns the generator of a shuffle, given its number.
    """
    ends = list(itertools.accumulate(counts))
    order: list[int] = []
    epoch = 0
    while len(order) < ends[-1]:
        shuffled = list(range(size))
        generator_of(epoch).shuffle(shuffled)
        open_slice = bisect_right(ends, len(order))  # the slice that contains the beginning of this shuffle
        slice_start = ends[open_slice] - counts[open_slice]
        in_slice = set(order[slice_start:])
        n_missing = ends[open_slice] - len(order)  # the number of indices that the slice still needs
        not_in_slice = [index for index in shuffled if index not in in_slice]
        completing = not_in_slice[:n_missing]
        completing_set = set(completing)  # for quick look-ups
        order += completing + [index for index in shuffled if index not in completing_set]
        epoch += 1
    return order[ends[-1] - counts[-1] : ends[-1]]
