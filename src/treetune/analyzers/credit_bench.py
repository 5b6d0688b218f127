"""Credit methods side by side, on the same answers of the same policy, against the truth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from treetune.analyzers.points import OfCheckpoints
from treetune.contracts import Finding, Need, OneLine
from treetune.episode_generators.base import Credit, GenerationContext
from treetune.episode_generators.metrics import mean
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.tree import trees_of
from treetune.vocabulary import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.analyzers.credit_measures import Credited, Truth
    from treetune.runtime.sampler import Sampler


@Analyzer.register("credit_bench")
@dataclass(frozen=True, kw_only=True)
class CreditBench(OfCheckpoints):
    """What each of `methods` gives the steps of a checkpoint's answers, held against the true advantages.

    The answers are those that the run kept of these weights, or fresh ones; of the first `problems` problems,
    groups whole. A state's true value is the mean of `truth` continuations, which share no seed with those of
    the methods; its own noise is part of every error and lowers every correlation alike. Nothing is trained.
    """

    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """By the names that tables call them."""
    problems: Annotated[int, Gt(0)] = 16
    truth: Annotated[int, Gt(1)] = 512

    needs_engine = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if not self.methods:
            yield Finding(
                "there are no methods to compare",
                "methods",
                "put configs/analyzers/credit_bench.jsonnet on the right",
            )
        yield from critics_asked_for(self.methods, experiment)

    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.analyzers.credit_measures import measure
        from treetune.analyzers.sources import answers_at, context_at

        found: dict[str, Any] = {}
        for point in points:
            sampler.server.load_checkpoint(point)
            answers, origin = answers_at(sampler, point, work, self.seed, self.problems)
            names = list(dict.fromkeys(one.problem.id for one in answers))[: self.problems]
            answers = [one for one in answers if one.problem.id in names]
            with sampler.phase(f"true values after iteration {point}", "continuations") as show:
                context = context_at(sampler, point, work, self.seed, "truth", show)
                truths = self._truths(context, answers)
            of_methods = {}
            for name, credit in self.methods.items():
                with sampler.phase(f"{name} after iteration {point}", "continuations") as show:
                    context = context_at(sampler, point, work, self.seed, f"credit-{name}", show)
                    of_methods[name] = measure(truths, credited(context, credit, answers), self.seed)
            found[str(point)] = {"answers": origin, "solved": mean([one.reward for one in answers])} | {
                "methods": of_methods
            }
        return Findings({"truth": self.truth, "by_checkpoint": found})

    def _truths(self, context: GenerationContext, answers: Sequence[Trajectory]) -> list[Truth]:
        from treetune.analyzers.credit_measures import Truth
        from treetune.analyzers.states import TRUTH, continued

        nodes = [
            (one, tuple(one.response_ids[:start].tolist()))
            for one in answers
            for start in (0, *one.step_ends[:-1])
        ]
        values = iter(mean(estimate.rewards) for estimate in continued(context, nodes, self.truth, TRUTH))
        return [
            Truth(one.problem.id, one.step_ends, tuple(next(values) for _ in one.step_ends), one.reward)
            for one in answers
        ]

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        from treetune.analyzers.credit_figure import draw_credit

        return draw_credit(
            {
                f"{name}, after {point} iterations": of_point["methods"]
                for name, result in results.items()
                for point, of_point in result["numbers"]["by_checkpoint"].items()
            }
        )


def critics_asked_for(methods: Mapping[str, Credit], experiment: PolicyIteration) -> Iterator[Finding]:
    """What is wrong with methods that nobody can compute from stored answers."""
    for name, credit in methods.items():
        if credit.needs_critic and not (credit.asks_critic and experiment.credit.needs_critic):
            yield Finding(
                f"{name!r} needs a critic, which is trained with a run and not by an analysis",
                ("methods", name),
                "leave it out, or take a run that trains one, and monte_carlo with the values 'critic' or"
                " 'control_variate'",
            )


def credited(context: GenerationContext, credit: Credit, answers: Sequence[Trajectory]) -> Credited:
    """What a method makes of answers that are there, in their order, with its cost."""
    from treetune.analyzers.credit_measures import Credited

    begun = time.perf_counter()
    episodes, metrics = credit.assign(context, trees_of(answers))
    seconds = time.perf_counter() - begun
    of_answer = {episode.trajectory: episode for episode in episodes}
    return Credited(
        [of_answer[one.id] for one in answers], int(metrics.get("credit/value_tokens", 0)), seconds
    )
