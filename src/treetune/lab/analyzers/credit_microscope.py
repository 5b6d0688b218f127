"""Shows the values and advantages that each credit method gives to the steps of a few answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import Finding, Need, OneLine
from treetune.credit.base import Credit
from treetune.lab.analyzers.credit_bench import find_missing_models
from treetune.lab.analyzers.figures import (
    FIGURE_COLOURS,
    MARKERS,
    draw_legend_below,
    draw_points_with_bars,
    make_panels,
)
from treetune.lab.analyzers.points import OfIterations, PointChoice, check_samples_answers
from treetune.lab.analyzers.step_credit import StepCredit, make_step_credit
from treetune.rollouts.selection import All
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import EPISODES, TRAJECTORIES, ExperimentDirectory
from treetune.seeds import derived_random
from treetune.vocabulary import Episode, TextCodec, Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.resources import RunResources

MARKER_SPREAD = 0.6
"""The share of the distance between two steps over which the methods' points are spread."""
AXIS_LABELS = {"values": "value before the step", "advantages": "advantage of the step"}


def draw_microscope(answers: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws a column for each answer, with its values above and its advantages below.

    `answers` has the row of each answer (see `_make_row`), by the title of its column."""
    titles = [f"{title} ({'right' if row['correct'] else 'wrong'})" for title, row in answers.items()]
    figure, axes = make_panels(titles * 2, rows=2)  # a panel per answer in each of the two rows
    ordered_methods: dict[str, None] = {}  # a dictionary as an ordered set
    for row in answers.values():
        ordered_methods |= dict.fromkeys(row["credit"])
    methods = list(ordered_methods)
    for figure_row, (kind, label) in enumerate(AXIS_LABELS.items()):
        for panel, row in zip(axes[figure_row * len(answers) :], answers.values()):
            for i, name in enumerate(methods):
                if name not in row["credit"]:
                    continue
                # The methods' points of a step are next to each other.
                shift = MARKER_SPREAD * (i / max(len(methods) - 1, 1) - 0.5)
                positions, numbers = [], []
                for step, number in enumerate(row["credit"][name][kind], 1):
                    if number:  # None: the method has no value before this step
                        positions.append(step + shift)
                        numbers.append(number)
                rounds_of_colours = i // len(FIGURE_COLOURS)
                style = {
                    "color": FIGURE_COLOURS[i % len(FIGURE_COLOURS)],
                    # Methods that share a colour have different marks: each time the colours begin again, the
                    # marks are shifted by one.
                    "marker": MARKERS[(rounds_of_colours + i) % len(MARKERS)],
                    "linestyle": "none",
                    "label": name,
                }
                draw_points_with_bars(panel, positions, numbers, **style)
            panel.set_xticks(range(1, len(row["steps"]) + 1))
            panel.set_xlabel("step", fontsize=8)
            panel.set_ylabel(label, fontsize=8)
            if kind == "advantages":
                panel.axhline(0, color="#999999", linewidth=0.8)
    # A method without values isn't in the panels of values, so the legend is that of the advantages. Answers
    # of several experiments may have credit of different methods.
    panels_of_advantages = axes[len(answers) :]
    draw_legend_below(figure, panels_of_advantages, columns=6)
    return figure


OWN_CREDIT, TRUE_CREDIT = "the run's own", "truth"
"""The names under which two credits are shown: the run's own, and the credit from the values of many
continuations."""

Credits = Mapping[str, Mapping[str, StepCredit]]
"""The credit of each answer, by the method's name and then by the answer's id."""


@Analyzer.register("credit_microscope")
@dataclass(frozen=True, kw_only=True)
class CreditMicroscope(OfIterations):
    """Shows the credit that the run itself and each of `methods` give to the steps of a few answers of an
    iteration: the value before each step and the step's advantage, with 95 % intervals where a method has
    standard errors. The run's report draws this credit.

    The credit of methods is computed as by `replay`, on whole groups: continuations that the run stored are
    read, and others are sampled with the weights of that iteration. As many right answers are shown as wrong
    ones. They are the answers on which the methods differ most, after each method's advantages are divided by
    their root mean square.
    """

    iterations: PointChoice = "last"
    """The iterations to look at: ``last`` (the last with stored weights), ``all``, or a list of their numbers
    from 0 on."""
    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """The credits to show, by their names in the report."""
    problems: Annotated[int, Gt(0)] = 16
    """The number of problems to whose answers the methods give credit."""
    answers: Annotated[int, Gt(0)] = 4
    """The number of answers that are shown."""
    truth: Annotated[int, Ge(0)] = 0
    """The number of continuations of each state of the shown answers whose mean reward is shown as the
    state's true value. They are sampled apart from those of the methods. 0: no true values are shown."""
    seed: Annotated[int, Ge(0)] = 0
    """The seed by which problems are drawn, and of the continuations for `truth`."""

    file = EPISODES

    @property
    @override
    def needs_engine(self) -> bool:  # type: ignore[override]
        return self.truth > 0 or any(credit.needs_engine for credit in self.methods.values())

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if not self.truth:  # no true values are shown, so no answer is continued for them
            return super().needs
        one_line = Need(OneLine(), "its truth continues answers from their beginnings", ONE_LINE_REMEDY)
        return (*super().needs, one_line)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from find_missing_models("methods", self.methods, experiment)
        for name in (OWN_CREDIT, TRUE_CREDIT):
            if name in self.methods:
                yield Finding(f"a method is called {name!r}", ("methods", name), "give it another name")
        if self.needs_engine:
            yield from check_samples_answers(experiment)

    @override
    def stored_iterations(self, directory: ExperimentDirectory) -> list[int]:
        """Returns the iterations with stored answers and, where something is to be sampled, with stored
        weights.

        Iteration 0 needs no checkpoint: its answers are sampled with the start weights.
        """
        with_answers = directory.iterations_with(TRAJECTORIES)
        iterations = []
        for point in super().stored_iterations(directory):  # the number of an iteration, from 0
            has_weights = point == 0 or (directory.checkpoint_folder(point) / "policy").is_dir()
            if point in with_answers and (has_weights or not self.needs_engine):
                iterations.append(point)
        if not iterations:
            raise ValueError(
                f"{directory.path} has no iteration with both its answers and the weights that sampled them:"
                " checkpoints: {keep_every: 5} in the experiment keeps those of every fifth"
            )
        return iterations

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        by_iteration = {str(point): self._analyse_iteration(resources, point, work) for point in points}
        return Findings({"truth": self.truth, "by_iteration": by_iteration})

    def _analyse_iteration(self, resources: RunResources, point: int, work: Path) -> dict[str, Any]:
        """Returns some answers of an iteration with their credit, and the costs of the methods.

        The credit is that of the run's own method (OWN_CREDIT), of `methods` and, with `truth`, of true
        values."""
        from treetune.rollouts.storage import read_episodes, read_trajectories

        session = resources.session
        folder = session.directory.iteration_folder(point)
        stored = read_trajectories(folder / TRAJECTORIES)
        graded = [answer for answer in stored if answer.grade.is_known]
        answers = self._choose_groups(graded, point)
        own_episodes = list(read_episodes(folder / EPISODES))
        credits: dict[str, dict[str, StepCredit]] = {OWN_CREDIT: _credit_by_answer(answers, own_episodes)}
        costs: dict[str, dict[str, float]] = {}
        for name, credit in self.methods.items():
            episodes, costs[name] = self._assign_credit(resources, credit, name, point, answers, work)
            credits[name] = _credit_by_answer(answers, episodes)
        # A run whose critic computes advantages in training has stored no advantages.
        credits = {name: by_answer for name, by_answer in credits.items() if by_answer}
        if not credits:
            raise ValueError(  # messages count iterations from 1, `point` from 0
                f"the credit of iteration {point + 1} gave no advantages before training, as a critic's"
                " doesn't: name methods, e.g. append configs/analyzers/credit_microscope.jsonnet to --configs"
            )
        chosen_answers = choose_answers(answers, credits, self.answers)
        if self.truth:
            credits[TRUE_CREDIT] = self._true_credit(resources, point, chosen_answers, work)
        codec = session.model.codec
        return {
            "costs": costs,
            "answers": [_make_row(answer, credits, codec) for answer in chosen_answers],
        }

    def _choose_groups(self, graded: Sequence[Trajectory], point: int) -> list[Trajectory]:
        """Returns all answers to `self.problems` drawn problems.

        Problems with both right and wrong answers are preferred.
        """
        groups: dict[str, list[Trajectory]] = {}
        for answer in graded:
            groups.setdefault(answer.problem.id, []).append(answer)
        problems = sorted(groups)
        derived_random(self.seed, point, "microscope").shuffle(problems)

        def is_mixed(problem: str) -> bool:
            return len({answer.grade.correct for answer in groups[problem]}) > 1

        # Mixed problems come first. Among them, and among the others, sorting keeps the drawn order.
        problems.sort(key=is_mixed, reverse=True)
        chosen_problems = set(problems[: self.problems])
        return [answer for answer in graded if answer.problem.id in chosen_problems]

    def _assign_credit(
        self,
        resources: RunResources,
        credit: Credit,
        name: str,
        point: int,
        answers: Sequence[Trajectory],
        work: Path,
    ) -> tuple[Sequence[Episode], dict[str, float]]:
        """Returns a method's episodes, and their cost in tokens and seconds."""
        from treetune.lab.analyzers.replay import assign_credit_again
        from treetune.tree import trees_of

        began = time.perf_counter()
        # All episodes are kept: the run's own selection may leave some answers out of training.
        config = replace(resources.session.config, credit=credit, selection=All())
        journal = work / f"{point:04d}.jsonl"  # shared by the methods: equal requests are sampled once
        episodes, metrics, tokens = assign_credit_again(
            resources, config, point, trees_of(answers), name, journal
        )
        return episodes, {
            "tokens_per_answer": metrics.get("credit/value_tokens", 0.0) / len(answers),
            "sampled_tokens": float(tokens),  # without those of continuations that a journal had already
            "seconds": time.perf_counter() - began,
        }

    def _true_credit(
        self, resources: RunResources, point: int, chosen_answers: Sequence[Trajectory], work: Path
    ) -> dict[str, StepCredit]:
        """Returns the credit of the chosen answers, by their ids, from the mean rewards of `truth`
        continuations of each state."""
        from treetune.credit.values.base import value_of_rewards
        from treetune.credit.vineppo import step_advantages
        from treetune.lab.analyzers.stored import context_at
        from treetune.lab.analyzers.true_values import TRUTH_PURPOSE, continue_prefixes

        prefixes = []
        for answer in chosen_answers:
            for start in (0, *answer.step_ends[:-1]):
                prefixes.append((answer, tuple(answer.response_ids[:start].tolist())))
        resources.server.load_checkpoint(point)
        title = f"true values in iteration {point + 1}"  # the console counts iterations from 1
        with resources.phase(title, "continuations") as show:
            context = context_at(resources, point, work, self.seed, "truth", show)
            continuations = iter(continue_prefixes(context, prefixes, self.truth, TRUTH_PURPOSE))
        credit_by_answer = {}
        for answer in chosen_answers:
            values, errors = [], []
            for _ in answer.step_ends:
                estimate = value_of_rewards(next(continuations).rewards)
                assert estimate is not None, "each state has `truth` graded continuations"
                values.append(estimate.value)
                errors.append(estimate.variance**0.5)
            # `make_step_credit` reads the advantages token by token.
            advantages: list[float] = []
            start = 0
            for advantage, end in zip(step_advantages(values, answer.reward), answer.step_ends):
                advantages += [advantage] * (end - start)
                start = end
            credit_by_answer[answer.id] = make_step_credit(
                answer.step_ends,
                answer.reward,
                advantages,
                credit_ends=answer.step_ends,
                values=values,
                errors=errors,
            )
        return credit_by_answer

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        answers = {}
        for name, result in results.items():
            for numbers in result["numbers"]["by_iteration"].values():
                for row in numbers["answers"]:
                    answers[f"{name}, {row['answer']}"] = row
        return draw_microscope(answers)


def _credit_by_answer(answers: Sequence[Trajectory], episodes: Sequence[Episode]) -> dict[str, StepCredit]:
    """Returns the credit of the answers that have an episode with advantages, by their ids."""
    episode_by_answer = {episode.trajectory: episode for episode in episodes}
    credit_by_answer = {}
    for answer in answers:
        episode = episode_by_answer.get(answer.id)
        if episode is None or episode.advantages is None:
            continue
        credit_by_answer[answer.id] = make_step_credit(
            answer.step_ends,
            answer.reward,
            episode.advantages.tolist(),
            credit_ends=episode.step_ends,
            values=episode.step_values,
            errors=episode.step_errors,
        )
    return credit_by_answer


def choose_answers(answers: Sequence[Trajectory], credits: Credits, count: int) -> list[Trajectory]:
    """Returns `count` answers: half of them right and half of them wrong, if there are enough of both.

    Right and wrong answers are chosen separately. In each half, the answers on which the methods differ most
    come first. A second answer to a problem comes only after the first answers to all problems. Answers for
    which a method has no credit are left out.
    """
    disagreements = _measure_disagreements(answers, credits)
    candidates = [answer for answer in answers if answer.id in disagreements]
    candidates.sort(key=lambda answer: (-disagreements[answer.id], answer.id))
    right = _different_problems([answer for answer in candidates if answer.grade.correct])
    wrong = _different_problems([answer for answer in candidates if not answer.grade.correct])
    # Half of them are right, or more where there are too few wrong ones.
    right_count = min(len(right), max(count // 2, count - len(wrong)))
    return [*right[:right_count], *wrong[: count - right_count]]


def _different_problems(answers: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns the answers in another order: first the first answer to each problem, and then all others."""
    first: list[Trajectory] = []
    others: list[Trajectory] = []
    problems_so_far: set[str] = set()
    for answer in answers:
        answers_of_kind = others if answer.problem.id in problems_so_far else first
        answers_of_kind.append(answer)
        problems_so_far.add(answer.problem.id)
    return first + others


def _measure_disagreements(answers: Sequence[Trajectory], credits: Credits) -> dict[str, float]:
    """Returns how much the methods disagree on each answer, by the answer's id.

    Each method's advantages are first divided by their root mean square. The disagreement is the variance of
    a step's advantages among the methods, averaged over the answer's steps. With only one method, it is the
    variance of the method's advantages among the answer's steps. Answers for which a method has no credit are
    left out.
    """
    from statistics import fmean, pvariance

    scales = {}
    for name, by_answer in credits.items():
        squares: list[float] = []
        for credit in by_answer.values():
            squares += [point.value**2 for point in credit.advantages]
        root_mean_square = fmean(squares) ** 0.5
        scales[name] = root_mean_square or 1.0  # a method's advantages may all be 0
    disagreements = {}
    for answer in answers:
        if any(answer.id not in by_answer for by_answer in credits.values()):
            continue
        advantages_by_method = []
        for name, by_answer in credits.items():
            advantages = by_answer[answer.id].advantages
            advantages_by_method.append([point.value / scales[name] for point in advantages])
        if len(advantages_by_method) == 1:
            [advantages_of_method] = advantages_by_method
            disagreements[answer.id] = pvariance(advantages_of_method)
        else:
            variances = [pvariance(of_step) for of_step in zip(*advantages_by_method, strict=True)]
            disagreements[answer.id] = fmean(variances)
    return disagreements


def _make_row(answer: Trajectory, credits: Credits, codec: TextCodec) -> dict[str, Any]:
    """Returns everything that the report shows of an answer, as JSON."""
    starts = (0, *answer.step_ends[:-1])
    return {
        "answer": answer.id,
        "prompt": codec.decode(answer.prompt_ids),
        "reward": answer.reward,
        "correct": answer.grade.correct,
        "unfinished": answer.unfinished,
        "steps": [
            codec.decode(answer.response_ids[start:end])
            for start, end in zip(starts, answer.step_ends, strict=True)
        ],
        "credit": {
            name: by_answer[answer.id].plain()
            for name, by_answer in credits.items()
            if answer.id in by_answer
        },
    }
