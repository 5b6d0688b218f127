"""Symbolic links that lead out of the viewer's folders are not followed, and told."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import pytest
from starlette.testclient import TestClient

from tests.viewer.recorded import recorded_run
from treetune_view.store import Store


def led_out(path: Path, elsewhere: Path) -> None:
    """Moves what lies there elsewhere, with a link to it in its place."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def test_folders_and_files_elsewhere_are_not_looked_into(
    client: TestClient, store: Store, tmp_path: Path
) -> None:
    [folder] = store.folders
    recorded_run(folder / "own", iterations=1)
    recorded_run(tmp_path / "elsewhere" / "secret", iterations=1)
    (tmp_path / "elsewhere" / "rows.jsonl").write_text('{"n": 1}\n')
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "rows.jsonl").symlink_to(tmp_path / "elsewhere" / "rows.jsonl")
    (folder / "again").symlink_to(folder / "own")

    assert [run.name for run in store.runs()] == ["again", "own"]
    assert client.get("/run", params={"run": "link/secret"}).status_code == 404
    assert client.get("/rows", params={"data": "rows.jsonl"}).status_code == 404
    for page in ("/", "/data"):
        text = client.get(page).text
        assert "Not followed" in text and f"{folder}/link" in text and f"{folder}/again" not in text
    assert f"{folder}/rows.jsonl" in client.get("/data").text

    both = Store([folder, tmp_path / "elsewhere"], tmp_path / "cache", look_again_s=0.0)
    assert len(both.runs()) == 4 and not both.left_out


@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "tokens.arrow", "logs", "logs/run.log", "iterations", "iterations/0000",
     "evaluations/0001", "evaluations/0001/validation", "evaluations/0001/validation/answers.jsonl",
     "evaluations/0001/validation/summary.json"],
)  # fmt: skip
def test_an_experiment_that_is_read_elsewhere_is_left_out_and_told(
    client: TestClient, store: Store, tmp_path: Path, name: str
) -> None:
    run = recorded_run(store.folders[0] / "run", iterations=1)
    (run.logs / "run.log").write_text("a line\n")
    assert client.get("/run?run=run").status_code == 200
    led_out(run.path / name, tmp_path / "elsewhere")

    for page in ("run", "answers", "timeline", "notes"):
        assert client.get(f"/{page}", params={"run": "run"}).status_code == 404
    assert f"{run.path / name}" in client.get("/").text


@pytest.mark.parametrize("name", ["trajectories.arrow", "episodes.arrow", "token_signals.arrow"])
def test_answers_that_lie_elsewhere_are_left_out_and_told(
    client: TestClient, store: Store, tmp_path: Path, name: str
) -> None:
    run = recorded_run(store.folders[0] / "run", iterations=2)
    led_out(run.iteration(0) / name, tmp_path / "elsewhere")

    assert client.get("/answer?run=run&source=i1&answer=train/0%230").status_code == 404
    assert client.get("/answer?run=run&source=i2&answer=train/0%230").status_code == 200
    told = f"{run.iteration(0) / name} is not read: it is a symbolic link that leads out of the folder"
    assert told in client.get("/answers?run=run").text


def test_checkpoints_on_another_disk_hide_no_experiment(store: Store, tmp_path: Path) -> None:
    run = recorded_run(store.folders[0] / "run", iterations=1)
    (run.path / "checkpoints").mkdir()
    led_out(run.path / "checkpoints", tmp_path / "elsewhere")

    assert [one.name for one in store.runs()] == ["run"] and not store.left_out


def test_a_data_set_of_several_files_has_them_in_its_own_folder(
    client: TestClient, store: Store, tmp_path: Path
) -> None:
    folder = store.folders[0] / "saved"
    datasets.Dataset.from_list([{"n": 1}]).save_to_disk(str(folder))
    [file] = folder.glob("*.arrow")
    led_out(file, tmp_path / "elsewhere")

    refused = client.get("/rows?data=saved")
    assert refused.status_code == 400 and f"{file} is a symbolic link that leads out" in refused.text
