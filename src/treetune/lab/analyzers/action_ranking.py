"""The order of next steps by their values, held against their true order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pvariance
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, MinLen
from typing_extensions import override

from treetune.contracts import Need, OneLine
from treetune.engine.base import Request
from treetune.lab.analyzers.figures import (
    Bootstrap,
    legend_below,
    mean_of,
    panels,
    points_with_bars,
    style_of,
)
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import ESTIMATE, TRUTH, ChosenState, choose_states, continue_prefixes
from treetune.lab.analyzers.value_accuracy import CRITIC, CriticValues, label_of, order_of
from treetune.rollouts.answers import split_steps
from treetune.rollouts.context import RolloutContext
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.seeds import derive_seed
from treetune.vocabulary import joined, token_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler

CLEAR_ERRORS = 2.0
"""A pair is clear where its truths differ by more than this many of their standard errors."""

Row = Mapping[str, Any]
Step = tuple[int, ...]
"""An answer so far: the token ids up to the end of a step."""


@Analyzer.register("action_ranking")
@dataclass(frozen=True, kw_only=True)
class ActionRanking(OfCheckpoints):
    """Next steps that the policy may take from one state, in the order that values put them in
    (Kazemnejad et al., arXiv:2410.01679, section 7: the best of five next steps).

    From each state continuations are sampled and cut at their next step boundary. Different steps are kept;
    a step that ends the answer is left out, since it is graded and not valued. A step's prediction is the
    mean of fresh continuations, or the critic's value of the state that it leads to.
    """

    rollouts: Annotated[int, Gt(1)] = 256
    """Continuations of a step whose mean is its truth."""
    samples: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)] = (1, 3, 9)
    """Numbers of continuations that predict it."""
    alternatives: Annotated[int, Gt(1)] = 5
    """Continuations of a state that give its next steps."""
    at_least: Annotated[int, Gt(1)] = 3
    """Different next steps that a state needs."""
    states: Annotated[int, Gt(0)] = 48
    """States that are ranked."""
    candidates: Annotated[int, Gt(0)] = 256
    """States that are tried for it."""
    problems: Annotated[int, Ge(1)] = 64
    """Training problems whose answers give the candidate states."""

    needs_engine = True
    judges_critic = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    def __post_init__(self) -> None:
        if self.at_least > self.alternatives:
            raise ValueError(f"at_least {self.at_least} of {self.alternatives} alternatives can't be had")

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import context_at, judged_at

        rows: list[Row] = []
        origins = {}
        for point in points:
            trajectories, origins[str(point)], critic = judged_at(
                sampler, point, work, self.seed, self.problems
            )
            chosen = choose_states(trajectories, self.candidates, self.seed, point)
            what = f"next steps after iteration {point}"
            with sampler.phase(what, "continuations") as show:
                context = context_at(sampler, point, work, self.seed, "actions", show)
                rows += self.measure(context, chosen, critic)
        if not rows:
            raise ValueError(
                f"none of the {self.candidates} states has {self.at_least} different next steps among"
                f" {self.alternatives}: the policy is too sure, or its answers have one step: raise"
                " alternatives, lower at_least, or look at an earlier checkpoint"
            )
        return Findings({**self.summarise(rows), "answers": origins}, rows)

    def measure(
        self, context: RolloutContext, states: Sequence[ChosenState], critic: CriticValues | None
    ) -> list[Row]:
        """Returns one row for each state that has enough next steps: their truths and predictions."""
        found = zip(states, self._next_steps(context, states), strict=True)
        kept = [(state, steps) for state, steps in found if len(steps) >= self.at_least][: self.states]
        nodes = [(state.trajectory, step) for state, steps in kept for step in steps]
        truths = iter(continue_prefixes(context, nodes, self.rollouts, TRUTH))
        tried = iter(continue_prefixes(context, nodes, sum(self.samples), ESTIMATE))
        reached = [joined([answer.prompt_ids, token_array(step)]) for answer, step in nodes]
        values = iter(critic(reached) if critic else ())
        rows: list[Row] = []
        for state, steps in kept:
            of_state = [next(truths).rewards for _ in steps]
            predictions = self._means([next(tried).rewards for _ in steps])
            if critic:
                predictions[CRITIC] = [next(values) for _ in steps]
            rows.append(
                {
                    "checkpoint": context.iteration,
                    "problem": state.trajectory.problem.id,
                    "answer": state.trajectory.id,
                    "step": state.step,
                    "position": state.position,
                    "text": context.codec.decode(state.prefix_ids),
                    "steps": [context.codec.decode(step[state.start :]) for step in steps],
                    "truths": [math.fsum(rewards) / len(rewards) for rewards in of_state],
                    "truth_errors": [math.sqrt(pvariance(r) / len(r)) for r in of_state],
                    "predictions": predictions,
                }
            )
        return rows

    def _next_steps(self, context: RolloutContext, states: Sequence[ChosenState]) -> list[list[Step]]:
        """Returns for each state the different answers so far that it may become with one more step."""
        assert context.engine is not None and context.settings.sampling is not None
        requests = [
            Request(
                prompt_ids=state.token_ids,
                seed=_seed(context, state),
                n=self.alternatives,
                sampling=replace(
                    sampling,
                    max_tokens=context.settings.token_budget(state.trajectory.prompt_ids, sampling.max_tokens)
                    - state.start,
                ),
                reads_logprobs=False,
            )
            for state in states
            for sampling in [context.task.of(state.trajectory.problem).sampling(context.settings.sampling)]
        ]
        found = []
        answered = zip(states, requests, context.engine.generate(requests), strict=True)
        for state, request, completions in answered:
            problem, stop = state.trajectory.problem, request.sampling.stop
            answers = [state.prefix_ids + tuple(completion.token_ids.tolist()) for completion in completions]
            steps: dict[Step, None] = {}  # in their order, each once
            for answer in answers:
                text = context.codec.decode(answer)
                ends = split_steps(context, problem, token_array(answer), text, stop)
                end = next(end for end in ends if end > state.start)
                if end < len(answer):
                    steps[answer[:end]] = None
            found.append(list(steps))
        return found

    def _means(self, rewards: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """Returns each estimator's means over its part of a step's rewards: none shares one with another."""
        parts = itertools.pairwise(itertools.accumulate(self.samples, initial=0))
        return {
            f"monte_carlo_{k}": [math.fsum(of_step[start:end]) / k for of_step in rewards]
            for k, (start, end) in zip(self.samples, parts, strict=True)
        }

    @override
    def summarise(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Returns how often each estimator ranks actions rightly, at every checkpoint and over all of them
        together."""
        points = sorted({row["checkpoint"] for row in rows})
        return {
            "rollouts": self.rollouts,
            "alternatives": self.alternatives,
            "all": self._numbers(rows),
            "by_checkpoint": {
                str(point): self._numbers([row for row in rows if row["checkpoint"] == point])
                for point in points
            },
        }

    def _numbers(self, rows: Sequence[Row]) -> dict[str, Any]:
        bootstrap = Bootstrap([row["problem"] for row in rows], self.seed)
        names = list(dict.fromkeys(name for row in rows for name in row["predictions"]))
        scores: dict[str, Callable[[Row, list[float]], float]] = {
            "pairwise": lambda row, predicted: pairwise(row["truths"], predicted),
            "pairwise_clear": lambda row, predicted: pairwise(row["truths"], predicted, row["truth_errors"]),
            "best": lambda row, predicted: best(row["truths"], predicted),
        }
        return {
            "states": len(rows),
            "steps": math.fsum(len(row["truths"]) for row in rows) / len(rows),
            "chance": {
                "pairwise": 0.5,
                "pairwise_clear": 0.5,
                "best": math.fsum(best(row["truths"], [0.0] * len(row["truths"])) for row in rows)
                / len(rows),
            },
            "estimators": {
                name: {
                    measure: bootstrap(mean_of([score(row, row["predictions"][name]) for row in rows]))
                    for measure, score in scores.items()
                }
                for name in names
            },
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, axes = panels(["Pairs of next steps in the right order", "The best next step found"])
        numbers = {name: result["numbers"]["all"] for name, result in results.items()}
        names = sorted({name for one in numbers.values() for name in one["estimators"]}, key=order_of)
        for i, (label, one) in enumerate(numbers.items()):
            shift = (i - (len(numbers) - 1) / 2) * 0.16
            style = style_of(i) | {"linestyle": "none"}
            for panel, measure in zip(axes, ("pairwise", "best"), strict=True):
                own = [
                    (names.index(name) + shift, found[measure]) for name, found in one["estimators"].items()
                ]
                points_with_bars(panel, [x for x, _ in own], [y for _, y in own], label=label, **style)
                panel.axhline(
                    one["chance"][measure], color=style["color"], linestyle=":", linewidth=1,
                    label=f"{label}: chance",
                )  # fmt: skip
        for panel in axes:
            panel.set_xticks(range(len(names)), [label_of(name) for name in names])
            panel.set_xlim(-0.6, len(names) - 0.4)
            panel.set_ylim(0, 1.02)
        legend_below(figure, axes[0])
        return figure


def _seed(context: RolloutContext, state: ChosenState) -> int:
    place = (context.iteration, state.trajectory.problem.id, repr(state.prefix_ids))
    return derive_seed(context.seed, *place, "steps")


def pairwise(
    truths: Sequence[float], predictions: Sequence[float], errors: Sequence[float] | None = None
) -> float:
    """Returns the share of pairs that the predictions put in the true order; equal predictions count half.

    Pairs of equal truths have no order and don't count, nor, with the truths' standard `errors`,
    those that differ by less than CLEAR_ERRORS of them. NaN where no pair is left.
    """
    scores = []
    for a, b in itertools.combinations(range(len(truths)), 2):
        difference = truths[a] - truths[b]
        least = CLEAR_ERRORS * math.hypot(errors[a], errors[b]) if errors is not None else 0.0
        if difference == 0 or abs(difference) <= least:
            continue
        predicted = (predictions[a] - predictions[b]) * difference
        scores.append(0.5 if predicted == 0 else float(predicted > 0))
    return math.fsum(scores) / len(scores) if scores else math.nan


def best(truths: Sequence[float], predictions: Sequence[float]) -> float:
    """Returns the chance that one of the steps with the best prediction, taken at random, truly is the
    best."""
    ahead = [i for i, value in enumerate(predictions) if value == max(predictions)]
    return sum(truths[i] == max(truths) for i in ahead) / len(ahead)
