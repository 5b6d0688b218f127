"""Graders that leave each problem to the one that is meant for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


class RoutedGrader(Grader):
    """Grades nothing by itself: `of` says who does. No configuration names one; tasks make them."""

    @override
    def of(self, problem: Problem) -> Grader:
        raise NotImplementedError

    @override
    def parts(self) -> Sequence[Grader]:
        raise NotImplementedError

    @property
    @override
    def best(self) -> float:
        return max(part.best for part in self.parts())

    @override
    def prepare(self) -> None:
        for part in self.parts():
            part.prepare()

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        return self.of(problem).grade(response, problem)


@dataclass(frozen=True, kw_only=True)
class ByDomain(RoutedGrader):
    """The grader of the problem's domain, or, where that one is routed as well, whom it names."""

    graders: Mapping[str, Grader] = field(hash=False)

    @override
    def of(self, problem: Problem) -> Grader:
        """Raises ValueError for a problem of no domain."""
        if problem.domain not in self.graders:
            known = ", ".join(sorted(self.graders))
            raise ValueError(
                f"{problem.id} is of the domain {problem.domain!r}: known are {known}"
                if problem.domain
                else f"{problem.id} says no domain: give it one of {known}"
            )
        return self.graders[problem.domain].of(problem)

    @override
    def parts(self) -> Sequence[Grader]:
        return [part for grader in self.graders.values() for part in grader.parts()]


@dataclass(frozen=True, kw_only=True)
class BySource(RoutedGrader):
    """The grader of the longest of `routes` that the problem's ``data_source`` begins with."""

    routes: Mapping[str, Grader] = field(hash=False)

    def route(self, source: str) -> Grader | None:
        fitting = [prefix for prefix in self.routes if source.startswith(prefix)]
        return self.routes[max(fitting, key=len)] if fitting else None

    @override
    def of(self, problem: Problem) -> Grader:
        """Raises ValueError for a source without a route."""
        source = str(problem.data.get("data_source", ""))
        grader = self.route(source)
        if grader is None:
            raise ValueError(
                f"no route fits the data_source {source!r} of {problem.id}: routes are"
                f" {', '.join(map(repr, sorted(self.routes)))}"
                if source
                else f"{problem.id} has no data_source, which says who grades it"
            )
        return grader

    @override
    def parts(self) -> Sequence[Grader]:
        return tuple(self.routes.values())
