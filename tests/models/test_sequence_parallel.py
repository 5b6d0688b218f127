"""Models whose attention can't be shared out over ranks are refused, and every token has one rank."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.helpers import tiny_model
from treetune.models.sequence_parallel import SequenceParallel


def parallel(size: int, rank: int = 0) -> SequenceParallel:
    return SequenceParallel(group=None, rank=rank, size=size)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="doesn't divide the 2 attention heads"):
        parallel(3).attach(tiny_model())


def test_attention_over_a_window_is_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="needs full attention in every layer"):
        parallel(2).attach(model)


def test_attention_that_writes_all_scores_is_refused() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'sdpa' and 'flash_attention_2'"):
        parallel(2).attach(model)


def test_what_is_written_of_a_shared_model_does_not_say_so() -> None:
    model = tiny_model()
    parallel(2).attach(model)
    assert "ulysses" not in str(model.config.to_dict())


@pytest.mark.parametrize("width", [6, 7])
def test_every_position_is_one_ranks_own(width: int) -> None:
    positions_N = torch.arange(3 * width)
    found = []
    for rank in range(2):
        mine_M, places_M = parallel(2, rank).own_positions(positions_N, width)
        found += mine_M.tolist()
        part = (width + 1) // 2
        for at, place in zip(mine_M.tolist(), places_M.tolist(), strict=True):
            assert (at // width, at % width) == (place // part, place % part + rank * part)
    assert sorted(found) == positions_N.tolist()
