"""Judge against rule: how often both gave the same verdict, and the answers on which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.page import Page, View
from treetune_view.store import NotThere
from treetune_view.store.answers import Answers
from treetune_view.store.columns import NUMBER
from treetune_view.store.folders import digest
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
        """The share of answers with both verdicts that are given the same."""
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
    """Returns whether there are columns for both verdicts."""
    return JUDGE in columns and RULE in columns


def agreements(answers: Answers, by: str, sources: Sequence[str]) -> list[Agreement]:
    """Returns one for each value of a column of the index, in its order."""
    judge, rule = quoted(JUDGE), quoted(RULE)
    rows = answers.sql(
        f"SELECT {quoted(by)} AS name, {judge} >= ? AS judged, {rule} >= ? AS ruled, count(*) AS count"
        f" FROM answers WHERE {rule} IS NOT NULL GROUP BY ALL ORDER BY name",
        [CORRECT_SCORE, CORRECT_SCORE],
        sources,
    )
    by_name: dict[str, dict[tuple[Any, Any], int]] = {}
    for row in rows:
        counts = by_name.setdefault(row["name"] or "", {})
        key = row["judged"], row["ruled"]
        counts[key] = counts.get(key, 0) + row["count"]
    return [
        Agreement(
            name,
            (
                (counts.get((False, False), 0), counts.get((False, True), 0)),
                (counts.get((True, False), 0), counts.get((True, True), 0)),
            ),
            sum(count for (judged, _), count in counts.items() if judged is None),
        )
        for name, counts in by_name.items()
    ]


def show(view: View) -> Response:
    """`?run=`, `?of=` (one file; without it all)."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    columns = answers.columns()
    waiting = [one.source.title for one in indexed if one.is_awaited]
    graded = graded_by_both(columns)
    if not graded and not waiting:
        raise NotThere(
            f"no answer of {view.run.name} has been graded by a judge and by a rule: the grader"
            " {type: 'judge', rule: {…}} has both grade them"
        )
    sources = {one.source.name: one.source for one in indexed if one.about is not None}
    of = view.choice("of", ("", *sources))
    by_file = agreements(answers, "source", ()) if graded else []
    by_file.sort(key=lambda one: list(sources).index(one.name))
    chosen = [one for one in by_file if not of or one.name == of]
    counts = [[sum(one.counts[judged][ruled] for one in chosen) for ruled in (0, 1)] for judged in (0, 1)]
    (a, b), (c, d) = counts
    domains = agreements(answers, "domain", (of,) if of else ()) if graded and "domain" in columns else []
    sign = {1: ">=", 0: "<"}

    def answers_with(judged: int, ruled: int) -> str:
        """Returns the address of the answers with these verdicts."""
        where = f"{JUDGE} {sign[judged]} {CORRECT_SCORE:g}; {RULE} {sign[ruled]} {CORRECT_SCORE:g}"
        return view.address("/answers", run=view.run.name, of=of or "everything", where=where)

    return view.render(
        "agreement.html",
        whole=Agreement("all", ((a, b), (c, d)), sum(one.alone for one in chosen)),
        by_file=by_file,
        domains=domains if len(domains) > 1 else [],
        sources=sources,
        of=of,
        waiting=waiting,
        problems=answers.problems(),
        answers_with=answers_with,
    )


PAGES = (
    Page(
        "/agreement",
        "Judge and rule",
        show,
        mark=lambda view: digest(view.store.answers(view.run).mark(), view.request.url.query),
    ),
)
