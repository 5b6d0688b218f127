"""Compares the order of next steps by their estimated values with their true order."""

from __future__ import annotations

import asyncio
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
from treetune.engine.requests import Request
from treetune.lab.analyzers.figures import (
    Bootstrap,
    draw_legend_below,
    draw_points_with_bars,
    make_panels,
    mean_of,
    style_of,
)
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import (
    ESTIMATE_PURPOSE,
    TRUTH_PURPOSE,
    ChosenState,
    choose_states,
    continue_prefixes,
)
from treetune.lab.analyzers.value_accuracy import (
    CRITIC,
    CriticFunction,
    label_of_estimator,
    order_of_estimator,
)
from treetune.rollouts.answers import split_steps
from treetune.rollouts.context import RolloutContext
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.seeds import derive_seed
from treetune.tasks.mixed import task_of
from treetune.vocabulary import Trajectory, concatenate, token_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.resources import RunResources

CLEAR_ERRORS = 2.0
"""A pair is clear where its true values differ by more than this many standard errors of their difference."""

RankedState = Mapping[str, Any]
"""A state with its next steps, their true values and their predictions; see `ActionRanking.measure`."""
PrefixIds = tuple[int, ...]
"""The token ids of an answer up to the end of a step."""


@Analyzer.register("action_ranking")
@dataclass(frozen=True, kw_only=True)
class ActionRanking(OfCheckpoints):
    """Compares the order of the policy's next steps by estimated values with their true order
    (Kazemnejad et al., arXiv:2410.01679, section 7: the best of five next steps).

    Continuations of a state are sampled and cut at their next step boundary, which gives the next steps of
    the state. A step that ends the answer is left out, because it is graded and has no value to estimate. The
    value of a step is predicted by the mean reward of fresh continuations, or by the critic's value of the
    state to which the step leads.
    """

    rollouts: Annotated[int, Gt(1)] = 256
    """The number of continuations of a step whose mean reward counts as the step's true value."""
    samples: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)] = (1, 3, 9)
    """The values of K: means of K continuations predict a step's value."""
    alternatives: Annotated[int, Gt(1)] = 5
    """The number of continuations of a state, each of which gives a next step."""
    at_least: Annotated[int, Gt(1)] = 3
    """The smallest number of different next steps with which a state is ranked."""
    states: Annotated[int, Gt(0)] = 48
    """The largest number of states that are ranked at a checkpoint."""
    candidates: Annotated[int, Gt(0)] = 256
    """The number of states whose next steps are sampled. Many of them have too few different next steps."""
    problems: Annotated[int, Ge(1)] = 64
    """The number of training problems that are answered, to get the candidate states, where the run kept no
    answers by the checkpoint's weights."""

    needs_engine = True
    judges_critic = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    def __post_init__(self) -> None:
        if self.at_least > self.alternatives:
            raise ValueError(
                f"at_least is {self.at_least} and exceeds alternatives, which is {self.alternatives}: raise"
                " alternatives"
            )

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import answers_and_critic_at, context_at

        rows: list[RankedState] = []
        origins = {}
        for point in points:
            trajectories, origins[str(point)], critic = answers_and_critic_at(
                resources, point, work, self.seed, self.problems
            )
            candidates = choose_states(trajectories, self.candidates, self.seed, point)
            with resources.phase(f"next steps after iteration {point}", "continuations") as show:
                context = context_at(resources, point, work, self.seed, "actions", show)
                rows += self.measure(context, candidates, critic)
        if not rows:
            raise ValueError(
                f"none of the {self.candidates} states has {self.at_least} different next steps among"
                f" {self.alternatives}: the policy is too certain, or its answers have a single step. Raise"
                " alternatives, lower at_least, or analyse an earlier checkpoint"
            )
        return Findings({**self.summarise(rows), "answers": origins}, rows)

    def measure(
        self, context: RolloutContext, states: Sequence[ChosenState], critic: CriticFunction | None
    ) -> list[RankedState]:
        """Returns a row for each state with enough next steps, for at most `self.states` states."""
        assert context.engine is not None
        # Each next step is represented by a prefix: the answer's tokens up to the end of the step.
        prefixes_of_states = context.engine.run(self._next_steps_of_all(context, states))
        chosen = []
        for state, prefixes in zip(states, prefixes_of_states, strict=True):
            if len(prefixes) >= self.at_least:
                chosen.append((state, prefixes))
        chosen = chosen[: self.states]
        # The prefixes of all states are in one list, so that their continuations are sampled together.
        all_prefixes: list[tuple[Trajectory, PrefixIds]] = []
        for state, prefixes in chosen:
            all_prefixes += [(state.trajectory, prefix) for prefix in prefixes]
        truths = iter(continue_prefixes(context, all_prefixes, self.rollouts, TRUTH_PURPOSE))
        estimates = iter(continue_prefixes(context, all_prefixes, sum(self.samples), ESTIMATE_PURPOSE))
        state_ids = [concatenate([answer.prompt_ids, token_array(prefix)]) for answer, prefix in all_prefixes]
        critic_values = iter(critic(state_ids) if critic else ())
        rows: list[RankedState] = []
        for state, prefixes in chosen:
            true_rewards = [next(truths).rewards for _ in prefixes]
            predictions = self._mean_rewards_by_k([next(estimates).rewards for _ in prefixes])
            if critic:
                predictions[CRITIC] = [next(critic_values) for _ in prefixes]
            rows.append(
                {
                    "checkpoint": context.iteration,
                    "problem": state.trajectory.problem.id,
                    "answer": state.trajectory.id,
                    "step": state.step,
                    "position": state.position,
                    "text": context.codec.decode(state.prefix_ids),
                    "steps": [context.codec.decode(prefix[state.start :]) for prefix in prefixes],
                    "truths": [math.fsum(rewards) / len(rewards) for rewards in true_rewards],
                    "truth_errors": [
                        math.sqrt(pvariance(rewards) / len(rewards)) for rewards in true_rewards
                    ],
                    "predictions": predictions,
                }
            )
        return rows

    async def _next_steps_of_all(
        self, context: RolloutContext, states: Sequence[ChosenState]
    ) -> list[list[PrefixIds]]:
        """Returns for each state the different prefixes that result from it with one more step."""
        return await asyncio.gather(*(self._next_steps(context, state) for state in states))

    async def _next_steps(self, context: RolloutContext, state: ChosenState) -> list[PrefixIds]:
        """Returns the different prefixes that result from the state with one more step."""
        assert context.engine is not None and context.settings.sampling is not None
        problem, prompt_ids = state.trajectory.problem, state.trajectory.prompt_ids
        sampling = task_of(context.task, problem).adjust_sampling(context.settings.sampling)
        budget = context.settings.token_budget(prompt_ids, sampling.max_tokens)
        request = Request(
            prompt_ids=state.token_ids,
            seed=_seed_of_next_steps(context, state),
            n=self.alternatives,
            sampling=replace(sampling, max_tokens=budget - state.start),
            reads_logprobs=False,
        )
        prefixes: dict[PrefixIds, None] = {}  # a dictionary as an ordered set
        for completion in await context.engine.sample(request):
            answer = state.prefix_ids + tuple(completion.token_ids.tolist())
            text = context.codec.decode(answer)
            # The next step begins where the state ends, at `state.start`. It ends at the first later end of a
            # step.
            ends = split_steps(context, problem, token_array(answer), text, request.sampling.stop)
            end = next(end for end in ends if end > state.start)
            if end < len(answer):  # a step that ends the answer leaves nothing to continue
                prefixes[answer[:end]] = None
        return list(prefixes)

    def _mean_rewards_by_k(self, rewards: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """Returns the mean of K rewards of each step, for each K: {"monte_carlo_3": [0.33, 1.0], …}.

        No reward is used for two values of K.
        """
        means: dict[str, list[float]] = {}
        start = 0
        for k in self.samples:
            end = start + k
            means[f"monte_carlo_{k}"] = [math.fsum(of_step[start:end]) / k for of_step in rewards]
            start = end
        return means

    @override
    def summarise(self, rows: Sequence[RankedState]) -> dict[str, Any]:
        """Returns how often each estimator ranks steps correctly, at each checkpoint and over all
        checkpoints."""
        by_checkpoint = {}
        for point in sorted({row["checkpoint"] for row in rows}):
            by_checkpoint[str(point)] = self._mean_scores([row for row in rows if row["checkpoint"] == point])
        return {
            "rollouts": self.rollouts,
            "alternatives": self.alternatives,
            "all": self._mean_scores(rows),
            "by_checkpoint": by_checkpoint,
        }

    def _mean_scores(self, rows: Sequence[RankedState]) -> dict[str, Any]:
        """Returns the mean scores of each estimator over the rows, with intervals, and the scores by
        chance."""
        bootstrap = Bootstrap([row["problem"] for row in rows], self.seed)
        scores: dict[str, Callable[[RankedState, list[float]], float]] = {
            "pairwise": lambda row, predicted: score_pairs(row["truths"], predicted),
            "pairwise_clear": lambda row, predicted: score_pairs(
                row["truths"], predicted, row["truth_errors"]
            ),
            "best": lambda row, predicted: score_best(row["truths"], predicted),
        }
        estimator_names: dict[str, None] = {}  # a dictionary as an ordered set
        for row in rows:
            estimator_names |= dict.fromkeys(row["predictions"])
        estimators: dict[str, dict[str, Any]] = {}
        for name in estimator_names:
            estimators[name] = {}
            for measure, score_row in scores.items():
                scores_of_rows = [score_row(row, row["predictions"][name]) for row in rows]
                estimators[name][measure] = bootstrap(mean_of(scores_of_rows))
        # For equal predictions, `best` is the probability that a step drawn at random is the best.
        best_by_chance = [score_best(row["truths"], [0.0] * len(row["truths"])) for row in rows]
        return {
            "states": len(rows),
            "steps": math.fsum(len(row["truths"]) for row in rows) / len(rows),
            "chance": {
                "pairwise": 0.5,
                "pairwise_clear": 0.5,
                "best": math.fsum(best_by_chance) / len(rows),
            },
            "estimators": estimators,
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, axes = make_panels(["Pairs of next steps in the right order", "The best next step found"])
        estimator_names: set[str] = set()
        for result in results.values():
            estimator_names |= result["numbers"]["all"]["estimators"].keys()
        names = sorted(estimator_names, key=order_of_estimator)
        for i, (label, result) in enumerate(results.items()):
            numbers = result["numbers"]["all"]
            # Experiments are next to each other at each estimator's position on the x axis.
            shift = (i - (len(results) - 1) / 2) * 0.16
            xs = [names.index(name) + shift for name in numbers["estimators"]]
            style = style_of(i) | {"linestyle": "none"}
            for panel, measure in zip(axes, ("pairwise", "best"), strict=True):
                scores = [measures[measure] for measures in numbers["estimators"].values()]
                draw_points_with_bars(panel, xs, scores, label=label, **style)
                panel.axhline(
                    numbers["chance"][measure], color=style["color"], linestyle=":", linewidth=1,
                    label=f"{label}: chance",
                )  # fmt: skip
        for panel in axes:
            panel.set_xticks(range(len(names)), [label_of_estimator(name) for name in names])
            panel.set_xlim(-0.6, len(names) - 0.4)
            panel.set_ylim(0, 1.02)
        draw_legend_below(figure, axes)
        return figure


def _seed_of_next_steps(context: RolloutContext, state: ChosenState) -> int:
    """Returns the seed of a state's next steps, which other states and continuations don't share."""
    return derive_seed(
        context.seed, context.iteration, state.trajectory.problem.id, repr(state.prefix_ids), "steps"
    )


def score_pairs(
    truths: Sequence[float], predictions: Sequence[float], errors: Sequence[float] | None = None
) -> float:
    """Returns the share of pairs that the predictions put in the true order. Equal predictions count half.

    Pairs of equal true values have no order and don't count. If the standard `errors` of the true values are
    given, pairs that differ by at most CLEAR_ERRORS standard errors of their difference don't count either.
    The share is NaN where no pair counts.

    Example: `score_pairs([0.1, 0.5, 0.9], [0.2, 0.2, 1.0])` is 2.5 / 3.
    """
    scores = []
    for a, b in itertools.combinations(range(len(truths)), 2):
        difference = truths[a] - truths[b]
        clear_difference = CLEAR_ERRORS * math.hypot(errors[a], errors[b]) if errors is not None else 0.0
        if abs(difference) <= clear_difference:  # also if both are 0
            continue
        # Positive if the predictions have the true order.
        agreement = (predictions[a] - predictions[b]) * difference
        scores.append(0.5 if agreement == 0 else float(agreement > 0))
    return math.fsum(scores) / len(scores) if scores else math.nan


def score_best(truths: Sequence[float], predictions: Sequence[float]) -> float:
    """Returns the probability that the step with the highest prediction is truly the best.

    If several steps have the highest prediction, one of them is drawn at random."""
    highest = max(predictions)
    best_predicted = [i for i, value in enumerate(predictions) if value == highest]
    return sum(truths[i] == max(truths) for i in best_predicted) / len(best_predicted)
