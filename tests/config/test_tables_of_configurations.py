"""A folder's table has configurations that are used like files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shipped import CONFIGS
from treetune.cli import arguments as completion
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import TABLE, configurations, is_configuration, load

ENTRIES = """{
  small: { trainer+: { rate: 1 } },
  'large_0.5': { trainer+: { rate: 2 } } + { double: self.trainer.rate * 2 },
  both: (import 'small.jsonnet') + { size: 3 },
}"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rates").mkdir()
    Path("rates", TABLE).write_text(ENTRIES)


def test_an_entry_is_named_imported_and_merged_like_a_file() -> None:
    assert load(["rates/small.jsonnet"], environ={}).data == {"trainer": {"rate": 1}}
    assert load(["rates/small.jsonnet", "rates/large_0.5.jsonnet"], environ={}).data["double"] == 4
    assert load(["rates/both.jsonnet"], environ={}).data == {"trainer": {"rate": 1}, "size": 3}
    Path("mine.jsonnet").write_text("(import 'rates/both.jsonnet') + { trainer+: { steps: 2 } }")
    assert load(["mine.jsonnet"], environ={}).data["trainer"] == {"rate": 1, "steps": 2}


def test_a_file_goes_before_the_entry_of_its_name() -> None:
    Path("rates/small.jsonnet").write_text("{ trainer+: { rate: 7 } }")
    assert load(["rates/both.jsonnet"], environ={}).data["trainer"] == {"rate": 7}


def test_an_explanation_names_the_table_and_the_entry() -> None:
    source = Explanation(load(["rates/small.jsonnet"], environ={})).settings(("trainer", "rate"))[-1].place
    assert f"rates/{TABLE}" in source and "rates/small.jsonnet" in source


def test_entries_are_listed_completed_and_offered_where_a_name_is_wrong() -> None:
    names = ["both", "large_0.5", "small"]
    assert [path.stem for path in configurations(Path("rates"))] == names
    assert completion.configs("rates/") == [f"rates/{name}.jsonnet" for name in names]
    with pytest.raises(ConfigError, match=r"did you mean .*rates/small\.jsonnet"):
        load(["rates/smal.jsonnet"], environ={})


def test_every_shipped_table_has_entries_and_no_file_beside_them() -> None:
    tables = list(CONFIGS.rglob(TABLE))
    assert len(tables) > 10
    for table in tables:
        text_only = [path for path in configurations(table.parent) if not path.is_file()]
        assert text_only and all(map(is_configuration, text_only))
        assert not list(table.parent.glob("names.jsonnet"))
