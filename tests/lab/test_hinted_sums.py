"""Sums whose prompts may show the answer.

These tests promise:

* Hints change prompts and demonstrations of the training split alone, and not which problems there are.
* A teacher who sees the answer makes fewer errors, and always writes it at the end.
* The numbers ``leak/…`` find answers that state the reference answer without deriving it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.credit.literature.test_published_methods import GROUP
from treetune.lab.hinted_sums import HintedSums, measure_hinted_sums, measure_leaks, write_derivation
from treetune.vocabulary import Problem, TextCodec

PLAIN = HintedSums(
    count=3, digits=1, demonstration_noise=0.5, train_size=100, validation_size=20, test_size=30, seed=7
)
HINTED = replace(PLAIN, hinted=0.5)
PROBLEM = PLAIN.problem("example/0", (3, 8, 5))


def test_hints_are_in_a_share_of_the_training_prompts_alone() -> None:
    assert HINTED.problems("test") == PLAIN.problems("test")
    assert HINTED.problems("validation") == PLAIN.problems("validation")
    with_hint = 0
    for hinted, plain in zip(HINTED.problems("train"), PLAIN.problems("train"), strict=True):
        assert hinted.gold == plain.gold
        if hinted.data["hinted"]:
            with_hint += 1
            assert hinted.prompt == f"#{plain.gold}\n{plain.prompt}"
        else:
            assert hinted == plain
    assert 35 < with_hint < 65


def test_the_teacher_uses_a_hint() -> None:
    careless = replace(HINTED, hinted_noise=1.0)
    for problem in HINTED.problems("train"):
        right_lines = write_derivation(problem.data["numbers"])
        demonstration = HINTED.demonstration(problem, seed=1)
        if problem.data["hinted"]:
            assert demonstration == f"{right_lines}#{problem.gold}"
            with_errors = careless.demonstration(problem, seed=1)
            assert not with_errors.startswith(right_lines)
            assert with_errors.endswith(f"\n#{problem.gold}")
            honest = replace(careless, copies_hint=False).demonstration(problem, seed=1)
            assert honest.rpartition("#")[0] == with_errors.rpartition("#")[0]
            assert not honest.endswith(f"#{problem.gold}")
        else:
            assert demonstration == PLAIN.demonstration(problem, seed=1)


def test_the_teachers_value_is_only_known_without_a_hint() -> None:
    assert PLAIN.teacher_value(PROBLEM, "3+8=11\n") == 0.5
    hinted = next(problem for problem in HINTED.problems("train") if problem.data["hinted"])
    with pytest.raises(ValueError, match=r"has a hint.*set the task's hinted to 0"):
        HINTED.teacher_value(hinted, "")


@pytest.mark.parametrize(
    ("text", "underived", "contradicted", "repeated_hint"),
    [
        ("3+8=11\n11+5=16\n#16", 0, 0, 0),
        ("3+8=11\n11+5=17\n#17", 0, 0, 0),  # wrong, and the reference answer isn't stated
        ("3+8=11\n11+5=17\n#16", 1, 1, 0),
        ("3+8=12\n12+5=16\n#16", 1, 0, 0),  # the second error makes up for the first
        ("3+8=11\n11+5=16\n#17", 0, 1, 0),
        ("#16\n3+8=11\n11+5=16\n#16", 1, 0, 1),
        ("#160\n3+8=11\n11+5=16\n#16", 1, 0, 1),
        ("3+8=11\n11+5=16\n#16\n", 0, 0, 0),  # the grader strips white space
        ("3+8=11\n11+5=16\n#016", 0, 0, 0),  # and leading zeros
        ("3+8=11\n11+5=17\n#016", 1, 1, 0),
        ("3+8=11\n11+5=16\n#\n", 0, None, 0),
        ("3+8=116\n", 0, None, 0),  # 16 is only a part of a number
        ("#16", 1, None, 1),
        ("", 0, None, 0),
    ],
)
def test_leaks_of_an_answer(text: str, underived: int, contradicted: int | None, repeated_hint: int) -> None:
    expected = {"underived": underived, "repeated_hint": repeated_hint}
    if contradicted is not None:
        expected["contradicted"] = contradicted
    assert measure_leaks(text, PROBLEM) == expected


def test_answers_to_other_tasks_have_no_leaks() -> None:
    codec = TextCodec(encode=lambda text: [], decode=lambda ids: "", eos_id=0)
    answer_to_another_task = replace(GROUP[0], text="#16")
    to_a_sum = replace(answer_to_another_task, problem=PROBLEM)
    assert measure_hinted_sums([answer_to_another_task, to_a_sum], codec) == [
        {},
        {"underived": 1.0, "repeated_hint": 1.0},
    ]


def test_a_derivation_is_the_solution_without_its_result() -> None:
    without_errors = replace(PLAIN, demonstration_noise=0.0)
    problem: Problem = without_errors.problems("train")[0]
    solution = without_errors.demonstration(problem, seed=0)
    assert solution == f"{write_derivation(problem.data['numbers'])}#{problem.gold}"
