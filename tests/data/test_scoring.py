"""Promises of `score_responses`:

* rows come out in their order, each with its grade and, on request, the boundaries of its steps;
* a second run keeps what was graded, drops a line that was cut short, and grades again what could not be
  graded;
* an ungraded response has no reward, which is not a reward of zero;
* the output of another input is refused, and a bad row is an error that stops no other row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.even_answers import EvenAnswers, OutOfOrder
from treetune.contracts import Finding
from treetune.data.scoring import score_responses
from treetune.domains.mixture import Domain, Mixture
from treetune.main import main
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.rows import Gsm8k


class WithoutJudge(EvenAnswers):
    """A grader that lacks something on this machine."""

    def check(self, experiment: object) -> Iterable[Finding]:
        yield Finding("no judge", level="missing")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ROWS = [
    {
        "problem": f"{n} + {n}?",
        "gold": f"It is <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
        # Right for even numbers and wrong for odd ones.
        "response": f"\nSo.\n#### {2 * (n // 2 * 2)}",
    }
    for n in range(6)
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_rows_come_out_in_their_order_with_grades_and_steps(source: Path, output: Path) -> None:
    arguments = ["--configs", "tasks/gsm8k.jsonnet", "score_responses", "--workers", "1", "--steps"]
    assert main([*arguments, "--input", str(source), "--output", str(output)]) == 0
    rows = read_rows(output)
    assert [row["problem"] for row in rows] == [row["problem"] for row in ROWS]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert rows[2]["extracted"] == "4"
    assert rows[2]["step_boundaries"] == [0, len(ROWS[2]["response"])]


def test_a_second_run_drops_a_torn_line_and_goes_on(source: Path, output: Path) -> None:
    score_responses(Gsm8k(), source, output, workers=1)
    complete = output.read_bytes()
    first_two_rows = b"".join(complete.splitlines(keepends=True)[:2]).replace(
        b'"seconds": 0', b'"seconds": 7'
    )
    output.write_bytes(first_two_rows + b'{"problem": "2 + ')
    scored = score_responses(Gsm8k(), source, output, workers=1)
    assert (scored.rows, scored.resumed, scored.correct) == (6, 2, 3)
    assert output.read_bytes().startswith(first_two_rows)
    assert [row["reward"] for row in read_rows(output)] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_the_output_of_another_input_is_refused(source: Path, output: Path, tmp_path: Path) -> None:
    score_responses(Gsm8k(), source, output, workers=1)
    with pytest.raises(ValueError, match=r"out.jsonl:1 is another answer than .*other.jsonl:1"):
        score_responses(Gsm8k(), write_rows(tmp_path / "other.jsonl", ROWS[::-1]), output, workers=1)
    with pytest.raises(ValueError, match=r"rows.jsonl:1 isn't a graded row: name another output"):
        score_responses(Gsm8k(), source, write_rows(tmp_path / "rows.jsonl", ROWS), workers=1)


def test_a_row_without_a_gold_answer_is_an_error_and_the_others_go_on(output: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [ROWS[0], {**ROWS[1], "gold": " "}, {"problem": "?"}, ROWS[2]])
    scored = score_responses(Gsm8k(), source, output, workers=1)
    rows = read_rows(output)
    assert [row["outcome"] for row in rows] == ["ok", "error", "error", "ok"]
    assert "'gold' is empty" in rows[1]["message"]
    assert f"2 timeouts and errors (the first: {rows[1]['message']})" in str(scored)
    assert scored.failed == 2


def test_a_response_that_could_not_be_graded_has_no_reward_rather_than_zero(
    output: Path, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{**row, "response": "abc"} for row in ROWS[:4]])
    task = replace(Gsm8k(), grader=OutOfOrder())  # is unavailable for responses of 3, 6, … characters
    scored = score_responses(task, source, output, workers=1)
    assert {(row["outcome"], row["reward"]) for row in read_rows(output)} == {("unavailable", None)}
    assert (scored.unavailable, scored.correct, scored.failed) == (4, 0, 0)
    assert "could not be graded" in str(scored)


def test_a_second_run_grades_what_could_not_be_graded_and_nothing_else(
    source: Path, output: Path, tmp_path: Path
) -> None:
    score_responses(Gsm8k(), write_rows(tmp_path / "first.jsonl", ROWS[:4]), output, workers=1)
    rows = read_rows(output)
    for index in (1, 2):
        rows[index] |= {"outcome": "unavailable", "reward": None, "message": "the judge is down"}
    rows[3]["seconds"] = 77.0  # a new grade would have another duration
    write_rows(output, rows)
    scored = score_responses(Gsm8k(), source, output, workers=1)
    assert (scored.rows, scored.resumed, scored.unavailable, scored.correct) == (6, 2, 0, 3)
    again = read_rows(output)
    assert [row["problem"] for row in again] == [row["problem"] for row in ROWS]
    assert {row["outcome"] for row in again} == {"ok"} and "message" not in again[1]
    assert again[3]["seconds"] == 77.0


def test_progress_is_reported_row_by_row_and_counts_rows_of_an_earlier_run(
    source: Path, output: Path, tmp_path: Path
) -> None:
    score_responses(Gsm8k(), write_rows(tmp_path / "first.jsonl", ROWS[:1]), output, workers=1)
    reports: list[tuple[int, int]] = []
    score_responses(Gsm8k(), source, output, workers=1, progress=lambda *report: reports.append(report))
    assert reports == [(done, len(ROWS)) for done in range(2, len(ROWS) + 1)]


def test_rows_of_a_mixture_are_graded_and_split_into_steps_by_their_domain(
    output: Path, tmp_path: Path
) -> None:
    sums = AdditionChain(train_size=1, validation_size=1, test_size=1)
    task = Mixture(domains={"words": Domain(task=Gsm8k()), "sums": Domain(task=sums)})
    response = "\nSo.\n#4\n#### 8 apples"
    rows = [
        {"domain": "words", "problem": "?", "gold": "#### 8", "response": response},
        {"domain": "sums", "problem": "?", "gold": "8", "response": response},
        {"domain": "other", "problem": "?", "gold": "8", "response": response},
        {"problem": "?", "gold": "8", "response": response},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    score_responses(task, source, output, workers=1, steps=True)
    of_words, of_sums, of_unknown_domain, without_domain = read_rows(output)
    assert of_words["reward"] == 1.0 and of_words["step_boundaries"] == [0, 4, len(response)]
    assert of_sums["reward"] == 0.0 and of_sums["step_boundaries"] == [0, 1, 5, 8, len(response)]
    assert of_unknown_domain["outcome"] == "error"
    assert "known are sums, words" in of_unknown_domain["message"]
    assert "has no domain: give it one of sums, words" in without_domain["message"]


def test_nothing_is_graded_where_a_requirement_of_the_grader_is_missing(source: Path, output: Path) -> None:
    with pytest.raises(ValueError, match="can't be graded here: no judge"):
        score_responses(replace(Gsm8k(), grader=WithoutJudge()), source, output)
    assert not output.exists()  # or the next run would keep what nobody has judged
