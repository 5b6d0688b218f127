"""A file whose every key is set again on its right is told; no shipped stack of files is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from treetune.config.explain import overridden
from treetune.config.jsonnet import CONFIGS, configurations, load

MAIN = Path(__file__).parents[2] / "src" / "treetune" / "main.py"
EXPERIMENT = "{ seed: 1, credit: { type: 'a', n: 1 }, trainer: { rate: 1 } }"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.jsonnet").write_text(EXPERIMENT)


def notes(*texts: str) -> list[str]:
    names = []
    for number, text in enumerate(texts):
        if text != "experiment":
            Path(f"{number}.jsonnet").write_text(text)
        names.append("experiment.jsonnet" if text == "experiment" else f"{number}.jsonnet")
    return list(overridden(load(names, environ={})))


def test_a_preset_on_the_left_of_its_experiment_is_told_with_what_overrides_it() -> None:
    (note,) = notes("{ credit: { type: 'b' }, trainer+: { rate: 2 } }", "experiment")
    assert note.startswith("0.jsonnet changes nothing")
    assert "credit.type" in note
    assert "by experiment.jsonnet" in note
    assert "further to the right" in note


def test_a_preset_that_another_one_replaces_is_told() -> None:
    (note,) = notes("experiment", "{ credit: { type: 'b' } }", "{ seed: 2 }", "{ credit: { type: 'c' } }")
    assert note.startswith("1.jsonnet changes nothing")
    assert "by 3.jsonnet" in note


@pytest.mark.parametrize(
    "texts",
    [
        ("experiment", "{ trainer+: { rate: 2 } }"),
        ("experiment", "{ trainer+: { rate: 1 } }", "{ seed: 2 }"),  # says again what is there already
        ("{ credit: { type: 'b' }, own: 1 }", "experiment"),  # one of its keys stays
        ("experiment", "{ trainer+: { rate:: 2 } }", "{ trainer+: { twice: super.rate * 2 } }"),
        ("experiment", "{ credit+: { n: 2 } }", "{ credit+: { n: super.n + 1 } }"),
        ("experiment",),
    ],
)
def test_a_file_that_does_something_is_not_told(texts: tuple[str, ...]) -> None:
    assert notes(*texts) == []


def test_no_documented_stack_of_presets_and_hardware_is_told() -> None:
    for preset in configurations(CONFIGS / "presets"):
        for right in ("hardware/lora.jsonnet", "shaping/overlong_penalty.jsonnet"):
            stack = ["quickstart/vineppo.jsonnet", str(preset), right]
            assert list(overridden(load(stack, environ={}))) == [], stack


def test_check_config_says_so_and_is_content(tmp_path: Path) -> None:
    words = [sys.executable, str(MAIN), "--configs", "credit/group.jsonnet,quickstart/vineppo.jsonnet"]
    done = subprocess.run([*words, "check_config"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.startswith("note: ")
    assert "quickstart/vineppo.jsonnet" in done.stderr
