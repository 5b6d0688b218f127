from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.trainers.batching import cut
from treetune.trainers.reference_schedule import DeepSpeedWarmupDecay
from treetune.trainers.schedule import Warmup

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 1000),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["padded", "packed"]),
)
def test_every_sequence_runs_exactly_once_within_the_budget(lengths, ranks, tokens, sequences, layout):
    shares = cut(lengths, range(len(lengths)), ranks=ranks, tokens=tokens, sequences=sequences, layout=layout)
    pieces = [piece for share in shares for piece in share]
    real = [index for piece in pieces if piece.real for index in piece.indices]
    assert sorted(real) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1, "every rank runs equally often"
    for piece in pieces:
        own = [lengths[i] for i in piece.indices]
        cost = max(own) * len(own) if layout == "padded" else sum(own)
        assert cost <= tokens or len(own) == 1
        assert sequences is None or len(own) <= sequences


@given(LENGTHS, st.integers(2, 4))
def test_ranks_carry_about_the_same_number_of_tokens(lengths, ranks):
    shares = cut(lengths, range(len(lengths)), ranks=ranks, tokens=10**9, sequences=None, layout="packed")
    load = [sum(lengths[i] for p in share if p.real for i in p.indices) for share in shares]
    assert max(load) - min(load) <= max(lengths)


def test_the_rate_warms_up_from_the_first_step_and_ends_where_the_decay_says():
    linear = Warmup(steps=4, decay="linear")
    assert [linear.factor(step, 8) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert Warmup(ratio=0.03, decay="constant").factor(0, 100) == pytest.approx(1 / 3)
    assert Warmup(decay="cosine").factor(5, 10) == pytest.approx(0.5)
    assert Warmup().factor(0, 10) == 1.0


def test_the_reference_schedule_jumps_rests_and_rises_with_the_logarithm() -> None:
    factors = [DeepSpeedWarmupDecay(ratio=0.1).factor(step, 100) for step in range(100)]
    assert factors[:2] == [1.0, 0.0]
    assert factors[2:4] == pytest.approx([math.log(2) / math.log(10), math.log(3) / math.log(10)])
    assert factors[10] == pytest.approx(1.0), "the tenth that the scheduler was asked for"
    assert factors[11] == 1.0
    assert factors[56] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(2 / 90)
