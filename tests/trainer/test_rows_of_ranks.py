"""Rows of a rank.

These tests promise that a rank has the tokens of exactly the rows that it runs, knows the lengths of all
rows, and waits for a file that another machine has not shown it yet.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_trainer import episodes, paired_episodes, threaded_episodes
from treetune.objectives.mle import MaximumLikelihood
from treetune.rollouts.storage import StoredEpisodes, write_episodes
from treetune.runtime import generation
from treetune.runtime.generation import wait_for_stored_episodes
from treetune.trainer.base import Trainer
from treetune.trainer.batches import micro_batches, rows_of_rank
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Sequences, units_of


def trainer_settings(**settings: Any) -> Trainer:
    return Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, tokens_per_micro_batch=64, **settings)


@pytest.mark.parametrize("kind", ["plain", "pairs", "threads"])
def test_each_of_eight_ranks_keeps_its_part_and_knows_the_lengths_of_all_rows(
    kind: str, tmp_path: Path
) -> None:
    rows = episodes(64)
    if kind == "pairs":
        rows = paired_episodes(40, of=rows)
    elif kind == "threads":
        rows = [row for row, _ in threaded_episodes(16)]
    write_episodes(tmp_path / "episodes.arrow", rows)
    stored = StoredEpisodes(tmp_path / "episodes.arrow")
    all_sequences, without_tokens = Sequences.of(rows), Sequences.of(stored, rows_with_tokens=())
    assert len(stored) == len(rows) and rows[3] in stored
    assert all(row.token_ids is None for row in without_tokens.rows)
    assert [row.length for row in without_tokens.rows] == [row.length for row in all_sequences.rows]
    assert without_tokens.distinct_rows() == all_sequences.distinct_rows()
    assert dataclasses.replace(without_tokens, rows=[]) == dataclasses.replace(all_sequences, rows=[])
    units = [without_tokens.rows_of(unit) for unit in units_of(stored, in_pairs=kind == "pairs")]
    settings, device, kept_by_any = trainer_settings(), torch.device("cpu"), set()
    for rank in range(8):
        rank_settings = {"ranks": Ranks(rank, 8, device, 60.0), "keep_units": kind == "pairs"}
        kept = rows_of_rank(without_tokens, units, settings, **rank_settings)
        assert len(kept) < len(all_sequences.rows) / 4
        kept_by_any |= kept
        own_batches = micro_batches(Sequences.of(stored, kept), units, settings, **rank_settings)
        all_batches = micro_batches(all_sequences, units, settings, **rank_settings)
        for batch, expected in zip(own_batches, all_batches, strict=True):
            assert torch.equal(batch.inputs.input_ids_BT, expected.inputs.input_ids_BT)
            assert torch.equal(batch.flat_index_N, expected.flat_index_N)
            assert batch.inputs.max_positions == expected.inputs.max_positions
    assert kept_by_any == set(range(len(all_sequences.rows)))


def test_ranks_that_share_a_sequence_both_have_it() -> None:
    without_tokens = Sequences.of(episodes(16), rows_with_tokens=())
    settings = trainer_settings(layout="packed", sequence_parallel_size=2)
    ranks = [Ranks(rank, 4, torch.device("cpu"), 60.0) for rank in range(4)]
    of_ranks = [
        rows_of_rank(without_tokens, without_tokens.distinct_rows(), settings, rank) for rank in ranks
    ]
    assert of_ranks[0] == of_ranks[1] != of_ranks[2] == of_ranks[3]


def test_a_file_that_another_machine_shows_late_or_in_an_old_version_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.arrow", tmp_path / "new.arrow"
    write_episodes(old, episodes(4))
    write_episodes(new, episodes(8))
    visible = tmp_path / "episodes.arrow"
    seal = generation.read_seal(new)
    monkeypatch.setattr(Ranks, "from_first", lambda self, name, own: seal)
    appearances = iter([lambda: None, lambda: old.rename(visible), lambda: new.rename(visible)])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(appearances)())
    assert len(wait_for_stored_episodes(Ranks(1, 2, torch.device("cpu"), 60.0), visible)) == 8
    visible.unlink()
    with pytest.raises(RuntimeError, match=r"doesn't see .*episodes\.arrow as the first rank has written it"):
        wait_for_stored_episodes(Ranks(1, 2, torch.device("cpu"), -1.0), visible)
