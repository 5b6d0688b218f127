"""Variance of a stochastic gradient from sums over minibatches, which is all that fits in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GradientSums:
    """Adds up minibatches' gradients; keeps their sum and the sum of their squared norms.

    With M independent minibatches of B episodes each and gradients g:

    * ``variance``: (Σ|g|² − |Σg|²/M) / (M − 1), the trace of the covariance of one g, unbiased;
    * ``squared_norm``: |Σg|²/M² − variance/M, the squared norm of the expected gradient, unbiased (and
      so below 0 at times, where it drowns in the noise);
    * ``noise_scale``: B · variance / squared_norm, the number of episodes at which noise and signal
      are equally large (McCandlish et al., arXiv:1812.06162, eq. 2.9); None where the norm drowned;
    * ``cosine``: (|Σg|² − Σ|g|²) / ((M − 1) · Σ|g|²), how alike two minibatches' gradients are.
    """

    batch_size: int
    count: int = 0
    squares: float = 0.0
    total: list[Tensor] = field(default_factory=list)

    def add(self, gradients: list[Tensor]) -> None:
        """One minibatch's, a tensor for each parameter."""
        import torch

        self.count += 1
        self.squares += sum(float(g.double().square().sum()) for g in gradients)
        if not self.total:
            self.total = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
        for sum_, gradient in zip(self.total, gradients, strict=True):
            sum_ += gradient

    def numbers(self) -> dict[str, float | None]:
        """The statistics above. Raises ValueError for fewer than two minibatches."""
        if self.count < 2:
            raise ValueError(f"{self.count} minibatches tell nothing about a variance: take smaller ones")
        m = self.count
        of_sum = sum(float(t.square().sum()) for t in self.total)
        variance = (self.squares - of_sum / m) / (m - 1)
        squared_norm = of_sum / m**2 - variance / m
        return {
            "minibatches": float(m),
            "variance": variance,
            "squared_norm": squared_norm,
            "relative_variance": variance / squared_norm if squared_norm > 0 else None,
            "noise_scale": self.batch_size * variance / squared_norm if squared_norm > 0 else None,
            "cosine": (of_sum - self.squares) / ((m - 1) * self.squares) if self.squares > 0 else None,
        }
