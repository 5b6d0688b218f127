from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.trainers.batching import Unit, cut
from treetune.trainers.schedule import Warmup

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
    shares = cut(lengths, work, ranks=ranks, tokens=tokens, sequences=sequences, layout=layout)
    pieces = [piece for share in shares for piece in share]
    real = [index for piece in pieces if piece.real for index in piece.indices]
    assert sorted(real) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1, "every rank runs equally often"
    for piece in pieces:
        own = [lengths[i] for i in piece.indices]
        cost = max(own) * len(own) if layout == "padded" else sum(own)
        assert cost <= tokens or piece.indices in work
        assert sequences is None or len(own) <= sequences or piece.indices in work


@given(LENGTHS, st.integers(1, 4))
def test_no_pair_is_separated(lengths, ranks):
    work = units(lengths, 2)
    for share in cut(lengths, work, ranks=ranks, tokens=300, sequences=3, layout="padded"):
        for piece in share:
            start = 0
            while start < len(piece.indices):
                unit = next(unit for unit in work if unit[0] == piece.indices[start])
                assert piece.indices[start : start + len(unit)] == unit
                start += len(unit)


@given(LENGTHS, st.integers(1, 2), st.integers(2, 4))
def test_ranks_carry_about_the_same_number_of_tokens(lengths, together, ranks):
    work = units(lengths, together)
    shares = cut(lengths, work, ranks=ranks, tokens=10**9, sequences=None, layout="packed")
    load = [sum(lengths[i] for p in share if p.real for i in p.indices) for share in shares]
    assert max(load) - min(load) <= max(sum(lengths[i] for i in unit) for unit in work)


def test_the_rate_warms_up_from_the_first_step_and_ends_where_the_decay_says():
    linear = Warmup(steps=4, decay="linear")
    assert [linear.factor(step, 8) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert Warmup(ratio=0.03, decay="constant").factor(0, 100) == pytest.approx(1 / 3)
    assert Warmup(decay="cosine").factor(5, 10) == pytest.approx(0.5)
    assert Warmup().factor(0, 10) == 1.0
