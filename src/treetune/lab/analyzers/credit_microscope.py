"""A few answers under the microscope: the worth that each credit method gives their steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import Finding, Need, OneLine
from treetune.lab.analyzers.credit_bench import required_critics
from treetune.lab.analyzers.figures import COLOURS, MARKS, legend_below, panels, points_with_bars
from treetune.lab.analyzers.points import Chosen, OfIterations, iterations_with, unanswered
from treetune.lab.analyzers.step_credit import StepCredit, step_credit
from treetune.rollouts.base import Credit
from treetune.rollouts.selection import All
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.seeds import derived_random
from treetune.vocabulary import Episode, TextCodec, Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler

SPREAD = 0.6
"""The share of the distance between two steps over which the methods' points are spread."""
WORDS = {"values": "value before the step", "advantages": "advantage of the step"}


def draw_microscope(answers: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A column for each answer, by its title: values above, advantages below."""
    titles = [f"{title} ({'right' if one['correct'] else 'wrong'})" for title, one in answers.items()]
    figure, axes = panels(titles * 2, rows=2)
    methods = list(dict.fromkeys(name for one in answers.values() for name in one["credit"]))
    for number, (kind, words) in enumerate(WORDS.items()):
        for panel, one in zip(axes[number * len(answers) :], answers.values()):
            for place, name in enumerate(methods):
                if name not in one["credit"]:
                    continue
                shift = SPREAD * (place / max(len(methods) - 1, 1) - 0.5)
                shown = [(step + shift, n) for step, n in enumerate(one["credit"][name][kind], 1) if n]
                style = {
                    "color": COLOURS[place % len(COLOURS)],
                    "marker": MARKS[(place // len(COLOURS) + place) % len(MARKS)],
                    "linestyle": "none",
                    "label": name,
                }
                points_with_bars(panel, [x for x, _ in shown], [n for _, n in shown], **style)
            panel.set_xticks(range(1, len(one["steps"]) + 1))
            panel.set_xlabel("step", fontsize=8)
            panel.set_ylabel(words, fontsize=8)
            if kind == "advantages":
                panel.axhline(0, color="#999999", linewidth=0.8)
    legend_below(figure, axes[len(answers)], columns=6)
    return figure


OWN, TRUTH = "the run's own", "truth"
"""The names of the run's own credit, and of what many continuations say."""

Credits = Mapping[str, Mapping[str, StepCredit]]
"""The credit by the method's name and the answer's id."""


@Analyzer.register("credit_microscope")
@dataclass(frozen=True, kw_only=True)
class CreditMicroscope(OfIterations):
    """The credit that the run itself and each of `methods` give the steps of a few answers of an iteration:
    the value before each step and its advantage, with 95 % intervals where a method knows how sure it is. The
    report shows them.

    Methods are computed as by `replay`, on whole groups: continuations that the run
    stored are read, others sampled from the weights of then. Right and wrong answers are shown in equal
    parts: those on which the methods differ most, each method's advantages measured by their root mean
    square.
    """

    iterations: Chosen = "last"
    """The iterations to look at: ``last``, whose weights are there, ``all``, or a list of their numbers from
    0 on."""
    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """The credits to show, by their names in the report."""
    problems: Annotated[int, Gt(0)] = 16
    """Problems whose answers the methods give credit to."""
    answers: Annotated[int, Gt(0)] = 4
    """Answers that are shown."""
    truth: Annotated[int, Ge(0)] = 0
    """Continuations of each of their states, of which no method has any, whose mean stands beside."""
    seed: Annotated[int, Ge(0)] = 0
    """The seed that draws problems and answers among those that are alike."""

    file = "episodes.arrow"

    @property
    @override
    def needs_engine(self) -> bool:  # type: ignore[override]
        return self.truth > 0 or any(credit.needs_engine for credit in self.methods.values())

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if not self.truth:
            return super().needs
        one_line = Need(OneLine(), "its truth continues answers from their beginnings", ONE_LINE_REMEDY)
        return (*super().needs, one_line)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from required_critics(self.methods, experiment)
        for name in (OWN, TRUTH):
            if name in self.methods:
                yield Finding(f"a method is called {name!r}", ("methods", name), "give it another name")
        if self.needs_engine:
            yield from unanswered(experiment)

    @override
    def kept(self, directory: ExperimentDirectory) -> list[int]:
        """Returns the iterations whose answers are there, with the weights of then where something is to be
        sampled."""
        answered = iterations_with(directory, "trajectories.arrow")
        kept = [
            point
            for point in super().kept(directory)
            if point in answered
            and (not point or not self.needs_engine or (directory.checkpoint(point) / "policy").is_dir())
        ]
        if not kept:
            raise ValueError(
                f"{directory.path} keeps no iteration's answers together with the weights that sampled them:"
                " checkpoints: {keep_every: 5} in the experiment keeps those of every fifth"
            )
        return kept

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        found = {str(point): self._of_iteration(sampler, point, work) for point in points}
        return Findings({"truth": self.truth, "by_iteration": found})

    def _of_iteration(self, sampler: Sampler, point: int, work: Path) -> dict[str, Any]:
        from treetune.rollouts.storage import read_episodes, read_trajectories

        session = sampler.session
        folder = session.directory.iteration(point)
        stored = [one for one in read_trajectories(folder / "trajectories.arrow") if one.grade.is_known]
        answers = self._looked_at(stored, point)
        own = {one.trajectory: one for one in read_episodes(folder / "episodes.arrow")}
        credits: dict[str, dict[str, StepCredit]] = {OWN: _of_steps(answers, own)}
        costs: dict[str, dict[str, float]] = {}
        for name, credit in self.methods.items():
            episodes, costs[name] = self._credited(sampler, credit, name, point, answers, work)
            credits[name] = _of_steps(answers, {one.trajectory: one for one in episodes})
        credits = {name: of_answers for name, of_answers in credits.items() if of_answers}
        if not credits:
            raise ValueError(
                f"the credit of iteration {point + 1} gave no advantages before training, as a critic's"
                " doesn't: name methods, e.g. put configs/analyzers/credit_microscope.jsonnet on the right"
            )
        chosen = choose(answers, credits, self.answers)
        if self.truth:
            credits[TRUTH] = self._truths(sampler, point, chosen, work)
        codec = session.model.codec
        return {
            "costs": costs,
            "answers": [_row(one, credits, codec) for one in chosen],
        }

    def _looked_at(self, stored: Sequence[Trajectory], point: int) -> list[Trajectory]:
        """The answers to some problems, first those with right and wrong ones."""
        groups: dict[str, list[Trajectory]] = {}
        for one in stored:
            groups.setdefault(one.problem.id, []).append(one)
        names = sorted(groups)
        derived_random(self.seed, point, "microscope").shuffle(names)
        names.sort(key=lambda name: len({one.grade.correct for one in groups[name]}), reverse=True)
        wanted = set(names[: self.problems])
        return [one for one in stored if one.problem.id in wanted]

    def _credited(
        self,
        sampler: Sampler,
        credit: Credit,
        name: str,
        point: int,
        answers: Sequence[Trajectory],
        work: Path,
    ) -> tuple[Sequence[Episode], dict[str, float]]:
        from treetune.lab.analyzers.replay import credited_again
        from treetune.tree import trees_of

        begun = time.perf_counter()
        config = replace(sampler.session.config, credit=credit, selection=All())
        journal = work / f"{point:04d}.jsonl"  # one for all: methods share what they ask alike
        episodes, metrics, tokens = credited_again(sampler, config, point, trees_of(answers), name, journal)
        return episodes, {
            "tokens_per_answer": metrics.get("credit/value_tokens", 0.0) / len(answers),
            "sampled_tokens": float(tokens),
            "seconds": time.perf_counter() - begun,
        }

    def _truths(
        self, sampler: Sampler, point: int, chosen: Sequence[Trajectory], work: Path
    ) -> dict[str, StepCredit]:
        from treetune.lab.analyzers.stored import context_at
        from treetune.lab.analyzers.true_values import TRUTH as PURPOSE
        from treetune.lab.analyzers.true_values import continued
        from treetune.rollouts.monte_carlo import step_advantages
        from treetune.rollouts.valuation import mean_of

        nodes = [
            (one, tuple(one.response_ids[:start].tolist()))
            for one in chosen
            for start in (0, *one.step_ends[:-1])
        ]
        sampler.server.load_checkpoint(point)
        with sampler.phase(f"true values in iteration {point + 1}", "continuations") as show:
            context = context_at(sampler, point, work, self.seed, "truth", show)
            rewards = iter([one.rewards for one in continued(context, nodes, self.truth, PURPOSE)])
        found = {}
        for one in chosen:
            means = [mean_of(next(rewards)) for _ in one.step_ends]
            values = [mean.value for mean in means if mean is not None]
            per_token = [
                advantage
                for advantage, start, end in zip(
                    step_advantages(values, one.reward), (0, *one.step_ends), one.step_ends
                )
                for _ in range(start, end)
            ]
            errors = [mean.variance**0.5 for mean in means if mean is not None]
            found[one.id] = step_credit(one.step_ends, one.reward, per_token, one.step_ends, values, errors)
        return found

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:

        return draw_microscope(
            {
                f"{name}, {one['answer']}": one
                for name, result in results.items()
                for of_point in result["numbers"]["by_iteration"].values()
                for one in of_point["answers"]
            }
        )


def _of_steps(answers: Sequence[Trajectory], episodes: Mapping[str, Episode]) -> dict[str, StepCredit]:
    """Returns the credit of answers that have an episode with advantages, by their ids."""
    return {
        one.id: step_credit(
            one.step_ends,
            one.reward,
            episode.advantages.tolist(),
            episode.step_ends,
            episode.step_values,
            episode.step_errors,
        )
        for one in answers
        if (episode := episodes.get(one.id)) is not None and episode.advantages is not None
    }


def choose(answers: Sequence[Trajectory], credits: Credits, count: int) -> list[Trajectory]:
    """Right ones and wrong ones in equal parts where there are both, those first on which the methods differ
    most, and no two of one problem while there are others."""
    differ = _disagreements(answers, credits)
    ordered = sorted((one for one in answers if one.id in differ), key=lambda one: (-differ[one.id], one.id))
    right = _different_problems([one for one in ordered if one.grade.correct])
    wrong = _different_problems([one for one in ordered if not one.grade.correct])
    of_right = min(len(right), max(count // 2, count - len(wrong)))
    return [*right[:of_right], *wrong[: count - of_right]]


def _different_problems(answers: Sequence[Trajectory]) -> list[Trajectory]:
    """The first answer to each problem, then the others."""
    first = {one.problem.id: one for one in reversed(answers)}
    return [
        one for is_first in (True, False) for one in answers if (first[one.problem.id] is one) is is_first
    ]


def _disagreements(answers: Sequence[Trajectory], credits: Credits) -> dict[str, float]:
    """Returns for each answer that all methods have the mean over its steps of the variance of what methods
    give it, each in units of its own root mean square. With one method alone: how much its advantages vary.
    """
    from statistics import fmean, pvariance

    scales = {
        name: fmean(shown.value**2 for one in of_answers.values() for shown in one.advantages) ** 0.5 or 1.0
        for name, of_answers in credits.items()
    }
    found = {}
    for answer in answers:
        if any(answer.id not in of_answers for of_answers in credits.values()):
            continue
        rows = [
            [shown.value / scales[name] for shown in of_answers[answer.id].advantages]
            for name, of_answers in credits.items()
        ]
        columns = [*zip(*rows, strict=True)] if len(rows) > 1 else rows
        found[answer.id] = fmean(pvariance(column) for column in columns)
    return found


def _row(one: Trajectory, credits: Credits, codec: TextCodec) -> dict[str, Any]:
    """Returns what the report shows of an answer."""
    starts = (0, *one.step_ends[:-1])
    return {
        "answer": one.id,
        "prompt": codec.decode(one.prompt_ids),
        "reward": one.reward,
        "correct": one.grade.correct,
        "unfinished": one.unfinished,
        "steps": [
            codec.decode(one.response_ids[start:end])
            for start, end in zip(starts, one.step_ends, strict=True)
        ],
        "credit": {
            name: of_answers[one.id].plain() for name, of_answers in credits.items() if one.id in of_answers
        },
    }
