"""`filter_data`: which rows go by their pass rates, lengths and quotas, and that a missing rate is not a
zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treetune.main import main
from treetune_data.difficulty.merging import RowRate, write_rates
from treetune_data.rules.fields import proportional
from treetune_domains.domain_rows import domain_row, read_domain_rows, row_key, write_parquet


class Work:
    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        self.folder, self.input, self.output = folder, folder / "rows.parquet", folder / "out"
        write_parquet(self.input, rows)

    def run(self, *rules: dict[str, Any], **settings: Any) -> int:
        config = self.folder / "config.jsonnet"
        config.write_text(json.dumps({"type": "filter_data", "rules": rules, **settings}))
        command = ["--configs", str(config), "filter_data", "--input", str(self.input)]
        return main([*command, "--output", str(self.output)])

    @property
    def kept(self) -> list[str]:
        return [row["prompt"][0]["content"] for _, row in read_domain_rows(self.output / "rows.parquet")]

    def rule(self, place: int = 0) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())["rules"][place]

    @property
    def dropped(self) -> list[str]:
        return [json.loads(line)["why"] for line in (self.output / "dropped.jsonl").read_text().splitlines()]


RATES = {"easy": (1.0, 0.9), "medium": (0.6, 0.2), "hard": (0.1, 0.0), "fresh": (None, None)}
"""What a strong and a weak model make of four rows."""


def row(name: str, source: str = "math__sums") -> dict[str, Any]:
    return domain_row(source, name, "1")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return Work(tmp_path, [row(name) for name in RATES])


def rates(folder: Path, which: int, names: list[str]) -> str:
    """What an estimate leaves in a folder."""
    found = []
    for index, name in enumerate(names):
        rate = RATES[name][which]
        answers = 0 if rate is None else 10
        key, correct = row_key(row(name)), round((rate or 0) * 10)
        found.append(RowRate(index, key, 0, "math__sums", answers, correct, rate, rate, 1.0, 0, 0))
    folder.mkdir()
    write_rates(folder / "rates.parquet", found)
    return str(folder)


def test_too_hard_for_the_strong_model_or_too_easy_for_the_weak_one_goes(work: Work) -> None:
    names = ["easy", "medium", "hard"]
    strong, weak = rates(work.folder / "strong", 0, names), rates(work.folder / "weak", 1, names)
    rule = {"type": "pass_rates", "strong": strong, "weak": weak, "low": 0.1, "high": 0.9, "missing": "keep"}
    assert work.run(rule) == 0
    assert work.kept == ["medium", "fresh"]
    assert work.dropped == [
        "too easy: the weak model's rate is 0.9",
        "too hard: the strong model's rate is 0.1",
    ]
    assert work.rule()["why"] == {"too hard": 1, "too easy": 1}


def test_a_missing_rate_is_told_and_no_zero(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    strong = rates(work.folder / "strong", 0, ["easy", "medium", "hard", "fresh"])
    rule = {"type": "pass_rates", "strong": strong, "low": 0.1, "high": None}
    assert work.run(rule) == 2
    assert "has no rate of the strong model" in capsys.readouterr().err
    assert work.run({**rule, "missing": "drop"}) == 0
    assert work.kept == ["easy", "medium"] and work.rule()["without_a_rate"] == {"strong": 1}
    assert work.run({**rule, "missing": "keep"}) == 0
    assert work.kept == ["easy", "medium", "fresh"]


def test_rates_enter_the_rows_under_their_names(work: Work) -> None:
    strong, weak = (rates(work.folder / name, which, ["medium"]) for which, name in enumerate(("s", "w")))
    assert work.run({"type": "pass_rates", "strong": strong, "weak": weak, "missing": "keep"}) == 0
    rows = {row["prompt"][0]["content"]: row for _, row in read_domain_rows(work.output / "rows.parquet")}
    assert rows["medium"]["low_pass_rate"] == 0.6 and rows["medium"]["high_pass_rate"] == 0.2
    assert "low_pass_rate" not in rows["easy"]


def test_the_rows_own_columns_count_where_no_folder_is_named(tmp_path: Path) -> None:
    columns = [{"low_pass_rate": 0.0, "high_pass_rate": 0.0}, {"low_pass_rate": 0.5, "high_pass_rate": 0.5}]
    work = Work(tmp_path, [row(str(number)) | one for number, one in enumerate(columns)])
    assert work.run({"type": "pass_rates"}) == 0
    assert work.kept == ["1"]


def test_quotas_of_domains_and_sources_and_of_all(tmp_path: Path) -> None:
    rows = [row(f"{source} {i}", source) for source in ("math__a", "math__b", "code__c") for i in range(20)]
    work = Work(tmp_path, rows)
    assert work.run({"type": "quotas", "most": {"math": 5, "math__a": 3}}) == 0
    assert work.rule()["kept"] == {"code": 20, "math": 5, "math__a": 3}
    assert (work.rule()["rows"], work.rule()["left"]) == (60, 28)
    kept = set(work.kept)
    assert sum(name.startswith("math__a") for name in kept) == 3
    work.input = tmp_path / "other.parquet"
    write_parquet(work.input, list(reversed(rows)))
    assert work.run({"type": "quotas", "most": {"math": 5, "math__a": 3}}) == 0
    assert set(work.kept) == kept, "the order of rows draws no other ones"
    assert work.run({"type": "quotas", "total": 30}) == 0
    assert len(work.kept) == 30 and sum(name.startswith("code") for name in work.kept) == 10


def test_a_quota_of_a_domain_that_is_not_there_is_refused(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run({"type": "quotas", "most": {"maht": 5}}) == 2
    assert "quotas name maht, and there are only math" in capsys.readouterr().err


def test_shares_add_up() -> None:
    assert proportional({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1, "b": 1, "c": 0}
    assert sum(proportional({"a": 17, "b": 3, "c": 1}, 11).values()) == 11


def test_characters_and_tokens_bound_rows(work: Work) -> None:
    model = {"type": "tiny", "alphabet": "abcdefghijklmnopqrstuvwxyz1"}
    rule = {"type": "length", "model": model, "max_prompt_tokens": 5}
    assert work.run(rule) == 0
    assert work.kept == ["easy", "hard", "fresh"] and work.dropped == ["a prompt of 6 tokens"]


def test_rows_stay_as_they_are(work: Work) -> None:
    before = [one for _, one in read_domain_rows(work.input)]
    assert work.run({"type": "exact_duplicates"}) == 0
    assert [one for _, one in read_domain_rows(work.output / "rows.parquet")] == before


def test_several_files_are_filtered_together(work: Work) -> None:
    write_parquet(work.folder / "rows2.parquet", [row("easy"), row("new")])
    work.input = work.folder / "rows*.parquet"
    assert work.run({"type": "exact_duplicates"}) == 0
    assert work.kept == [*RATES, "new"]


def test_no_rates_no_filter(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run({"type": "pass_rates", "strong": "nowhere"}) == 2
    assert "there are no pass rates nowhere" in (told := " ".join(capsys.readouterr().err.split()))
    assert "estimate_difficulty --output nowhere" in told
    assert work.run({"type": "pass_rates", "low": None, "high": None}) == 2
    assert "low and high are both null" in capsys.readouterr().err
    assert work.run({"type": "pass_rates", "strong": str(work.input)}) == 2
    assert "holds no rates" in capsys.readouterr().err


def test_rows_without_the_schema_are_told_with_their_place(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    work.input = work.folder / "rows.jsonl"
    work.input.write_text('{"question": "?"}\n')
    assert work.run({"type": "exact_duplicates"}) == 2
    assert "rows.jsonl:1: it has no data_source" in capsys.readouterr().err
