"""Rows of many domains: written and read back, graded by their source, and refused before the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from treetune.contracts import Finding
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
from treetune.main import main
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.countdown import Countdown
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
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


def write(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["rows.parquet", "rows.jsonl"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / request.param)


def findings(task: RoutedRows) -> list[Finding]:
    return [finding for finding in task.check(None) if finding.level == "error"]


def test_the_longest_route_that_fits_grades(written: Path) -> None:
    task = rows_task(written)
    assert [task.grader.of(one) for one in task.problems("train")] == [HASH, HASH, BAR, BAR]
    short = rows_task(written, routes={"math": NUMERIC, "": BAR})
    assert [short.grader.of(one) for one in short.problems("train")] == [NUMERIC, NUMERIC, BAR, BAR]
    mixture = Mixture(domains={"all": Domain(task=task)})
    found = [(one.domain, mixture.grader.of(one)) for one in mixture.problems("train")]
    assert found == [("all", HASH), ("all", HASH), ("all", BAR), ("all", BAR)]
    first = task.problems("train")[0]
    assert task.grader.grade("so it is #2", first).correct
    assert not task.grader.grade("so it is |2", first).correct


def test_a_row_is_asked_as_its_conversation_or_as_it_is(written: Path) -> None:
    sums, _, code, raw = rows_task(written).problems("train")
    assert (sums.prompt, sums.messages, sums.as_is) == ("1 + 1?", (), False)
    assert code.messages == (Message("system", "Be brief."), Message("user", "Sort 2 1."))
    assert (raw.prompt, raw.messages, raw.as_is) == ("Ask\n<think>", (), True)


def test_golds_are_text_and_extra_info_keeps_its_names(written: Path) -> None:
    sums, _, code, _ = rows_task(written).problems("train")
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
def test_a_row_tells_its_domain(written: Path, domain: Any, domains: list[str]) -> None:
    assert [one.domain for one in rows_task(written, domain=domain).problems("train")] == domains


def test_an_unknown_source_is_told_before_the_run_with_all_of_them_and_the_nearest(written: Path) -> None:
    task = rows_task(written, routes={"mathh": HASH, "codegen": BAR})
    (finding,) = findings(task)
    assert finding.key == "routes"
    assert "'math__sums' (did you mean the route 'mathh'?)" in finding.what
    assert "sources are codegen__mine, math__sums, math__sums_hard, ood__raw, and routes" in finding.what
    with pytest.raises(ValueError, match="no route matches the data_source 'math__sums'"):
        task.problems("train")
    assert not findings(rows_task(written))
    by_pattern = RoutedRows(source=InFiles(train=str(written)), routes={"codegen": BAR})
    assert "'math__sums'" in findings(by_pattern)[0].what


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"data_source": None}, "it has no data_source"),
        ({"reward_model": None}, "it has no reward_model"),
        ({"reward_model": {"groundtruth": "2"}}, "its reward_model has no ground_truth"),
    ],
)
def test_a_row_that_lacks_something_is_told_before_the_run_with_its_place(
    tmp_path: Path, broken: dict[str, Any], told: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], **broken}])
    (finding,) = findings(rows_task(path))
    assert finding.key == "train" and finding.what.startswith(f"{path}:2: {told}")
    assert not findings(rows_task(path, bad_rows="skip"))


def test_of_parquet_nothing_is_read_that_nobody_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", [{**row, "low_pass_rate": 0.5, "own": "x"} for row in ROWS])
    task = rows_task(path)
    assert task.size("train") == 4
    assert [one.data["low_pass_rate"] for one in task.problems("train")] == [0.5] * 4
    assert "own" not in task.problems("train")[0].data
    assert rows_task(path, keep=("own",)).problems("train")[0].data["own"] == "x"
    assert parquet.read_schema(path).names[-1] == "own"
    _, row = next(read_rows(path, ("data_source", "own", "nothing")))
    assert row == {"data_source": "math__sums", "own": "x"}


def test_rows_are_chosen_by_their_pass_rate(tmp_path: Path) -> None:
    rated = [{**row, "low_pass_rate": place / 3} for place, row in enumerate(ROWS)]
    medium = Difficulty(field="low_pass_rate", above=0.0, below=1.0)
    domain = Domain(task=rows_task(write(tmp_path / "rows.parquet", rated)), difficulty=medium)
    sources = [one.data["data_source"] for one in Mixture(domains={"a": domain}).problems("train")]
    assert sources == ["math__sums_hard", "codegen__mine"]


def test_bad_rows_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x"}, *ROWS])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: it has no data_source"):
        rows_task(path).problems("train")
    assert len(rows_task(path, bad_rows="skip").problems("train")) == 4


def test_demonstrations_are_a_key_of_what_the_row_says(written: Path) -> None:
    task = rows_task(written, demonstration_field="level")
    problems = task.problems("train")
    assert task.demonstration(problems[0], 0) == "easy"
    with pytest.raises(ValueError, match=r"'train/1' has no text under 'level' to learn from.*'ability'"):
        task.demonstration(problems[1], 0)
    with pytest.raises(ValueError, match="name a key of their extra_info"):
        rows_task(written).check_demonstrations()
    with pytest.raises(ValueError, match=r"name those of prompts and answers in model\.alphabet"):
        rows_task(written).alphabet()
    row = domain_row("math__sums", "1+1=", "2", extra_info={"solution": "#2 "})
    path = write(written.with_name("one.jsonl"), [row])
    assert rows_task(path, demonstration_field="solution").alphabet() == " #+12="


MIXED = Mixture(
    domains={
        "sums": Domain(task=AdditionChain(train_size=6, validation_size=1, test_size=1)),
        "numbers": Domain(task=Countdown(train_size=4, validation_size=1, test_size=1)),
    }
)


def as_exported(problem: Problem) -> dict[str, Any]:
    data = {k: list(v) if isinstance(v, tuple) else v for k, v in problem.data.items()}
    return {"gold": problem.gold, "prompt": problem.prompt, "domain": problem.domain, **data}


def test_what_is_exported_is_read_back(tmp_path: Path) -> None:
    assert export_rows(MIXED, "train", tmp_path / "rows.parquet") == 10
    graders = {name: domain.task.grader for name, domain in MIXED.domains.items()}
    again = rows_task(tmp_path / "rows.parquet", routes=graders)
    for before, after in zip(MIXED.problems("train"), again.problems("train"), strict=True):
        found = as_exported(after)
        assert as_exported(before).items() <= found.items()
        assert found["id"] == before.id and found["split"] == "train"
        assert again.grader.of(after) == MIXED.grader.of(before)
    assert {one.data["data_source"] for one in again.problems("train")} == {
        "sums__addition_chain",
        "numbers__countdown",
    }


def test_rows_are_exported_as_they_came(written: Path, tmp_path: Path) -> None:
    task = rows_task(written)
    export_rows(task, "train", tmp_path / "again.parquet")
    for before, after in zip(
        task.problems("train"), rows_task(tmp_path / "again.parquet").problems("train"), strict=True
    ):
        assert before.data.items() <= {**after.data, "index": before.data.get("index")}.items()
        for name in ("prompt", "gold", "messages", "as_is", "domain"):
            assert getattr(before, name) == getattr(after, name)


def test_verl_reads_what_is_exported(tmp_path: Path) -> None:
    """As its data set and its reward managers ask a row."""
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


# What is written is what is read, and what others write is read as well.

OWN = [
    ROWS[0],
    domain_row(
        "codegen__mine",
        SYSTEM,
        {"inputs": ["2 1"], "outputs": ["1 2"]},
        extra_info={"index": 1, "tests": [{"in": 1}, {"in": "x"}], "names": ["f", "g"], "level": 3},
    ),
    ROWS[3],
]


def test_what_is_written_is_read_with_its_lists_objects_and_columns_of_ones_own(tmp_path: Path) -> None:
    rows = [{**OWN[0], "low_pass_rate": 0.5, "tags": [{"a": 1}]}, *OWN[1:]]
    for written in (OWN, rows):
        path = write(tmp_path / "rows.parquet", written)
        assert [row for _, row in read_domain_rows(path)] == written
    first, second, _ = parquet.read_table(path).to_pylist()
    assert first["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (first["extra_info"]["index"], second["extra_info"]["names"]) == (7, ["f", "g"])


def test_a_key_without_a_value_in_any_row_is_left_out(tmp_path: Path) -> None:
    row = {**OWN[0], "extra_info": {"index": 7, "hint": None}}
    [(_, again)] = read_domain_rows(write(tmp_path / "rows.parquet", [row]))
    assert again["extra_info"] == {"index": 7}


def test_the_same_rows_give_the_same_bytes_and_a_row_is_known_by_what_is_asked_and_what_is_right(
    tmp_path: Path,
) -> None:
    one = write(tmp_path / "a.parquet", OWN)
    again = write(tmp_path / "b.parquet", [normalise_row(json.loads(json.dumps(row))) for row in OWN])
    assert one.read_bytes() == again.read_bytes()
    same = domain_row("math__sums", "1 + 1?", "2", extra_info={"index": 99})
    assert row_key(same) == row_key(OWN[0])
    assert row_key(domain_row("math__sums", "1 + 1?", "3")) != row_key(OWN[0])
    assert prompt_text(OWN[2]) == "Ask\n<think>"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "x", "reward_model": {"ground_truth": "1"}}, "no data_source"),
        ({**OWN[0], "reward_model": {"style": "rule"}}, "no ground_truth"),
        ({**OWN[0], "prompt": []}, "list of messages"),
        ({**OWN[0], "prompt": [{"role": "me", "content": "x"}]}, "role 'me'"),
        ({**OWN[0], "extra_info": "text"}, "extra_info should be an object"),
    ],
)
def test_a_row_that_is_none_says_what_it_lacks(row: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        normalise_row(row)


def test_files_are_read_by_their_ending_in_the_order_of_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", OWN[:1])
    write_parquet(tmp_path / "2.parquet", OWN[1:])
    found = list(InFiles(train=str(tmp_path / "*.parquet")).rows("train"))
    names = ["1.parquet[0]", "2.parquet[0]", "2.parquet[1]"]
    assert [place for place, _ in found] == [f"{tmp_path}/{name}" for name in names]
    path = write(tmp_path / "rows.jsonl", [{"a": 1}])
    assert list(read_rows(path)) == [(f"{path}:1", {"a": 1})]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"torn\.parquet can't be read as Parquet"):
        list(read_rows(tmp_path / "torn.parquet"))
    with pytest.raises(ValueError, match="there is no file"):
        InFiles(train=str(tmp_path / "nowhere.parquet")).files("train")
