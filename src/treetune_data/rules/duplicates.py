"""Rows that ask what another one before them asks: the same words, or nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_data.rules.words import hashed, runs, word_list
from treetune_domains.domain_rows import DATA_SOURCE, GROUND_TRUTH, REWARD_MODEL, prompt_text
from treetune_domains.extras import missing_extras

if TYPE_CHECKING:
    import numpy as np

MISSED = 1e-3


@Rule.register("exact_duplicates")
@dataclass(frozen=True, kw_only=True)
class ExactDuplicates(Rule):
    """Drops a row whose prompt has the same words in the same order as one before it, punctuation and
    capitals aside where `loose`. The summary says how many of them had another ground truth: one of the two
    is wrong.
    """

    loose: bool = False
    """Whether punctuation and capitals make no difference."""
    name: str | None = None

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        first: dict[int, tuple[str, str]] = {}
        found = {}
        contradicting = 0
        for one in rows:
            text = prompt_text(one.row)
            words = " ".join(word_list(text) if self.loose else text.split())
            key = hashed(words, 16)
            gold = one.row[REWARD_MODEL][GROUND_TRUTH]
            place, other = first.setdefault(key, (one.place, gold))
            if place != one.place:
                another = " with another ground truth" if other != gold else ""
                found[one.number] = f"the same as {place}{another}"
                contradicting += other != gold
        return Verdict(found, {"with_another_ground_truth": contradicting})


@Rule.register("near_duplicates")
@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Rule):
    """Drops a row whose prompt has nearly the same words as one before it that stays: the sets of their runs
    of `ngram` words have a Jaccard similarity of `similarity` or more. In scripts without spaces between
    words, two characters count as a word.

    The default leaves variants of a template with other numbers. A copy with every tenth word changed is
    found with ``ngram: 2, similarity: 0.6``, which drops such variants as well.

    MinHash with locality-sensitive hashing finds the candidates, and misses fewer than one in a thousand;
    each is then compared as it is, so nothing goes by chance. More `permutations` compare fewer. With
    `within_source`, rows of different sources are not compared.
    """

    similarity: Annotated[float, Gt(0), Le(1)] = 0.8
    ngram: Annotated[int, Ge(1)] = 5
    """Words of a run; a shorter prompt is one run."""
    permutations: Annotated[int, Ge(16), Le(1024)] = 128
    within_source: bool = False
    """Whether rows of different sources may be alike."""
    name: str | None = None

    def __post_init__(self) -> None:
        for what in missing_extras("the rule near_duplicates", "datasketch"):
            raise ValueError(f"what it needs isn't here: {what}")

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        import numpy as np
        from datasketch import MinHash, MinHashLSH

        bands = bands_for(self.similarity, self.permutations)
        index = MinHashLSH(num_perm=self.permutations, params=bands)
        empty = MinHash(num_perm=self.permutations, seed=1, hashfunc=_as_it_is)  # its permutations are dear
        kept: dict[int, tuple[str, str, np.ndarray]] = {}
        found = {}
        for done, one in enumerate(rows):
            if done % 64 == 0:
                context.progress(done, len(rows))
            words = word_list(prompt_text(one.row))
            own = np.unique(np.fromiter((hashed(run, 4) for run in runs(words, self.ngram)), np.uint32))
            sketch = empty.copy()
            sketch.update_batch(own.tolist())
            best = max(
                (
                    (_jaccard(own, other), -number)
                    for number in index.query(sketch)
                    for _, source, other in [kept[number]]
                    if not self.within_source or source == one.row[DATA_SOURCE]
                ),
                default=(0.0, 0),
            )
            if best[0] >= self.similarity:
                found[one.number] = f"{best[0]:.2f} alike {kept[-best[1]][0]}"
                continue
            index.insert(one.number, sketch)
            kept[one.number] = one.place, one.row[DATA_SOURCE], own
        return Verdict(found)


def bands_for(similarity: float, permutations: int) -> tuple[int, int]:
    """Bands and rows of each, the longest bands (the fewest candidates) that miss a pair of this similarity
    with a chance below `MISSED`: ``(1 - s ** rows) ** bands``."""
    rows = max(
        (
            rows
            for rows in range(1, permutations + 1)
            if (1 - similarity**rows) ** (permutations // rows) < MISSED
        ),
        default=1,
    )
    return permutations // rows, rows


def _jaccard(runs: np.ndarray, other: np.ndarray) -> float:
    """Of two sets, each sorted."""
    import numpy as np

    both = len(np.intersect1d(runs, other, assume_unique=True))
    return both / (len(runs) + len(other) - both)


def _as_it_is(run: int) -> int:
    return run
