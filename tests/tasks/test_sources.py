"""Rows from Hugging Face data sets, and what the tasks of mathematical problems make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treetune.main import main
from treetune.tasks.rows import Gsm8k
from treetune.tasks.sources import OnDisk, OnHub
from treetune_domains.math_tasks import CollegeMath, Math, OlympiadBench

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


def test_a_missing_split_names_those_that_are_there(folder: str) -> None:
    task = Math(source=OnDisk(path=folder), validation_size=None)
    with pytest.raises(ValueError, match=r"has no split 'validation': it has 'train', 'test'"):
        task.problems("validation")
    task = Math(source=OnDisk(path=folder, validation=None), validation_size=None)
    with pytest.raises(ValueError, match="the task has no validation split"):
        task.problems("validation")
    assert (
        len(Math(source=OnDisk(path=folder, validation="test"), validation_size=None).problems("validation"))
        == 2
    )


def test_a_folder_that_is_no_data_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no data set in .*nowhere"):
        Math(source=OnDisk(path=str(tmp_path / "nowhere"))).problems("test")
    with pytest.raises(ValueError, match=r"it has no dataset_dict\.json"):
        Math(source=OnDisk(path=str(tmp_path))).problems("test")


def test_a_hub_that_cannot_be_reached_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no network"))
    )
    task = Math(source=OnHub(name="someone/something", revision="abc"))
    with pytest.raises(
        ValueError, match=r"someone/something \(revision abc\) cannot be fetched: no network.*type: 'disk'"
    ):
        task.problems("test")


def test_a_hub_data_set_is_asked_for_by_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*arguments: object, **options: object) -> dict[str, list[dict[str, str]]]:
        asked.append((arguments, options))
        return {"test": ROWS[:2]}

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(Math(source=OnHub(name="a/b", revision="abc", subset="main")).problems("test")) == 2
    assert asked == [(("a/b", "main"), {"revision": "abc"})]


def test_files_of_the_hub_are_splits_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*arguments: object, data_files: dict[str, str], **options: object) -> dict[str, Any]:
        asked.append(data_files)
        return dict.fromkeys(data_files, ROWS[:1])

    monkeypatch.setattr("datasets.load_dataset", load)
    source = OnHub(name="a/b", revision="abc", files={"train": "train/*.parquet"})
    assert len(list(source.rows("train"))) == 1 and asked == [{"train": "train/*.parquet"}]
    with pytest.raises(ValueError, match="files of a/b has no pattern for its split 'test'"):
        list(source.rows("test"))


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
def test_sets_to_measure_on_have_no_training_split(task: CollegeMath) -> None:
    with pytest.raises(ValueError, match="the task has no train split"):
        task.problems("train")


def test_a_template_without_the_problem_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt needs \{problem\} exactly once"):
        Gsm8k(prompt="Solve it:")
    assert Gsm8k(prompt="Q: {problem}\nA:").prompted(" {x}? ") == "Q: {x}?\nA:"


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
    arguments = [
        "--configs",
        f"tasks/{name}.jsonnet",
        "score_responses",
        "--workers",
        "1",
        "--steps",
        "--deadline",
        "60",
    ]
    assert main([*arguments, "--input", str(source), "--output", str(output)]) == 0
    row = json.loads(output.read_text())
    assert row["reward"] == reward
    assert len(row["step_boundaries"]) == steps


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
