"""Every sequence runs once on some rank, and each step has the learning rate of its schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.trainer.base import DeepSpeedWarmupDecay, Warmup
from treetune.trainer.batches import Unit, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def units(lengths: list[int], together: int) -> list[Unit]:
    """Sequences alone, or two by two where there is a second one."""
    return [tuple(range(i, min(i + together, len(lengths)))) for i in range(0, len(lengths), together)]


@given(
    LENGTHS,
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 1000),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["padded", "packed"]),
)
def test_every_sequence_runs_exactly_once_within_the_budget(
    lengths, together, ranks, tokens, sequences, layout
):
    work = units(lengths, together)
    planned = plan_micro_batches(
        lengths, work, ranks=ranks, max_tokens=tokens, max_rows=sequences, layout=layout
    )
    batches = [batch for of_rank in planned for batch in of_rank]
    real = [index for batch in batches if not batch.is_dummy for index in batch.indices]
    assert sorted(real) == list(range(len(lengths)))
    assert len({len(of_rank) for of_rank in planned}) == 1, "every rank runs equally often"
    for batch in batches:
        own = [lengths[i] for i in batch.indices]
        cost = max(own) * len(own) if layout == "padded" else sum(own)
        assert cost <= tokens or batch.indices in work
        assert sequences is None or len(own) <= sequences or batch.indices in work


@given(LENGTHS, st.integers(1, 4))
def test_no_pair_is_separated(lengths, ranks):
    work = units(lengths, 2)
    planned = plan_micro_batches(lengths, work, ranks=ranks, max_tokens=300, max_rows=3, layout="padded")
    for of_rank in planned:
        for batch in of_rank:
            start = 0
            while start < len(batch.indices):
                unit = next(unit for unit in work if unit[0] == batch.indices[start])
                assert batch.indices[start : start + len(unit)] == unit
                start += len(unit)


@given(LENGTHS, st.integers(1, 2), st.integers(2, 4))
def test_ranks_carry_about_the_same_number_of_tokens(lengths, together, ranks):
    work = units(lengths, together)
    planned = plan_micro_batches(lengths, work, ranks=ranks, max_tokens=10**9, max_rows=None, layout="packed")
    load = [
        sum(lengths[i] for batch in of_rank if not batch.is_dummy for i in batch.indices)
        for of_rank in planned
    ]
    assert max(load) - min(load) <= max(sum(lengths[i] for i in unit) for unit in work)


def test_the_rate_warms_up_from_the_first_step_and_ends_where_the_decay_says():
    linear = Warmup(steps=4, decay="linear")
    assert [linear.factor(step, 8) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert Warmup(ratio=0.03, decay="constant").factor(0, 100) == pytest.approx(1 / 3)
    assert Warmup(decay="cosine").factor(5, 10) == pytest.approx(0.5)
    assert Warmup().factor(0, 10) == 1.0
    # The paper's 16,000 steps on MATH warm up for 480.
    paper = Warmup(ratio=0.03, decay="linear")
    assert paper.factor(478, 16_000) < 1.0 == paper.factor(480, 16_000)
    assert paper.factor(16_000, 16_000) == 0.0


def test_the_schedule_of_the_papers_code_jumps_rests_and_rises_with_the_logarithm():
    factors = [DeepSpeedWarmupDecay(ratio=0.1).factor(step, 100) for step in range(100)]
    assert factors[:2] == [1.0, 0.0]
    assert factors[2:4] == pytest.approx([math.log(2) / math.log(10), math.log(3) / math.log(10)])
    assert factors[10] == pytest.approx(1.0), "the tenth that the scheduler was asked for"
    assert factors[11] == 1.0
    assert factors[56] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(2 / 90)
