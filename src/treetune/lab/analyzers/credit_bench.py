"""Credit methods side by side, on the same answers of the same policy, against the truth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Finding, Need, OneLine
from treetune.credit.base import Credit
from treetune.credit.episodes import make_episode
from treetune.credit.rloo import Rloo
from treetune.engine.base import Engine
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import ByEngine, StateIds, TrueValues, find_values_once
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.tree import trees_of
from treetune.vocabulary import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.lab.analyzers.credit_measures import Credited, Truth
    from treetune.runtime.sampler import Sampler
    from treetune.runtime.session import Session


@Analyzer.register("credit_bench")
@dataclass(frozen=True, kw_only=True)
class CreditBench(OfCheckpoints):
    """What each of `methods` gains at a checkpoint: how much noise it takes out of the gradient, and at what
    cost (`treetune.lab.arena.gain`), beside what the true advantages would.

    The answers are to `problems` problems, groups whole: those that the run kept of these weights, or fresh
    ones where it kept fewer. What states are truly worth, `truth` finds; it is kept by its content in
    ``truths`` of the experiment, so that it is found once. Nothing is trained.

    Methods that ask for the same continuations share them: tokens are counted for each, and seconds are
    charged at the speed at which they were sampled.
    """

    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """The credits to compare, by their names in tables."""
    problems: Annotated[int, Gt(0)] = 16
    truth: TrueValues | None = field(default_factory=ByEngine)
    """How the true values of states are found; null: they aren't, and there is no ceiling."""

    needs_engine = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if not self.methods:
            yield Finding(
                "there are no methods to compare",
                "methods",
                "put configs/analyzers/credit_bench.jsonnet on the right",
            )
        if self.truth is not None:
            yield from self.truth.check(experiment)
        yield from required_critics(self.methods, experiment)

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        return Findings(
            {
                "truth": None if self.truth is None else self.truth.described(),
                "by_checkpoint": {str(point): self._at(sampler, point, work) for point in points},
            }
        )

    def _at(self, sampler: Sampler, point: int, work: Path) -> dict[str, Any]:
        """Returns one checkpoint's numbers."""
        from treetune.lab.analyzers.credit_measures import Credited, measure, reliability
        from treetune.lab.analyzers.gradients import problem_gradients
        from treetune.lab.analyzers.stored import answers_at, context_at
        from treetune.lab.arena.gain import TRUE_ADVANTAGES, gain

        sampler.server.load_checkpoint(point)
        answers, origin = answers_at(sampler, point, work, self.seed, self.problems, enough=self.problems)
        names = list(dict.fromkeys(one.problem.id for one in answers))[: self.problems]
        answers = [one for one in answers if one.problem.id in names]
        methods: dict[str, Credited] = {}
        truths: list[Truth] = []
        if self.truth is not None:
            with sampler.phase(f"true values after iteration {point}", "states") as show:
                context = context_at(sampler, point, work, self.seed, "truth", show)
                truths = true_values(self.truth, context, sampler.session, point, answers)
            of_truth = zip(truths, answers, strict=True)
            methods[TRUE_ADVANTAGES] = Credited(
                [make_episode(context, answer, one.advantages, one.values) for one, answer in of_truth]
            )
        of_engine = Speed(sampler.server.engine)
        context = context_at(sampler, point, work, self.seed, "credit")
        # Those that ask for most come first: what others ask for is then among theirs.
        for name in sorted(self.methods, key=lambda name: -getattr(self.methods[name], "samples", 0)):
            with sampler.phase(f"{name} after iteration {point}", "continuations") as show:
                context = replace(context, log=replace(context.log, progress=show))
                with of_engine.measured():
                    methods[name] = credited(context, self.methods[name], answers)
        reference = credited(context, Rloo(), answers)
        sampled = sum(len(one.response_ids) for one in answers)
        found = {}
        with sampler.phase(f"gradients after iteration {point}", "problems") as show:
            credits = [reference.episodes, *(one.episodes for one in methods.values())]
            of_reference, *of_methods = problem_gradients(sampler.session, point, credits, self.seed, show)
        for (name, one), gradients in zip(methods.items(), of_methods, strict=True):
            unbiased = name == TRUE_ADVANTAGES or self.methods[name].is_unbiased(context)
            true = of_methods[0] if truths else of_reference
            found[name] = gain(of_reference, true, gradients, 1 + one.tokens / sampled, unbiased, self.seed)
            if truths:
                found[name] |= measure(truths, one, self.seed)
            found[name]["seconds"] = of_engine.seconds(one.tokens)
        return {
            "answers": origin,
            "solved": mean([one.reward for one in answers]),
            "truth_reliability": reliability(truths) if truths else None,
            "methods": found,
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        from treetune.lab.arena.gain import draw_gain

        return draw_gain(
            {
                f"{name}, after {point} iterations": of_point["methods"]
                for name, result in results.items()
                for point, of_point in result["numbers"]["by_checkpoint"].items()
            }
        )


def true_values(
    truth: TrueValues,
    context: RolloutContext,
    session: Session,
    point: int,
    answers: Sequence[Trajectory],
) -> list[Truth]:
    """Returns what is true of each answer."""
    from treetune.lab.analyzers.credit_measures import Truth

    places = [
        StateIds(one.problem, one.prompt_ids, one.response_ids[:start])
        for one in answers
        for start in (0, *one.step_ends[:-1])
    ]
    known = iter(find_values_once(truth, context, session, point, places))
    truths = []
    for one in answers:
        own = [next(known) for _ in one.step_ends]
        values, noise = tuple(each.value for each in own), tuple(each.noise for each in own)
        truths.append(Truth(one.problem.id, one.step_ends, values, one.reward, noise))
    return truths


class Speed:
    """The speed of an engine, over all that it sampled while it was measured."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine, self._tokens, self._seconds = engine, 0, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        assert self._engine is not None
        before, begun = self._engine.tokens, time.perf_counter()
        yield
        if sampled := self._engine.tokens - before:
            self._tokens += sampled
            self._seconds += time.perf_counter() - begun

    def seconds(self, tokens: int) -> float | None:
        """Returns the seconds of so many tokens; None where none were sampled, as all were there."""
        if not tokens:
            return 0.0
        return self._seconds * tokens / self._tokens if self._tokens else None


def required_critics(methods: Mapping[str, Credit], experiment: PolicyIteration) -> Iterator[Finding]:
    """Yields what is wrong with methods that nobody can compute from stored answers."""
    for name, credit in methods.items():
        if credit.needs_critic and not (credit.asks_critic and experiment.credit.needs_critic):
            yield Finding(
                f"{name!r} needs a critic, which is trained with a run and not by an analysis",
                ("methods", name),
                "leave it out, or take a run that trains one, and monte_carlo with the values 'critic' or"
                " 'control_variate'",
            )


def credited(context: RolloutContext, credit: Credit, answers: Sequence[Trajectory]) -> Credited:
    """Returns a method's episodes of given answers, in their order, with its cost."""
    from treetune.lab.analyzers.credit_measures import Credited

    episodes, metrics = credit.assign(context, trees_of(answers))
    of_answer = {episode.trajectory: episode for episode in episodes}
    return Credited([of_answer[one.id] for one in answers], int(metrics.get("credit/value_tokens", 0)))
