"""Promise: a run whose optimiser's state is cut for other ranks is refused before its folder is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import refuse_other_ranks

PARTS = {
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
}


def stored(folder: Path, names: set[str]) -> ExperimentDirectory:
    checkpoint = folder / "checkpoints" / "0003"
    state = checkpoint / "trainer" / "policy" / "state"
    state.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    for name in names:
        (state / name).touch()
    return ExperimentDirectory(folder)


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_other_ranks_are_refused_with_the_right_number(tmp_path: Path, prefix: str) -> None:
    directory = stored(tmp_path, {prefix + name for name in PARTS})
    refuse_other_ranks(directory, 2)
    for ranks in (1, 4):
        with pytest.raises(ValueError, match=r"on 2 ranks up to iteration 3.*NUM_GPUS=2"):
            refuse_other_ranks(directory, ranks)


def test_what_is_not_cut_goes_on_with_any(tmp_path: Path) -> None:
    directory = stored(tmp_path, {"mp_rank_00_model_states.pt"})
    for ranks in (1, 2, 4):
        refuse_other_ranks(directory, ranks)
    refuse_other_ranks(ExperimentDirectory(tmp_path / "nothing"), 2)
