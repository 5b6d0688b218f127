"""The exact gradient variance of RLOO and of true advantages in a language, without sampling an answer.

Let an answer have reward R, success rate v = E[R], score S = ∇ log π(answer), gradient G = E[R·S], and let n
answers make a group. V is the trace of the covariance of a group's gradient (`gain.py`).

RLOO. Its gradient is the mean over all pairs (i, j) of the group of h = ½ (R_i − R_j)(S_i − S_j), a
U-statistic of order two. So its variance is Hoeffding's ("A class of statistics with asymptotically normal
distribution", 1948, equation 5.13):

    V(RLOO) = (4 (n − 2) ζ₁ + 2 ζ₂) / (n (n − 1)),
    ζ₁ = ¼ (E[(R − v)² |S|²] − |G|²)                       the variance of E[h | one of the two answers]
    ζ₂ = ½ ((1 − 2v) E[R |S|²] + v E|S|²)                  the variance of h, for rewards of 0 and 1

True advantages. The answers' gradients Σ_t A_t s_t are independent, where s_t is the score of token t:

    V(true advantages) = (Σ_t E[A_t² |s_t|²] − |G|²) / n

The policy has its own parameters at each position and status, so scores of different tokens are orthogonal
and |S|² = Σ_t |s_t|². All expectations are then sums over positions and statuses.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from treetune.lab.arena.languages import Language

ADVANTAGE_ROUNDING = 1e-9
"""A token is decisive if one of its options has an advantage larger than this. Smaller ones are rounding."""
VARIANCE_ROUNDING = 1e-12
"""A difference is rounding if its share of the terms that are subtracted is below this."""


class ExactVariance(NamedTuple):
    """The exact variances of a language. Example, for "first of 8" with groups of eight: ``ExactVariance(
    rloo=0.1080, true_advantages=0.0117, decisive_share=0.125)``, a gain of 9.21."""

    rloo: float
    true_advantages: float
    decisive_share: float
    """The expected share of an answer's steps at which the chosen option changes the chance of success."""

    @property
    def gain(self) -> float:
        """The gain per answer of true advantages: V(RLOO) / V(true advantages); infinite where their gradient
        has no variance, as for a single choice between two equally likely options."""
        return self.rloo / self.true_advantages if self.true_advantages else math.inf


def exact_variance(language: Language, answers: int = 8, environment: Collection[int] = ()) -> ExactVariance:
    """Returns the exact variances of a language.

    Names end with shapes: T positions in an answer, S statuses (the states of an answer), O options (the
    choices at a position).

    Args:
        answers: The number of answers in a group.
        environment: The positions whose tokens the environment writes. No credit trains these tokens, and
            they are not the policy's decisions.
    """
    values_TS = language.values_TS
    # The probability that an answer has each status before the token.
    reach_S = np.zeros(len(language.correct_S))
    reach_S[0] = 1.0
    # The sums of the module's formulas: E|S|², E[R |S|²], |G|² and Σ_t E[A_t² |s_t|²]. Here s_t is the score
    # of a token (the gradient of its log-prob), S the sum of an answer's scores, R its reward, G = E[R S] the
    # gradient, and A_t the advantage of a token.
    squared_norm = squared_norm_of_correct = squared_gradient = weighted_by_advantage = 0.0
    decisive_tokens = 0.0
    for position in range(language.length):
        chances_SO = language.chances_TSO[position]
        after_SO = language.after_TSO[position]
        reach_SO = reach_S[:, None] * chances_SO
        values_after_SO = values_TS[position + 1][after_SO]
        # Options with probability 0 only pad the array, and must not make a position decisive.
        advantages_SO = np.where(chances_SO > 0, values_after_SO - values_TS[position][:, None], 0.0)
        if position not in environment:
            # The score of an option has the entry 1 − p at its own logit, and −p at those of the others. Its
            # squared norm is (1 − p)² + Σ p² over the others = 1 − 2p + Σ p² over all. For W equally likely
            # wordings, the same formula gives 1 − 1 / W.
            norm_of_option_SO = 1 - 2 * chances_SO + (chances_SO**2).sum(1)[:, None]
            norm_of_wording_S = 1 - 1 / language.wordings_TS[position]
            norms_SO = norm_of_option_SO + norm_of_wording_S[:, None]
            squared_norm += (reach_SO * norms_SO).sum()
            squared_norm_of_correct += (reach_SO * norms_SO * values_after_SO).sum()
            weighted_by_advantage += (reach_SO * norms_SO * advantages_SO**2).sum()
            # E[R · s_t] at an option's logit is reach · probability · advantage. It is 0 at the logits of
            # wordings, which don't change the value.
            squared_gradient += ((reach_SO * advantages_SO) ** 2).sum()
            decisive_S = np.abs(advantages_SO).max(1) > ADVANTAGE_ROUNDING
            decisive_tokens += reach_S[decisive_S].sum()
        next_S = np.zeros_like(reach_S)
        np.add.at(next_S, after_SO, reach_SO)
        reach_S = next_S
    success = values_TS[0, 0]
    # E[(R − v)² |S|²]. R is 0 or 1, so (R − v)² = (1 − 2v) R + v².
    centred = (1 - 2 * success) * squared_norm_of_correct + success**2 * squared_norm
    # The module's ζ₁ is the variance of a pair's expected gradient, given one of the pair's two answers. Its
    # ζ₂ is the variance of a pair's gradient.
    variance_of_mean = (centred - squared_gradient) / 4
    variance_of_pair = ((1 - 2 * success) * squared_norm_of_correct + success * squared_norm) / 2
    # If the gradient has no noise, the difference of the two terms is 0 except for rounding.
    true_variance = weighted_by_advantage - squared_gradient
    if true_variance < VARIANCE_ROUNDING * weighted_by_advantage:
        true_variance = 0.0
    # RLOO's gradient is the mean over all pairs of different answers. Two pairs may have an answer in common,
    # so their gradients are not independent. Hoeffding's formula for such means (U-statistics) is used below.
    pairs = answers * (answers - 1)
    # A step has at most one token that is a choice, so there are as many decisive steps as decisive tokens.
    steps = (language.length - len(environment)) / language.step
    return ExactVariance(
        rloo=float((4 * (answers - 2) * variance_of_mean + 2 * variance_of_pair) / pairs),
        true_advantages=float(true_variance / answers),
        decisive_share=float(decisive_tokens / steps),
    )
