"""What a run knew of single tokens lies beside its episodes, and is made again when it goes on; and when it
did what."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.in_process import small, train
from treetune.rollouts.storage import SIGNALS, read_episodes, read_token_signals
from treetune.store.checksums import read_record
from treetune.store.timeline import read_timeline


def test_signals_lie_beside_the_episodes_and_come_out_the_same_when_trained_again(tmp_path: Path) -> None:
    directory = train(small(tmp_path))
    files = [directory.iteration(i) / SIGNALS for i in range(2)]
    before = [path.read_bytes() for path in files]
    for i, path in enumerate(files):
        signals, episodes = read_token_signals(path), read_episodes(path.with_name("episodes.arrow"))
        assert [one.trajectory for one in signals] == [one.trajectory for one in episodes]
        assert [len(one.entropies) for one in signals] == [int(one.trained.sum()) for one in episodes]
        row = read_record(directory.iteration(i) / "metrics.json", "")
        gaps = np.abs(np.concatenate([one.gaps for one in signals if one.gaps is not None]))
        assert row["engine/logprob_gap_max"] == pytest.approx(float(gaps.max()), rel=1e-5)
    # Killed after one iteration and in the midst of the next: no checkpoint, and what it had begun to write.
    shutil.rmtree(directory.path / "checkpoints")
    files[0].unlink()
    files[1].write_bytes(b"of another try")
    train(small(tmp_path))
    assert [path.read_bytes() for path in files] == before

    first, second = read_timeline(directory.logs / "run.timeline.jsonl")
    assert first.closed and second.closed
    phases = [[one for one in process.spans if one.lane == "phases"] for process in (first, second)]
    assert [one.name for one in phases[0] if one.about["iteration"] == 1] == [
        "generation", "credit", "training", "evaluation", "commit"
    ], "the last iteration's weights are sampled from by nobody"  # fmt: skip
    assert "generation" not in {one.name for one in phases[1]}, "what was sampled is read back"
    assert {"iteration 1: training", "iteration 1: checkpoint"} <= {one.name for one in second.spans}
