"""How often an iteration asks problems of each domain of a mixture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from treetune.config.registrable import Registrable
from treetune.tasks.drawing import Drawing


class Weighting(Registrable):
    """From the domains' own weights and the numbers of their training problems to how often each is drawn."""

    def over_iterations(
        self, given: Mapping[str, float], sizes: Mapping[str, int], drawing: Drawing
    ) -> Iterator[Mapping[str, float]]:
        """The weights of every iteration from the first to the one that is drawn."""
        raise NotImplementedError


class ConstantWeights(Weighting):
    """The same in every iteration."""

    def weight(self, given: float, size: int) -> float:
        raise NotImplementedError

    def over_iterations(
        self, given: Mapping[str, float], sizes: Mapping[str, int], drawing: Drawing
    ) -> Iterator[Mapping[str, float]]:
        weights = {name: self.weight(given[name], sizes[name]) for name in given}
        return itertools.repeat(weights, drawing.iteration + 1)


@Weighting.register("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(ConstantWeights):
    """The domains' own weights."""

    def weight(self, given: float, size: int) -> float:
        return given


@Weighting.register("proportional")
@dataclass(frozen=True, kw_only=True)
class Proportional(ConstantWeights):
    """The domains' own weights times how many problems they have: every problem is drawn as often as any,
    where the domains' own weights are equal."""

    def weight(self, given: float, size: int) -> float:
        return given * size


@Weighting.register("temperature")
@dataclass(frozen=True, kw_only=True)
class Temperature(ConstantWeights):
    """The domains' own weights times their sizes to the power of 1 / `temperature`: 1 is proportional, and
    the larger, the more alike they are (Raffel et al., arXiv:1910.10683, section 3.5.2)."""

    temperature: Annotated[float, Gt(0)]

    def weight(self, given: float, size: int) -> float:
        return given * size ** (1 / self.temperature)


LEARNABLE = "domains/{}/learnable"
"""The metric that the curriculum reads."""


@Weighting.register("curriculum")
@dataclass(frozen=True, kw_only=True)
class Curriculum(Weighting):
    """Draws more of the domains on which the policy is neither always right nor always wrong.

    The weight of a domain is its own one times ``floor + Q``. Q begins at 1; whenever the domain was drawn,
    it moves by `rate` towards four times the mean over its problems of p (1 − p), p being the share of a
    problem's answers that were right (unbiased, from the metric ``domains/<name>/learnable``). What is always
    or never solved so falls to its `floor`, and is drawn often enough to be found out when that changes.

    p (1 − p) as what is to be learnt from a problem: Rutherford et al. (arXiv:2408.15099), and for language
    models Foster et al. (arXiv:2502.12272). A running mean by category: Chen et al. (arXiv:2505.14970), there
    of absolute advantages, and drawn from by a softmax.
    """

    rate: Annotated[float, Gt(0), Le(1)] = 0.5
    floor: Annotated[float, Gt(0)] = 0.1

    def over_iterations(
        self, given: Mapping[str, float], sizes: Mapping[str, int], drawing: Drawing
    ) -> Iterator[Mapping[str, float]]:
        values = dict.fromkeys(given, 1.0)
        for iteration in range(drawing.iteration + 1):
            if iteration:
                measured = drawing.recorded(iteration - 1)
                for name, value in values.items():
                    if (found := measured.get(LEARNABLE.format(name))) is not None:
                        values[name] = value + self.rate * (4 * found - value)
            yield {name: given[name] * (self.floor + value) for name, value in values.items()}
