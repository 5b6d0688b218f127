"""Mixtures: a task that consists of several tasks, its domains, and the rules by which their problems are
drawn."""

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
from treetune.contracts import Answers, Feature, Finding, Need, Part, SampledAnswers, TaskDemonstrations
from treetune.domains.environments.base import Environment, environment_of
from treetune.domains.graders.routed import ByDomain
from treetune.exceptions import NoSplit
from treetune.seeds import derived_random
from treetune.tasks.base import Params, Split, Task
from treetune.tasks.drawing import DrawingContext, DrawingRule, slice_of_epochs
from treetune.tasks.graders.base import Grader
from treetune.tasks.mixed import MixedTask
from treetune.vocabulary import Metrics, Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Difficulty(Part):
    """A selection of training problems that are neither too easy nor too hard.

    It keeps problems with a number strictly between two bounds, such as a pass rate between 0.1 and 0.9. A
    problem without the number raises ValueError when it is read.
    """

    field: Annotated[str, MinLen(1)]
    """The key of the number in `Problem.data`."""
    above: float | None = None
    """The lower bound; null: none."""
    below: float | None = None
    """The upper bound; null: none."""

    def __post_init__(self) -> None:
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(
                f"above is {self.above:g} and below is {self.below:g}, which leaves no problem: above has to"
                " be smaller"
            )

    def keeps(self, problem: Problem) -> bool:
        # A task that reads rows from files puts the columns into `data` that its setting `keep` names.
        value = problem.data.get(self.field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"problem {problem.id!r} has no number {self.field!r} to choose it by (it has"
                f" {', '.join(map(repr, problem.data)) or 'nothing'}): name another field, or let the task"
                " keep the row's"
            )
        is_above = self.above is None or value > self.above
        is_below = self.below is None or value < self.below
        return is_above and is_below


@dataclass(frozen=True, kw_only=True)
class Domain(Part):
    """A task of a mixture, with its weight and its settings in the mixture."""

    task: Task
    weight: Annotated[float, Ge(0)] = 1.0
    """The weight with which its problems are drawn for training, relative to other domains (see the mixture's
    `weighting`). A domain of weight 0 is never trained, only measured."""
    stop: tuple[str, ...] | None = None
    """The strings that end its answers; null: the task's own `stop`, or if the task has none, the
    rollout's."""
    max_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens of its answers. The limits of the rollout and of evaluation sets apply, too."""
    difficulty: Difficulty | None = None
    """Selects training problems. Evaluation uses all problems."""

    def __post_init__(self) -> None:
        if self.stop and "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")


@dataclass(frozen=True)
class DomainTask(Task):
    """A task with the name, ids, stop strings and limit of tokens that it has as a domain of a mixture."""

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

    @property
    def is_trained(self) -> bool:
        """Whether training draws problems of the domain. A domain of weight 0 is only measured."""
        return self.domain.weight > 0

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        problems, difficulty = self.task.problems(split), self.domain.difficulty
        if split == "train" and difficulty is not None:
            problems = [problem for problem in problems if difficulty.keeps(problem)]
            if not problems:
                raise ValueError("no training problem is of that difficulty: widen its bounds")
        return self._name_domain(problems)

    def _name_domain(self, problems: Sequence[Problem]) -> list[Problem]:
        return [replace(problem, id=f"{self.name}/{problem.id}", domain=self.name) for problem in problems]

    def has(self, split: Split) -> bool:
        """Returns whether the mixture's split contains problems of this domain."""
        if split == "train" and not self.is_trained:
            return False
        try:
            self.task.size(split)
        except NoSplit:
            # Every trained domain needs a train split. If it is missing, the result is True nevertheless, so
            # that `problems` raises with a message.
            return split == "train"
        return True

    @override
    def size(self, split: Split) -> int | None:
        # The number of problems of the chosen difficulty is known only after all have been read.
        is_selected = split == "train" and self.domain.difficulty is not None
        return None if is_selected else self.task.size(split)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return self._name_domain(self.task.examples(count))

    @override
    def adjust_sampling(self, params: Params) -> Params:
        task_params: Any = self.task.adjust_sampling(params)  # `SamplingParams`, which tasks don't import
        stop = self.domain.stop
        if stop is None:
            # The domain sets no stop strings. Some tasks have a setting `stop` for use in a mixture. If it is
            # missing or empty, the sampling's stop strings remain.
            stop = getattr(self.task, "stop", ()) or task_params.stop
        max_tokens = task_params.max_tokens
        if self.domain.max_tokens is not None:
            max_tokens = min(max_tokens, self.domain.max_tokens)
        return replace(task_params, max_tokens=max_tokens, stop=stop)

    # Everything else is passed on to the task.
    gives: ClassVar[Any] = property(attrgetter("task.gives"))
    demonstration: ClassVar[Any] = property(attrgetter("task.demonstration"))
    sequential_demonstration: ClassVar[Any] = property(attrgetter("task.sequential_demonstration"))
    step_boundaries: ClassVar[Any] = property(attrgetter("task.step_boundaries"))
    boundaries_look_back: ClassVar[Any] = property(attrgetter("task.boundaries_look_back"))
    alphabet: ClassVar[Any] = property(attrgetter("task.alphabet"))


class Weighting(Registrable):
    """A rule for how often each domain is drawn, from the domains' own weights and the numbers of their
    training problems.

    A rule that is the same in every iteration overrides `weight`, and any other rule `over_iterations`.
    """

    def weight(self, base_weight: float, size: int) -> float:
        """Returns a domain's weight, for a rule that is the same in every iteration."""
        raise NotImplementedError

    def over_iterations(
        self, base_weights: Mapping[str, float], sizes: Mapping[str, int], drawing: DrawingContext
    ) -> Iterator[Mapping[str, float]]:
        """Yields the domains' weights in each iteration, from the first to the one that is drawn now. (With
        epochs, a draw depends on how many problems the earlier iterations have taken.)"""
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
    """Multiplies the domains' own weights by the numbers of their problems. If the domains' own weights are
    equal, every problem is drawn equally often."""

    @override
    def weight(self, base_weight: float, size: int) -> float:
        return base_weight * size


@Weighting.register("temperature")
@dataclass(frozen=True, kw_only=True)
class Temperature(Weighting):
    """Multiplies the domains' own weights by a root of their sizes (Raffel et al., arXiv:1910.10683, section
    3.5.2)."""

    temperature: Annotated[float, Gt(0)]
    """The degree of the root. 1 is ``proportional``, and larger degrees make the weights more equal."""

    @override
    def weight(self, base_weight: float, size: int) -> float:
        return base_weight * size ** (1 / self.temperature)


LEARNABLE_METRIC = "domains/{}/learnable"
"""The metric that the curriculum reads, with the domain's name in place of ``{}``."""


@Weighting.register("curriculum")
@dataclass(frozen=True, kw_only=True)
class Curriculum(Weighting):
    """Draws more problems of the domains on which the policy is neither always right nor always wrong.

    A domain's weight is multiplied by ``floor + Q``. Q begins at 1. After each iteration in which the domain
    was drawn, Q moves towards four times the mean of p (1 − p) over its problems, where p is the share of
    right answers to a problem (unbiased, from the metric ``domains/<name>/learnable``). p (1 − p) is 0 for
    problems that are always or never solved.

    Rutherford et al. (arXiv:2408.15099) use p (1 − p) as a measure of what a problem teaches, and Foster et
    al. (arXiv:2502.12272) do so for language models. Chen et al. (arXiv:2505.14970) also use a running mean
    for each category of problems, but of absolute advantages, and turn the means into weights by a softmax.
    """

    rate: Annotated[float, Gt(0), Le(1)] = 0.5
    """The step size with which Q moves towards a new measurement."""
    floor: Annotated[float, Gt(0)] = 0.1
    """The smallest factor of a domain's weight, so that it is still drawn and measured sometimes."""

    @override
    def over_iterations(
        self, base_weights: Mapping[str, float], sizes: Mapping[str, int], drawing: DrawingContext
    ) -> Iterator[Mapping[str, float]]:
        # For each domain, a running estimate of how much it teaches (Q in the class's docstring).
        estimates = dict.fromkeys(base_weights, 1.0)
        for iteration in range(drawing.iteration + 1):
            if iteration > 0:  # before the first iteration, nothing has been measured
                measured = drawing.recorded(iteration - 1)
                for name, estimate in estimates.items():
                    learnable = measured.get(LEARNABLE_METRIC.format(name))
                    if learnable is not None:  # the domain was drawn
                        # `learnable` estimates the domain's mean of p (1 - p), where p is the share of
                        # right answers to a problem. The mean is at most 1/4, so four times the mean is
                        # at most 1.
                        estimates[name] = estimate + self.rate * (4 * learnable - estimate)
            yield {name: base_weights[name] * (self.floor + estimate) for name, estimate in estimates.items()}


FIXED = Fixed()


@Task.register("mixture")
@dataclass(frozen=True, kw_only=True)
class Mixture(MixedTask):
    """A task of several domains, each with its own grader, step boundaries, prompts, stop strings, budget of
    tokens and selection by difficulty. Metrics are also given for each domain (``domains/<name>/…``).

    The id of a problem is ``<domain>/<its id>``. The draws of a domain derive from its name, the run's seed
    and the iteration. So neither another domain nor an interruption changes the order of its problems or
    their answers. The validation and test splits have all problems of the domains that have such a split,
    evenly mixed.
    """

    domains: Annotated[Mapping[str, Domain], MinLen(1)] = field(hash=False)
    """The domains by their names."""
    weighting: Weighting = FIXED
    """The rule for how often each domain is drawn for training."""
    prefer_mixed: Annotated[float, Ge(1)] = 1.0
    """The weight of a problem of which some, but not all, answers were right when it was last drawn. Other
    problems have the weight 1."""

    def __post_init__(self) -> None:
        for name in self.domains:
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"domains has {name!r}, which is not a valid name: use letters, digits, '_', '-', '.'"
                )
        if not any(domain.weight for domain in self.domains.values()):
            raise ValueError("all domains have the weight 0: give one of them a larger one")

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        """Returns `TaskDemonstrations`. If some trained domains have no demonstrations, its `why_none` names
        the first of these domains."""
        for task in self.trained_parts():
            demonstrations = [feature for feature in task.gives if isinstance(feature, TaskDemonstrations)]
            if not demonstrations:
                return (TaskDemonstrations(f"the domain {task.name!r} has none"),)
            if demonstrations[0].why_none:
                return (TaskDemonstrations(f"domain {task.name!r}: {demonstrations[0].why_none}"),)
        return (TaskDemonstrations(),)

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if not isinstance(self.weighting, Curriculum) and self.prefer_mixed == 1:
            return ()
        # With a single answer to each problem, the share of right ones would be 0 or 1: no problem would be
        # mixed, or learnable.
        because = "it is drawn by how often the policy is right on a problem"
        return Need(SampledAnswers(), because), Need(Answers(2), because)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if self.prefer_mixed > 1 and experiment.problem_sampling == "epochs":
            yield Finding(
                "prefer_mixed draws some problems more often, and problem_sampling 'epochs' draws each"
                " problem equally often",
                "prefer_mixed",
                "set it to 1, or problem_sampling to 'between_iterations'",
            )
        for name, domain in self.domains.items():
            if isinstance(domain.task, Mixture):
                yield Finding(
                    "a mixture can't be a domain of another one",
                    f"domains.{name}.task",
                    "add its domains to this mixture's",
                )
            sampling = experiment.rollout.sampling
            if domain.max_tokens is not None and sampling and domain.max_tokens > sampling.max_tokens:
                yield Finding(
                    f"max_tokens of the domain is {domain.max_tokens}, and exceeds the rollout's, which is"
                    f" {sampling.max_tokens} and applies to all domains",
                    f"domains.{name}.max_tokens",
                    "lower it, or raise the rollout's",
                )

    @cached_property
    def _tasks(self) -> Mapping[str, DomainTask]:
        return {name: DomainTask(name, self.domains[name]) for name in sorted(self.domains)}

    @cached_property
    @override
    def grader(self) -> Grader:  # type: ignore[override]
        return ByDomain(graders={name: task.grader for name, task in self._tasks.items()})

    @override
    def of(self, problem: Problem) -> Task:
        """Returns the problem's domain. Raises ValueError for a problem of another task."""
        if problem.domain not in self._tasks:
            raise ValueError(
                f"problem {problem.id!r} is of domain {problem.domain!r}: the mixture has"
                f" {', '.join(self._tasks)}"
            )
        return self._tasks[problem.domain]

    @override
    def parts(self) -> Sequence[DomainTask]:
        return tuple(self._tasks.values())

    @override
    def trained_parts(self) -> Sequence[DomainTask]:
        return tuple(task for task in self._tasks.values() if task.is_trained)

    @override
    def domain_names(self) -> Sequence[str]:
        return tuple(self._tasks)

    def _tasks_with(self, split: Split) -> list[DomainTask]:
        """Returns the domains that have a split. Raises NoSplit if there are none."""
        tasks = [task for task in self._tasks.values() if task.has(split)]
        if not tasks:
            raise NoSplit(f"no domain of the mixture has a {split} split: give it to one of them")
        return tasks

    @cached_property
    def _problems_by_split(self) -> dict[Split, Sequence[Problem]]:
        """The problems of the splits that have been read."""
        return {}

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in self._problems_by_split:
            pools: dict[str, Sequence[Problem]] = {}
            for task in self._tasks_with(split):
                try:
                    pools[task.name] = task.problems(split)
                except ValueError as error:
                    raise ValueError(f"domain {task.name!r}: {error}") from error
            # With equal weights, the domains take turns: one problem of each, until a domain has no more.
            equal_weights = dict.fromkeys(pools, 1.0)
            self._problems_by_split[split] = tuple(interleave(pools, equal_weights))
        return self._problems_by_split[split]

    @override
    def size(self, split: Split) -> int | None:
        total = 0
        for task in self._tasks_with(split):
            size = task.size(split)
            if size is None:
                return None
            total += size
        return total

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return interleave({name: task.examples(count) for name, task in self._tasks.items()})[:count]

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).demonstration(problem, seed)

    @override
    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).sequential_demonstration(problem, seed)

    @override
    def step_boundaries(self, response: str) -> list[int]:
        raise ValueError("a mixture has no steps: ask the task of a problem (`task_of`) for them")

    @property
    @override
    def boundaries_look_back(self) -> bool:
        return all(task.boundaries_look_back for task in self.parts())

    @override
    def alphabet(self) -> str:
        characters: set[str] = set()
        for task in self.parts():
            characters |= set(task.alphabet())
        return "".join(sorted(characters))

    @override
    def drawing_rule(self) -> DrawingRule:
        base_weights = {name: domain.weight for name, domain in self.domains.items()}
        return MixtureDrawing(base_weights, self.weighting, self.prefer_mixed)


@dataclass(frozen=True)
class MixtureDrawing(DrawingRule):
    """Draws as many problems of each domain as its weight asks for."""

    base_weights: Mapping[str, float]
    """The domains' own weights."""
    weighting: Weighting
    prefer_mixed: float
    """`Mixture.prefer_mixed`."""

    @property
    @override
    def reads_pass_rates(self) -> bool:  # type: ignore[override]
        return self.prefer_mixed > 1

    @override
    def draw(self, problems: Sequence[Problem], count: int, drawing: DrawingContext) -> list[Problem]:
        """Returns `count` problems, as many of each domain as its weight asks for, evenly mixed."""
        pools = _group_by_domain(problems)
        sizes = {name: len(pool) for name, pool in pools.items()}
        counts: list[Mapping[str, int]] = []  # for each iteration up to this one
        for iteration, weights in enumerate(self._weights(sizes, drawing)):
            # Only epochs depend on the counts of earlier iterations.
            if drawing.replacement == "epochs" or iteration == drawing.iteration:
                generator = derived_random(drawing.seed, iteration, "problems of each domain")
                counts.append(allocate_problems(weights, sizes, count, generator))
        # A problem is mixed if some, but not all, of its answers were right when it was last drawn.
        # `prefer_mixed` is the weight of such a problem in the draw; any other problem has the weight 1.
        mixed_ids = self._ids_of_mixed_problems(drawing)
        chosen = {}
        for name, pool in pools.items():
            counts_of_domain = [counts_of_iteration[name] for counts_of_iteration in counts]
            # Without a problem to prefer, the draw is the same as without `prefer_mixed`.
            if any(problem.id in mixed_ids for problem in pool):
                preferences = [self.prefer_mixed if problem.id in mixed_ids else 1.0 for problem in pool]
                generator = derived_random(drawing.seed, drawing.iteration, "preferred problems", name)
                indices = order_by_preference(preferences, generator)[: counts_of_domain[-1]]
            else:
                indices = draw_indices(len(pool), counts_of_domain, name, drawing)
            chosen[name] = [pool[index] for index in indices]
        return interleave(chosen)

    def _ids_of_mixed_problems(self, drawing: DrawingContext) -> set[str]:
        """Returns the ids of the problems of which some, but not all, answers were right when they were last
        drawn."""
        if self.prefer_mixed <= 1:
            return set()  # no problem is preferred, so the ids wouldn't be used
        last_rates: dict[str, float] = {}
        for iteration in range(drawing.iteration):
            last_rates |= drawing.pass_rates(iteration)
        return {id for id, rate in last_rates.items() if 0 < rate < 1}

    @override
    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: DrawingContext
    ) -> list[Problem]:
        """Returns all problems that haven't been taken, in the order in which they are to be added."""
        taken_ids = {problem.id for problem in taken}
        pools = _group_by_domain(problems)
        sizes = {name: len(pool) for name, pool in pools.items()}
        *_, weights = self._weights(sizes, drawing)  # the weights of the last iteration, the present one
        remaining: dict[str, list[Problem]] = {}
        for name, pool in pools.items():
            remaining[name] = [problem for problem in pool if problem.id not in taken_ids]
            derived_random(drawing.seed, drawing.iteration, "further problems", name).shuffle(remaining[name])
        return interleave(remaining, weights)

    @override
    def metrics(self, problems: Sequence[Problem], drawing: DrawingContext) -> Metrics:
        """Returns ``domains/<name>/weight``: each domain's share of the sum of all weights."""
        sizes = {name: len(pool) for name, pool in _group_by_domain(problems).items()}
        *_, weights = self._weights(sizes, drawing)  # the weights of the last iteration, the present one
        total = math.fsum(weights.values())
        return {f"domains/{name}/weight": weight / total for name, weight in weights.items()}

    def _weights(self, sizes: Mapping[str, int], drawing: DrawingContext) -> Iterable[Mapping[str, float]]:
        base_weights = {name: self.base_weights[name] for name in sizes}
        return self.weighting.over_iterations(base_weights, sizes, drawing)


def _group_by_domain(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Returns the problems of each domain, in the order of the names."""
    pools: dict[str, list[Problem]] = {}
    for problem in problems:
        pools.setdefault(problem.domain, []).append(problem)
    return dict(sorted(pools.items()))


def allocate_problems(
    weights: Mapping[str, float], sizes: Mapping[str, int], count: int, generator: random.Random
) -> dict[str, int]:
    """Returns how many of `count` problems each domain gives, on average in proportion to the weights.

    Each domain gives the whole part of its quota. The problems that are still missing come from domains by
    chance: a domain gives one more with a probability that is the fractional part of its quota. So a small
    domain gets its share over many iterations. A domain whose quota exceeds its size gives all its problems,
    and the others give more. Raises ValueError if all domains together have too few problems.

    Example: for 10 problems and the weights 1 and 2, the quotas are 3.33 and 6.67. The domains give 3 and 6
    problems, and the tenth comes from the second domain with probability 2/3.
    """
    allocated = dict.fromkeys(weights, 0)
    names = sorted(name for name, weight in weights.items() if weight > 0)
    left_to_allocate = count
    # A domain with too few problems gives all of them. This raises the quotas of the others, so repeat.
    while True:
        quotas = _quotas(names, weights, left_to_allocate)
        exhausted = [name for name in names if quotas[name] >= sizes[name]]
        if not exhausted:  # also if no domain is left
            break
        for name in exhausted:
            allocated[name] = sizes[name]
            left_to_allocate -= sizes[name]
        names = [name for name in names if name not in exhausted]
    if not names:
        if left_to_allocate:
            raise ValueError(
                f"problems_per_iteration is {count}, and the domains of the mixture have"
                f" {count - left_to_allocate} problems: choose at most so many"
            )
        return allocated
    # Systematic sampling: the fractional parts of the quotas (the remainders) are put end to end on a line.
    # Points are put on the line at a distance of 1 from each other, the first of them at random. A domain
    # gives one problem more if there is a point in its remainder.
    point = generator.random()
    end_of_remainder = 0.0
    missing = left_to_allocate - sum(math.floor(quota) for quota in quotas.values())
    for name, quota in quotas.items():
        allocated[name] = math.floor(quota)
        end_of_remainder += quota - math.floor(quota)
        # The last domain gives the last problem even if rounding has moved the line's end before the point.
        is_last_chance = missing == 1 and name == names[-1]
        if missing and (end_of_remainder > point or is_last_chance):
            allocated[name] += 1
            missing -= 1
            point += 1
    return allocated


def _quotas(names: Sequence[str], weights: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns each domain's share of `count`. It is rounded to 9 digits, so that rounding errors don't turn
    a whole number of problems, 3, into 2.9999…, whose whole part is 2."""
    total = math.fsum(weights[name] for name in names)
    return {name: round(count * weights[name] / total, 9) for name in names}


def draw_indices(size: int, counts: Sequence[int], name: str, drawing: DrawingContext) -> list[int]:
    """Returns the indices of a domain's problems in this iteration.

    Seeds derive from the domain's name, so the result doesn't depend on other domains. If more problems are
    drawn, the first ones stay the same.

    Args:
        size: The domain's number of problems.
        counts: How many problems the domain gives in each iteration, up to this one.
        name: The domain's name.
        drawing: The iteration, the run's seed, and the rule of replacement.
    """
    if drawing.replacement == "epochs":
        return slice_of_epochs(
            size, counts, lambda epoch: derived_random(drawing.seed, epoch, "problems of an epoch", name)
        )
    generator = derived_random(drawing.seed, drawing.iteration, "problems", name)
    return list(first_of_shuffle(size, counts[-1], generator))


def order_by_preference(weights: Sequence[float], generator: random.Random) -> list[int]:
    """Returns the indices of all weights in the order of a draw without replacement, in which each index is
    drawn with a probability in proportion to its weight (Efraimidis and Spirakis, 2006)."""
    keys = [generator.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(weights)), key=lambda index: -keys[index])


def first_of_shuffle(size: int, count: int, generator: random.Random) -> Iterator[int]:
    """Yields the first `count` indices of a shuffle of ``range(size)``.

    With an equally seeded generator, a larger `count` yields these indices first, and then others.

    This is the shuffle of Fisher and Yates, of which only the moved elements are stored.
    """
    element_at: dict[int, int] = {}  # the element at a position, if it isn't the position itself
    for position in range(count):
        swapped_position = position + generator.randrange(size - position)
        yield element_at.get(swapped_position, swapped_position)
        element_at[swapped_position] = element_at.get(position, position)


def interleave(queues: Mapping[str, Sequence[T]], weights: Mapping[str, float] | None = None) -> list[T]:
    """Returns the items of all queues, evenly mixed. Each queue keeps its order.

    Example: the queues "ab" and "xyzu" give x, a, y, z, b, u. The first items of the result come from the
    queues about in proportion to the weights; without weights, in proportion to the queues' lengths.
    """
    positions: list[tuple[float, str, int]] = []
    for name, queue in queues.items():
        # All items are sorted by a position on a line. A queue of density d has d items on a stretch of
        # length 1, in the middles of d equal parts. Without weights, each queue fills this stretch exactly.
        density = len(queue) if weights is None else weights[name]
        positions += [((index + 0.5) / density, name, index) for index in range(len(queue))]
    return [queues[name][index] for _, name, index in sorted(positions)]
