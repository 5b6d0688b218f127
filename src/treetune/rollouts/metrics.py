"""Metrics of all ranks: the numbers are pooled first and averaged afterwards, so that they are the
same however the work was cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.domain_numbers import domain_columns, domain_counts
from treetune.rollouts.numbers import columns as number_columns
from treetune.rollouts.numbers import number_metrics
from treetune.vocabulary import Metrics, Trajectory


def pooled(
    context: RolloutContext, name: str, columns: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """The columns of all ranks, one below the other in rank order; a rank may lack some. Collective."""
    ranks = [columns_of_rank for (columns_of_rank,) in context.ranks.exchange(name, [dict(columns)])]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [value for rank in ranks for value in rank.get(name, ())] for name in names}


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The (weighted) mean, without rounding errors that depend on the order."""
    if weights is None:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def trajectory_metrics(context: RolloutContext, trajectories: Sequence[Trajectory]) -> Metrics:
    """What the answers of all ranks were like; all answers to one problem are on one rank.

    ``episodes/score``: the grader's mean verdict; ``episodes/correct``: the share of correct answers;
    ``episodes/reward``: the mean of what credit is given for, which shaping changes afterwards;
    ``episodes/once_hit``: share of problems with at least one right answer;
    ``episodes/unique``: mean share of different texts among the answers to a problem;
    ``episodes/mixed``: share of problems whose answers differ in score;
    ``episodes/no_answer``, ``timeout``, ``error``: shares of what the grader could not grade;
    ``episodes/unavailable``: share of what nobody could grade, which is no part of what is said of scores;
    ``<group>/…``: means of the answers' named numbers; ``domains/<name>/…``: see `domains`.
    Collective.
    """
    graded = [t for t in trajectories if t.grade.is_known]
    answers = {
        "score": [t.score for t in graded],
        "correct": [float(t.grade.correct) for t in graded],
        "reward": [t.reward for t in graded],
        "unfinished": [float(t.unfinished) for t in trajectories],
        "prompt_tokens": [float(len(t.prompt_ids)) for t in trajectories],
        "response_tokens": [float(t.step_ends[-1]) for t in trajectories],
        "steps": [float(len(t.step_ends)) for t in trajectories],
        **{
            outcome: [float(t.grade.outcome == outcome) for t in trajectories]
            for outcome in ("no_answer", "timeout", "error", "unavailable")
        },
    }
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem.id, []).append(trajectory)
    problems = {
        "once_hit": [
            float(any(t.grade.correct for t in g))
            for g in groups.values()
            if any(t.grade.is_known for t in g)
        ],
        "unique": [len({t.text for t in g}) / len(g) for g in groups.values()],
        "mixed": [float(len({t.score for t in g if t.grade.is_known}) > 1) for g in groups.values()],
    }
    own = {f"episodes/{key}": values for key, values in (answers | problems).items()}
    named = number_columns(trajectories) | domain_columns(groups)
    columns = pooled(context, "rollout-metrics", own | named)
    numbers = {name: columns[name] for name in columns if name not in own}
    metrics = {name: mean(columns[name]) for name in own if columns[name]} | number_metrics(numbers)
    if columns["episodes/response_tokens"]:
        metrics["episodes/response_tokens_max"] = max(columns["episodes/response_tokens"])
    return metrics | {
        "episodes/count": float(len(columns["episodes/unfinished"])),
        "episodes/problems": float(len(columns["episodes/mixed"])),
        **domain_counts(columns),
    }
