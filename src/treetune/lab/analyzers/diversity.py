"""The diversity of the answers to one problem."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.lab.analyzers.figures import (
    Bootstrap,
    draw_legend_below,
    draw_points_with_bars,
    label_iteration_axis,
    make_panels,
    mean_of,
    style_of,
)
from treetune.lab.analyzers.points import OfIterations
from treetune.runtime.analysis import Analyzer, Findings
from treetune.vocabulary import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.resources import RunResources

TokenTuple = tuple[int, ...]
"""The token ids of an answer, or of an n-gram."""

DIVERSITY_MEASURES = ("unique_answers", "distinct_results", "distinct_ngrams", "overlap")


@Analyzer.register("diversity")
@dataclass(frozen=True, kw_only=True)
class Diversity(OfIterations):
    """The diversity of the n stored answers to each problem, averaged over problems:

    * ``unique_answers``: different answers (by token ids) / n;
    * ``distinct_results``: different extracted final answers / n, where "nothing extracted" counts as one;
    * ``distinct_ngrams``: different n-grams / all n-grams of the answers, averaged over n = 1 … `order`
      (distinct-n of Li et al., arXiv:1510.03055);
    * ``overlap``: mean over pairs of answers of the mean over n of 2·|A ∩ B| / (|A| + |B|), A and B
      being the multisets of their n-grams: 1 for equal answers, 0 for answers without a common token.

    n-grams are of token ids. Problems with a single answer are left out of the overlap.
    """

    order: Annotated[int, Gt(0)] = 4
    """The longest n-grams that are counted."""

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.rollouts.storage import read_trajectories

        rows: list[dict[str, Any]] = []
        for point in points:
            groups: dict[str, list[Trajectory]] = {}
            folder = resources.session.directory.iteration_folder(point)
            for trajectory in read_trajectories(folder / self.file):
                groups.setdefault(trajectory.problem.id, []).append(trajectory)
            for problem, answers in groups.items():
                ids = [tuple(answer.response_ids.tolist()) for answer in answers]
                rows.append(
                    {
                        "iteration": point,
                        "problem": problem,
                        "answers": len(answers),
                        "unique_answers": len(set(ids)) / len(ids),
                        # "Nothing extracted" (None) counts as one final answer.
                        "distinct_results": len({answer.grade.extracted for answer in answers}) / len(ids),
                        "distinct_ngrams": distinct_ngrams(ids, self.order),
                        "overlap": measure_overlap(ids, self.order),
                    }
                )
        return Findings(self.summarise(rows), rows)

    @override
    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        by_iteration = {}
        for point in sorted({row["iteration"] for row in rows}):
            rows_there = [row for row in rows if row["iteration"] == point]
            # The analysis has no setting for a seed, so the iteration's number is the seed.
            bootstrap = Bootstrap([row["problem"] for row in rows_there], seed=point)
            numbers: dict[str, Any] = {"problems": len(rows_there)}
            for measure in DIVERSITY_MEASURES:
                # `mean_of` leaves out NaN: problems for which a measure is not defined.
                values = [math.nan if row[measure] is None else row[measure] for row in rows_there]
                numbers[measure] = bootstrap(mean_of(values))
            by_iteration[str(point)] = numbers
        return {"by_iteration": by_iteration}

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        titles = [
            "Different answers",
            "Different final answers",
            "Different n-grams",
            "Overlap of pairs of answers",
        ]
        figure, axes = make_panels(titles, rows=2)
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i) | {"label": label}
            by_point = result["numbers"]["by_iteration"]
            for panel, measure in zip(axes, DIVERSITY_MEASURES, strict=True):
                xs = [int(point) for point in by_point]
                draw_points_with_bars(panel, xs, [numbers[measure] for numbers in by_point.values()], **style)
        for panel in axes:
            label_iteration_axis(panel, "finished iterations when the answers were sampled")
        draw_legend_below(figure, axes)
        return figure


def count_ngrams(ids: TokenTuple, n: int) -> Counter[TokenTuple]:
    return Counter(ids[i : i + n] for i in range(len(ids) - n + 1))


def distinct_ngrams(answers: Sequence[TokenTuple], order: int) -> float | None:
    """Returns the share of different n-grams among all n-grams of the answers, averaged over n.

    The mean is over each n from 1 to `order` for which there are n-grams. Returns None where all answers are
    empty.
    """
    shares = []
    for n in range(1, order + 1):
        counts: Counter[TokenTuple] = Counter()
        for answer in answers:
            counts.update(count_ngrams(answer, n))
        if counts:
            shares.append(len(counts) / counts.total())
    return sum(shares) / len(shares) if shares else None


def measure_overlap(answers: Sequence[TokenTuple], order: int) -> float | None:
    """Returns the mean, over pairs of answers, of the share of n-grams that the two have in common (Dice's
    coefficient).

    A pair's share is averaged over each n from 1 to `order` for which at least one of its answers has
    n-grams. Returns None for fewer than two answers.
    """
    overlaps = []
    for first, second in itertools.combinations(answers, 2):
        shares = []
        for n in range(1, order + 1):
            first_counts, second_counts = count_ngrams(first, n), count_ngrams(second, n)
            total = first_counts.total() + second_counts.total()
            if total:
                shares.append(2 * (first_counts & second_counts).total() / total)
        overlaps.append(sum(shares) / len(shares) if shares else 1.0)  # two empty answers are equal
    return sum(overlaps) / len(overlaps) if overlaps else None
