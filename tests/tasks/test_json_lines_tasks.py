from __future__ import annotations

import json
from pathlib import Path

import pytest

from treetune.tasks.rows import Gsm8k


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


def test_holding_out_all_rows_is_told_before_they_are_read(tmp_path: Path) -> None:
    train = (file(tmp_path / "a.jsonl", 5),)
    (finding,) = Gsm8k(train=train, validation_size=5).check(None)
    assert (finding.key, finding.what) == (
        "validation_size",
        "validation_size is 5, but the train split holds 5 problems",
    )
    assert Gsm8k(train=train, validation_size=5).size("train") is None
    assert Gsm8k(train=train, validation_size=4).size("train") == 1
    assert not list(Gsm8k(train=train, validation_size=4).check(None))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    there, missing = file(tmp_path / "a.jsonl", 1), str(tmp_path / "b.jsonl")
    assert Gsm8k(train=(there, missing), test=(there,)).missing() == [missing]


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Gsm8k(test=(str(path),)).problems("test")


def test_bad_rows_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"question": "?", "answer": ""}\n{"question": "?", "answer": "1"}\n')
    assert len(Gsm8k(test=(str(path),), bad_rows="skip").problems("test")) == 1


def test_missing_files_and_splits_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.jsonl"):
        Gsm8k(test=(str(tmp_path / "nowhere.jsonl"),)).problems("test")
    with pytest.raises(ValueError, match="the task has no validation split"):
        Gsm8k(validation_size=None).problems("validation")
