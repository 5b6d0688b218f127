"""Promise of the check that a model exists: a model that is neither a folder nor in the hub's cache is a
warning with the size of its download, or missing where downloads are off.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from treetune.models.presence import check_presence

NAME = "someone/model-7b"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def cache_model(name: str) -> None:
    """Write the files of a cached model as the hub's library lays them out."""
    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a" * 40)
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")


def test_a_model_that_the_start_downloads_is_a_warning_with_its_size() -> None:
    [finding] = check_presence(NAME, None, "name_or_path")
    assert (finding.level, finding.key) == ("warning", "name_or_path")
    assert "neither a folder in" in finding.what and "nor in the local cache" in finding.what
    assert "the start downloads it from the Hugging Face hub, about 14.0 GB." in finding.what
    [finding] = check_presence("Qwen/Qwen2.5-0.5B", None, "model")
    assert "about 1.0 GB" in finding.what
    [finding] = check_presence("someone/model", None, "model")
    assert "hub. Whether" in finding.what


def test_without_downloads_a_model_that_is_not_cached_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [finding] = check_presence(NAME, None, "name_or_path")
    assert finding.level == "missing" and "HF_HUB_OFFLINE is set" in finding.what
    assert finding.remedy.startswith("unset HF_HUB_OFFLINE") and f"hf download {NAME}" in finding.remedy


def test_a_cached_model_and_a_folder_exist_and_another_revision_does_not() -> None:
    cache_model(NAME)
    assert list(check_presence(NAME, None, "model")) == []
    assert list(check_presence(NAME, "a" * 40, "model")) == []
    [finding] = check_presence(NAME, "v2", "model")
    assert "(revision 'v2')" in finding.what
    Path("folder").mkdir()
    Path("folder/config.json").write_text("{}")
    assert list(check_presence("folder", None, "model")) == []


@pytest.mark.parametrize("name", ["./no/folder", "someone/model--x"])
def test_what_can_be_neither_a_folder_nor_a_name_is_missing(name: str) -> None:
    [finding] = check_presence(name, None, "model")
    assert finding.level == "missing" and finding.remedy
