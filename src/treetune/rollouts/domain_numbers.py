"""Metrics by domain, where problems have one: ``domains/<name>/…``.

Of answers: ``reward``, ``correct``, ``unfinished``, ``unavailable``, ``error`` and ``response_tokens``, means
as in ``episodes/``. Of problems: ``problems``, how many the domain gave; ``mixed``, the share whose answers
differ in score; ``learnable``, the mean of p (1 − p), where p is the share of right answers to a problem
(unbiased, of problems with several answers). Of trained tokens: ``advantage_std`` and ``advantage_zero``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treetune.vocabulary import Episode, Metrics, Trajectory

PREFIX = "domains/"
OF_ITERATION = (
    *("reward", "correct", "unfinished", "unavailable", "error", "response_tokens"),
    *("problems", "mixed", "learnable", "advantage_std", "advantage_zero", "weight"),
)
"""What an iteration records of a domain; ``weight`` is the share of problems that a mixture asks for."""
_OF_PROBLEM = "mixed"


def name_in(key: str) -> tuple[str, str] | None:
    """The domain and the number that a name is of; None for names that are of no domain."""
    if not key.startswith(PREFIX):
        return None
    domain, _, number = key.removeprefix(PREFIX).partition("/")
    return domain, number


def domain_columns(groups: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """The numbers of a rank's answers, given by problem, and of its problems; their means are metrics."""
    columns: dict[str, list[float]] = {}
    for answers in groups.values():
        domain = answers[0].problem.domain
        if not domain:
            continue
        graded = [one for one in answers if one.grade.is_known]
        numbers: dict[str, list[float]] = {
            "reward": [one.reward for one in graded],
            "correct": [float(one.grade.correct) for one in graded],
            "unfinished": [float(one.unfinished) for one in answers],
            "unavailable": [float(not one.grade.is_known) for one in answers],
            "error": [float(one.grade.outcome == "error") for one in answers],
            "response_tokens": [float(len(one.response_ids)) for one in answers],
            _OF_PROBLEM: [float(len({one.score for one in graded}) > 1)],
        }
        if (count := len(graded)) > 1:
            share = sum(one.grade.correct for one in graded) / count
            numbers["learnable"] = [share * (1 - share) * count / (count - 1)]
        for name, values in numbers.items():
            if values:
                columns.setdefault(f"{PREFIX}{domain}/{name}", []).extend(values)
    return columns


def domain_counts(columns: Mapping[str, Sequence[float]]) -> Metrics:
    """How many problems each domain gave, from all ranks' columns."""
    return {
        f"{PREFIX}{of[0]}/problems": float(len(values))
        for key, values in columns.items()
        if (of := name_in(key)) is not None and of[1] == _OF_PROBLEM
    }


def domain_advantages(episodes: Sequence[Episode]) -> Metrics:
    """How far apart each domain's advantages lie, over its trained tokens, and the share that are 0."""
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
