"""What a report and a table say of each domain is what was recorded and measured of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page import Page
from tests.reports.synthetic import metrics_row, summary, write_experiment, write_summary
from treetune_tables.columns import by_problem, number_in, value_named
from treetune_view.report import write_report

DOMAINS = {"code": 0.2, "grids": 0.35, "logic": 0.5, "sums": 0.8}


def of_domains(iteration: int, moved: bool) -> dict[str, float]:
    row: dict[str, float] = {}
    for place, (name, start) in enumerate(DOMAINS.items()):
        correct = start + (0.95 - start) * (1 - math.exp(-iteration / (6 + 4 * place)))
        numbers = {
            "reward": correct,
            "correct": correct,
            "unfinished": 0.05 * math.exp(-iteration / 5),
            "unavailable": 0.0,
            "response_tokens": 20 + 9 * place + math.sin(iteration),
            "problems": 8,
            "mixed": 2 * correct * (1 - correct),
            "learnable": correct * (1 - correct),
            "advantage_std": 0.5 * correct,
            "advantage_zero": 1 - correct,
            "weight": 0.25 + (0.01 * (place - 1.5) * (iteration % 7) if moved else 0.0),
        }
        row |= {f"domains/{name}/{number}": value for number, value in numbers.items()}
    return row


def measured(share: float, **more: Any) -> dict[str, Any]:
    by_domain = {name: summary(share * start, 0.05, n_problems=64) for name, start in DOMAINS.items()}
    return summary(share, domains=by_domain, **more)


def experiment(path: Path, moved: bool = False) -> Path:
    write_experiment(path, name=path.name, passes={})
    rows = [json.dumps(metrics_row(i, **of_domains(i, moved))) for i in range(25)]
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    for done in (5, 10, 15, 20, 25):
        write_summary(path, done, "test", measured(0.5 + done / 60))
    return path


def test_each_domain_has_a_curve_and_a_row_with_its_interval(tmp_path: Path) -> None:
    page = Page(write_report([experiment(tmp_path / "mixed")]))
    assert page.text.count("By domain") == 1
    for name, start in DOMAINS.items():
        share = (0.5 + 25 / 60) * start
        assert f"{name} test {share:.3f} [{share - 0.05:.3f}, {share + 0.05:.3f}]" in page.words
    assert "share of correct answers" in page.text and "spread of the advantages" in page.text
    assert "nobody could grade" not in page.text, "what is always 0 has no chart"
    assert "the weights ask for" not in page.text, "weights that stay as they are have no chart"


def test_weights_that_move_are_drawn(tmp_path: Path) -> None:
    page = Page(write_report([experiment(tmp_path / "moved", moved=True)]))
    assert "the weights ask for" in page.text


def test_several_experiments_are_compared_on_each_domain(tmp_path: Path) -> None:
    page = Page(write_report([experiment(tmp_path / "mixed"), experiment(tmp_path / "alone")]))
    for name in DOMAINS:
        assert f"pass@1 on test, domain {name}" in page.text


def test_without_domains_there_is_no_section(tmp_path: Path) -> None:
    assert "By domain" not in Page(write_report([write_experiment(tmp_path / "plain")])).text


def test_a_tables_number_of_a_domain_is_that_of_its_summary_and_its_answers() -> None:
    found = measured(0.5)
    assert number_in(found, "domains/logic/pass_at_1", "there") == 0.25
    assert number_in(found, "domains/logic/pass_at_4", "there") == 0.35
    assert value_named("domains/logic/mean_tokens").better == "lower"
    with pytest.raises(ValueError, match="no domain 'logik' in there: its domains are code, grids"):
        number_in(found, "domains/logik/pass_at_1", "there")
    with pytest.raises(ValueError, match="'domains/logic/num_tokens_in_the_longest_thread' is no number of"):
        value_named("domains/logic/num_tokens_in_the_longest_thread")
    rows = [
        {"problem": "logic/a", "domain": "logic", "reward": 1.0},
        {"problem": "logic/a", "domain": "logic", "reward": 0.0},
        {"problem": "code/a", "domain": "code", "reward": 1.0},
    ]
    assert by_problem(rows, "domains/logic/pass_at_1") == {"logic/a": 0.5}
