"""Credit methods side by side, on the same answers of the same policy, against the truth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from treetune.contracts import Finding, Need, OneLine
from treetune.inference.base import Engine
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.tree import trees_of
from treetune.vocabulary import Trajectory
from treetune_lab.analyzers.figures import COLOURS, MARKS, legend_below, panels, points_with_bars
from treetune_lab.analyzers.points import OfCheckpoints
from treetune_lab.analyzers.true_values import ByEngine, State, TrueValues, found_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler
    from treetune.runtime.session import Session
    from treetune_lab.analyzers.credit_measures import Credited, Truth

FREE = 0.5
"""The position on the logarithmic axis of methods that sample nothing."""


ALONE_INCHES = (7.2, 5.4)
"""The size of a single panel, with room for its legend."""


def draw_credit(by_panel: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """A panel for each task or checkpoint, with a point for each method: the correlation of its advantages
    with the true ones over the tokens that it sampled for an answer."""
    figure, axes = panels(list(by_panel), rows=-(-len(by_panel) // 3))
    methods = list(dict.fromkeys(name for found in by_panel.values() for name in found))
    for one, found in zip(axes, by_panel.values(), strict=True):
        for name, numbers in found.items():
            place = methods.index(name)
            style = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKS[(place // len(COLOURS) + place) % len(MARKS)],
                "linestyle": "none",
                "label": name,
            }
            points_with_bars(
                one, [max(numbers["tokens_per_answer"], FREE)], [numbers["correlation"]], **style
            )
        one.set_xscale("log")
        one.axvline(FREE * 1.4, color="#bbbbbb", linewidth=0.8, linestyle=":")
        one.set_xlabel("tokens sampled for the credit of an answer (left of the line: none)", fontsize=8)
        one.set_ylabel("correlation with true advantages (up is better)", fontsize=8)
    if len(by_panel) == 1:
        figure.set_size_inches(*ALONE_INCHES)
    legend_below(figure, axes[0], columns={1: 3, 2: 4}.get(len(by_panel), 5))
    return figure


COLUMNS = (
    ("method", "---"),
    ("tokens an answer ↓", "---:"),
    ("correlation ↑", "---:"),
    ("error ↓", "---:"),
    ("bias of values → 0", "---:"),
    ("right signs at the decisive step ↑", "---:"),
    ("cosine of a batch's gradient ↑", "---:"),
    ("its relative variance ↓", "---:"),
    ("seconds", "---:"),
)
MEASURED = ("correlation", "error", "bias", "decisive_signs")


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, a method in each."""
    lines = [f"| {' | '.join(name for name, _ in COLUMNS)} |", f"|{'|'.join(rule for _, rule in COLUMNS)}|"]
    for name, one in methods.items():
        cells = [
            name,
            f"{one['tokens_per_answer']:.0f}",
            *(told(one, key) for key in MEASURED),
            _plain(one.get("cosine"), 3),
            _plain(one.get("relative_variance"), 2),
            _plain(one["seconds"], 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def told(found: Mapping[str, Any], name: str) -> str:
    """A number with its interval, as tables have it."""
    one = found[name]
    if one["value"] is None:
        return "–"
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _plain(number: float | None, digits: int) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


@Analyzer.register("credit_bench")
@dataclass(frozen=True, kw_only=True)
class CreditBench(OfCheckpoints):
    """The advantages that each of `methods` gives the steps of a checkpoint's answers, held against the true
    advantages.

    The answers are to `problems` problems, groups whole: those that the run kept of these weights, or fresh
    ones where it kept fewer. What states are truly worth, `truth` finds; it is kept by its content in
    ``truths`` of the experiment, so that it is found once. Its own noise is part of every error and lowers
    every correlation alike, by the root of ``truth_reliability``. Nothing is trained.

    Methods that ask for the same continuations share them: tokens are counted for each, and seconds are
    charged at the speed at which they were sampled.
    """

    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """The credits to compare, by their names in tables."""
    problems: Annotated[int, Gt(0)] = 16
    truth: TrueValues = field(default_factory=ByEngine)
    gradient_batch: Annotated[int, Gt(1)] | None = None
    """Answers to a batch, whose gradient is held against the one by true advantages. None: no gradients."""

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
        yield from self.truth.check(experiment)
        yield from critics_asked_for(self.methods, experiment)

    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        return Findings(
            {
                "truth": self.truth.described(),
                "by_checkpoint": {str(point): self._at(sampler, point, work) for point in points},
            }
        )

    def _at(self, sampler: Sampler, point: int, work: Path) -> dict[str, Any]:
        """Returns one checkpoint's numbers."""
        from treetune_lab.analyzers.credit_measures import measure, reliability
        from treetune_lab.analyzers.stored import answers_at, context_at

        sampler.server.load_checkpoint(point)
        answers, origin = answers_at(sampler, point, work, self.seed, self.problems, enough=self.problems)
        names = list(dict.fromkeys(one.problem.id for one in answers))[: self.problems]
        answers = [one for one in answers if one.problem.id in names]
        with sampler.phase(f"true values after iteration {point}", "states") as show:
            context = context_at(sampler, point, work, self.seed, "truth", show)
            truths = self._truths(context, sampler.session, point, answers)
        methods, of_engine = {}, Speed(sampler.server.engine)
        context = context_at(sampler, point, work, self.seed, "credit")
        # Those that ask for most come first: what others ask for is then among theirs.
        for name in sorted(self.methods, key=lambda name: -getattr(self.methods[name], "samples", 0)):
            with sampler.phase(f"{name} after iteration {point}", "continuations") as show:
                context = replace(context, log=replace(context.log, progress=show))
                with of_engine.measured():
                    methods[name] = credited(context, self.methods[name], answers)
        found = {
            name: measure(truths, methods[name], self.seed)
            | {"seconds": of_engine.seconds(methods[name].tokens)}
            for name in self.methods
        }
        if self.gradient_batch is not None:
            from treetune_lab.analyzers.gradients import against_true_ones

            with sampler.phase(f"gradients after iteration {point}", "methods") as show:
                episodes = {name: one.episodes for name, one in methods.items()}
                gradients = against_true_ones(
                    sampler.session, point, truths, episodes, self.gradient_batch, show
                )
            found = {name: one | gradients[name] for name, one in found.items()}
        return {
            "answers": origin,
            "solved": mean([one.reward for one in answers]),
            "truth_reliability": reliability(truths),
            "methods": found,
        }

    def _truths(
        self, context: RolloutContext, session: Session, point: int, answers: Sequence[Trajectory]
    ) -> list[Truth]:
        from treetune_lab.analyzers.credit_measures import Truth

        places = [
            State(one.problem, one.prompt_ids, one.response_ids[:start])
            for one in answers
            for start in (0, *one.step_ends[:-1])
        ]
        known = iter(found_once(self.truth, context, session, point, places))
        truths = []
        for one in answers:
            own = [next(known) for _ in one.step_ends]
            values, noise = tuple(each.value for each in own), tuple(each.noise for each in own)
            truths.append(Truth(one.problem.id, one.step_ends, values, one.reward, noise))
        return truths

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:

        return draw_credit(
            {
                f"{name}, after {point} iterations": of_point["methods"]
                for name, result in results.items()
                for point, of_point in result["numbers"]["by_checkpoint"].items()
            }
        )


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


def critics_asked_for(methods: Mapping[str, Credit], experiment: PolicyIteration) -> Iterator[Finding]:
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
    from treetune_lab.analyzers.credit_measures import Credited

    begun = time.perf_counter()
    episodes, metrics = credit.assign(context, trees_of(answers))
    seconds = time.perf_counter() - begun
    of_answer = {episode.trajectory: episode for episode in episodes}
    return Credited(
        [of_answer[one.id] for one in answers], int(metrics.get("credit/value_tokens", 0)), seconds
    )
