"""How an iteration's problems are shared among domains, and drawn from each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from treetune.seeds import derived_random
from treetune.tasks.sampling import Replacement, slice_of_epochs
from treetune.vocabulary import Metrics

T = TypeVar("T")


def nothing_recorded(iteration: int) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Drawing:
    """Which iteration's problems are drawn, and how. `recorded` has the metrics that the rollout of an
    earlier iteration left, and `pass_rates` the share of right answers to each of its problems, where the
    task `remembers_pass_rates`. Both are the same on all ranks, and collective."""

    seed: int
    iteration: int
    replacement: Replacement = "between_iterations"
    recorded: Callable[[int], Metrics] = nothing_recorded
    pass_rates: Callable[[int], Mapping[str, float]] = nothing_recorded


def shares(
    weights: Mapping[str, float], sizes: Mapping[str, int], count: int, generator: random.Random
) -> dict[str, int]:
    """How many of `count` problems each domain gives, on average in proportion to the weights.

    Whole parts of ``count * weight`` are given; what is left goes to domains by chance, each with the
    probability of its remainder, so that a small one has its share over many iterations. A domain that is
    asked for more than it has gives all, and the others the rest. Raises ValueError where all together have
    too few.
    """
    found = dict.fromkeys(weights, 0)
    open_, left = sorted(name for name, weight in weights.items() if weight > 0), count
    while full := [name for name in open_ if _quota(name, open_, weights, left) >= sizes[name]]:
        for name in full:
            found[name] = sizes[name]
            left -= sizes[name]
        open_ = [name for name in open_ if name not in full]
    if not open_:
        if left:
            raise ValueError(
                f"problems_per_iteration is {count}, and the domains of the mixture have"
                f" {count - left} problems: choose at most so many"
            )
        return found
    # Systematic sampling: points one apart, thrown over the remainders laid end to end.
    point, laid = generator.random(), 0.0
    quotas = {name: _quota(name, open_, weights, left) for name in open_}
    seats = left - sum(math.floor(quota) for quota in quotas.values())
    for name, quota in quotas.items():
        found[name] = math.floor(quota)
        laid += quota - math.floor(quota)
        if seats and (laid > point or (seats == 1 and name == open_[-1])):
            found[name] += 1
            seats -= 1
            point += 1
    return found


def _quota(name: str, open_: Sequence[str], weights: Mapping[str, float], count: int) -> float:
    """Rounded, so that a whole number of problems is one."""
    return round(count * weights[name] / math.fsum(weights[other] for other in open_), 9)


def drawn(size: int, counts: Sequence[int], name: str, drawing: Drawing) -> list[int]:
    """The places of a domain's problems in the iteration, given how many it gave in each so far.

    Seeds derive from the domain's name: how many others there are changes nothing, and where more or fewer
    are drawn, the first ones are the same.
    """
    if drawing.replacement == "epochs":
        return slice_of_epochs(
            size, counts, lambda epoch: derived_random(drawing.seed, epoch, "problems of an epoch", name)
        )
    generator = derived_random(drawing.seed, drawing.iteration, "problems", name)
    return list(first_of_shuffle(size, counts[-1], generator))


def by_preference(weights: Sequence[float], generator: random.Random) -> list[int]:
    """All places, in the order of draws without replacement in which each is drawn in proportion to its
    weight (Efraimidis and Spirakis, 2006)."""
    keys = [generator.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(weights)), key=lambda place: -keys[place])


def first_of_shuffle(size: int, count: int, generator: random.Random) -> Iterator[int]:
    """The first `count` places of a shuffle of `size`: those that a larger `count` begins with as well."""
    moved: dict[int, int] = {}
    for place in range(count):
        other = place + generator.randrange(size - place)
        yield moved.get(other, other)
        moved[other] = moved.get(place, place)


def interleaved(queues: Mapping[str, Sequence[T]], weights: Mapping[str, float] | None = None) -> list[T]:
    """All of them, each queue in its order, mixed evenly from the first on to the last, or so that what
    comes first is in proportion to the weights."""
    placed = [
        ((place + 0.5) / (len(queue) if weights is None else weights[name]), name, place)
        for name, queue in queues.items()
        for place in range(len(queue))
    ]
    return [queues[name][place] for _, name, place in sorted(placed)]
