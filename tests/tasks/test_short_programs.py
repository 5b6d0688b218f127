"""Short programs: descriptions, golds and demonstrations that agree, and a teacher who slips."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from treetune.vocabulary import Problem
from treetune_domains.graders.code import Code
from treetune_domains.puzzles.short_programs import INPUTS, STEPS, ShortPrograms, Step, result
from treetune_domains.sandbox.bubblewrap import Bubblewrap


def run(program: str) -> list[int]:
    found = []
    for value in INPUTS:
        printed: list[int] = []
        exec(program, {"x": value, "print": printed.append})
        found += printed
    return found


def expected(problem: Problem) -> list[int]:
    known = {step.symbols: step for step in STEPS}
    return [result([known[name] for name in problem.data["steps"]], value) for value in INPUTS]


def test_a_demonstration_without_slips_does_what_the_description_says() -> None:
    task = ShortPrograms(wording="symbols", train_size=100, validation_size=10, test_size=10)
    for problem in task.problems("train"):
        assert problem.prompt == ",".join(problem.data["steps"]) + ":\n"
        assert run(task.demonstration(problem, seed=1)) == expected(problem)


def test_the_steps_lines_of_python_do_what_the_steps_do() -> None:
    for step in STEPS:
        assert run(f"{step.line}\nprint(x)") == [step.value(value) for value in INPUTS]


def test_the_inputs_tell_any_two_steps_apart() -> None:
    def results(step: Step) -> list[int]:
        return [step.value(value) for value in INPUTS]

    assert all(results(one) != results(other) for one, other in itertools.combinations(STEPS, 2))


def test_a_teacher_who_slips_is_right_about_as_often_as_no_line_slips() -> None:
    task = ShortPrograms(wording="symbols", steps=(3, 3), demonstration_noise=0.2, train_size=400)
    problems = task.problems("train")
    right = [run(task.demonstration(one, seed)) == expected(one) for seed, one in enumerate(problems)]
    assert 0.8**3 - 0.07 < sum(right) / len(right) < 0.8**3 + 0.1


def test_prompts_and_demonstrations_in_symbols_are_in_the_alphabet() -> None:
    task = ShortPrograms(wording="symbols", demonstration_noise=0.5, train_size=200)
    for problem in task.problems("train"):
        assert not set(problem.prompt + task.demonstration(problem, 0)) - set(task.alphabet())


def test_in_words_a_program_is_asked_for_in_english_and_shown_in_a_block() -> None:
    task = ShortPrograms(train_size=5)
    (problem, *_) = task.problems("train")
    assert problem.prompt.startswith("Write a Python program")
    assert task.demonstration(problem, 0).startswith("```python\nx=int(input())\n")
    with pytest.raises(ValueError, match="real tokenizer"):
        task.alphabet()


def test_golds_hold_what_is_read_and_printed() -> None:
    task = ShortPrograms(wording="symbols", train_size=20)
    for problem in task.problems("train"):
        gold = json.loads(problem.gold)
        assert gold["inputs"] == [str(value) for value in INPUTS]
        assert gold["outputs"] == [str(value) for value in expected(problem)]
        assert problem.data["prefix"] == "x=int(input())"


@pytest.mark.parametrize("wording", ["symbols", "words"])
def test_programs_are_graded_by_running_them_in_the_sandbox(wording: Any) -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")
    grader = Code(blocks="whole" if wording == "symbols" else "all")
    task = ShortPrograms(
        wording=wording, steps=(2, 2), train_size=2, validation_size=1, test_size=1, grader=grader
    )
    (problem, other) = task.problems("train")
    assert grader.grade(task.demonstration(problem, 0), problem).correct
    assert not grader.grade(task.demonstration(other, 0), problem).correct
    assert grader.grade("\n", problem).outcome == "no_answer"
