"""Exports of an evaluation: logs of Inspect and Parquet files.

The tests hold that both have every answer and number of the evaluation, that missing values stay missing,
and that a damaged answer is named and leaves no file.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from tests.view.exports.measured import ANSWERS, write_experiment
from treetune.view.exports.evaluations import METADATA_KEY, choose_evaluation, write_parquet
from treetune.view.exports.inspect_log import write_inspect_log


def read_archive(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_an_archive_has_what_inspect_looks_for_and_the_same_numbers(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "run")
    assert write_inspect_log(choose_evaluation(experiment, None, None), tmp_path / "log.eval") == len(ANSWERS)
    members = read_archive(tmp_path / "log.eval")
    header = members["header.json"]
    assert header["status"] == "success" and header["version"] == 2
    assert header["eval"]["model"] == "treetune/small/vineppo@4"
    assert header["eval"]["model_generate_config"] == {"temperature": 0.5, "top_p": 0.9, "seed": 0}
    assert header["eval"]["revision"] == {"type": "git", "origin": "", "commit": "a" * 40, "dirty": True}
    [score] = header["results"]["scores"]
    metrics = {name: metric["value"] for name, metric in score["metrics"].items()}
    assert metrics["pass_at_1"] == 0.75 and metrics["ci_low"] == 0.625 and metrics["pass_at_2"] == 0.5
    assert "majority_vote" not in metrics
    assert (score["scored_samples"], score["unscored_samples"]) == (3, 1)
    assert [(summary["id"], summary["epoch"]) for summary in members["summaries.json"]] == [
        ("test/0", 1), ("test/0", 2), ("test/1", 1), ("test/1", 2),
    ]  # fmt: skip
    cut = members["samples/test/0_epoch_2.json"]
    assert cut["output"]["choices"][0]["stop_reason"] == "max_tokens"
    assert cut["output"]["completion"] == "\ufffd half, \x00 null, \x1b[31m escape, </script>"
    assert cut["scores"]["math"]["value"] == 0.0
    assert members["samples/test/1_epoch_1.json"]["scores"] == {}, "an answer without a grade has no score"


def test_both_forms_of_a_log_have_the_same_content_and_equal_bytes_each_time(tmp_path: Path) -> None:
    chosen = choose_evaluation(write_experiment(tmp_path / "run"), "test", 0)
    for name in ("a.eval", "b.eval", "a.json"):
        write_inspect_log(chosen, tmp_path / name)
    assert (tmp_path / "a.eval").read_bytes() == (tmp_path / "b.eval").read_bytes()
    log = json.loads((tmp_path / "a.json").read_text())
    archive = read_archive(tmp_path / "a.eval")
    assert log.pop("samples") == [sample for name, sample in archive.items() if name.startswith("samples/")]
    assert log == archive["header.json"]


def test_parquet_has_a_row_per_answer_and_null_for_missing_values(tmp_path: Path) -> None:
    chosen = choose_evaluation(write_experiment(tmp_path / "run"), None, None)
    assert write_parquet(chosen, tmp_path / "answers.parquet") == len(ANSWERS)
    table = parquet.read_table(tmp_path / "answers.parquet")
    columns = table.to_pydict()
    assert columns["reward"] == [1.0, 0.0, None, 0.0]
    assert columns["grade/tests"] == [None, None, None, 0.5]
    assert columns["turns/count"] == [2.0, None, None, None]
    assert columns["text"][1].startswith("\ufffd half, \x00 null")
    assert columns["message"] == [None, None, "the judge is down", None]
    about = json.loads(table.schema.metadata[METADATA_KEY])
    assert about["set"] == "test" and about["summary"]["pass_at_1"] == 0.75


def test_many_answers_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune.view.exports.evaluations.ROWS_AT_ONCE", 3)
    answers = [{**ANSWERS[0], "problem": f"test/{i}", "text": str(i)} for i in range(7)]
    chosen = choose_evaluation(write_experiment(tmp_path / "run", answers), None, None)
    assert write_parquet(chosen, tmp_path / "answers.parquet") == 7
    assert parquet.read_table(tmp_path / "answers.parquet")["text"].to_pylist() == list("0123456")


@pytest.mark.parametrize(
    ("label", "iteration", "message"),
    [
        (None, None, "evaluations of easy, hard: choose one with --set"),
        ("esay", None, "no evaluation of 'esay'; it has easy, hard"),
        ("easy", 3, "not evaluated after 3 iterations of .*, only after 0, 4"),
    ],
)
def test_a_missing_evaluation_is_refused_with_those_that_exist(
    tmp_path: Path, label: str | None, iteration: int | None, message: str
) -> None:
    experiment = write_experiment(tmp_path / "run", sets=("easy", "hard"))
    with pytest.raises(ValueError, match=message):
        choose_evaluation(experiment, label, iteration)


def test_a_damaged_answer_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "run")
    chosen = choose_evaluation(experiment, None, None)
    with chosen.answers.open("a") as file:
        file.write('{"problem": "te')
    for name in ("log.eval", "log.json"):
        with pytest.raises(ValueError, match=r"answers.jsonl:5 is not an answer .* evaluate again"):
            write_inspect_log(chosen, tmp_path / name)
        assert not (tmp_path / name).exists()
