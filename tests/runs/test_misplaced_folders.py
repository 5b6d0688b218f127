"""A checkpoint's or iteration's folder that lies in another's place is refused by what it says of itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.small_run import small, train, weights_of
from treetune.exceptions import Damaged
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import read_record, write_record


def run_of(base: Path, iterations: int) -> PolicyIteration:
    """Begins a run, or goes on with it."""
    config = small(base, iterations=iterations)
    train(config, seed=1, model={"layers": 1})
    return config


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    """Two iterations. Not to be changed: take a copy."""
    return run_of(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def of_two(two: PolicyIteration, tmp_path: Path) -> ExperimentDirectory:
    shutil.copytree(two.directory, tmp_path, dirs_exist_ok=True)
    return ExperimentDirectory(tmp_path / "small")


def test_a_checkpoint_in_anothers_place_is_refused(of_two: ExperimentDirectory, tmp_path: Path) -> None:
    shutil.rmtree(of_two.checkpoint_folder(2))
    shutil.copytree(of_two.checkpoint_folder(1), of_two.checkpoint_folder(2))
    with pytest.raises(Damaged, match="written for number 1, but is in the folder of number 2"):
        run_of(tmp_path, 3)


@pytest.mark.parametrize("part", ["trainer", "policy"])
def test_a_part_of_another_checkpoint_is_refused(
    of_two: ExperimentDirectory, tmp_path: Path, part: str
) -> None:
    shutil.rmtree(of_two.checkpoint_folder(2) / part)
    shutil.copytree(of_two.checkpoint_folder(1) / part, of_two.checkpoint_folder(2) / part)
    with pytest.raises(Damaged, match=f"{part} is not what this checkpoint was written with"):
        run_of(tmp_path, 3)


@pytest.mark.parametrize("name", ["trajectories.arrow", "episodes.arrow", "rollout.json"])
def test_a_file_of_another_iteration_is_refused(
    of_two: ExperimentDirectory, tmp_path: Path, name: str
) -> None:
    """The second iteration is trained again, from what lies in its folder."""
    shutil.rmtree(of_two.checkpoint_folder(2))
    second = of_two.iteration_folder(1)
    shutil.copy(of_two.iteration_folder(0) / name, second / name)
    if name == "trajectories.arrow":
        (second / "episodes.arrow").unlink()  # or nobody reads the answers again
    with pytest.raises(
        Damaged, match=r"is of iteration 1 and lies in the folder of|for number 0, but is in the folder of"
    ):
        run_of(tmp_path, 3)


def test_the_metrics_of_another_iteration_are_refused(of_two: ExperimentDirectory, tmp_path: Path) -> None:
    shutil.copy(of_two.iteration_folder(0) / "metrics.json", of_two.iteration_folder(1) / "metrics.json")
    with pytest.raises(Damaged, match="for number 0, but is in the folder of number 1"):
        run_of(tmp_path, 3)


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(
    of_two: ExperimentDirectory, tmp_path: Path
) -> None:
    """It doesn't say what its parts are, nor why it was written."""
    undisturbed = run_of(tmp_path / "undisturbed", 3)
    state = read_record(of_two.checkpoint_folder(2) / "state.json", "")
    earlier = {key: state[key] for key in ("iteration", "config")}
    write_record(of_two.checkpoint_folder(2) / "state.json", earlier)
    assert of_two.regular_checkpoints() == [1, 2]
    assert weights_of(run_of(tmp_path, 3)) == weights_of(undisturbed)
