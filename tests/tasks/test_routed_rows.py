"""Rows with a data_source: who grades them, how they are asked, and what is refused before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treetune.contracts import Finding
from treetune.main import main
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.countdown import Countdown
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.sources import InFiles
from treetune.vocabulary import Message, Problem
from treetune_domains.domain_rows import domain_row, write_parquet
from treetune_domains.mixture import Difficulty, Domain, Mixture
from treetune_domains.routed_rows import RoutedRows, export_rows

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


@pytest.fixture(params=["rows.parquet", "rows.jsonl"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        write_parquet(path, ROWS)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def findings(task: RoutedRows) -> list[Finding]:
    return list(task.check(None))


def test_the_longest_route_that_fits_grades(written: Path) -> None:
    task = rows_task(written)
    assert [task.grader.of(one) for one in task.problems("train")] == [HASH, HASH, BAR, BAR]
    short = rows_task(written, routes={"math": NUMERIC, "": BAR})
    assert [short.grader.of(one) for one in short.problems("train")] == [NUMERIC, NUMERIC, BAR, BAR]
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


def test_within_a_mixture_rows_are_of_that_domain_and_graded_by_their_source(written: Path) -> None:
    mixture = Mixture(domains={"all": Domain(task=rows_task(written))})
    problems = mixture.problems("train")
    assert {one.domain for one in problems} == {"all"}
    assert [mixture.grader.of(one) for one in problems] == [HASH, HASH, BAR, BAR]


def test_an_unknown_source_is_told_before_the_run_with_all_of_them_and_the_nearest(written: Path) -> None:
    task = rows_task(written, routes={"mathh": HASH, "codegen": BAR})
    (finding,) = findings(task)
    assert finding.key == "routes"
    assert "'math__sums' (did you mean the route 'mathh'?)" in finding.what
    assert "sources are codegen__mine, math__sums, math__sums_hard, ood__raw, and routes" in finding.what
    with pytest.raises(ValueError, match="no route fits the data_source 'math__sums'"):
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
    rows = [ROWS[0], {**ROWS[1], **broken}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = findings(rows_task(path))
    assert finding.key == "train" and finding.what.startswith(f"{path}:2: {told}")
    assert not findings(rows_task(path, bad_rows="skip"))


def test_of_parquet_nothing_is_read_that_nobody_asked_for(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    from treetune.tasks.sources import read_rows

    write_parquet(tmp_path / "rows.parquet", [{**row, "low_pass_rate": 0.5, "own": "x"} for row in ROWS])
    task = rows_task(tmp_path / "rows.parquet")
    assert task.size("train") == 4
    assert [one.data["low_pass_rate"] for one in task.problems("train")] == [0.5] * 4
    assert "own" not in task.problems("train")[0].data
    assert rows_task(tmp_path / "rows.parquet", keep=("own",)).problems("train")[0].data["own"] == "x"
    assert parquet.read_schema(tmp_path / "rows.parquet").names[-1] == "own"
    _, row = next(read_rows(tmp_path / "rows.parquet", ("data_source", "own", "nothing")))
    assert row == {"data_source": "math__sums", "own": "x"}


def test_rows_are_chosen_by_their_pass_rate(tmp_path: Path) -> None:
    rated = [{**row, "low_pass_rate": place / 3} for place, row in enumerate(ROWS)]
    write_parquet(tmp_path / "rows.parquet", rated)
    medium = Difficulty(field="low_pass_rate", above=0.0, below=1.0)
    task = Mixture(domains={"a": Domain(task=rows_task(tmp_path / "rows.parquet"), difficulty=medium)})
    assert [one.data["data_source"] for one in task.problems("train")] == ["math__sums_hard", "codegen__mine"]


def test_bad_rows_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": "x"}, *ROWS]))
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
    assert (
        main(["--configs", str(config), "export_rows", "--split", "validation", "--output", str(output)]) == 0
    )
    assert "2 problems" in capsys.readouterr().out
    assert len(rows_task(output).problems("train")) == 2


def test_small_rows_with_demonstrations_name_the_characters_of_a_tiny_model(written: Path) -> None:
    with pytest.raises(ValueError, match=r"name those of prompts and answers in model\.alphabet"):
        rows_task(written).alphabet()
    row = domain_row("math__sums", "1+1=", "2", extra_info={"solution": "#2 "})
    (path := written.with_name("one.jsonl")).write_text(json.dumps(row) + "\n")
    assert rows_task(path, demonstration_field="solution").alphabet() == " #+12="
