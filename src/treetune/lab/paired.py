"""The difference of two methods that were measured on the same problems, with one seed or several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def paired(differences: Sequence[Mapping[str, float]]) -> tuple[float, float | None, float | None]:
    """Returns the mean of each seed's differences by problem, half of its 95 % interval, and the two-sided
    p-value of a mean of 0.

    Seeds and problems are both drawn from many, and every seed meets the same problems: with MS_s, MS_p and
    MS_e the mean squares of seeds, problems and what is left, the mean of S · P differences varies by
    (MS_s + MS_p − MS_e) / (S · P), with Satterthwaite's degrees of freedom (the quasi-F of Clark, 1973, "The
    language-as-fixed-effect fallacy"). It is never taken for less than what seeds alone or problems alone
    let expect. With one seed it is Student's test over problems, with one number a seed that over seeds;
    None of both where neither are several.

    Raises ValueError if the seeds' problems differ.
    """
    import numpy as np
    from scipy.special import stdtr, stdtrit

    problems = list(differences[0])
    if any(one.keys() != differences[0].keys() for one in differences):
        raise ValueError("the seeds were measured on different problems")
    matrix_SP = np.array([[one[problem] for problem in problems] for one in differences])
    n_seeds, n_problems = matrix_SP.shape
    mean = float(matrix_SP.mean())
    if matrix_SP.size < 2:
        return mean, None, None
    of_seeds_S, of_problems_P = matrix_SP.mean(axis=1) - mean, matrix_SP.mean(axis=0) - mean
    rest_SP = matrix_SP - mean - of_seeds_S[:, None] - of_problems_P[None, :]
    free = n_seeds - 1, n_problems - 1, (n_seeds - 1) * (n_problems - 1)
    sums = n_problems * (of_seeds_S**2).sum(), n_seeds * (of_problems_P**2).sum(), (rest_SP**2).sum()
    seeds, others, rest = (float(total) / max(1, degrees) for total, degrees in zip(sums, free, strict=True))
    spread, degrees = max(
        (seeds + others - rest, _satterthwaite((seeds, others, rest), free)),
        (seeds, free[0]),
        (others, free[1]),
    )
    if spread <= 0:
        return mean, 0.0, 1.0 if mean == 0 else 0.0
    error = math.sqrt(spread / (n_seeds * n_problems))
    return mean, float(stdtrit(degrees, 0.975)) * error, 2 * float(stdtr(degrees, -abs(mean) / error))


def _satterthwaite(mean_squares: Sequence[float], free: Sequence[int]) -> float:
    seeds, others, rest = mean_squares
    parts = [square**2 / degrees for square, degrees in zip(mean_squares, free, strict=True) if degrees]
    return (seeds + others - rest) ** 2 / sum(parts) if sum(parts) else 1.0
