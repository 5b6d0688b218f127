"""Trains on problems that are neither too easy nor too hard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Answers, Need
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection.all import selection_metrics
from treetune.vocabulary import Episode, Metrics


@Selection.register("mixed_groups")
@dataclass(frozen=True, kw_only=True)
class MixedGroups(Selection):
    """Drops groups in which every answer scored the same: relative to them, nothing was better.

    The filter of DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2); sampling anew is
    the rollout ``until_mixed``'s. It is about the score: a group in which all are right, and some are
    merely shorter, is dropped.

    Of the groups that are left, the first `at_most` are kept, in the order of the problems, which has
    nothing to do with their answers (None: all). ``selection/groups_dropped`` is the share of groups
    without spread, ``selection/groups_surplus`` the number of those over `at_most`.
    """

    at_most: Annotated[int, Gt(0)] | None = None

    needs = (Need(Answers(2), "it looks for problems whose answers differ"),)

    def most_kept(self, answers: int, problems: int) -> int:
        groups = problems if self.at_most is None else min(problems, self.at_most)
        return groups * (answers // max(1, problems))

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        scores: dict[str, set[float]] = {}
        for episode in episodes:
            scores.setdefault(episode.group, set()).add(episode.score)
        mixed = [group for group, of_group in scores.items() if len(of_group) > 1]
        chosen = set(mixed[: self.at_most])
        kept = [episode for episode in episodes if episode.group in chosen]
        metrics = selection_metrics(episodes, kept)
        metrics["selection/groups_surplus"] = float(len(mixed) - len(chosen))
        if scores:
            metrics["selection/groups_dropped"] = 1.0 - len(mixed) / len(scores)
        return kept, metrics
