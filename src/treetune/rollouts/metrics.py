"""Metrics of all ranks. Numbers are pooled first and averaged afterwards, so that a mean is the same however
the work was cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.numbers import columns as number_columns
from treetune.rollouts.numbers import number_metrics
from treetune.vocabulary import Episode, Metrics, Trajectory


def pooled(
    context: RolloutContext, name: str, columns: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Returns the columns of all ranks, one below the other in rank order; a rank may lack some.
    Collective."""
    ranks = [columns_of_rank for (columns_of_rank,) in context.ranks.exchange(name, [dict(columns)])]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [value for rank in ranks for value in rank.get(name, ())] for name in names}


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Returns the (weighted) mean, without rounding errors that depend on the order."""
    if weights is None:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def trajectory_metrics(context: RolloutContext, trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the metrics of all ranks' answers; all answers to one problem are on one rank.

    ``episodes/score``: the grader's mean verdict; ``episodes/correct``: the share of correct answers;
    ``episodes/reward``: the mean of what credit is given for, which shaping changes afterwards;
    ``episodes/once_hit``: share of problems with at least one right answer;
    ``episodes/unique``: mean share of different texts among the answers to a problem;
    ``episodes/mixed``: share of problems whose answers differ in score;
    ``episodes/no_answer``, ``timeout``, ``error``: shares of what the grader could not grade;
    ``episodes/unavailable``: share of what nobody could grade, which no metric of scores counts;
    ``<group>/…``: means of the answers' named numbers; ``domains/<name>/…``: see `domain_columns`.
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
    fixed = {f"episodes/{key}": values for key, values in (answers | problems).items()}
    named = number_columns(trajectories) | domain_columns(groups)
    columns = pooled(context, "rollout-metrics", fixed | named)
    numbers = {name: columns[name] for name in columns if name not in fixed}
    metrics = {name: mean(columns[name]) for name in fixed if columns[name]} | number_metrics(numbers)
    if columns["episodes/response_tokens"]:
        metrics["episodes/response_tokens_max"] = max(columns["episodes/response_tokens"])
    return metrics | {
        "episodes/count": float(len(columns["episodes/unfinished"])),
        "episodes/problems": float(len(columns["episodes/mixed"])),
        **domain_counts(columns),
    }


PREFIX = "domains/"
OF_ITERATION = (
    *("reward", "correct", "unfinished", "unavailable", "error", "response_tokens"),
    *("problems", "mixed", "learnable", "advantage_std", "advantage_zero", "weight"),
)
"""What an iteration records of a domain; ``weight`` is the share of problems that a mixture asks for."""
_OF_PROBLEM = "mixed"


def split_domain(key: str) -> tuple[str, str] | None:
    """Splits `PREFIX` + ``math/accuracy`` into (``math``, ``accuracy``). Returns None for a metric without a
    domain."""
    if not key.startswith(PREFIX):
        return None
    domain, _, number = key.removeprefix(PREFIX).partition("/")
    return domain, number


def domain_columns(groups: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """Returns the numbers of a rank's answers, given by problem, and of its problems; their means are the
    metrics ``domains/<name>/…``.

    Of answers: ``reward``, ``correct``, ``unfinished``, ``unavailable``, ``error`` and ``response_tokens``,
    as in ``episodes/``. Of problems: ``mixed``, the share whose answers differ in score; ``learnable``, the
    mean of p (1 − p), where p is the share of right answers to a problem (unbiased, of problems with several
    answers). `domain_counts` adds ``problems``, how many the domain gave; `domain_advantages` adds
    ``advantage_std`` and ``advantage_zero`` of trained tokens.
    """
    columns: dict[str, list[float]] = {}
    for answers in groups.values():
        domain = answers[0].problem.domain
        if not domain:
            continue
        graded = [answer for answer in answers if answer.grade.is_known]
        scores = {answer.score for answer in graded}
        numbers: dict[str, list[float]] = {
            "reward": [answer.reward for answer in graded],
            "correct": [float(answer.grade.correct) for answer in graded],
            "unfinished": [float(answer.unfinished) for answer in answers],
            "unavailable": [float(not answer.grade.is_known) for answer in answers],
            "error": [float(answer.grade.outcome == "error") for answer in answers],
            "response_tokens": [float(len(answer.response_ids)) for answer in answers],
            _OF_PROBLEM: [float(len(scores) > 1)],
        }
        count = len(graded)
        if count > 1:
            share = sum(answer.grade.correct for answer in graded) / count
            # count / (count - 1) makes it unbiased, as it does for a variance.
            numbers["learnable"] = [share * (1 - share) * count / (count - 1)]
        for name, values in numbers.items():
            if values:
                columns.setdefault(f"{PREFIX}{domain}/{name}", []).extend(values)
    return columns


def domain_counts(columns: Mapping[str, Sequence[float]]) -> Metrics:
    """Counts the problems that each domain gave, from all ranks' columns."""
    counts: Metrics = {}
    for key, values in columns.items():
        domain_and_name = split_domain(key)
        if domain_and_name is None:
            continue
        domain, name = domain_and_name
        if name == _OF_PROBLEM:  # this column has one value for each problem
            counts[f"{PREFIX}{domain}/problems"] = float(len(values))
    return counts


def domain_advantages(episodes: Sequence[Episode]) -> Metrics:
    """Returns the standard deviation of each domain's advantages, over its trained tokens, and the share that
    are 0."""
    import numpy as np

    advantages: dict[str, list[np.ndarray]] = {}
    for episode in episodes:
        if episode.domain and episode.advantages is not None:
            trained = episode.advantages[episode.trained]
            advantages.setdefault(episode.domain, []).append(trained)
    metrics: Metrics = {}
    for domain, of_episodes in sorted(advantages.items()):
        values = np.concatenate(of_episodes)
        metrics[f"{PREFIX}{domain}/advantage_std"] = math.sqrt(float(values.var()))
        metrics[f"{PREFIX}{domain}/advantage_zero"] = float((values == 0.0).mean())
    return metrics
