"""Promises of `filter_data`:

* rows are dropped by pass rates, lengths and quotas, each with its reason, and a missing rate is not a zero;
* the order of the rows doesn't change which of them a quota keeps;
* rows that stay are unchanged, and several files are filtered together;
* missing rates, rules without a bound and rows without the schema are told with their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data import command
from tests.data.command import write_lines
from treetune.data.difficulty.merging import RowRate, write_rates
from treetune.data.rules.fields import share_proportionally
from treetune.domains.domain_rows import domain_row, read_domain_rows, row_key, write_parquet


class Work(command.Work):
    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        super().__init__(folder, "filter_data", [])
        self.input = folder / "rows.parquet"
        write_parquet(self.input, rows)

    def filter(self, *rules: dict[str, Any]) -> int:
        return self.run(rules=rules)

    def refusal(self, rule: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
        """Return the message, in one line, by which the command refuses a rule."""
        assert self.filter(rule) == 2
        return " ".join(capsys.readouterr().err.split())

    @property
    def reasons(self) -> list[str]:
        return [record["why"] for record in self.dropped]

    @property
    def rule(self) -> dict[str, Any]:
        """What the summary says of the first rule."""
        return self.summary["rules"][0]


RATES = {"easy": (1.0, 0.9), "medium": (0.6, 0.2), "hard": (0.1, 0.0), "fresh": (None, None)}
"""Pass rates of a strong and of a weak model on four rows."""


def row(name: str, source: str = "math__sums") -> dict[str, Any]:
    return domain_row(source, name, "1")


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path, [row(name) for name in RATES])


def write_estimate(folder: Path, model: int, names: list[str]) -> str:
    """Write the rates of a model (0 strong, 1 weak) on these rows as an estimate does; return the folder."""
    row_rates = []
    for index, name in enumerate(names):
        rate = RATES[name][model]
        answers = 0 if rate is None else 10
        key, correct = row_key(row(name)), round((rate or 0) * 10)
        row_rates.append(RowRate(index, key, 0, "math__sums", answers, correct, rate, rate, 1.0, 0, 0))
    folder.mkdir()
    write_rates(folder / "rates.parquet", row_rates)
    return str(folder)


def test_too_hard_for_the_strong_model_or_too_easy_for_the_weak_one_goes(work: Work) -> None:
    names = ["easy", "medium", "hard"]
    strong = write_estimate(work.folder / "strong", 0, names)
    weak = write_estimate(work.folder / "weak", 1, names)
    rule = {"type": "pass_rates", "strong": strong, "weak": weak, "low": 0.1, "high": 0.9, "missing": "keep"}
    assert work.filter(rule) == 0
    assert work.prompts() == ["medium", "fresh"]
    too_easy, too_hard = work.reasons
    assert too_easy == "too easy: the weak model's rate is 0.9"
    assert too_hard == "too hard: the strong model's rate is 0.1"
    assert work.rule["why"] == {"too hard": 1, "too easy": 1}


def test_a_missing_rate_is_told_and_does_not_count_as_zero(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    strong = write_estimate(work.folder / "strong", 0, [*RATES])
    rule = {"type": "pass_rates", "strong": strong, "low": 0.1, "high": None}
    assert "has no rate of the strong model" in work.refusal(rule, capsys)
    assert work.filter({**rule, "missing": "drop"}) == 0
    assert work.prompts() == ["easy", "medium"] and work.rule["without_a_rate"] == {"strong": 1}
    assert work.filter({**rule, "missing": "keep"}) == 0
    assert work.prompts() == ["easy", "medium", "fresh"]


def test_rates_enter_the_rows_under_their_names(work: Work) -> None:
    strong = write_estimate(work.folder / "strong", 0, ["medium"])
    weak = write_estimate(work.folder / "weak", 1, ["medium"])
    assert work.filter({"type": "pass_rates", "strong": strong, "weak": weak, "missing": "keep"}) == 0
    easy, medium, *_ = work.rows()
    assert (medium["low_pass_rate"], medium["high_pass_rate"]) == (0.6, 0.2)
    assert "low_pass_rate" not in easy


def test_the_columns_of_the_rows_count_where_no_folder_is_named(tmp_path: Path) -> None:
    never_solved = row("never solved") | {"low_pass_rate": 0.0, "high_pass_rate": 0.0}
    half_solved = row("half solved") | {"low_pass_rate": 0.5, "high_pass_rate": 0.5}
    work = Work(tmp_path, [never_solved, half_solved])
    assert work.filter({"type": "pass_rates"}) == 0
    assert work.prompts() == ["half solved"]


def test_quotas_bound_domains_sources_and_the_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(f"{source} {i}", source) for source in ("math__a", "math__b", "code__c") for i in range(20)]
    work = Work(tmp_path, rows)
    quotas = {"type": "quotas", "most": {"math": 5, "math__a": 3}}
    assert work.filter(quotas) == 0
    assert work.rule["kept"] == {"code": 20, "math": 5, "math__a": 3}
    assert (work.rule["rows"], work.rule["left"]) == (60, 28)
    kept_prompts = set(work.prompts())
    assert sum(name.startswith("math__a") for name in kept_prompts) == 3
    write_parquet(work.input, list(reversed(rows)))
    assert work.filter(quotas) == 0
    assert set(work.prompts()) == kept_prompts, "another order of the rows changes which are kept"
    assert work.filter({"type": "quotas", "total": 30}) == 0
    assert len(work.prompts()) == 30 and sum(name.startswith("code") for name in work.prompts()) == 10
    unknown = work.refusal({"type": "quotas", "most": {"maht": 5}}, capsys)
    assert "quotas name maht, and there are only code, math" in unknown


def test_proportional_shares_add_up_to_the_total() -> None:
    assert share_proportionally({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1, "b": 1, "c": 0}
    assert sum(share_proportionally({"a": 17, "b": 3, "c": 1}, 11).values()) == 11


def test_characters_and_tokens_bound_rows(work: Work) -> None:
    model = {"type": "tiny", "alphabet": "abcdefghijklmnopqrstuvwxyz1"}
    assert work.filter({"type": "length", "model": model, "max_prompt_tokens": 5}) == 0
    assert work.prompts() == ["easy", "hard", "fresh"] and work.reasons == ["a prompt of 6 tokens"]


def test_rows_stay_as_they_are_and_several_files_are_filtered_together(work: Work) -> None:
    before = [domain_row for _, domain_row in read_domain_rows(work.input)]
    assert work.filter({"type": "exact_duplicates"}) == 0
    assert work.rows() == before
    write_parquet(work.folder / "rows2.parquet", [row("easy"), row("new")])
    work.input = work.folder / "rows*.parquet"
    assert work.filter({"type": "exact_duplicates"}) == 0
    assert work.prompts() == [*RATES, "new"]


def test_missing_rates_a_rule_without_bounds_and_rows_without_the_schema_are_refused(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = work.refusal({"type": "pass_rates", "strong": "nowhere"}, capsys)
    assert "there are no pass rates nowhere" in nowhere and "estimate_difficulty --output nowhere" in nowhere
    unbounded = work.refusal({"type": "pass_rates", "low": None, "high": None}, capsys)
    assert "low and high are both null" in unbounded
    other_file = work.refusal({"type": "pass_rates", "strong": str(work.input)}, capsys)
    assert "holds no rates" in other_file
    work.input = write_lines(work.folder / "rows.jsonl", [{"question": "?"}])
    assert "rows.jsonl:1: it has no data_source" in work.refusal({"type": "exact_duplicates"}, capsys)
