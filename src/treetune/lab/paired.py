"""Tests the difference of two methods on the same problems, with one or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PairedDifference(NamedTuple):
    """A mean difference of two methods.

    Example: ``PairedDifference(mean=0.03, half_width=0.02, p_value=0.004)``.
    """

    mean: float
    half_width: float | None
    """Half of the 95 % interval; None for a single difference."""
    p_value: float | None
    """The two-sided p-value of the hypothesis that the mean is 0; None for a single difference."""


class _BySource(NamedTuple):
    """A number for each source of variance: the mean squares of an analysis of variance, or their degrees of
    freedom."""

    seeds: float
    problems: float
    residual: float


def compare_pairs(differences: Sequence[Mapping[str, float]]) -> PairedDifference:
    """Returns the mean of the differences, with its interval and p-value.

    Seeds and problems are both drawn from larger populations, and every seed is measured on the same
    problems. An analysis of variance gives the mean squares MS_s of seeds, MS_p of problems and MS_e of the
    residuals. The mean of S · P differences then has the variance (MS_s + MS_p − MS_e) / (S · P), with
    Satterthwaite's degrees of freedom (the quasi-F of Clark, 1973, "The language-as-fixed-effect fallacy").
    Seeds alone would give the variance MS_s / (S · P), and problems alone MS_p / (S · P). The largest of the
    three variances is used. With one seed, this is Student's t-test over problems. With one problem, this is
    Student's t-test over seeds.

    Args:
        differences: For each seed, the difference of the two methods on each problem. Example: two seeds and
            two problems, ``[{"test/0": 0.1, "test/1": 0.0}, {"test/0": 0.2, "test/1": -0.1}]``.

    Raises:
        ValueError: The seeds' problems differ.
    """
    import numpy as np
    from scipy.special import stdtr, stdtrit

    problems = list(differences[0])
    if any(of_seed.keys() != differences[0].keys() for of_seed in differences):
        raise ValueError("the seeds were measured on different problems")
    matrix_SP = np.array([[of_seed[problem] for problem in problems] for of_seed in differences])
    n_seeds, n_problems = matrix_SP.shape
    mean = float(matrix_SP.mean())
    if matrix_SP.size < 2:
        return PairedDifference(mean, None, None)

    # The analysis of variance: effects of seeds, of problems, and the residuals. With a single seed (or
    # problem), its effects and the residuals have no degrees of freedom and are 0; `max` avoids 0 / 0.
    seed_effects_S = matrix_SP.mean(axis=1) - mean
    problem_effects_P = matrix_SP.mean(axis=0) - mean
    residuals_SP = matrix_SP - mean - seed_effects_S[:, None] - problem_effects_P[None, :]
    degrees_of_freedom = _BySource(
        seeds=n_seeds - 1, problems=n_problems - 1, residual=(n_seeds - 1) * (n_problems - 1)
    )
    mean_squares = _BySource(
        seeds=float(n_problems * (seed_effects_S**2).sum()) / max(1, degrees_of_freedom.seeds),
        problems=float(n_seeds * (problem_effects_P**2).sum()) / max(1, degrees_of_freedom.problems),
        residual=float((residuals_SP**2).sum()) / max(1, degrees_of_freedom.residual),
    )
    # The largest of three variances of the mean, multiplied by S · P, and its degrees of freedom. Chance can
    # make MS_s + MS_p − MS_e smaller than one of its terms, or even negative.
    seeds_and_problems = mean_squares.seeds + mean_squares.problems - mean_squares.residual
    scaled_variance, degrees = max(
        (seeds_and_problems, _satterthwaite(mean_squares, degrees_of_freedom)),
        (mean_squares.seeds, degrees_of_freedom.seeds),
        (mean_squares.problems, degrees_of_freedom.problems),
    )
    if scaled_variance <= 0:  # all differences are equal
        return PairedDifference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    error = math.sqrt(scaled_variance / (n_seeds * n_problems))
    # `stdtr` is the distribution function of Student's t, and `stdtrit` its inverse.
    half_width = float(stdtrit(degrees, 0.975)) * error
    p_value = 2 * float(stdtr(degrees, -abs(mean) / error))
    return PairedDifference(mean, half_width, p_value)


def _satterthwaite(mean_squares: _BySource, degrees_of_freedom: _BySource) -> float:
    """Returns the degrees of freedom of MS_s + MS_p − MS_e, by Satterthwaite's formula.

    The formula is (MS_s + MS_p − MS_e)² divided by Σ MS² / f, a sum over the three mean squares, each with
    its own degrees of freedom f."""
    terms = []
    for mean_square, degrees in zip(mean_squares, degrees_of_freedom, strict=True):
        if degrees:  # a mean square without degrees of freedom is 0, as with a single seed
            terms.append(mean_square**2 / degrees)
    if not sum(terms):
        return 1.0  # all mean squares are 0, and so is the variance: any number will do
    return (mean_squares.seeds + mean_squares.problems - mean_squares.residual) ** 2 / sum(terms)
