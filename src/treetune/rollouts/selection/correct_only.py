"""Trains on answers that were right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Experiment, Finding
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection.all import selection_metrics, unreachable
from treetune.vocabulary import CORRECT_SCORE, Episode, Metrics


@Selection.register("correct_only")
@dataclass(frozen=True, kw_only=True)
class CorrectOnly(Selection):
    """Episodes that score at least `reward_threshold`, the first `max_per_problem` of each problem.

    ReST-EM (Singh et al., arXiv:2312.06585) caps the answers per problem, at 10 in
    their experiments, so that easy problems don't crowd out hard ones.
    """

    reward_threshold: float = CORRECT_SCORE
    max_per_problem: Annotated[int, Gt(0)] | None = None

    keeps_groups = False

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return unreachable(self.reward_threshold, experiment)

    def most_kept(self, answers: int, problems: int) -> int:
        return answers if self.max_per_problem is None else min(answers, self.max_per_problem * problems)

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        taken: Counter[str] = Counter()
        kept = []
        for episode in episodes:
            if episode.score < self.reward_threshold or taken[episode.group] == self.max_per_problem:
                continue
            taken[episode.group] += 1
            kept.append(episode)
        capped = sum(count == self.max_per_problem for count in taken.values())
        return kept, selection_metrics(episodes, kept) | {"selection/groups_capped": float(capped)}
