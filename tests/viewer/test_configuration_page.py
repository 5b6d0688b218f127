"""Where each value of a configuration comes from, as far as its files still say the same."""

import json
from pathlib import Path

import pytest

from tests.viewer.recorded import begin_run
from treetune.config.jsonnet import load
from treetune.runtime.directory import ExperimentDirectory
from treetune_view.store import Store
from treetune_view.store.origins import Origins, origins

VARIABLES = {"APP_SEED": "7"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    place = tmp_path / "configs"
    place.mkdir()
    (place / "base.jsonnet").write_text("{ credit: { type: 'group', samples: 2 },\n  iterations: 3,\n}\n")
    (place / "over.jsonnet").write_text("{\n  iterations: 5,\n}\n")
    return place


def found(store: Store, seconds: float = 20) -> Origins:
    return origins(store.experiment(store.run("run")), seconds=seconds)


def commanded(store: Store, command: dict[str, object]) -> ExperimentDirectory:
    run = begin_run(store.folders[0] / "run")
    (run.path / "manifest.json").write_text(json.dumps({"command": command}))
    return run


@pytest.fixture
def begun(store: Store, files: Path) -> Store:
    """With a run of these files, an override and a variable."""
    override = "{credit+: {samples: 4}}"
    words = ["--configs", f"{files}/base.jsonnet,over.jsonnet", "--override", override, "run"]
    config = load([f"{files}/base.jsonnet", f"{files}/over.jsonnet"], [override], environ=VARIABLES)
    run = commanded(store, {"words": words, "folder": str(files), "variables": VARIABLES})
    (run.path / "config.json").write_text(json.dumps(config.data))
    return store


def test_every_value_has_the_places_that_set_it_the_one_that_won_first(begun: Store) -> None:
    places, problem = found(begun).places, found(begun).problem
    assert problem == ""
    short = [place.rpartition("/")[2] for place in places["iterations"]]
    assert short == ["over.jsonnet:2", "base.jsonnet:2"]
    assert places["credit.samples"][0] == "--override"
    assert places["credit.type"][0].endswith("base.jsonnet:1") and "APP_SEED" in places["seed"][0]


def test_files_that_have_changed_or_are_gone_explain_nothing(begun: Store, files: Path) -> None:
    (files / "over.jsonnet").write_text("{ iterations: 6 }")
    assert "another iterations" in found(begun).problem
    (files / "over.jsonnet").unlink()
    assert "no longer what they were" in found(begun).problem


def test_a_command_that_is_not_known_or_cannot_be_read_ends_in_words(store: Store) -> None:
    begin_run(store.folders[0] / "run")
    assert "did not write down its command" in found(store).problem
    for command in ({}, {"words": ["--configs"], "folder": "/", "variables": {}}):
        commanded(store, command)
        assert "can't be evaluated again" in found(store).problem


def test_a_configuration_without_an_end_is_given_up(store: Store, files: Path) -> None:
    (files / "base.jsonnet").write_text("local f(n) = f(n + 1) tailstrict; { a: f(0) }")
    words = ["--configs", f"{files}/base.jsonnet"]
    commanded(store, {"words": words, "folder": str(files), "variables": {}})
    assert "within 2 s" in found(store, seconds=2).problem


def test_what_fails_in_the_background_has_an_end_too(store: Store) -> None:
    begin_run(store.folders[0] / "run")

    def failing() -> str:
        raise KeyError("words")

    while (said := store.later("it", store.run("run"), failing, repr)) is None:
        pass
    assert said == "KeyError('words')"
