"""Where each value of a configuration comes from, as far as its files still say the same."""

import json
from pathlib import Path

import pytest

from tests.viewer.recorded import begin_run
from treetune.config.jsonnet import load
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


def begun(store: Store, files: Path) -> Origins:
    """Of a run of these files with an override and a variable."""
    words = [
        "--configs",
        f"{files}/base.jsonnet,over.jsonnet",
        "--override",
        "{credit+: {samples: 4}}",
        "run",
    ]
    given = [f"{files}/base.jsonnet", f"{files}/over.jsonnet"]
    config = load(given, ["{credit+: {samples: 4}}"], environ=VARIABLES)
    run = begin_run(store.folders[0] / "run")
    (run.path / "config.json").write_text(json.dumps(config.data))
    command = {"words": words, "folder": str(files), "variables": VARIABLES}
    (run.path / "manifest.json").write_text(json.dumps({"command": command}))
    return origins(store.experiment(store.run("run")))


def test_every_value_has_the_places_that_set_it_the_one_that_won_first(store: Store, files: Path) -> None:
    found = begun(store, files)

    assert found.problem == ""
    assert [place.rpartition("/")[2] for place in found.places["iterations"]] == [
        "over.jsonnet:2",
        "base.jsonnet:2",
    ]
    assert found.places["credit.samples"][0] == "--override"
    assert found.places["credit.type"][0].endswith("base.jsonnet:1")
    assert "APP_SEED" in found.places["seed"][0]


def test_files_that_have_changed_explain_nothing(store: Store, files: Path) -> None:
    begun(store, files)
    (files / "over.jsonnet").write_text("{ iterations: 6 }")

    assert "another iterations" in origins(store.experiment(store.run("run"))).problem


def test_files_that_are_gone_explain_nothing(store: Store, files: Path) -> None:
    begun(store, files)
    (files / "over.jsonnet").unlink()

    assert "no longer what they were" in origins(store.experiment(store.run("run"))).problem


def test_a_run_that_knows_no_command_says_so(store: Store) -> None:
    begin_run(store.folders[0] / "run")

    assert "did not write down its command" in origins(store.experiment(store.run("run"))).problem


def _commanded(store: Store, command: dict[str, object]) -> Origins:
    run = begin_run(store.folders[0] / "run")
    (run.path / "manifest.json").write_text(json.dumps({"command": command}))
    return origins(store.experiment(store.run("run")), seconds=20)


@pytest.mark.parametrize(
    "command",
    [{}, {"words": ["--configs"], "folder": "/", "variables": {}}],
    ids=["empty", "half"],
)
def test_a_command_that_cannot_be_read_ends_in_words(store: Store, command: dict[str, object]) -> None:
    assert "can't be evaluated again" in _commanded(store, command).problem


def test_a_configuration_without_an_end_is_given_up(store: Store, files: Path) -> None:
    (files / "base.jsonnet").write_text("local f(n) = f(n + 1) tailstrict; { a: f(0) }")
    run = begin_run(store.folders[0] / "run")
    command = {"words": ["--configs", f"{files}/base.jsonnet"], "folder": str(files), "variables": {}}
    (run.path / "manifest.json").write_text(json.dumps({"command": command}))

    assert "within 3 s" in origins(store.experiment(store.run("run")), seconds=3).problem


def test_what_fails_in_the_background_has_an_end_too(store: Store) -> None:
    begin_run(store.folders[0] / "run")

    def failing() -> str:
        raise KeyError("words")

    while (said := store.later("it", store.run("run"), failing, repr)) is None:
        pass
    assert said == "KeyError('words')"
