"""Metrics of an iteration's answers and rows, over all ranks.

Numbers of all ranks are pooled first and averaged afterwards, so that a mean does not depend on how answers
were distributed over ranks. Example: ``mean(pool_columns(context, "lengths", {"tokens": [12.0,
7.0]})["tokens"])``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.numbers import collect_number_columns, number_metrics
from treetune.vocabulary import Episode, Metrics, Trajectory


def pool_columns(
    context: RolloutContext, name: str, columns: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Returns each column with the values of all ranks, in rank order. Collective.

    Args:
        context: The context of the phase.
        name: The name of the exchange between ranks.
        columns: This rank's columns. Another rank may have other columns.
    """
    pooled_columns: dict[str, list[float]] = {}
    for columns_of_rank in context.ranks.exchange(name, dict(columns)):
        for column, values in columns_of_rank.items():
            pooled_columns.setdefault(column, []).extend(values)
    return pooled_columns


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Returns the (weighted) mean. `fsum` makes it independent of the order of the values."""
    if weights is None:
        return math.fsum(values) / len(values)
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return math.fsum(products) / math.fsum(weights)


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of a population (divided by n). `fsum` makes it independent of the order
    of the values."""
    center = mean(values)
    return math.sqrt(mean([(value - center) ** 2 for value in values]))


def trajectory_metrics(context: RolloutContext, trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the metrics of all ranks' answers. All answers to one problem are on one rank. Collective.

    * ``episodes/score``: the mean of the grader's verdicts; ``episodes/correct``: the share of correct
      answers;
    * ``episodes/reward`` and ``episodes/reward_std``: the mean and the standard deviation (of the population)
      of the rewards that credit distributes; if there is shaping, `apply_shaping` replaces both;
    * ``episodes/once_hit``: share of problems with at least one right answer;
    * ``episodes/unique``: mean share of different texts among the answers to a problem;
    * ``episodes/mixed``: share of problems whose answers differ in score;
    * ``episodes/no_answer``, ``timeout``, ``error``: shares of answers with these outcomes of grading;
    * ``episodes/unavailable``: share of answers whose grader was unavailable. No metric of scores counts
      them;
    * ``<group>/…``: means of the answers' named numbers; ``domains/<name>/…``: see `domain_columns`.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem.id, []).append(trajectory)
    columns_of_episodes = _columns_of_answers(trajectories) | _columns_of_problems(groups)
    local_values = {f"episodes/{name}": values for name, values in columns_of_episodes.items()}
    local_numbers = collect_number_columns(trajectories) | domain_columns(groups)
    columns = pool_columns(context, "rollout-metrics", local_values | local_numbers)
    metrics = {name: mean(columns[name]) for name in local_values if columns[name]}
    # The columns that aren't in `local_values` have the named numbers and the domains' numbers. Some of them
    # may come only from other ranks.
    metrics |= number_metrics({name: columns[name] for name in columns if name not in local_values})
    if columns["episodes/reward"]:
        metrics["episodes/reward_std"] = deviation(columns["episodes/reward"])
    if columns["episodes/response_tokens"]:
        metrics["episodes/response_tokens_max"] = max(columns["episodes/response_tokens"])
    return metrics | {
        "episodes/count": float(len(columns["episodes/unfinished"])),
        "episodes/problems": float(len(columns["episodes/mixed"])),
        **domain_counts(columns),
    }


def _columns_of_answers(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Returns the values whose means are metrics of answers: a value for each answer, or each graded one."""
    graded = [t for t in trajectories if t.grade.is_known]
    columns = {
        "score": [t.score for t in graded],
        "correct": [float(t.grade.correct) for t in graded],
        "reward": [t.reward for t in graded],
        "unfinished": [float(t.unfinished) for t in trajectories],
        "prompt_tokens": [float(len(t.prompt_ids)) for t in trajectories],
        # The last step ends with the answer, so its end is the answer's number of tokens.
        "response_tokens": [float(t.step_ends[-1]) for t in trajectories],
        "steps": [float(len(t.step_ends)) for t in trajectories],
    }
    for outcome in ("no_answer", "timeout", "error", "unavailable"):
        columns[outcome] = [float(t.grade.outcome == outcome) for t in trajectories]
    return columns


def _columns_of_problems(groups: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """Returns the values whose means are metrics of problems. `groups` has the answers to each problem."""
    columns: dict[str, list[float]] = {"once_hit": [], "unique": [], "mixed": []}
    for group in groups.values():
        graded = [t for t in group if t.grade.is_known]
        if graded:  # without a graded answer, it isn't known whether the problem was solved
            columns["once_hit"].append(float(any(t.grade.correct for t in graded)))
        columns["unique"].append(len({t.text for t in group}) / len(group))
        # A problem without graded answers adds a value, too: the length of this column is the metric
        # ``episodes/problems``.
        columns["mixed"].append(float(len({t.score for t in graded}) > 1))
    return columns


DOMAIN_PREFIX = "domains/"
DOMAIN_METRICS = (
    *("reward", "correct", "unfinished", "unavailable", "error", "response_tokens"),
    *("problems", "mixed", "learnable", "advantage_std", "advantage_zero", "weight"),
)
"""The names of the metrics that an iteration records for each domain. ``weight`` is the share of problems
that a mixture asks for."""
_ONE_FOR_EACH_PROBLEM = "mixed"
"""A column with one value for each problem, whose length is therefore the number of problems."""


def split_domain(key: str) -> tuple[str, str] | None:
    """Returns the domain and the name of a metric; None for a metric without a domain.

    Example: ``split_domain("domains/math/reward")`` is ``("math", "reward")``.
    """
    if not key.startswith(DOMAIN_PREFIX):
        return None
    domain, _, name = key.removeprefix(DOMAIN_PREFIX).partition("/")
    return domain, name


def domain_columns(groups: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """Returns columns of a rank's answers and problems for each domain. Their means over all ranks are the
    metrics ``domains/<name>/…``.

    * Columns with a value for each answer: ``reward``, ``correct``, ``unfinished``, ``unavailable``,
      ``error`` and ``response_tokens``, as in ``episodes/``.
    * Columns with a value for each problem: ``mixed``, 1 if its answers differ in score, or else 0; and
      ``learnable``, an unbiased estimate of p (1 − p), where p is the probability of a right answer. Only
      problems with several graded answers have it.

    `domain_counts` adds ``problems``, the number of the domain's problems. `domain_advantages` adds
    ``advantage_std`` and ``advantage_zero`` of trained tokens.

    Args:
        groups: The answers to each problem, by the problem's id.
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
            # The column ``mixed``, whose length is the number of problems.
            _ONE_FOR_EACH_PROBLEM: [float(len(scores) > 1)],
        }
        count = len(graded)
        if count > 1:
            share = sum(answer.grade.correct for answer in graded) / count
            # The factor count / (count - 1) makes the estimate unbiased, as for a sample variance.
            numbers["learnable"] = [share * (1 - share) * count / (count - 1)]
        for name, values in numbers.items():
            if values:
                columns.setdefault(f"{DOMAIN_PREFIX}{domain}/{name}", []).extend(values)
    return columns


def domain_counts(columns: Mapping[str, Sequence[float]]) -> Metrics:
    """Returns the number of problems of each domain, from all ranks' columns."""
    counts: Metrics = {}
    for key, values in columns.items():
        domain_and_name = split_domain(key)
        if domain_and_name is None:  # a column of all domains together
            continue
        domain, name = domain_and_name
        if name == _ONE_FOR_EACH_PROBLEM:
            counts[f"{DOMAIN_PREFIX}{domain}/problems"] = float(len(values))
    return counts


def domain_advantages(episodes: Sequence[Episode]) -> Metrics:
    """Returns two metrics for each domain: the standard deviation of the advantages of its trained tokens,
    and the share of these advantages that are 0."""
    import numpy as np

    advantages: dict[str, list[np.ndarray]] = {}
    for episode in episodes:
        if episode.domain and episode.advantages is not None:
            trained = episode.advantages[episode.trained]
            advantages.setdefault(episode.domain, []).append(trained)
    metrics: Metrics = {}
    for domain, advantages_by_episode in sorted(advantages.items()):
        values = np.concatenate(advantages_by_episode)
        metrics[f"{DOMAIN_PREFIX}{domain}/advantage_std"] = math.sqrt(float(values.var()))
        metrics[f"{DOMAIN_PREFIX}{domain}/advantage_zero"] = float((values == 0.0).mean())
    return metrics
