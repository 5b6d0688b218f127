"""Losses of critics. A loss also decides how many outputs the critic's head has, and which value they stand
for.

* `squared_error`: one output, which is the value V(s). The loss is ½ (V − R)² (the return R is the sum of the
  rewards that follow).
* `hl_gauss`: a classification. The range of returns is cut into bins, the head has an output for each bin,
  and V(s) is the mean of the bins' centres under the softmax of the outputs (Imani and White,
  arXiv:1806.04613, section 3; Farebrother et al., arXiv:2403.03950, section 3.1).

Example of `hl_gauss` with four bins on the range 0 to 1 and σ = 0.1. The return 0.5 becomes a Gaussian around
0.5, of which each bin gets a part::

    edges       0      0.25     0.5      0.75     1
    target        0.006    0.494    0.494    0.006         value 0.5
    softmax       0.1      0.2      0.3      0.4           value 0.625, cross-entropy 1.41
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding

if TYPE_CHECKING:
    from torch import Tensor

SIGMA_IN_BINS = 0.75
"""The default of σ in `hl_gauss`, in widths of a bin (Farebrother et al., arXiv:2403.03950)."""


class CriticLoss(Registrable):
    """The loss with which the critic learns returns, and the meaning of the outputs of its head."""

    default = "squared_error"

    @property
    def outputs(self) -> int:
        """The number of outputs of the critic's head."""
        raise NotImplementedError

    def values(self, outputs_NK: Tensor) -> Tensor:
        """Returns the values that the head's outputs stand for, shape [N]."""
        raise NotImplementedError

    def refuse_returns(self, returns_N: Tensor) -> None:
        """Raises ValueError for returns that the critic can't learn."""

    def loss(
        self,
        outputs_NK: Tensor,
        returns_N: Tensor,
        weights_N: Tensor,
        old_values_N: Tensor,
        value_clip: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss, and the share of tokens whose value was clipped.

        Both are weighted sums over the tokens, with `weights_N`.

        Args:
            outputs_NK: The outputs of the critic's head.
            returns_N: The returns that the critic learns.
            weights_N: The weights of the tokens.
            old_values_N: The values before the iteration's training.
            value_clip: `CriticSettings.value_clip`.
        """
        raise NotImplementedError


@CriticLoss.register("squared_error")
@dataclass(frozen=True, kw_only=True)
class SquaredError(CriticLoss):
    """Half the squared error of the value, with PPO's bound on how far a value may move (`value_clip`)."""

    @property
    @override
    def outputs(self) -> int:
        return 1

    @override
    def values(self, outputs_NK: Tensor) -> Tensor:
        return outputs_NK.squeeze(-1)

    @override
    def loss(
        self,
        outputs_NK: Tensor,
        returns_N: Tensor,
        weights_N: Tensor,
        old_values_N: Tensor,
        value_clip: float | None,
    ) -> tuple[Tensor, Tensor]:
        return squared_value_loss(self.values(outputs_NK), old_values_N, returns_N, weights_N, value_clip)


@CriticLoss.register("hl_gauss")
@dataclass(frozen=True, kw_only=True)
class HlGauss(CriticLoss):
    """HL-Gauss: cross-entropy with a Gaussian around the return, over `bins` bins of equal width (Imani and
    White, arXiv:1806.04613; Farebrother et al., arXiv:2403.03950, section 3.1). arXiv:2608.02181 trains
    critics for reasoning with it.

    A bin with the edges l and r gets the target Φ((r − R)/σ) − Φ((l − R)/σ), divided by the sum over all
    bins. The loss is −Σ target · log softmax(outputs). `value_clip` has no effect, and isn't needed: the
    gradient of a token's loss with respect to an output is at most 1, however wrong the value is.

    The loss is least if the softmax of the outputs is the mean of the targets. The value is then the mean
    return, if the mean of the bins' centres under each target is the return of this target. For returns 5σ or
    more inside the range this holds to 1e-6. At the ends of the range it doesn't, since half of the Gaussian
    is cut off: with `min` 0, `max` 1 and 51 bins, a critic without any other error has the value 0.0135 in
    place of 0 and 0.9865 in place of 1, and with λ = 0 the expected gradient on the tests' language is off by
    2.4 % of its length. So the default range goes beyond 0 and 1."""

    bins: Annotated[int, Ge(2)] = 51
    """The number of bins."""
    sigma: Annotated[float, Gt(0)] | None = None
    """The standard deviation σ of the Gaussian; null: 0.75 times the width of a bin."""
    min: float = -0.1
    """The lower end of the range. Set it below the smallest return, by 5σ or more."""
    max: float = 1.1
    """The upper end of the range. Set it above the largest return, by 5σ or more."""

    def __post_init__(self) -> None:
        if not self.min < self.max:
            raise ValueError(
                f"min is {self.min:g} and max is {self.max:g}: set max to a larger number than min"
            )

    @property
    @override
    def outputs(self) -> int:
        return self.bins

    @property
    def deviation(self) -> float:
        """σ, the standard deviation of the Gaussian around a return."""
        return self.sigma or SIGMA_IN_BINS * (self.max - self.min) / self.bins

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        penalty = experiment.trainer.objective.kl_penalty
        if penalty is not None and penalty.placement == "reward":
            yield Finding(
                "the critic's loss 'hl_gauss' has a range of returns, and KL penalties in the reward have no"
                " bound",
                "$.trainer.objective.kl_placement",
                "set kl_placement to 'loss', or the critic's loss to {type: 'squared_error'}",
            )

    @override
    def values(self, outputs_NK: Tensor) -> Tensor:
        edges_E = self._edges(outputs_NK)
        centres_K = (edges_E[:-1] + edges_E[1:]) / 2
        return outputs_NK.softmax(-1) @ centres_K

    def targets(self, returns_N: Tensor) -> Tensor:
        """Returns for each return the distribution over the K bins that the critic learns, shape [N, K].

        It is a Gaussian around the return: each bin has the Gaussian's mass between the edges of the bin.
        """
        import torch

        edges_E = self._edges(returns_N)
        # Φ: the Gaussian's mass below each edge
        below_NE = torch.special.ndtr((edges_E - returns_N[:, None]) / self.deviation)
        masses_NK = below_NE.diff(dim=-1)
        # The part of the Gaussian outside of all bins is missing, so the masses are scaled to the sum 1.
        return masses_NK / masses_NK.sum(-1, keepdim=True)

    @override
    def refuse_returns(self, returns_N: Tensor) -> None:
        """Raises ValueError if a return lies outside of the bins."""
        if not returns_N.numel():
            return
        lowest, highest = float(returns_N.min()), float(returns_N.max())
        # Every comparison with NaN is false, so with this `not` NaN is refused, too.
        if not (lowest >= self.min and highest <= self.max):
            raise ValueError(
                f"the critic's loss 'hl_gauss' has bins from {self.min:g} to {self.max:g}, and the returns of"
                f" this iteration go from {lowest:g} to {highest:g}: set loss.min and loss.max of the critic"
                " to a range that holds all returns"
            )

    @override
    def loss(
        self,
        outputs_NK: Tensor,
        returns_N: Tensor,
        weights_N: Tensor,
        old_values_N: Tensor,
        value_clip: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropy between the critic's distributions and those of the returns, and the
        clipped share 0."""
        cross_entropy_N = -(self.targets(returns_N) * outputs_NK.log_softmax(-1)).sum(-1)
        clipped_share = cross_entropy_N.new_zeros(())  # this loss doesn't clip
        return (weights_N * cross_entropy_N).sum(), clipped_share

    def _edges(self, example: Tensor) -> Tensor:
        """Returns the edges of the bins, shape [K + 1], with the device and the precision of `example`."""
        import torch

        return torch.linspace(self.min, self.max, self.bins + 1, dtype=example.dtype, device=example.device)


def squared_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the critic's loss ``½ Σ w·max((V-R)², (clip(V, V_old ± c) - R)²)`` and the share of clipped
    tokens."""
    squared_errors_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * (weights_N * squared_errors_N).sum(), values_N.new_zeros(())
    # If a value has moved towards its return by more than the clip, the clipped loss is the larger one. The
    # clipped value is constant in V, so the token has no gradient.
    clipped_values_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    clipped_squared_errors_N = (clipped_values_N - returns_N).square()
    clipped_share = (weights_N * (clipped_squared_errors_N > squared_errors_N)).sum()
    larger_N = squared_errors_N.maximum(clipped_squared_errors_N)
    return 0.5 * (weights_N * larger_N).sum(), clipped_share
