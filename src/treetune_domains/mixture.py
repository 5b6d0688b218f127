"""Several tasks as the domains of one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from treetune.contracts import Answers, Finding, Need, SampledAnswers
from treetune.seeds import derived_random
from treetune.tasks.base import NoSplit, Split, Task
from treetune.tasks.drawing import Drawing, by_preference, drawn, interleaved, shares
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Metrics, Problem
from treetune_domains.domain import Domain, DomainTask
from treetune_domains.graders.routed import ByDomain
from treetune_domains.weighting import Curriculum, Fixed, Weighting

FIXED = Fixed()


@Task.register("mixture")
@dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """One task of several `domains`, each with its own grader, step boundaries, prompts, stop strings, budget
    of tokens and selection by difficulty. What is measured is also told by domain (``domains/<name>/…``).

    A problem is called ``<domain>/<its id>``. `weighting` says how often each domain is drawn for training. A
    domain's draws derive from its name, the run's seed and the iteration: another domain beside it, or an
    interruption, changes neither which of its problems come first nor their answers. Validation and test are
    all problems of the domains that have such a split, one of each domain after the other.

    `prefer_mixed` draws a problem so many times as readily as others if some, but not all, of its answers
    were right when it was last asked.
    """

    domains: Annotated[Mapping[str, Domain], MinLen(1)] = field(hash=False)
    weighting: Weighting = FIXED
    prefer_mixed: Annotated[float, Ge(1)] = 1.0

    def __post_init__(self) -> None:
        for name in self.domains:
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"domains has {name!r}, which is no name for a domain: use letters, digits, '_', '-', '.'"
                )
        if not any(domain.weight for domain in self.domains.values()):
            raise ValueError("all domains have the weight 0: give one of them a larger one")

    @property
    def needs(self) -> tuple[Need, ...]:
        if not isinstance(self.weighting, Curriculum) and not self.remembers_pass_rates:
            return ()
        because = "it is drawn by how often the policy is right on a problem"
        return Need(SampledAnswers(), because), Need(Answers(2), because)

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
    def remembers_pass_rates(self) -> bool:
        return self.prefer_mixed > 1

    @cached_property
    def _tasks(self) -> Mapping[str, DomainTask]:
        return {name: DomainTask(name, self.domains[name]) for name in sorted(self.domains)}

    @cached_property
    def grader(self) -> Grader:  # type: ignore[override]
        return ByDomain(graders={name: task.grader for name, task in self._tasks.items()})

    def of(self, problem: Problem) -> Task:
        """Raises ValueError for a problem of no domain."""
        if problem.domain not in self._tasks:
            raise ValueError(
                f"problem {problem.id!r} is of domain {problem.domain!r}: the mixture has"
                f" {', '.join(self._tasks)}"
            )
        return self._tasks[problem.domain]

    def parts(self) -> Sequence[Task]:
        return tuple(self._tasks.values())

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

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in self._read:
            found: dict[str, Sequence[Problem]] = {}
            for task in self._with(split):
                try:
                    found[task.name] = task.problems(split)
                except ValueError as error:
                    raise ValueError(f"domain {task.name!r}: {error}") from error
            self._read[split] = tuple(interleaved(found, dict.fromkeys(found, 1.0)))
        return self._read[split]

    def size(self, split: Split) -> int | None:
        total = 0
        for task in self._with(split):
            own = task.size(split)
            if own is None:
                return None
            total += own
        return total

    def missing(self) -> Sequence[str]:
        return list(dict.fromkeys(name for task in self._tasks.values() for name in task.missing()))

    def examples(self, count: int) -> Sequence[Problem]:
        return interleaved({name: task.examples(count) for name, task in self._tasks.items()})[:count]

    def check_demonstrations(self) -> None:
        for task in self._with("train"):
            task.check_demonstrations()

    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).demonstration(problem, seed)

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return self.of(problem).sequential_demonstration(problem, seed)

    def step_boundaries(self, response: str) -> list[int]:
        raise ValueError("steps are a domain's: ask the task of a problem (`of`) for them")

    def alphabet(self) -> str:
        return "".join(sorted({character for task in self.parts() for character in task.alphabet()}))

    def draw(self, problems: Sequence[Problem], count: int, drawing: Drawing) -> list[Problem]:
        pools = _by_domain(problems)
        sizes = {name: len(pool) for name, pool in pools.items()}
        counts: list[Mapping[str, int]] = []
        for iteration, weights in enumerate(self._weights(sizes, drawing)):
            # Where every iteration draws anew, what earlier ones drew is nobody's matter.
            if drawing.replacement == "epochs" or iteration == drawing.iteration:
                seats = derived_random(drawing.seed, iteration, "problems of each domain")
                counts.append(shares(weights, sizes, count, seats))
        mixed = self._mixed(drawing) if self.remembers_pass_rates else set()
        chosen = {}
        for name, pool in pools.items():
            own = [one[name] for one in counts]
            if any(problem.id in mixed for problem in pool):
                readily = [self.prefer_mixed if problem.id in mixed else 1.0 for problem in pool]
                generator = derived_random(drawing.seed, drawing.iteration, "preferred problems", name)
                places = by_preference(readily, generator)[: own[-1]]
            else:
                places = drawn(len(pool), own, name, drawing)
            chosen[name] = [pool[place] for place in places]
        return interleaved(chosen)

    def _mixed(self, drawing: Drawing) -> set[str]:
        """The ids of problems that were last answered right in part."""
        latest: dict[str, float] = {}
        for iteration in range(drawing.iteration):
            latest |= drawing.pass_rates(iteration)
        return {id for id, rate in latest.items() if 0 < rate < 1}

    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: Drawing
    ) -> list[Problem]:
        ids = {problem.id for problem in taken}
        pools = _by_domain(problems)
        *_, weights = self._weights({name: len(pool) for name, pool in pools.items()}, drawing)
        rest = {name: [one for one in pool if one.id not in ids] for name, pool in pools.items()}
        for name, pool in rest.items():
            derived_random(drawing.seed, drawing.iteration, "further problems", name).shuffle(pool)
        return interleaved(rest, weights)

    def drawing_metrics(self, problems: Sequence[Problem], drawing: Drawing) -> Metrics:
        """``domains/<name>/weight``: the share of the iteration's problems that the weights ask for."""
        sizes = {name: len(pool) for name, pool in _by_domain(problems).items()}
        *_, weights = self._weights(sizes, drawing)
        total = math.fsum(weights.values())
        return {f"domains/{name}/weight": weight / total for name, weight in weights.items()}

    def _weights(self, sizes: Mapping[str, int], drawing: Drawing) -> Iterable[Mapping[str, float]]:
        given = {name: self.domains[name].weight for name in sizes}
        return self.weighting.over_iterations(given, sizes, drawing)


def _by_domain(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """In the order of the names, whatever order the domains come in."""
    pools: dict[str, list[Problem]] = {}
    for problem in problems:
        pools.setdefault(problem.domain, []).append(problem)
    return dict(sorted(pools.items()))
