"""Which problems an iteration works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from treetune.seeds import derived_random
from treetune.vocabulary import Problem

T = TypeVar("T")

Replacement = Literal["between_iterations", "epochs"]


def sample_problems(
    problems: Sequence[T],
    count: int,
    seed: int,
    iteration: int,
    replacement: Replacement = "between_iterations",
) -> list[T]:
    """`count` different problems for `iteration` (from 0), the same for the same seed.

    ``between_iterations`` shuffles all problems anew for each iteration and takes the first
    `count`: no problem comes twice in an iteration, any may come again in the next one (VinePPO's
    choice for policy gradients). ``epochs`` goes through one shuffle after the other in
    consecutive slices: every problem comes once before any comes again (RestEM's and DPO's).

    Raises ValueError for no problems, and for a `count` below 1 or above their number.
    """
    if not problems:
        raise ValueError("there are no problems to sample from")
    if not 1 <= count <= len(problems):
        raise ValueError(
            f"problems_per_iteration is {count}, but the split has {len(problems)} problems: "
            f"choose between 1 and {len(problems)}"
        )
    assert iteration >= 0
    if replacement == "between_iterations":
        generator = derived_random(seed, iteration, "problems")
        # `sample` is a shuffle of which only the first `count` places are drawn.
        chosen = generator.sample(range(len(problems)), count)
    else:
        chosen = _slice_of_epochs(len(problems), count, seed, iteration)
    return [problems[index] for index in chosen]


def further_problems(
    problems: Sequence[Problem], taken: Sequence[Problem], seed: int, iteration: int
) -> list[Problem]:
    """The problems that are not `taken`, in a shuffle of their own for this iteration.

    They are drawn whatever `problem_sampling` says: with ``epochs``, one that is drawn here has its
    own turn as well.
    """
    ids = {problem.id for problem in taken}
    rest = [problem for problem in problems if problem.id not in ids]
    derived_random(seed, iteration, "further problems").shuffle(rest)
    return rest


def _slice_of_epochs(size: int, count: int, seed: int, iteration: int) -> list[int]:
    """Places ``[iteration * count, (iteration + 1) * count)`` of shuffle after shuffle.

    Where a slice runs over the seam of two epochs, problems that the old epoch put into it wait
    until the slice is full, so that no slice holds a problem twice.
    """
    order: list[int] = []
    epoch = 0
    while len(order) < (iteration + 1) * count:
        fresh = list(range(size))
        derived_random(seed, epoch, "problems of an epoch").shuffle(fresh)
        begun = len(order) % count
        in_slice = set(order[len(order) - begun :])
        missing = count - begun if begun else 0
        first = [index for index in fresh if index not in in_slice][:missing]
        taken = set(first)
        order += first + [index for index in fresh if index not in taken]
        epoch += 1
    return order[iteration * count : (iteration + 1) * count]
