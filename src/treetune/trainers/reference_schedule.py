"""The learning rate of the VinePPO paper's runs, as its DeepSpeed really set it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from treetune.trainers.schedule import Schedule


@Schedule.register("deepspeed_warmup_decay")
@dataclass(frozen=True, kw_only=True)
class DeepSpeedWarmupDecay(Schedule):
    """``WarmupDecayLR`` of DeepSpeed 0.14.1, driven as the paper's code drives it: the first step has
    the whole rate, the second none; then the rate rises with the logarithm of the step and falls
    linearly to 0.

    For comparisons with published runs only: the first step is larger than any other, without any
    warm-up before it. `Warmup` is what was meant.
    """

    ratio: Annotated[float, Gt(0), Le(1)] = 0.03
    """The warm-up's share of the run's steps."""

    def factor(self, step: int, total_steps: int) -> float:
        if step == 0:
            return 1.0  # the optimiser's own rate: the scheduler speaks for the first time after it
        warmup = max(2, math.ceil(self.ratio * total_steps))
        heard = step - 1
        if heard < warmup:
            return math.log(heard + 1) / math.log(warmup)
        return max(0.0, (total_steps - heard) / max(1, total_steps - warmup))
