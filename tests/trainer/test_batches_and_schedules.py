"""Micro-batches and schedules.

These tests promise that every sequence runs once on some rank, within the budget, and that each step has the
learning rate of its schedule.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.trainer.base import DeepSpeedWarmupDecay, Warmup
from treetune.trainer.batches import Unit, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def make_units(lengths: list[int], unit_size: int) -> list[Unit]:
    """Returns units of one sequence, or of two where there is a second one."""
    return [tuple(range(i, min(i + unit_size, len(lengths)))) for i in range(0, len(lengths), unit_size)]


@given(
    LENGTHS,
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 1000),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["padded", "packed"]),
)
def test_every_sequence_runs_exactly_once_within_the_budget(
    lengths, unit_size, ranks, tokens, sequences, layout
):
    work = make_units(lengths, unit_size)
    planned = plan_micro_batches(
        lengths, work, ranks=ranks, max_tokens=tokens, max_rows=sequences, layout=layout
    )
    batches = list(itertools.chain.from_iterable(planned))
    real_batches = [batch for batch in batches if not batch.is_dummy]
    real = itertools.chain.from_iterable(batch.indices for batch in real_batches)
    assert sorted(real) == list(range(len(lengths)))
    assert len({len(batches_of_rank) for batches_of_rank in planned}) == 1, "every rank runs equally often"
    for batch in batches:
        lengths_of_batch = [lengths[i] for i in batch.indices]
        cost = max(lengths_of_batch) * len(lengths_of_batch) if layout == "padded" else sum(lengths_of_batch)
        assert cost <= tokens or batch.indices in work
        assert sequences is None or len(lengths_of_batch) <= sequences or batch.indices in work


@given(LENGTHS, st.integers(1, 4))
def test_no_pair_is_separated(lengths, ranks):
    work = make_units(lengths, 2)
    planned = plan_micro_batches(lengths, work, ranks=ranks, max_tokens=300, max_rows=3, layout="padded")
    for batches_of_rank in planned:
        for batch in batches_of_rank:
            start = 0
            while start < len(batch.indices):
                unit = next(unit for unit in work if unit[0] == batch.indices[start])
                assert batch.indices[start : start + len(unit)] == unit
                start += len(unit)


@given(LENGTHS, st.integers(1, 2), st.integers(2, 4))
def test_ranks_carry_about_the_same_number_of_tokens(lengths, unit_size, ranks):
    work = make_units(lengths, unit_size)
    planned = plan_micro_batches(lengths, work, ranks=ranks, max_tokens=10**9, max_rows=None, layout="packed")
    load = []
    for batches_of_rank in planned:
        real_batches = [batch for batch in batches_of_rank if not batch.is_dummy]
        indices = itertools.chain.from_iterable(batch.indices for batch in real_batches)
        load.append(sum(lengths[index] for index in indices))
    assert max(load) - min(load) <= max(sum(lengths[i] for i in unit) for unit in work)


def test_the_rate_warms_up_from_the_first_step_and_decays_to_its_end():
    linear = Warmup(steps=4, decay="linear")
    assert [linear.factor(step, 8) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert Warmup(ratio=0.03, decay="constant").factor(0, 100) == pytest.approx(1 / 3)
    assert Warmup(decay="cosine").factor(5, 10) == pytest.approx(0.5)
    assert Warmup().factor(0, 10) == 1.0
    # The paper's 16,000 steps on MATH warm up for 480.
    paper = Warmup(ratio=0.03, decay="linear")
    assert paper.factor(478, 16_000) < 1.0 == paper.factor(480, 16_000)
    assert paper.factor(16_000, 16_000) == 0.0


def test_the_schedule_of_the_papers_code_jumps_to_0_and_rises_with_the_logarithm():
    factors = [DeepSpeedWarmupDecay(ratio=0.1).factor(step, 100) for step in range(100)]
    assert factors[:2] == [1.0, 0.0]
    assert factors[2:4] == pytest.approx([math.log(2) / math.log(10), math.log(3) / math.log(10)])
    assert factors[10] == pytest.approx(1.0), "the tenth that the scheduler was asked for"
    assert factors[11] == 1.0
    assert factors[56] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(2 / 90)
