"""Graders that choose another grader for each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


class RoutedGrader(Grader):
    """A grader that calls the grader that `of` returns for a problem. Tasks make such graders; configurations
    can't name them."""

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
    """Calls the grader of the problem's domain. If that grader is routed, too, it chooses the next one."""

    graders: Mapping[str, Grader] = field(hash=False)

    @override
    def of(self, problem: Problem) -> Grader:
        """Raises ValueError for a problem without a known domain."""
        if problem.domain not in self.graders:
            domains = ", ".join(sorted(self.graders))
            if not problem.domain:
                raise ValueError(f"{problem.id} has no domain: give it one of {domains}")
            raise ValueError(f"{problem.id} has the domain {problem.domain!r}: known are {domains}")
        return self.graders[problem.domain].of(problem)

    @override
    def parts(self) -> Sequence[Grader]:
        parts: list[Grader] = []
        for grader in self.graders.values():
            parts += grader.parts()
        return parts


@dataclass(frozen=True, kw_only=True)
class BySource(RoutedGrader):
    """Calls the grader of the longest key of `routes` that is a prefix of the problem's ``data_source``."""

    routes: Mapping[str, Grader] = field(hash=False)

    def route(self, source: str) -> Grader | None:
        """Returns the grader of a ``data_source``; None if no key of `routes` is a prefix of it."""
        fitting = [prefix for prefix in self.routes if source.startswith(prefix)]
        return self.routes[max(fitting, key=len)] if fitting else None

    @override
    def of(self, problem: Problem) -> Grader:
        """Raises ValueError if no route fits the source."""
        source = str(problem.data.get("data_source", ""))
        grader = self.route(source)
        if grader is None:
            if not source:
                raise ValueError(f"{problem.id} has no data_source, which chooses its grader")
            routes = ", ".join(map(repr, sorted(self.routes)))
            raise ValueError(f"no route fits the data_source {source!r} of {problem.id}: routes are {routes}")
        return grader

    @override
    def parts(self) -> Sequence[Grader]:
        return tuple(self.routes.values())
