"""Mixtures: several tasks as the domains of one, and how their problems are drawn."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Finding, Need, Part, SampledAnswers
from treetune.domains.environments.base import Environment, environment_of
from treetune.domains.graders.routed import ByDomain
from treetune.exceptions import NoSplit
from treetune.seeds import derived_random
from treetune.tasks.base import Params, Split, Task
from treetune.tasks.drawing import Drawing, slice_of_epochs
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Metrics, Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Difficulty(Part):
    """A selection of training problems that are neither too easy nor too hard: those with a number strictly
    between two bounds, such as a pass rate between 0.1 and 0.9. A problem without that number raises
    ValueError when it is read."""

    field: Annotated[str, MinLen(1)]
    """A number in `Problem.data`."""
    above: float | None = None
    """The lower bound; null: none."""
    below: float | None = None
    """The upper bound; null: none."""

    def __post_init__(self) -> None:
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(
                f"above is {self.above:g} and below is {self.below:g}, which leaves nothing: the first has to"
                " be smaller"
            )

    def keeps(self, problem: Problem) -> bool:
        value = problem.data.get(self.field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"problem {problem.id!r} has no number {self.field!r} to choose it by (it has"
                f" {', '.join(map(repr, problem.data)) or 'nothing'}): name another field, or let the task"
                " keep the row's"
            )
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)


@dataclass(frozen=True, kw_only=True)
class Domain(Part):
    """A task of a mixture, with a weight and settings of its own."""

    task: Task
    weight: Annotated[float, Ge(0)] = 1.0
    """Draws of its problems in proportion to the other domains' (see the mixture's `weighting`); 0 only
    measures it."""
    stop: tuple[str, ...] | None = None
    """The strings that end its answers; null: the task's own `stop`, or the rollout's where it has none."""
    max_tokens: Annotated[int, Gt(0)] | None = None
    """Tokens of its answers, never more than the rollout or an evaluation set allows."""
    difficulty: Difficulty | None = None
    """Leaves out training problems; evaluation keeps all."""

    def __post_init__(self) -> None:
        if self.stop and "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")


@dataclass(frozen=True)
class DomainTask(Task):
    """A task with the name, ids, stop strings and budget that it has as a domain of a mixture."""

    name: str
    domain: Domain

    @property
    def task(self) -> Task:
        return self.domain.task

    @property
    @override
    def grader(self) -> Grader:  # type: ignore[override]
        return self.task.grader

    @property
    def environment(self) -> Environment | None:
        return environment_of(self.task)

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        problems, difficulty = self.task.problems(split), self.domain.difficulty
        if split == "train" and difficulty is not None:
            problems = [problem for problem in problems if difficulty.keeps(problem)]
            if not problems:
                raise ValueError("no training problem is of that difficulty: widen its bounds")
        return self._named(problems)

    def _named(self, problems: Sequence[Problem]) -> list[Problem]:
        return [replace(problem, id=f"{self.name}/{problem.id}", domain=self.name) for problem in problems]

    def has(self, split: Split) -> bool:
        """Returns whether the mixture's split has problems of it."""
        if split == "train" and not self.domain.weight:
            return False
        try:
            self.task.size(split)
        except NoSplit:
            return split == "train"  # which it must have: `problems` raises
        return True

    @override
    def size(self, split: Split) -> int | None:
        selected = split == "train" and self.domain.difficulty is not None
        return None if selected else self.task.size(split)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return self._named(self.task.examples(count))

    @override
    def sampling(self, params: Params) -> Params:
        task_params: Any = self.task.sampling(params)
        stop = self.domain.stop
        if stop is None:
            stop = getattr(self.task, "stop", ()) or task_params.stop
        budget = min(task_params.max_tokens, self.domain.max_tokens or task_params.max_tokens)
        return replace(task_params, max_tokens=budget, stop=stop)

    # All else is as the task has it.
    check_demonstrations: ClassVar[Any] = property(attrgetter("task.check_demonstrations"))
    demonstration: ClassVar[Any] = property(attrgetter("task.demonstration"))
    sequential_demonstration: ClassVar[Any] = property(attrgetter("task.sequential_demonstration"))
    step_boundaries: ClassVar[Any] = property(attrgetter("task.step_boundaries"))
    answer_boundaries: ClassVar[Any] = property(attrgetter("task.answer_boundaries"))
    boundaries_look_back: ClassVar[Any] = property(attrgetter("task.boundaries_look_back"))
    alphabet: ClassVar[Any] = property(attrgetter("task.alphabet"))


class Weighting(Registrable):
    """A rule for how often each domain is drawn, given the domains' own weights and the numbers of their
    training problems."""

    def weight(self, base_weight: float, size: int) -> float:
        """Returns a domain's weight, for a rule that is the same in every iteration."""
        raise NotImplementedError

    def over_iterations(
        self, base_weights: Mapping[str, float], sizes: Mapping[str, int], drawing: Drawing
    ) -> Iterator[Mapping[str, float]]:
        """Yields the weights of every iteration from the first to the one that is drawn."""
        weights = {name: self.weight(base_weights[name], sizes[name]) for name in base_weights}
        return itertools.repeat(weights, drawing.iteration + 1)


@Weighting.register("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Weighting):
    """Takes the domains' own weights."""

    @override
    def weight(self, base_weight: float, size: int) -> float:
        return base_weight


@Weighting.register("proportional")
@dataclass(frozen=True, kw_only=True)
class Proportional(Weighting):
    """Multiplies the domains' own weights by how many problems they have: every problem is drawn as often as
    any other where the domains' own weights are equal."""

    @override
    def weight(self, base_weight: float, size: int) -> float:
        return base_weight * size


@Weighting.register("temperature")
@dataclass(frozen=True, kw_only=True)
class Temperature(Weighting):
    """Multiplies the domains' own weights by a root of their sizes (Raffel et al., arXiv:1910.10683, section
    3.5.2)."""

    temperature: Annotated[float, Gt(0)]
    """The degree of the root: 1 is proportional, and the larger, the more alike the weights are."""

    @override
    def weight(self, base_weight: float, size: int) -> float:
        return base_weight * size ** (1 / self.temperature)


LEARNABLE = "domains/{}/learnable"
"""The metric that the curriculum reads."""


@Weighting.register("curriculum")
@dataclass(frozen=True, kw_only=True)
class Curriculum(Weighting):
    """Draws more of the domains on which the policy is neither always right nor always wrong.

    The weight of a domain is its own one times ``floor + Q``. Q begins at 1; whenever the domain was drawn,
    it moves towards four times the mean over its problems of p (1 − p), p being the share of a problem's
    answers that were right (unbiased, from the metric ``domains/<name>/learnable``). It is 0 for problems
    that are always or never solved.

    p (1 − p) as what is to be learnt from a problem: Rutherford et al. (arXiv:2408.15099), and for language
    models Foster et al. (arXiv:2502.12272). A running mean by category: Chen et al. (arXiv:2505.14970), there
    of absolute advantages, and drawn from by a softmax.
    """

    rate: Annotated[float, Gt(0), Le(1)] = 0.5
    """The step of Q towards its newest measurement."""
    floor: Annotated[float, Gt(0)] = 0.1
    """The least factor of a domain's weight, so that it is drawn often enough to notice a change."""

    @override
    def over_iterations(
        self, base_weights: Mapping[str, float], sizes: Mapping[str, int], drawing: Drawing
    ) -> Iterator[Mapping[str, float]]:
        values = dict.fromkeys(base_weights, 1.0)
        for iteration in range(drawing.iteration + 1):
            if iteration:
                measured = drawing.recorded(iteration - 1)
                for name, value in values.items():
                    if (learnable := measured.get(LEARNABLE.format(name))) is not None:
                        values[name] = value + self.rate * (4 * learnable - value)
            yield {name: base_weights[name] * (self.floor + value) for name, value in values.items()}


FIXED = Fixed()


@Task.register("mixture")
@dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """A task of several domains, each with its own grader, step boundaries, prompts, stop strings, budget
    of tokens and selection by difficulty. Measurements are also given by domain (``domains/<name>/…``).

    A problem is called ``<domain>/<its id>``. A domain's draws derive from its name, the run's seed and the
    iteration: another domain beside it, or an interruption, changes neither which of its problems come first
    nor their answers. Validation and test are all problems of the domains that have such a split, one of each
    domain after the other.
    """

    domains: Annotated[Mapping[str, Domain], MinLen(1)] = field(hash=False)
    """The domains by their names."""
    weighting: Weighting = FIXED
    """How often each domain is drawn for training."""
    prefer_mixed: Annotated[float, Ge(1)] = 1.0
    """Draws a problem so many times as readily as others if some, but not all, of its answers were right when
    it was last asked."""

    def __post_init__(self) -> None:
        for name in self.domains:
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"domains has {name!r}, which is no name for a domain: use letters, digits, '_', '-', '.'"
                )
        if not any(domain.weight for domain in self.domains.values()):
            raise ValueError("all domains have the weight 0: give one of them a larger one")

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if not isinstance(self.weighting, Curriculum) and not self.remembers_pass_rates:
            return ()
        because = "it is drawn by how often the policy is right on a problem"
        return Need(SampledAnswers(), because), Need(Answers(2), because)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if self.remembers_pass_rates and experiment.problem_sampling == "epochs":
            yield Finding(
                "some problems are to be drawn more readily (prefer_mixed), and problem_sampling 'epochs'"
                " takes each once before any comes again",
                "prefer_mixed",
                "set it to 1, or problem_sampling to 'between_iterations'",
            )
        for name, domain in self.domains.items():
            if isinstance(domain.task, Mixture):
                yield Finding(
                    "a mixture can't be a domain of another one",
                    f"domains.{name}.task",
                    "name its domains beside the others",
                )
            sampling = experiment.rollout.sampling
            if domain.max_tokens is not None and sampling and domain.max_tokens > sampling.max_tokens:
                yield Finding(
                    f"answers may have {domain.max_tokens} tokens, and the rollout's max_tokens is"
                    f" {sampling.max_tokens}, which no domain goes beyond",
                    f"domains.{name}.max_tokens",
                    "lower it, or raise the rollout's",
                )

    @property
    @override
    def remembers_pass_rates(self) -> bool:
        return self.prefer_mixed > 1

    @cached_property
    def _tasks(self) -> Mapping[str, DomainTask]:
        return {name: DomainTask(name, self.domains[name]) for name in sorted(self.domains)}

    @cached_property
    @override
    def grader(self) -> Grader:  # type: ignore[override]
        return ByDomain(graders={name: task.grader for name, task in self._tasks.items()})

    @override
    def of(self, problem: Problem) -> Task:
        """Returns the problem's domain. Raises ValueError for a problem of none."""
        if problem.domain not in self._tasks:
            raise ValueError(
                f"problem {problem.id!r} is of domain {problem.domain!r}: the mixture has"
                f" {', '.join(self._tasks)}"
            )
        return self._tasks[problem.domain]

    @override
    def parts(self) -> Sequence[Task]:
        return tuple(self._tasks.values())

    @override
    def domain_names(self) -> Sequence[str]:
        return tuple(self._tasks)

    def _with(self, split: Split) -> list[DomainTask]:
        tasks = [task for task in self._tasks.values() if task.has(split)]
        if not tasks:
            raise NoSplit(f"no domain of the mixture has a {split} split: give it to one of them")
        return tasks

    @cached_property
    def _read(self) -> dict[Split, Sequence[Problem]]:
        return {}

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in self._read:
            pools: dict[str, Sequence[Problem]] = {}
            for task in self._with(split):
                try:
                    pools[task.name] = task.problems(split)
                except ValueError as error:
                    raise ValueError(f"domain {task.name!r}: {error}") from error
            self._read[split] = tuple(interleaved(pools, dict.fromkeys(pools, 1.0)))
        return self._read[split]

    @override
    def size(self, split: Split) -> int | None:
        sizes = [task.size(split) for task in self._with(split)]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return interleaved({name: task.examples(count) for name, task in self._tasks.items()})[:count]

    @override
    def check_demonstrations(self) -> None:
        for task in self._with("train"):
            task.check_demonstrations()

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).demonstration(problem, seed)

    @override
    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).sequential_demonstration(problem, seed)

    @override
    def step_boundaries(self, response: str) -> list[int]:
        raise ValueError("steps are a domain's: ask the task of a problem (`of`) for them")

    @property
    @override
    def boundaries_look_back(self) -> bool:
        return all(task.boundaries_look_back for task in self.parts())

    @override
    def alphabet(self) -> str:
        return "".join(sorted({character for task in self.parts() for character in task.alphabet()}))

    @override
    def draw(self, problems: Sequence[Problem], count: int, drawing: Drawing) -> list[Problem]:
        pools = _by_domain(problems)
        sizes = {name: len(pool) for name, pool in pools.items()}
        counts: list[Mapping[str, int]] = []
        for iteration, weights in enumerate(self._weights(sizes, drawing)):
            # Where every iteration draws anew, the counts of earlier ones don't matter.
            if drawing.replacement == "epochs" or iteration == drawing.iteration:
                seats = derived_random(drawing.seed, iteration, "problems of each domain")
                counts.append(shares(weights, sizes, count, seats))
        last_rates: dict[str, float] = {}
        for iteration in range(drawing.iteration) if self.remembers_pass_rates else ():
            last_rates |= drawing.pass_rates(iteration)
        mixed = {id for id, rate in last_rates.items() if 0 < rate < 1}
        chosen = {}
        for name, pool in pools.items():
            counts_so_far = [counts_of_iteration[name] for counts_of_iteration in counts]
            if any(problem.id in mixed for problem in pool):
                readily = [self.prefer_mixed if problem.id in mixed else 1.0 for problem in pool]
                generator = derived_random(drawing.seed, drawing.iteration, "preferred problems", name)
                indices = by_preference(readily, generator)[: counts_so_far[-1]]
            else:
                indices = drawn(len(pool), counts_so_far, name, drawing)
            chosen[name] = [pool[index] for index in indices]
        return interleaved(chosen)

    @override
    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: Drawing
    ) -> list[Problem]:
        ids = {problem.id for problem in taken}
        pools = _by_domain(problems)
        *_, weights = self._weights({name: len(pool) for name, pool in pools.items()}, drawing)
        rest = {name: [problem for problem in pool if problem.id not in ids] for name, pool in pools.items()}
        for name, pool in rest.items():
            derived_random(drawing.seed, drawing.iteration, "further problems", name).shuffle(pool)
        return interleaved(rest, weights)

    @override
    def drawing_metrics(self, problems: Sequence[Problem], drawing: Drawing) -> Metrics:
        """Returns ``domains/<name>/weight``: the share of the iteration's problems that the weights ask
        for."""
        sizes = {name: len(pool) for name, pool in _by_domain(problems).items()}
        *_, weights = self._weights(sizes, drawing)
        total = math.fsum(weights.values())
        return {f"domains/{name}/weight": weight / total for name, weight in weights.items()}

    def _weights(self, sizes: Mapping[str, int], drawing: Drawing) -> Iterable[Mapping[str, float]]:
        base_weights = {name: self.domains[name].weight for name in sizes}
        return self.weighting.over_iterations(base_weights, sizes, drawing)


def _by_domain(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Returns the problems of each domain, in the order of the names."""
    pools: dict[str, list[Problem]] = {}
    for problem in problems:
        pools.setdefault(problem.domain, []).append(problem)
    return dict(sorted(pools.items()))


def shares(
    weights: Mapping[str, float], sizes: Mapping[str, int], count: int, generator: random.Random
) -> dict[str, int]:
    """Returns how many of `count` problems each domain gives, on average in proportion to the weights.

    Whole parts of ``count * weight`` are given; what is left goes to domains by chance, each with the
    probability of its remainder, so that a small one has its share over many iterations. A domain that is
    asked for more than it has gives all, and the others the rest. Raises ValueError where all together have
    too few.
    """
    seats_of = dict.fromkeys(weights, 0)
    open_domains, free_seats = sorted(name for name, weight in weights.items() if weight > 0), count
    # A domain that is asked for all that it has is full, and the others share its surplus: until none is.
    while full := [
        name for name in open_domains if _quota(name, open_domains, weights, free_seats) >= sizes[name]
    ]:
        for name in full:
            seats_of[name] = sizes[name]
            free_seats -= sizes[name]
        open_domains = [name for name in open_domains if name not in full]
    if not open_domains:
        if free_seats:
            raise ValueError(
                f"problems_per_iteration is {count}, and the domains of the mixture have"
                f" {count - free_seats} problems: choose at most so many"
            )
        return seats_of
    # Systematic sampling: the remainders are laid end to end on a line, and points at a distance of 1 are put
    # over it, the first one at random. A domain gets a seat for a point in its remainder.
    point, laid = generator.random(), 0.0
    quotas = {name: _quota(name, open_domains, weights, free_seats) for name in open_domains}
    remaining_seats = free_seats - sum(math.floor(quota) for quota in quotas.values())
    for name, quota in quotas.items():
        seats_of[name] = math.floor(quota)
        laid += quota - math.floor(quota)
        if remaining_seats and (laid > point or (remaining_seats == 1 and name == open_domains[-1])):
            seats_of[name] += 1
            remaining_seats -= 1
            point += 1
    return seats_of


def _quota(name: str, open_: Sequence[str], weights: Mapping[str, float], count: int) -> float:
    """Returns a domain's share of `count`, rounded, so that a whole number of problems is one."""
    return round(count * weights[name] / math.fsum(weights[other] for other in open_), 9)


def drawn(size: int, counts: Sequence[int], name: str, drawing: Drawing) -> list[int]:
    """Returns the indices of a domain's problems in the iteration, given its `counts` in each one so far.

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
    """Returns all indices, in the order of draws without replacement in which each is drawn in proportion to
    its weight (Efraimidis and Spirakis, 2006)."""
    keys = [generator.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(weights)), key=lambda index: -keys[index])


def first_of_shuffle(size: int, count: int, generator: random.Random) -> Iterator[int]:
    """Yields the first `count` indices of a shuffle of `size`; a larger `count` begins with the same."""
    moved: dict[int, int] = {}
    for index in range(count):
        other = index + generator.randrange(size - index)
        yield moved.get(other, other)
        moved[other] = moved.get(index, index)


def interleaved(queues: Mapping[str, Sequence[T]], weights: Mapping[str, float] | None = None) -> list[T]:
    """Returns the items of all queues, each queue in its order, mixed evenly.

    With weights, the first ones are in proportion to these. Without, the queues "ab" and "xyzu" give
    x, a, y, z, b, u.
    """
    placed: list[tuple[float, str, int]] = []
    for name, queue in queues.items():
        # Item i of n stands in the middle of the i-th of n equal parts of the result.
        density = len(queue) if weights is None else weights[name]
        placed += [((index + 0.5) / density, name, index) for index in range(len(queue))]
    return [queues[name][index] for _, name, index in sorted(placed)]
