"""The learning rate that the paper's code really set."""

from __future__ import annotations

import math

import pytest

from treetune.trainers.base import DeepSpeedWarmupDecay


def test_the_reference_schedule_jumps_rests_and_rises_with_the_logarithm() -> None:
    factors = [DeepSpeedWarmupDecay(ratio=0.1).factor(step, 100) for step in range(100)]
    assert factors[:2] == [1.0, 0.0]
    assert factors[2:4] == pytest.approx([math.log(2) / math.log(10), math.log(3) / math.log(10)])
    assert factors[10] == pytest.approx(1.0), "the tenth that the scheduler was asked for"
    assert factors[11] == 1.0
    assert factors[56] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(2 / 90)
