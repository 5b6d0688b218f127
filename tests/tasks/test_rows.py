"""Promises of reading rows of problems:

* files, data sets on disk and data sets of the hub give the same problems, with prompt, gold and
  demonstration;
* a held-out validation split is always the same and shares no row with the training split;
* bad rows, missing files, columns and splits are told with file, line and the setting that names them;
* golds of the real data sets are graded right, and their solutions split into steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treetune.contracts import Finding
from treetune.domains.math_tasks import CollegeMath, Math, OlympiadBench
from treetune.findings import missing_requirements
from treetune.main import main
from treetune.tasks.base import Task
from treetune.tasks.rows import Gsm8k
from treetune.tasks.sources import OnDisk, OnHub, count_rows, describe_missing_file, distinct_texts, read_rows

ROWS = [
    {
        "problem": f"What is $\\frac{{{n}}}{{1}}$?", "solution": f"It is $\\boxed{{{n}}}$.", "answer": str(n),
        "level": "Level 1", "type": "Prealgebra",
    }
    for n in range(8)
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from datasets import Dataset, DatasetDict

    path = tmp_path_factory.mktemp("data") / "math"
    splits = {"train": Dataset.from_list(ROWS[:6]), "test": Dataset.from_list(ROWS[6:])}
    DatasetDict(splits).save_to_disk(str(path))
    return str(path)


def test_a_data_set_on_disk_gives_the_same_problems_as_files(folder: str, tmp_path: Path) -> None:
    on_disk = Math(source=OnDisk(path=folder), validation_size=2)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:6]))
    from_files = Math(train=(str(file),), validation_size=2)
    for split in ("train", "validation"):
        assert on_disk.problems(split) == from_files.problems(split)
    problem = on_disk.problems("test")[0]
    assert problem.prompt == "[MATH_TASK] Problem:\nWhat is $\\frac{6}{1}$?\n\nSolution:"
    assert problem.gold == "6"
    assert problem.data == {"level": "Level 1", "type": "Prealgebra", "solution": "It is $\\boxed{6}$."}
    assert on_disk.demonstration(problem, 0) == "\nIt is $\\boxed{6}$."
    assert on_disk.grader.grade(on_disk.demonstration(problem, 0), problem).reward == 1.0


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ({}, "validation", r"has no split 'validation': it has 'train', 'test'"),
        ({"validation": None}, "validation", "the task has no validation split"),
        ({"path": "nowhere"}, "test", r"there is no data set in .*nowhere"),
        ({"path": "."}, "test", r"it has no dataset_dict\.json"),
    ],
)
def test_a_missing_split_names_the_existing_ones_and_a_folder_without_any_is_told(
    folder: str, tmp_path: Path, source: dict[str, Any], split: Any, message: str
) -> None:
    path = str(tmp_path / source["path"]) if "path" in source else folder
    with pytest.raises(ValueError, match=message):
        Math(source=OnDisk(**source | {"path": path}), validation_size=None).problems(split)
    with_validation = Math(source=OnDisk(path=folder, validation="test"), validation_size=None)
    assert len(with_validation.problems("validation")) == 2


def test_a_hub_is_asked_for_a_revision_or_for_files_and_one_that_cannot_be_reached_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def load(*arguments: object, **options: Any) -> dict[str, Any]:
        calls.append((arguments, options))
        return dict.fromkeys(options.get("data_files", ["test"]), ROWS[:2])

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(Math(source=OnHub(name="a/b", revision="abc", subset="main")).problems("test")) == 2
    files = {"train": "train/*.parquet"}
    source = OnHub(name="a/b", revision="abc", files=files)
    assert len(list(source.rows("train"))) == 2
    assert calls[0] == (("a/b", "main"), {"revision": "abc"}) and calls[1][1]["data_files"] == files
    with pytest.raises(ValueError, match="files of a/b has no pattern for its split 'test'"):
        list(source.rows("test"))

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    remedy = r"someone/something \(revision abc\) cannot be fetched: no network.*type: 'disk'"
    with pytest.raises(ValueError, match=remedy):
        Math(source=OnHub(name="someone/something", revision="abc")).problems("test")


def test_the_gold_is_the_solution_where_a_row_has_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {"problem": "1+1?", "solution": "Clearly $\\boxed{2}$."}
    path.write_text(json.dumps(row) + "\n")
    task = Math(test=(str(path),))
    (problem,) = task.problems("test")
    assert problem.gold == row["solution"]
    assert task.grader.grade("So \\boxed{2}", problem).reward == 1.0
    path.write_text(json.dumps({"problem": "1+1?", "answer": " "}) + "\n")
    with pytest.raises(ValueError, match=r"t.jsonl:1: a row without a gold answer: its 'answer' is empty"):
        Math(test=(str(path),), bad_rows="stop", keep=()).problems("test")


@pytest.mark.parametrize("task", [CollegeMath(), OlympiadBench()])
def test_data_sets_for_evaluation_have_no_training_split(task: CollegeMath) -> None:
    with pytest.raises(ValueError, match="the task has no train split"):
        task.problems("train")


def test_a_template_without_the_problem_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt needs \{problem\} exactly once"):
        Gsm8k(prompt="Solve it:")
    assert Gsm8k(prompt="Q: {problem}\nA:").fill_prompt(" {x}? ") == "Q: {x}?\nA:"


@pytest.mark.parametrize(
    ("name", "response", "reward", "steps"),
    [
        ("math", "Let us see what it is.\nIt is $\\boxed{0.5}$ there.", 1.0, 3),
        ("math_reference", "It is $\\boxed{\\frac12}$.", 1.0, 2),
        ("college_math", "It is $\\boxed{1/2}$.", 1.0, 2),
        ("olympiadbench", "It is $\\boxed{5}$.", 0.0, 2),
    ],
)
def test_the_configured_tasks_score_responses(
    tmp_path: Path, name: str, response: str, reward: float, steps: int
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"problem": "?", "gold": "\\frac{1}{2}", "response": response}) + "\n")
    arguments = ["--configs", f"tasks/{name}.jsonnet", "score_responses", "--workers", "1", "--steps"]
    arguments += ["--deadline", "60", "--input", str(source), "--output", str(output)]
    assert main(arguments) == 0
    row = json.loads(output.read_text())
    assert (row["reward"], len(row["step_boundaries"])) == (reward, steps)


def file(path: Path, count: int) -> str:
    rows = [
        {"question": f" What is {{{n}}}? ", "answer": f"It is <<{n}+0={n}>>{n}.\n#### {n}"}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_problem_has_the_papers_prompt_and_the_solution_as_demonstration(tmp_path: Path) -> None:
    task = Gsm8k(test=(file(tmp_path / "a.jsonl", 3),))
    problem = task.problems("test")[2]
    assert problem.prompt == "[MATH_TASK] Problem:\nWhat is {2}?\n\nSolution:"
    assert task.demonstration(problem, 0) == "\nIt is 2.\n#### 2"
    assert task.grader.grade(task.demonstration(problem, 0), problem).reward == 1.0


def test_a_held_out_validation_split_is_the_same_every_time_and_apart_from_train(tmp_path: Path) -> None:
    task = Gsm8k(train=(file(tmp_path / "a.jsonl", 20),), validation_size=5)
    train, validation = task.problems("train"), task.problems("validation")
    assert (len(train), len(validation)) == (15, 5)
    assert {problem.id for problem in [*train, *validation]} == {f"train/{n}" for n in range(20)}
    again = Gsm8k(train=task.train, validation_size=5)
    assert again.problems("validation") == validation


def mistakes(task: Task) -> list[Finding]:
    """Returns what is wrong with a task on every machine."""
    return [finding for finding in task.check(None) if finding.level == "error"]


def test_holding_out_all_rows_is_told_before_they_are_read(tmp_path: Path) -> None:
    train = (file(tmp_path / "a.jsonl", 5),)
    (finding,) = mistakes(Gsm8k(train=train, validation_size=5))
    assert (finding.key, finding.what) == (
        "validation_size",
        "validation_size is 5, but the train split has only 5 problems",
    )
    assert Gsm8k(train=train, validation_size=5).size("train") is None
    assert Gsm8k(train=train, validation_size=4).size("train") == 1
    assert mistakes(Gsm8k(train=train, validation_size=4)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the test split is empty"),
        ('{"question": "?", "answer": "1"}\n{"question": "?"}\n', "t.jsonl:2: a row without a gold answer"),
        (
            '{"question": "?", "answer": ""}\n',
            "t.jsonl:1: a row without a gold answer: its 'answer' is empty",
        ),
        ('{"question": \n', "t.jsonl:1: not a line of JSON"),
        ("[1]\n", "t.jsonl:1: a row must be a JSON object"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Gsm8k(test=(str(path),)).problems("test")


def test_bad_rows_can_be_left_out_and_missing_files_and_splits_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "?", "answer": ""}\n{"question": "?", "answer": "1"}\n')
    assert len(Gsm8k(test=(str(path),), bad_rows="skip").problems("test")) == 1
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.jsonl"):
        Gsm8k(test=(str(tmp_path / "nowhere.jsonl"),)).problems("test")
    with pytest.raises(ValueError, match="the task has no validation split"):
        Gsm8k(validation_size=None).problems("validation")
    existing, missing = file(tmp_path / "a.jsonl", 1), str(tmp_path / "b.jsonl")
    task = Gsm8k(train=(existing, missing), test=(existing,))
    assert missing_requirements([task]) == [f"there is no file {missing} (looked for in {Path.cwd()})"]


def test_the_folder_of_fetched_files_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_missing_file(Path("data")) == f"there is no file data (looked for in {tmp_path})"


def test_test_rows_need_no_solution_and_training_rows_do(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    as_test = Math(test=(str(path),), train=(), validation_size=None)
    assert [finding.what for finding in as_test.check(None)] == []
    (problem,) = as_test.problems("test")
    assert as_test.grader.grade("\\boxed{2}", problem).reward == 1.0
    with pytest.raises(ValueError, match="problem 'test/0' has no text under 'solution' to learn from"):
        as_test.demonstration(problem, 0)
    as_train = Math(train=(str(path),), test=(), validation_size=None)
    assert ["demonstration_field" in finding.what for finding in as_train.check(None)] == [True]
    with pytest.raises(ValueError, match="a row without a demonstration: it has no 'solution'"):
        as_train.problems("train")


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "math500" / "test.jsonl"


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data here")
def test_math_500s_golds_are_right_and_its_solutions_split() -> None:
    task = Math(test=(str(SHARED),), problem_field="question", demonstration_field=None)
    for problem in task.problems("test"):
        bare = problem.gold.rpartition("The answer is: ")[2]
        assert task.grader.grade(problem.gold, problem).reward == 1.0
        assert task.grader.grade(f"\\boxed{{{bare}}}", problem).reward == 1.0
        offsets = task.step_boundaries(problem.gold)
        assert (offsets[0], offsets[-1]) == (0, len(problem.gold))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    "content", ['{"question": "1 + 1?", "answer": {}}\n', "no JSON\n"], ids=["no gold", "not JSON"]
)
def test_a_bad_file_is_reported_under_the_setting_that_names_it(
    tmp_path: Path, split: str, content: str
) -> None:
    good, bad = file(tmp_path / "good.jsonl", 4), tmp_path / "bad.jsonl"
    bad.write_text(content)
    files = {"train": (good,), "validation": (good,), "test": (good,)} | {split: (str(bad),)}
    findings = [*Gsm8k(**files, validation_size=None).first_findings(bad)]  # type: ignore[arg-type]
    assert [finding.key for finding in findings] == [split]


def test_a_carriage_return_within_a_row_does_not_make_it_two(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "1 + 1?",\r "answer": "2"}\r\n{"question": "2?", "answer": "2"}\n')
    assert count_rows(path) == len([*read_rows(path)]) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_only_texts_are_distinct_texts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text('{"a": ["x"]}\n{"a": "y"}\n{"a": {"b": 1}}\n{"a": "y"}\n{}\n{"a": 3}\n')
        assert distinct_texts(path, "a") == ["y"]
    else:
        pq.write_table(pa.table({"a": [["x"], ["y"]], "b": ["z", "z"]}), path)
        assert distinct_texts(path, "a") == []
        assert distinct_texts(path, "b") == ["z"]


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "rows.csv"])
def test_missing_and_unsupported_files_are_refused_by_every_reader(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    path = tmp_path / name
    for read in (count_rows, lambda path: distinct_texts(path, "a"), lambda path: [*read_rows(path)]):
        with pytest.raises(ValueError, match=r"there is no file|should end in"):
            read(path)
