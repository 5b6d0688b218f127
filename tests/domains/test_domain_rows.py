"""Promises of rows of several domains in files:

* rows that are written are read back with all their values, and equal rows give equal bytes;
* the longest route that matches a row's data source grades it, and a source without a route is told before
  a run;
* a row that lacks something is told with its place, or left out where the settings say so;
* exported rows are read back as the same problems, and the trainer verl reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from tests.support.shipped import experiment_of
from treetune.contracts import Finding, TaskDemonstrations
from treetune.domains.domain_rows import (
    domain_row,
    normalise_row,
    prompt_text,
    read_domain_rows,
    row_key,
    write_parquet,
)
from treetune.domains.mixture import Difficulty, Domain, Mixture
from treetune.domains.routed_rows import RoutedRows, export_rows
from treetune.findings import collect_findings
from treetune.main import main
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import Task
from treetune.tasks.countdown import Countdown
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.rows import QuestionRows
from treetune.tasks.sources import InFiles, read_rows
from treetune.vocabulary import Message, Problem

HASH, BAR, NUMERIC = FinalAnswer(marker="#"), FinalAnswer(marker="|"), Numeric(without_marker="last_number")
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort 2 1."}]
ROWS = [
    domain_row("math__sums", "1 + 1?", 2, ability="math", extra_info={"index": 7, "level": "easy"}),
    domain_row("math__sums_hard", "11 * 11?", "121", ability="math"),
    domain_row("codegen__mine", SYSTEM, {"inputs": ["2 1"]}, ability="code", extra_info={"names": ["f"]}),
    domain_row("ood__raw", "Ask", "x", ability="QA", raw_prompt="Ask\n<think>", apply_chat_template=False),
]
ROUTES = {"math__sums": HASH, "math": NUMERIC, "": BAR}


def rows_task(path: Path, **more: Any) -> RoutedRows:
    return RoutedRows(train=(str(path),), **{"routes": ROUTES, **more})


def write_rows(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["rows.parquet", "rows.jsonl"])
def rows_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_rows(tmp_path / request.param)


def errors_of(task: RoutedRows) -> list[Finding]:
    return [finding for finding in task.check(None) if finding.level == "error"]


def test_the_longest_route_that_fits_grades(rows_file: Path) -> None:
    task = rows_task(rows_file)
    assert [task.grader.of(problem) for problem in task.problems("train")] == [HASH, HASH, BAR, BAR]
    short = rows_task(rows_file, routes={"math": NUMERIC, "": BAR})
    assert [short.grader.of(problem) for problem in short.problems("train")] == [NUMERIC, NUMERIC, BAR, BAR]
    mixture = Mixture(domains={"all": Domain(task=task)})
    assert {problem.domain for problem in mixture.problems("train")} == {"all"}
    assert [mixture.grader.of(problem) for problem in mixture.problems("train")] == [HASH, HASH, BAR, BAR]
    sum_problem = task.problems("train")[0]
    assert task.grader.grade("so it is #2", sum_problem).correct
    assert not task.grader.grade("so it is |2", sum_problem).correct


def warnings_about_stop(experiment: Any) -> list[tuple[str, ...]]:
    """Returns the keys of the warnings about stop strings that end no answer."""
    keys = []
    for key, finding in collect_findings(experiment):
        if finding.level == "warning" and "ends no answer" in finding.what:
            keys.append(key)
    return keys


@pytest.mark.parametrize("type_of_task", ["rows", "questions"])
def test_stop_strings_that_end_no_answer_are_reported(type_of_task: str, rows_file: Path) -> None:
    experiment = experiment_of("quickstart/grpo", "{evaluation+: {rollout: null}}")
    task: Task = rows_task(rows_file, stop=("#",))
    if type_of_task == "questions":
        task = QuestionRows(train=(str(rows_file),), grader=HASH, stop=("#",))
    without_stop = replace(task, stop=())  # type: ignore[type-var]
    with_stop_in_rollout = replace(experiment.rollout, stop=("#", "|"))  # type: ignore[type-var]
    assert warnings_about_stop(replace(experiment, task=task)) == [("task", "stop")]
    assert warnings_about_stop(replace(experiment, task=without_stop)) == []
    assert warnings_about_stop(replace(experiment, task=task, rollout=with_stop_in_rollout)) == []
    mixture = Mixture(domains={"all": Domain(task=task)})
    assert warnings_about_stop(replace(experiment, task=mixture)) == []
    # The evaluation's rollout samples the answers of its sets.
    (first_set, *_) = experiment.evaluation.sets
    evaluation = replace(experiment.evaluation, sets=(replace(first_set, task=task),))
    assert warnings_about_stop(replace(experiment, evaluation=evaluation)) == [
        ("evaluation", "sets", "0", "task", "stop")
    ]
    evaluation = replace(evaluation, rollout=with_stop_in_rollout)
    assert warnings_about_stop(replace(experiment, evaluation=evaluation)) == []


def test_a_row_becomes_a_conversation_or_a_raw_prompt(rows_file: Path) -> None:
    sums, _, code, raw = rows_task(rows_file).problems("train")
    assert (sums.prompt, sums.messages, sums.as_is) == ("1 + 1?", (), False)
    assert code.messages == (Message("system", "Be brief."), Message("user", "Sort 2 1."))
    assert (raw.prompt, raw.messages, raw.as_is) == ("Ask\n<think>", (), True)


def test_golds_are_text_and_extra_info_keeps_its_names(rows_file: Path) -> None:
    sums, _, code, _ = rows_task(rows_file).problems("train")
    assert (sums.gold, json.loads(code.gold)) == ("2", {"inputs": ["2 1"]})
    assert sums.data == {"index": 7, "level": "easy", "data_source": "math__sums", "ability": "math"}
    assert code.data["names"] == ["f"]


@pytest.mark.parametrize(
    ("domain", "domains"),
    [
        ("data_source", ["math", "math", "codegen", "ood"]),
        ("ability", ["math", "math", "code", "QA"]),
        ({"math": "easy", "math__sums_hard": "hard", "": "other"}, ["easy", "hard", "other", "other"]),
        (None, ["", "", "", ""]),
    ],
)
def test_a_row_tells_its_domain(rows_file: Path, domain: Any, domains: list[str]) -> None:
    assert [problem.domain for problem in rows_task(rows_file, domain=domain).problems("train")] == domains


def test_an_unknown_source_is_told_before_the_run_with_all_of_them_and_the_nearest(rows_file: Path) -> None:
    task = rows_task(rows_file, routes={"mathh": HASH, "codegen": BAR})
    (finding,) = errors_of(task)
    assert finding.key == "routes"
    assert "'math__sums' (did you mean the route 'mathh'?)" in finding.what
    assert "sources are codegen__mine, math__sums, math__sums_hard, ood__raw, and routes" in finding.what
    with pytest.raises(ValueError, match="no route matches the data_source 'math__sums'"):
        task.problems("train")
    assert not errors_of(rows_task(rows_file))
    by_pattern = RoutedRows(source=InFiles(train=str(rows_file)), routes={"codegen": BAR})
    assert "'math__sums'" in errors_of(by_pattern)[0].what


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"data_source": None}, "it has no data_source"),
        ({"reward_model": None}, "it has no reward_model"),
        ({"reward_model": {"groundtruth": "2"}}, "its reward_model has no ground_truth"),
    ],
)
def test_a_row_that_lacks_something_is_told_before_the_run_with_its_place(
    tmp_path: Path, broken: dict[str, Any], message: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], **broken}])
    (finding,) = errors_of(rows_task(path))
    assert finding.key == "train" and finding.what.startswith(f"{path}:2: {message}")
    assert not errors_of(rows_task(path, bad_rows="skip"))


def test_only_the_columns_that_are_needed_are_read_from_parquet(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", [{**row, "low_pass_rate": 0.5, "own": "x"} for row in ROWS])
    task = rows_task(path)
    assert task.size("train") == 4
    assert [problem.data["low_pass_rate"] for problem in task.problems("train")] == [0.5] * 4
    assert "own" not in task.problems("train")[0].data
    assert rows_task(path, keep=("own",)).problems("train")[0].data["own"] == "x"
    assert parquet.read_schema(path).names[-1] == "own"
    _, row = next(read_rows(path, ("data_source", "own", "nothing")))
    assert row == {"data_source": "math__sums", "own": "x"}


def test_rows_are_chosen_by_their_pass_rate(tmp_path: Path) -> None:
    rated = [{**row, "low_pass_rate": index / 3} for index, row in enumerate(ROWS)]
    medium = Difficulty(field="low_pass_rate", above=0.0, below=1.0)
    domain = Domain(task=rows_task(write_rows(tmp_path / "rows.parquet", rated)), difficulty=medium)
    problems = Mixture(domains={"a": domain}).problems("train")
    assert [problem.data["data_source"] for problem in problems] == ["math__sums_hard", "codegen__mine"]


def test_bad_rows_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}, *ROWS])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: it has no data_source"):
        rows_task(path).problems("train")
    assert len(rows_task(path, bad_rows="skip").problems("train")) == 4


def test_a_demonstration_is_the_text_under_a_key_of_extra_info(rows_file: Path) -> None:
    task = rows_task(rows_file, demonstration_field="level")
    problems = task.problems("train")
    assert task.demonstration(problems[0], 0) == "easy"
    with pytest.raises(ValueError, match=r"'train/1' has no text under 'level' to learn from.*'ability'"):
        task.demonstration(problems[1], 0)
    (lacking,) = rows_task(rows_file).gives
    assert isinstance(lacking, TaskDemonstrations) and "demonstration_field is null" in lacking.why_none
    with pytest.raises(ValueError, match="name a key of their extra_info"):
        rows_task(rows_file).demonstration(problems[0], 0)
    with pytest.raises(ValueError, match=r"name those of prompts and answers in model\.alphabet"):
        rows_task(rows_file).alphabet()
    row = domain_row("math__sums", "1+1=", "2", extra_info={"solution": "#2 "})
    path = write_rows(rows_file.with_name("one.jsonl"), [row])
    assert rows_task(path, demonstration_field="solution").alphabet() == " #+12="


MIXED = Mixture(
    domains={
        "sums": Domain(task=AdditionChain(train_size=6, validation_size=1, test_size=1)),
        "numbers": Domain(task=Countdown(train_size=4, validation_size=1, test_size=1)),
    }
)


def as_exported(problem: Problem) -> dict[str, Any]:
    data = {key: list(value) if isinstance(value, tuple) else value for key, value in problem.data.items()}
    return {"gold": problem.gold, "prompt": problem.prompt, "domain": problem.domain, **data}


def test_exported_rows_are_read_back_as_the_same_problems(tmp_path: Path) -> None:
    assert export_rows(MIXED, "train", tmp_path / "rows.parquet") == 10
    graders = {name: domain.task.grader for name, domain in MIXED.domains.items()}
    again = rows_task(tmp_path / "rows.parquet", routes=graders)
    for before, after in zip(MIXED.problems("train"), again.problems("train"), strict=True):
        exported = as_exported(after)
        assert as_exported(before).items() <= exported.items()
        assert exported["id"] == before.id and exported["split"] == "train"
        assert again.grader.of(after) == MIXED.grader.of(before)
    sources = {problem.data["data_source"] for problem in again.problems("train")}
    assert sources == {"sums__addition_chain", "numbers__countdown"}


def test_rows_of_files_are_exported_unchanged(rows_file: Path, tmp_path: Path) -> None:
    task = rows_task(rows_file)
    export_rows(task, "train", tmp_path / "again.parquet")
    for before, after in zip(
        task.problems("train"), rows_task(tmp_path / "again.parquet").problems("train"), strict=True
    ):
        assert before.data.items() <= {**after.data, "index": before.data.get("index")}.items()
        for name in ("prompt", "gold", "messages", "as_is", "domain"):
            assert getattr(before, name) == getattr(after, name)


def test_verl_reads_what_is_exported(tmp_path: Path) -> None:
    """The assertions are on the keys that its data set and its reward managers read."""
    from datasets import load_dataset

    export_rows(MIXED, "train", tmp_path / "rows.parquet")
    rows = load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    for index, (row, problem) in enumerate(zip(rows, MIXED.problems("train"), strict=True)):
        assert [dict(message) for message in row["prompt"]] == [{"role": "user", "content": problem.prompt}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": problem.gold}
        assert row["data_source"].startswith(problem.domain)
        assert row["extra_info"].get("index", 0) == index


def test_the_command_exports_a_tasks_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "task.jsonnet"
    config.write_text("{ task: { type: 'addition_chain', train_size: 5, validation_size: 2, test_size: 1 } }")
    output = tmp_path / "rows.parquet"
    arguments = ["--configs", str(config), "export_rows", "--split", "validation", "--output", str(output)]
    assert main(arguments) == 0
    assert "2 problems" in capsys.readouterr().out
    assert len(rows_task(output).problems("train")) == 2


# Writing and reading

STRUCTURED_ROWS = [
    ROWS[0],
    domain_row(
        "codegen__mine",
        SYSTEM,
        {"inputs": ["2 1"], "outputs": ["1 2"]},
        extra_info={"index": 1, "tests": [{"in": 1}, {"in": "x"}], "names": ["f", "g"], "level": 3},
    ),
    ROWS[3],
]


def test_rows_are_read_back_with_their_lists_objects_and_additional_columns(tmp_path: Path) -> None:
    rows = [{**STRUCTURED_ROWS[0], "low_pass_rate": 0.5, "tags": [{"a": 1}]}, *STRUCTURED_ROWS[1:]]
    for rows_to_write in (STRUCTURED_ROWS, rows):
        path = write_rows(tmp_path / "rows.parquet", rows_to_write)
        assert [row for _, row in read_domain_rows(path)] == rows_to_write
    sums, code, _ = parquet.read_table(path).to_pylist()
    assert sums["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert sums["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (sums["extra_info"]["index"], code["extra_info"]["names"]) == (7, ["f", "g"])


def test_a_key_without_a_value_in_any_row_is_left_out(tmp_path: Path) -> None:
    row = {**STRUCTURED_ROWS[0], "extra_info": {"index": 7, "hint": None}}
    [(_, again)] = read_domain_rows(write_rows(tmp_path / "rows.parquet", [row]))
    assert again["extra_info"] == {"index": 7}


def test_the_same_rows_give_the_same_bytes_and_a_row_is_identified_by_prompt_and_gold(
    tmp_path: Path,
) -> None:
    copies = [normalise_row(json.loads(json.dumps(row))) for row in STRUCTURED_ROWS]
    file = write_rows(tmp_path / "a.parquet", STRUCTURED_ROWS)
    file_of_copies = write_rows(tmp_path / "b.parquet", copies)
    assert file.read_bytes() == file_of_copies.read_bytes()
    with_another_index = domain_row("math__sums", "1 + 1?", "2", extra_info={"index": 99})
    assert row_key(with_another_index) == row_key(STRUCTURED_ROWS[0])
    assert row_key(domain_row("math__sums", "1 + 1?", "3")) != row_key(STRUCTURED_ROWS[0])
    assert prompt_text(STRUCTURED_ROWS[2]) == "Ask\n<think>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "reward_model": {"ground_truth": "1"}}, "no data_source"),
        ({**STRUCTURED_ROWS[0], "reward_model": {"style": "rule"}}, "no ground_truth"),
        ({**STRUCTURED_ROWS[0], "prompt": []}, "list of messages"),
        ({**STRUCTURED_ROWS[0], "prompt": [{"role": "me", "content": "x"}]}, "role 'me'"),
        ({**STRUCTURED_ROWS[0], "extra_info": "text"}, "extra_info should be an object"),
    ],
)
def test_a_malformed_row_is_refused_with_what_it_lacks(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalise_row(row)


def test_files_are_read_by_their_ending_in_the_order_of_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", STRUCTURED_ROWS[:1])
    write_parquet(tmp_path / "2.parquet", STRUCTURED_ROWS[1:])
    places = [place for place, _ in InFiles(train=str(tmp_path / "*.parquet")).rows("train")]
    names = ["1.parquet[0]", "2.parquet[0]", "2.parquet[1]"]
    assert places == [f"{tmp_path}/{name}" for name in names]
    path = write_rows(tmp_path / "rows.jsonl", [{"a": 1}])
    assert list(read_rows(path)) == [(f"{path}:1", {"a": 1})]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"torn\.parquet can't be read as Parquet"):
        list(read_rows(tmp_path / "torn.parquet"))
    with pytest.raises(ValueError, match="there is no file"):
        InFiles(train=str(tmp_path / "nowhere.parquet")).files("train")
