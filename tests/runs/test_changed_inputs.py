"""A run goes on with the model and the rows that it began with, or says what has changed and stops."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import directory_of, small, train
from treetune.engine.settings import InProcessSettings
from treetune.models.policy_files import write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.saved_weights import saved_weights
from treetune.models.sources import TinyModel
from treetune.runtime import manifest
from treetune.runtime.base import PolicyIteration
from treetune.store.checksums import write_record

ALPHABET = "0123456789+= "


def write_model(folder: Path, seed: int) -> None:
    tiny = TinyModel(layers=1, hidden_size=32, heads=1, intermediate_size=32)
    model = tiny.load_model(seed, lambda: ALPHABET)
    write_policy(saved_weights(model), model.config, tiny.load_tokenizer(lambda: ALPHABET), folder)


def write_checkpoint(experiment: Path, number: int, seed: int) -> None:
    folder = experiment / "checkpoints" / f"{number:04d}"
    write_model(folder / "policy", seed)
    (folder / "state.json").write_text("{}")


def started(tmp_path: Path, name: str = "start/checkpoints/last/policy") -> PolicyIteration:
    """A run that has sampled something."""
    write_checkpoint(tmp_path / "start", 1, seed=1)
    config = replace(small(tmp_path), model=PretrainedModel(name_or_path=str(tmp_path / name)))
    begin(config)
    work = directory_of(config).iteration_folder(0)
    work.mkdir(parents=True)
    (work / "episodes.arrow").write_bytes(b"")
    return config


def begin(config: PolicyIteration, **keys: Any) -> list[str]:
    plain = {
        "type": "policy_iteration",
        "model": {"type": "pretrained", "name_or_path": config.model.name_or_path},
        **keys,
    }
    directory_of(config).path.mkdir(parents=True, exist_ok=True)
    return manifest.begin_or_resume(directory_of(config), config, plain, 1)


def test_a_start_model_that_has_moved_on_is_refused_and_going_on_is_a_choice(tmp_path: Path) -> None:
    config = started(tmp_path)
    assert begin(config) == []
    write_checkpoint(tmp_path / "start", 2, seed=2)
    with pytest.raises(ValueError, match=r"start model was .*0001/policy.* and is .*0002/policy") as told:
        begin(config)
    assert "changed_inputs to 'accept'" in str(told.value)
    accepting = replace(config, changed_inputs="accept")
    (remark,) = begin(accepting, changed_inputs="accept")
    assert "accepted" in remark and "0002/policy" in remark
    assert begin(config) == [], "what was accepted is what it goes on with from here on"


def test_the_same_model_at_another_place_is_no_change(tmp_path: Path) -> None:
    config = started(tmp_path)
    write_checkpoint(tmp_path / "start", 2, seed=2)
    by_number = PretrainedModel(name_or_path=str(tmp_path / "start" / "checkpoints" / "0001" / "policy"))
    assert begin(replace(config, model=by_number)) == []
    other = PretrainedModel(name_or_path=str(tmp_path / "start" / "checkpoints" / "0002" / "policy"))
    with pytest.raises(ValueError, match=r"another configuration: model\.name_or_path") as told:
        begin(replace(config, model=other))
    remedy = f"--override '{{experiment_name: \"{config.experiment_name}_2\"}}'"
    assert remedy in str(told.value)


def test_a_run_with_a_checkpoint_goes_on_with_its_start_model_in_another_folder(tmp_path: Path) -> None:
    engine = InProcessSettings()
    train(small(tmp_path, engine, experiment_name="start", iterations=1))
    first_folder, second_folder = tmp_path / "start" / "checkpoints" / "0001" / "policy", tmp_path / "moved"
    shutil.copytree(first_folder, second_folder)
    for iterations, folder in ((1, first_folder), (2, second_folder)):
        model = PretrainedModel(name_or_path=str(folder))
        config = small(tmp_path, engine, experiment_name="second", iterations=iterations, model=model)
        train(config, model={"type": "pretrained", "name_or_path": str(folder)})
    assert len(directory_of(config).read_metrics()) == 2


def test_weights_that_were_written_over_in_place_are_refused(tmp_path: Path) -> None:
    config = started(tmp_path)
    policy = tmp_path / "start" / "checkpoints" / "0001" / "policy"
    shutil.rmtree(policy)
    write_model(policy, seed=3)
    with pytest.raises(ValueError, match="start model was"):
        begin(config)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_that_have_changed_are_refused(split: str, tmp_path: Path) -> None:
    config = started(tmp_path)
    sizes = {"train": "train_size", "validation": "validation_size", "test": "test_size"}
    fewer = {sizes[split]: config.task.size(split) - 1}
    with pytest.raises(ValueError, match=rf"the problems of {split} were \d+ .* and are \d+ "):
        begin(replace(config, task=replace(config.task, **fewer)))


def test_a_run_of_an_older_version_goes_on_with_a_word_and_is_pinned_from_then_on(tmp_path: Path) -> None:
    config = started(tmp_path)
    stored = manifest.read_manifest(directory_of(config))
    older = {key: value for key, value in stored.items() if key not in ("inputs", "checksum")}
    write_record(directory_of(config).manifest_file, older)
    (remark,) = begin(config)
    assert "recorded no digest of the start model" in remark
    assert begin(config) == []
    write_checkpoint(tmp_path / "start", 2, seed=2)
    with pytest.raises(ValueError, match="start model was"):
        begin(config)
    assert older["data"]["train"]
    write_record(directory_of(config).manifest_file, {**older, "data": {**older["data"], "train": "0" * 16}})
    with pytest.raises(ValueError, match=r"the problems of train have changed \(fingerprint 0{16}"):
        begin(config)


def test_a_run_whose_start_models_own_run_went_on_refuses_to_go_on_with_another_reference(
    tmp_path: Path,
) -> None:
    """The whole of it: the start model is the last checkpoint of an experiment, which trains on meanwhile."""
    engine = InProcessSettings()
    first = small(tmp_path, engine, experiment_name="start", iterations=1)
    train(first)
    last = tmp_path / "start" / "checkpoints" / "last" / "policy"
    model = PretrainedModel(name_or_path=str(last))
    second = small(tmp_path, engine, experiment_name="second", iterations=1, model=model)
    train(second)
    metrics = directory_of(second).read_metrics()
    train(replace(first, iterations=2))
    with pytest.raises(ValueError, match="start model"):
        train(replace(second, iterations=2))
    assert directory_of(second).read_metrics() == metrics, "nothing was trained"
