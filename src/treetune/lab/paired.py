"""Tests the difference of two methods on the same problems, with one or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def paired(differences: Sequence[Mapping[str, float]]) -> tuple[float, float | None, float | None]:
    """Returns the mean difference, half the width of its 95 % interval, and the two-sided p-value of a mean
    of 0. The latter two are None for a single number.

    Seeds and problems are both random effects, and all seeds have the same problems. With the mean squares
    MS_s of S seeds, MS_p of P problems and MS_e of the residuals, the variance of the mean of the S · P
    differences is (MS_s + MS_p − MS_e) / (S · P), with Satterthwaite's degrees of freedom (the quasi-F of
    Clark, 1973, "The language-as-fixed-effect fallacy"). At least the variance by seeds alone or problems
    alone is assumed. With a single seed it is Student's test over problems, and with a single problem over
    seeds.

    Args:
        differences: for each seed, the difference of the two methods on each problem, by its id.

    Raises ValueError if the problems of the seeds differ.
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
        return mean, None, None
    # Two-way analysis of variance: effects of seeds and problems, and residuals.
    effects_S, effects_P = matrix_SP.mean(axis=1) - mean, matrix_SP.mean(axis=0) - mean
    residuals_SP = matrix_SP - mean - effects_S[:, None] - effects_P[None, :]
    freedoms = n_seeds - 1, n_problems - 1, (n_seeds - 1) * (n_problems - 1)
    ms_seeds = float(n_problems * (effects_S**2).sum()) / max(1, freedoms[0])
    ms_problems = float(n_seeds * (effects_P**2).sum()) / max(1, freedoms[1])
    ms_residuals = float((residuals_SP**2).sum()) / max(1, freedoms[2])
    combined = ms_seeds + ms_problems - ms_residuals
    # The largest of the three variances, with its degrees of freedom.
    variance, freedom = max(
        (combined, _satterthwaite((ms_seeds, ms_problems, ms_residuals), freedoms)),
        (ms_seeds, freedoms[0]),
        (ms_problems, freedoms[1]),
    )
    if variance <= 0:  # all differences are equal
        return mean, 0.0, 1.0 if mean == 0 else 0.0
    error = math.sqrt(variance / (n_seeds * n_problems))
    half_width = float(stdtrit(freedom, 0.975)) * error
    p_value = 2 * float(stdtr(freedom, -abs(mean) / error))
    return mean, half_width, p_value


def _satterthwaite(mean_squares: Sequence[float], freedoms: Sequence[int]) -> float:
    """Returns the degrees of freedom of MS_s + MS_p − MS_e (Satterthwaite's approximation)."""
    ms_seeds, ms_problems, ms_residuals = mean_squares
    denominator = 0.0
    for mean_square, freedom in zip(mean_squares, freedoms, strict=True):
        if freedom:
            denominator += mean_square**2 / freedom
    return (ms_seeds + ms_problems - ms_residuals) ** 2 / denominator if denominator else 1.0
