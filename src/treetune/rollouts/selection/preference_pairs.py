"""Trains on pairs of answers to a problem, of which one was right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Answers, Experiment, Finding, Need, Pairs, UseOfPairs
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection.all import selection_metrics, unreachable
from treetune.seeds import derived_random
from treetune.vocabulary import CORRECT_SCORE, Episode, Metrics


@Selection.register("preference_pairs")
@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Selection):
    """Every answer that scores at least `reward_threshold` against every other one to the same problem.

    Of more than `max_pairs_per_problem` pairs (None: no bound) that many are drawn, each as likely
    as any other. The draw derives from run seed, iteration and problem. A problem whose answers
    are all on one side gives no pair.

    An answer comes as often as it is compared: first the better one of a pair, then the other, both
    with the pair's number. ``selection/kept`` counts answers that are in any pair.
    """

    reward_threshold: float = CORRECT_SCORE
    max_pairs_per_problem: Annotated[int, Gt(0)] | None = 64

    keeps_groups = False

    gives = (Pairs(),)
    needs = (
        Need(UseOfPairs(), "it makes pairs of answers"),
        Need(Answers(2), "it pairs answers to the same problem"),
    )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return unreachable(self.reward_threshold, experiment)

    def most_kept(self, answers: int, problems: int) -> int:
        each = answers // max(1, problems)
        pairs = (each // 2) * (each - each // 2)
        bound = self.max_pairs_per_problem
        return problems * (pairs if bound is None else min(pairs, bound))

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        rows: list[Episode] = []
        possible = capped = 0
        for name, group in groups.items():
            accepted = [e for e in group if e.score >= self.reward_threshold]
            rejected = [e for e in group if e.score < self.reward_threshold]
            count = len(accepted) * len(rejected)
            numbers: Sequence[int] = range(count)
            if self.max_pairs_per_problem is not None and count > self.max_pairs_per_problem:
                draw = derived_random(context.seed, context.iteration, name, "pairs")
                numbers = sorted(draw.sample(numbers, self.max_pairs_per_problem))
                capped += 1
            for number in numbers:
                better, other = divmod(number, len(rejected))
                pair = len(rows) // 2
                rows.append(replace(accepted[better], pair=pair, chosen=True))
                rows.append(replace(rejected[other], pair=pair, chosen=False))
            possible += count
        kept = list({row.trajectory: row for row in rows}.values())
        return rows, selection_metrics(episodes, kept) | {
            "selection/pairs": float(len(rows) // 2),
            "selection/pairs_possible": float(possible),
            "selection/groups_capped": float(capped),
        }
