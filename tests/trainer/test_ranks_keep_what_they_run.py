"""A rank has the tokens of the rows that it runs, and all have every row."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.helpers import episodes, paired_episodes, threaded_episodes
from treetune.objectives.mle import MaximumLikelihood
from treetune.rollouts.storage import StoredEpisodes, write_episodes
from treetune.runtime import generation
from treetune.runtime.generation import wait_for_stored_episodes
from treetune.trainer.base import Trainer
from treetune.trainer.batches import micro_batches, rows_of_rank
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Sequences, units_of


def trainer(**settings: Any) -> Trainer:
    return Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, tokens_per_micro_batch=64, **settings)


@pytest.mark.parametrize("kind", ["plain", "pairs", "threads"])
def test_each_of_eight_ranks_keeps_its_part_and_all_have_every_row(kind: str, tmp_path: Path) -> None:
    rows = episodes(64)
    if kind == "pairs":
        rows = paired_episodes(40, of=rows)
    elif kind == "threads":
        rows = [row for row, _ in threaded_episodes(16)]
    write_episodes(tmp_path / "episodes.arrow", rows)
    stored = StoredEpisodes(tmp_path / "episodes.arrow")
    whole, known = Sequences.of(rows), Sequences.of(stored, rows_with_tokens=())
    assert len(stored) == len(rows) and rows[3] in stored
    assert all(row.token_ids is None for row in known.rows)
    assert [row.length for row in known.rows] == [
        row.length for row in whole.rows
    ] and known.distinct_rows() == whole.distinct_rows()
    assert dataclasses.replace(known, rows=[]) == dataclasses.replace(whole, rows=[])
    units = [known.rows_of(unit) for unit in units_of(stored, in_pairs=kind == "pairs")]
    settings, device, seen = trainer(), torch.device("cpu"), set()
    for rank in range(8):
        place = {"ranks": Ranks(rank, 8, device, 60.0), "keep_units": kind == "pairs"}
        own = rows_of_rank(known, units, settings, **place)
        assert len(own) < len(whole.rows) / 4
        seen |= own
        few = micro_batches(Sequences.of(stored, own), units, settings, **place)
        everything = micro_batches(whole, units, settings, **place)
        for one, other in zip(few, everything, strict=True):
            assert torch.equal(one.inputs.input_ids_BT, other.inputs.input_ids_BT)
            assert torch.equal(one.flat_index_N, other.flat_index_N)
            assert one.inputs.max_positions == other.inputs.max_positions
    assert seen == set(range(len(whole.rows)))


def test_ranks_that_share_a_sequence_both_have_it() -> None:
    known = Sequences.of(episodes(16), rows_with_tokens=())
    settings = trainer(layout="packed", sequence_parallel_size=2)
    ranks = [Ranks(rank, 4, torch.device("cpu"), 60.0) for rank in range(4)]
    of_ranks = [rows_of_rank(known, known.distinct_rows(), settings, rank) for rank in ranks]
    assert of_ranks[0] == of_ranks[1] != of_ranks[2] == of_ranks[3]


def test_what_another_machine_shows_late_or_old_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.arrow", tmp_path / "new.arrow"
    write_episodes(old, episodes(4))
    write_episodes(new, episodes(8))
    shown = tmp_path / "episodes.arrow"
    seal = generation.seal_of(new)
    monkeypatch.setattr(Ranks, "from_first", lambda self, name, own: seal)
    comes = iter([lambda: None, lambda: old.rename(shown), lambda: new.rename(shown)])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(comes)())
    assert len(wait_for_stored_episodes(Ranks(1, 2, torch.device("cpu"), 60.0), shown)) == 8
    shown.unlink()
    with pytest.raises(RuntimeError, match=r"doesn't see .*episodes\.arrow as the first rank has written it"):
        wait_for_stored_episodes(Ranks(1, 2, torch.device("cpu"), -1.0), shown)
