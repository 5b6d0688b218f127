"""Where a judge and a rule graded the same answers: how often they agree, and where they don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.store.answers import Answers
from treetune_view.store.columns import NUMBER
from treetune_view.store.queries import quoted

JUDGE, RULE = NUMBER + "judge", NUMBER + "rule"
"""Columns with what each of them would give an answer, where it was asked."""


@dataclass(frozen=True)
class Agreement:
    """Answers by both verdicts: `counts[judge][rule]`, 1 for right. `alone` were graded by the rule only: the
    judge isn't asked about what the rule accepts where ``when`` is ``rule_rejects``."""

    name: str
    counts: tuple[tuple[int, int], tuple[int, int]]
    alone: int = 0

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def share(self) -> float | None:
        """Of answers with both verdicts, how many are given the same."""
        return (self.counts[0][0] + self.counts[1][1]) / self.total if self.total else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa (1960): agreement beyond that of two who guess as often as these, 1 at most. None
        where both always said the same one thing: then there is nothing to tell."""
        if self.share is None:
            return None
        judged, ruled = sum(self.counts[1]), self.counts[0][1] + self.counts[1][1]
        # In whole numbers: chance is certain only if both never vary.
        chance = judged * ruled + (self.total - judged) * (self.total - ruled)
        if chance == self.total**2:
            return None
        by_chance = chance / self.total**2
        return (self.share - by_chance) / (1 - by_chance)


def graded_by_both(columns: Mapping[str, str]) -> bool:
    """Whether there are columns for both verdicts."""
    return JUDGE in columns and RULE in columns


def agreements(answers: Answers, by: str, sources: Sequence[str]) -> list[Agreement]:
    """One for each value of a column of the index, in its order."""
    judge, rule = quoted(JUDGE), quoted(RULE)
    rows = answers.sql(
        f"SELECT {quoted(by)} AS name, {judge} >= ? AS judged, {rule} >= ? AS ruled, count(*) AS count"
        f" FROM answers WHERE {rule} IS NOT NULL GROUP BY ALL ORDER BY name",
        [CORRECT_SCORE, CORRECT_SCORE],
        sources,
    )
    made: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        made.setdefault(row["name"] or "", []).append(row)
    return [_agreement(name, own) for name, own in made.items()]


def together(name: str, several: Sequence[Agreement]) -> Agreement:
    """All of them as one."""
    counts = tuple(
        tuple(sum(one.counts[judged][ruled] for one in several) for ruled in (0, 1)) for judged in (0, 1)
    )
    return Agreement(name, counts, sum(one.alone for one in several))  # type: ignore[arg-type]


def _agreement(name: str, rows: Sequence[Mapping[str, Any]]) -> Agreement:
    counts = {(row["judged"], row["ruled"]): row["count"] for row in rows}

    def of(judged: bool, ruled: bool) -> int:
        return counts.get((judged, ruled), 0)

    table = ((of(False, False), of(False, True)), (of(True, False), of(True, True)))
    return Agreement(name, table, sum(count for (judged, _), count in counts.items() if judged is None))
