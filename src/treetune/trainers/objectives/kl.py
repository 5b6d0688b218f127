"""Estimators of KL(policy || reference) from sampled tokens (J. Schulman, "Approximating KL
divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate, shape [N], with d = log p - log p_ref:

    k1 = d (unbiased, high variance); k2 = d²/2 (biased, its gradient is that of the KL);
    k3 = exp(-d) - 1 + d (unbiased and never negative).
    """
    difference_N = logprobs_N - ref_logprobs_N
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return 0.5 * difference_N.square()
    return (-difference_N).exp() - 1 + difference_N
