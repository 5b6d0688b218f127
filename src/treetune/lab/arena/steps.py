"""Measures whether a credit finds the decisive step of an answer, by comparison with exact advantages.

`gain.py` measures how noisy a credit's gradient is, and this file whether the credits of single steps are
right. The credit of a step is the mean of its tokens' advantages; tokens that aren't trained count as 0, and
the end token, which is certain, is left out. Each answer with at least two steps has three measures:

* truth: Spearman's rank correlation, over the answer's steps, of their credits with their true advantages;
* fluency: the same with the steps' log-probabilities under the policy;
* decisive: 1 if the step whose credit is largest in size has the true advantage that is largest in size.

Ranks are taken within an answer, as in "Credit Without Ground Truth" (2608.19760). Over the steps of several
answers, a credit that only knows each answer's reward would correlate with the truth, too.

* Equal numbers share their mean rank. A credit that is the same for all steps of an answer has the
  correlation 0.
* If several steps have the largest credit, `decisive` is the expectation of a draw among them. `chance` is
  the expectation of a draw among all steps.
* Answers in which the truth (or the fluency) is the same for all steps are left out of its correlation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treetune.lab.analyzers.figures import NUMBER_OF_RESAMPLES
from treetune.lab.arena.languages import Language
from treetune.seeds import derive_seed
from treetune.vocabulary import Episode, Trajectory

Steps: TypeAlias = NDArray[np.float64]
"""A number for each step of each answer, [answers, steps]."""
COMPARED_DIGITS = 9
"""Numbers of an answer that agree in this many digits, relative to the answer's largest one, count as equal.
If they didn't, rounding would decide their ranks."""
LARGEST_ROUNDING_ERROR = 1e-9
"""Numbers up to this size are rounding, and count as 0."""
STEP_MEASURES = ("truth", "fluency", "decisive", "chance")


class StepSums(NamedTuple):
    """The measures of some problems.

    Example: of two problems with eight answers each, the second of which has no answer with a decisive step:
    ``sums["decisive"] = [7.0, 0.0]`` and ``counts["decisive"] = [8.0, 0.0]``.
    """

    sums: dict[str, NDArray[np.float64]]
    """For each measure, its sum over a problem's answers."""
    counts: dict[str, NDArray[np.float64]]
    """For each measure, the number of a problem's answers that have it."""


def step_sums(
    language: Language, answers: Sequence[Trajectory], episodes: Sequence[Episode], groups: Sequence[int]
) -> StepSums:
    """Returns the measures of a credit for each group of answers.

    Args:
        language: The answers' made-up language. Its policy is a table, so that true advantages are known.
        answers: The answers, in the order of the groups.
        episodes: The training row of each answer, with the credit's advantages.
        groups: The number of answers in each group.
    """
    status_NT = np.stack([language.statuses(answer.response_ids) for answer in answers])
    # The end token, which is after `language.length` tokens, is left out: it is certain.
    credit_NT = np.stack([(episode.advantages * episode.trained)[: language.length] for episode in episodes])
    # Sums take the place of means: all steps have the same number of tokens, so the ranks are the same.
    credit_NS = _sum_by_step(language, credit_NT)
    true_NS = true_advantages(language, status_NT)
    # The fluency of a step is its log-probability under the policy.
    fluency_NS = _sum_by_step(language, language.log_probabilities(status_NT))
    by_measure = {
        "truth": rank_correlations(credit_NS, true_NS),
        "fluency": rank_correlations(credit_NS, fluency_NS),
        "decisive": decisive_hits(credit_NS, true_NS),
        # A credit that is the same for all steps is largest at every step, so the draw is among all steps.
        "chance": decisive_hits(np.ones_like(true_NS), true_NS),
    }
    starts = np.cumsum([0, *groups[:-1]])
    sums, counts = {}, {}
    for name, values_N in by_measure.items():
        is_defined_N = np.isfinite(values_N)
        sums[name] = np.add.reduceat(np.where(is_defined_N, values_N, 0.0), starts)
        counts[name] = np.add.reduceat(is_defined_N.astype(float), starts)
    return StepSums(sums, counts)


def step_measures(blocks: Sequence[StepSums], seed: int) -> dict[str, Any]:
    """Returns each measure's mean over answers, with its interval (95 %, bootstrap over problems).

    Args:
        blocks: The measures of blocks of problems, each from `step_sums`.
        seed: The seed of the run, from which the bootstrap's own seed is derived.

    Example: ``{"truth": {"value": 0.81, "low": 0.79, "high": 0.83}, …, "chance": {…}}``. If no answer has a
    measure, the measure's three numbers are None.
    """
    problems = sum(len(block.sums["truth"]) for block in blocks)
    generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
    # A resample R of the bootstrap is described by how often it contains each problem N.
    times_RN = generator.multinomial(problems, np.full(problems, 1 / problems), size=NUMBER_OF_RESAMPLES)
    measures: dict[str, dict[str, float | None]] = {}
    for name in STEP_MEASURES:
        sums_N = np.concatenate([block.sums[name] for block in blocks])
        counts_N = np.concatenate([block.counts[name] for block in blocks])
        if not counts_N.sum():
            measures[name] = {"value": None, "low": None, "high": None}
            continue
        sums_R, counts_R = times_RN @ sums_N, times_RN @ counts_N
        is_defined_R = counts_R > 0  # a resample may have no problem with the measure
        means_R = sums_R[is_defined_R] / counts_R[is_defined_R]
        low, high = (float(np.percentile(means_R, percent)) for percent in (2.5, 97.5))
        measures[name] = {"value": float(sums_N.sum() / counts_N.sum()), "low": low, "high": high}
    return measures


def true_advantages(language: Language, status_NT: NDArray[np.intp]) -> Steps:
    """Returns the exact advantage of each step: the change of the probability of a correct answer.

    Args:
        language: The language of the answers. It knows the probability of a correct answer at every status
            (the state of an unfinished answer, as a number).
        status_NT: The status before each token of an answer, and after the last.
    """
    # `values_TS` has the probability of a correct answer by position and status.
    values_NT = language.values_TS[np.arange(language.length + 1), status_NT]
    return _sum_by_step(language, np.diff(values_NT, axis=1))


def rank_correlations(credit_NS: Steps, other_NS: Steps) -> NDArray[np.float64]:
    """Returns Spearman's rank correlation of each answer's two rows.

    The correlation is 0 where the credit is the same for all steps. It is NaN where the other values are the
    same for all steps.
    """
    from scipy.stats import rankdata

    def centred_ranks(values_NS: Steps) -> Steps:
        ranks_NS = rankdata(_scale_and_round(values_NS), axis=1)
        return ranks_NS - ranks_NS.mean(1, keepdims=True)

    credit_ranks_NS, other_ranks_NS = centred_ranks(credit_NS), centred_ranks(other_NS)
    products_N = (credit_ranks_NS * other_ranks_NS).sum(1)
    credit_squares_N = (credit_ranks_NS**2).sum(1)
    other_squares_N = (other_ranks_NS**2).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlations_N = products_N / np.sqrt(credit_squares_N * other_squares_N)
    correlations_N[credit_squares_N == 0] = 0.0
    correlations_N[other_squares_N == 0] = np.nan
    return correlations_N


def decisive_hits(credit_NS: Steps, true_NS: Steps) -> NDArray[np.float64]:
    """Returns the probability, for each answer, that the step with the largest credit in size is decisive.

    A step is decisive if no other step of the answer has a larger true advantage in size. If several steps
    have the largest credit in size, one of them is drawn. NaN for answers whose true advantages are all 0.
    """
    is_decisive_NS, is_largest_NS = _is_largest(true_NS), _is_largest(credit_NS)
    hits_N = (is_decisive_NS & is_largest_NS).sum(1) / is_largest_NS.sum(1)
    has_decisive_step_N = np.abs(true_NS).max(1) > LARGEST_ROUNDING_ERROR
    return np.where(has_decisive_step_N, hits_N, np.nan)


def _sum_by_step(language: Language, values_NT: NDArray[np.float64]) -> Steps:
    """Returns for each step the sum of the values of its tokens."""
    step_starts = np.arange(0, language.length, language.step)
    return np.add.reduceat(values_NT, step_starts, axis=1)


def _scale_and_round(values_NS: Steps) -> Steps:
    """Returns the values divided by the answer's largest one in size, rounded to `COMPARED_DIGITS`."""
    largest_N1 = np.abs(values_NS).max(1, keepdims=True)
    # Division by infinity gives a row of zeros for an answer whose values are all rounding errors.
    divisor_N1 = np.where(largest_N1 > LARGEST_ROUNDING_ERROR, largest_N1, np.inf)
    return np.round(values_NS / divisor_N1, COMPARED_DIGITS)


def _is_largest(values_NS: Steps) -> NDArray[np.bool_]:
    """Returns whether each step's value is the answer's largest one in size, or equal to it."""
    sizes_NS = np.abs(_scale_and_round(values_NS))
    return sizes_NS == sizes_NS.max(1, keepdims=True)
