"""Promises of the tasks of sums and products:

* splits share no problem, and numbers are as many and as large as the settings say;
* solutions are written as documented, in lines or in threads, and a slip is carried on;
* the teacher's value of a prefix is exact: it equals an enumeration of all slips and the measured success.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import texts
from tests.support.thread_text import without_threads
from treetune.tasks.arithmetic import SLIPS, AdditionChain, SolutionLine, WrittenArithmetic
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.multiplication import Multiplication
from treetune.threads.format import find_format_faults, text_segments
from treetune.vocabulary import Problem

SMALL = {"train_size": 60, "validation_size": 10, "test_size": 20}
SPLITS = ("train", "validation", "test")


def problem_of(task: WrittenArithmetic, *numbers: int) -> Problem:
    is_product = isinstance(task, Multiplication)
    gold = eval((" * " if is_product else " + ").join(map(str, numbers)))
    return Problem(id="test/0", prompt="", gold=str(gold), data={"numbers": numbers})


SIZES = {
    "seed": st.integers(),
    "train_size": st.integers(1, 300),
    "validation_size": st.integers(1, 30),
    "test_size": st.integers(1, 30),
    "digits": st.integers(2, 4),
}
tasks = st.one_of(
    st.builds(AdditionChain, count=st.integers(2, 6), **SIZES),
    st.builds(Multiplication, factors=st.integers(2, 8), **SIZES),
)


@given(tasks)
@settings(max_examples=30)
def test_splits_never_share_a_problem_and_a_teacher_without_noise_is_right(task: WrittenArithmetic) -> None:
    numbers = [tuple(sorted(problem.data["numbers"])) for split in SPLITS for problem in task.problems(split)]
    assert len(set(numbers)) == len(numbers) == sum(map(task.size, SPLITS))
    for problem in task.problems("test"):
        solution = task.demonstration(problem, 0)
        assert task.grader.grade(solution, problem).reward == 1.0
        assert set(problem.prompt + solution) <= set(task.alphabet())


def test_all_existing_problems_can_be_used_and_one_more_is_refused() -> None:
    # 45 pairs of the numbers from 1 to 9, in any order.
    task = AdditionChain(count=2, digits=1, train_size=35, validation_size=5, test_size=5)
    assert len({p.gold for split in SPLITS for p in task.problems(split)}) == 17
    with pytest.raises(ValueError, match="is 46, but there are only 45 different problems"):
        AdditionChain(count=2, digits=1, train_size=36, validation_size=5, test_size=5)


def test_solutions_are_written_as_documented() -> None:
    addition, multiplication = AdditionChain(), Multiplication(factors=3)
    assert (
        addition.demonstration(problem_of(addition, 12, 34, 56, 78), 0)
        == "12+34=46\n46+56=102\n102+78=180\n#180"
    )
    assert multiplication.demonstration(problem_of(multiplication, 23, 40, 17), 0) == (
        "23*40=920\n920*10=9200\n920*7=6440\n9200+6440=15640\n#15640"
    )
    prompts = [task.problems("train")[0].prompt for task in (addition, multiplication)]
    assert re.fullmatch(r"\d\d(\+\d\d){3}=\n", prompts[0])
    assert re.fullmatch(r"\d\d(\*\d\d){2}=\n", prompts[1])


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_a_teacher_that_always_slips_goes_on_from_the_wrong_value(digits: int) -> None:
    task = Multiplication(factors=3, digits=digits, demonstration_noise=1.0, **SMALL | {"train_size": 5})
    for problem in task.problems("test"):
        *lines, answer = task.demonstration(problem, 1).split("\n")
        for line in lines:
            product, result = line.split("=")
            assert int(result) - eval(product) in SLIPS
        assert answer == f"#{result}"
        assert task.grader.grade(answer, problem).reward == 0.0


def test_factors_are_as_many_and_as_large_as_asked() -> None:
    def factors_of(task: Multiplication) -> list[tuple[int, ...]]:
        return [problem.data["numbers"] for split in SPLITS for problem in task.problems(split)]

    ranged = Multiplication(factors=(5, 8), min_value=0, max_value=1000, **SMALL)
    factors = factors_of(ranged)
    assert {len(of_problem) for of_problem in factors} == {5, 6, 7, 8}
    assert max(map(max, factors)) > 900 > 100 > min(map(min, factors))
    larger = replace(ranged, train_size=200)
    assert larger.problems("test") == ranged.problems("test")
    factors = factors_of(Multiplication(first_digits=3, digits=1, **SMALL))
    assert all(100 <= long_factor < 1000 and 2 <= digit < 10 for long_factor, digit in factors)
    assert len(set(factors)) == 90


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factors": 9}, "factors is 9: a number from 2 to 8"),
        ({"factors": (5, 4)}, "factors is .5, 4.: a number from 2 to 8"),
        ({"min_value": 3}, "min_value and max_value belong together"),
        ({"min_value": 3, "max_value": 2}, "min_value is 3, more than max_value, 2"),
        ({"form": "tree", "factors": 3}, "3 factors never make two pairs"),
        ({"wording": "words"}, "set grader to {type: 'numeric', without_marker: 'boxed'}"),
        ({"first_digits": 2}, "leave it out if digits is the same"),
        (
            {"first_digits": 1, "digits": 2},
            "only 720 different problems with 2 numbers of 2 digits, the first",
        ),
        ({"min_value": 1, "max_value": 9}, "only 45 different problems with 2 numbers from 1 to 9"),
    ],
)
def test_sizes_that_make_no_problems_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Multiplication(**settings)


@given(st.text())
def test_step_boundaries_lose_nothing_of_any_text(response: str) -> None:
    boundaries = AdditionChain().step_boundaries(response)
    assert (boundaries[0], boundaries[-1]) == (0, len(response))
    assert all(a < b for a, b in itertools.pairwise(boundaries))
    assert all("\n" not in response[a : b - 1] for a, b in itertools.pairwise(boundaries))


def answer_after(
    task: WrittenArithmetic, problem: Problem, prefix: Sequence[int], slips: Sequence[int]
) -> int:
    """Return the answer of a solution that begins with these numbers and has these slips after them."""
    numbers, errors = iter(prefix), iter(slips)

    def write(line: SolutionLine) -> int:
        number = next(numbers, None)
        return line.value + next(errors) if number is None else number

    return task._write_lines(problem, write)[-1][1]


def chance_by_enumeration(task: WrittenArithmetic, problem: Problem, prefix: list[int]) -> float:
    """Sum the chances of all ways to slip in the remaining lines that lead to the gold."""
    lines = task._write_lines(problem, lambda line: line.value)
    chance = 0.0
    for slips in itertools.product((0, *SLIPS), repeat=len(lines) - len(prefix)):
        answer = answer_after(task, problem, prefix, slips)
        if str(answer) == problem.gold:
            noise = task.demonstration_noise
            slip_count = sum(slip > 0 for slip in slips)
            chance += (noise / len(SLIPS)) ** slip_count * (1 - noise) ** (len(slips) - slip_count)
    return chance


@given(
    st.sampled_from([(12, 34), (12, 34, 56, 78), (99, 10, 47, 10, 23)]),
    st.lists(st.sampled_from([-33, -21, -20, -11, -10, -2, -1, 0, 0, 0, 1, 10]), max_size=4),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_teachers_value_is_exact_after_any_prefix(
    numbers: tuple[int, ...], errors: list[int], noise: float, is_product: bool
) -> None:
    task: WrittenArithmetic
    if is_product:
        task = Multiplication(factors=3, demonstration_noise=noise)
        numbers = numbers[:3] if len(numbers) >= 3 else (*numbers, 20)
    else:
        task = AdditionChain(demonstration_noise=noise)
    problem = problem_of(task, *numbers)
    next_errors = iter(errors)
    lines = task._write_lines(problem, lambda line: line.value + next(next_errors, 0))
    prefix = lines[: len(errors)]
    prefix_text = "".join(f"{line.lead}{value}\n" for line, value in prefix)
    exact = chance_by_enumeration(task, problem, [value for _, value in prefix])
    assert task.teacher_value(problem, prefix_text) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    "task",
    [AdditionChain(demonstration_noise=0.12, **SMALL), Multiplication(demonstration_noise=0.12, **SMALL)],
    ids=["addition", "multiplication"],
)
def test_the_teachers_value_is_its_measured_success(task: WrittenArithmetic) -> None:
    problem = task.problems("train")[0]
    value = task.teacher_value(problem, "")
    steps = task.demonstration(problem, 0).count("\n")
    assert value == pytest.approx(0.88**steps)
    right = sum(task.grader.grade(task.demonstration(problem, seed), problem).reward for seed in range(4000))
    assert abs(right / 4000 - value) < 4 * (value * (1 - value) / 4000) ** 0.5


@pytest.mark.parametrize(
    ("prefix", "value"),
    [
        ("12+34=46\n", 0.81),
        ("12+34=46\n46+56=102\n102+78=180\n", 1.0),
        ("12+34=46\n46+56=112\n", 0.0),
        ("12+34=46\n46+56=92\n", 0.05),  # a slip by 10 makes up for it
        ("12+34=46\n46+56=102\n102+78=180\n#180", 1.0),
        ("12+34=46\n#180", 1.0),
        ("12+34=46\n#46", 0.0),
    ],
)
def test_the_value_of_a_prefix_follows_a_solution_from_step_to_step(prefix: str, value: float) -> None:
    task = AdditionChain(demonstration_noise=0.1)
    problem = problem_of(task, 12, 34, 56, 78)
    assert task.teacher_value(problem, prefix) == pytest.approx(value)
    assert task.sequential_demonstration(problem, 7) == task.demonstration(problem, 7)


def test_values_of_long_solutions_are_exact_and_computed_without_enumeration() -> None:
    task = Multiplication(factors=8, digits=4, demonstration_noise=0.1)
    problem = problem_of(task, 1641, 2711, 2609, 3178, 2996, 8673, 6672, 9155)
    lines_left = task.demonstration(problem, 0).count("\n") - 1
    # Six lines are left before the next factor, which multiplies what is missing beyond repair:
    # two of them have to be too large by 10 and one by 1, or they cannot make up for it at all.
    value = task.teacher_value(problem, f"1641*2000={1641 * 2000 - 21}\n")
    assert value == pytest.approx(60 * 0.05**3 * 0.9 ** (lines_left - 3))
    assert task.teacher_value(problem, f"1641*2000={1641 * 2000 - 8}\n") == 0.0
    assert task.teacher_value(problem, "1641*2000=0\n") == 0.0


@pytest.mark.parametrize(
    "prefix",
    ["46", "46\n102", "46\n\n", "x\n", "46\n", "12+34=46\n46+56=102",
     "12+34=46\n0+46=46\n46+56=102\n102+78=180\n", "-46\n"],
)  # fmt: skip
def test_a_prefix_that_ends_within_a_step_or_has_a_wrong_step_is_refused(prefix: str) -> None:
    task = AdditionChain()
    with pytest.raises(ValueError, match=r"prefix|not a step"):
        task.teacher_value(problem_of(task, 12, 34, 56, 78), prefix)


# Products in threads

_TEXTS = texts(Path(__file__).parent / "cases/products_in_threads.txt")
DOCUMENTED = {form: text.removesuffix("\n") for form, text in _TEXTS.items()}
IN_WORDS = {"wording": "words", "grader": Numeric(without_marker="boxed")}


def test_products_in_threads_are_written_as_documented() -> None:
    digits = Multiplication(form="digits", detail="digits")
    assert digits.demonstration(problem_of(digits, 23, 47), 0) == DOCUMENTED["threads"]
    assert digits.demonstration(problem_of(digits, 23, 40), 0) == "20*40=800\n3*40=120\n800+120=920\n#920"
    tree, tree_digits = (
        Multiplication(form=form, factors=4, min_value=0, max_value=30) for form in ("tree", "tree_digits")
    )
    in_pairs = tree.demonstration(problem_of(tree, 2, 13, 30, 5), 0)
    assert in_pairs.startswith(DOCUMENTED["pairs"][: DOCUMENTED["pairs"].index("<Parallel>", 1)])
    assert in_pairs.endswith("</Parallel>\n26*100=2600\n26*50=1300\n2600+1300=3900\n#3900")
    of_places = tree_digits.demonstration(problem_of(tree_digits, 2, 13, 30, 5), 0)
    assert "<Outline>1:2*10</Outline><Outline>2:2*3</Outline><Outline>3:30*5</Outline>" in of_places
    assert of_places.endswith(DOCUMENTED["pairs"][DOCUMENTED["pairs"].rindex("<Parallel>") :])
    words = Multiplication(form="digits", **IN_WORDS)
    assert words.demonstration(problem_of(words, 23, 47), 0) == DOCUMENTED["words"]
    assert "product of 23, 47 and 5?" in words._prompt((23, 47, 5))


threaded_tasks = st.builds(
    Multiplication,
    form=st.sampled_from(["tree", "digits", "tree_digits"]),
    factors=st.one_of(st.integers(4, 6), st.just((4, 7))),
    detail=st.sampled_from(["partials", "digits"]),
    parallelise=st.sampled_from([0.0, 0.5, 1.0]),
    demonstration_noise=st.sampled_from([0.0, 0.3]),
    min_value=st.just(0),
    max_value=st.sampled_from([9, 40, 1000]),
    train_size=st.just(3),
    validation_size=st.just(1),
    test_size=st.just(1),
)


@given(threaded_tasks, st.integers(0, 9))
@settings(max_examples=40)
def test_solutions_in_threads_are_well_formed_and_their_lines_go_on_from_each_other(
    task: Multiplication, seed: int
) -> None:
    for problem in task.problems("train"):
        solution = task.demonstration(problem, seed)
        assert "".join(piece.text for piece in text_segments(solution)) == solution
        assert find_format_faults(solution, adjacent=True, conclusions="refused") == []
        assert ("<Parallel>" in solution) <= (task.parallelise > 0)
        lines = without_threads(solution).split("\n")
        for expression, result in (line.split("=") for line in lines[:-1]):
            slips = SLIPS if task.demonstration_noise else ()
            assert int(result) - eval(expression) in (0, *slips)
        assert lines[-1] == f"#{result}"
        if not task.demonstration_noise:
            assert task.grader.grade(solution, problem).reward == 1.0
        for piece in text_segments(solution):
            assert set(re.sub("</?[A-Z][a-z]+>", "", piece.text)) <= set(task.alphabet())


@given(threaded_tasks, st.integers(0, 9))
@settings(max_examples=30)
def test_a_solution_in_threads_has_the_lines_of_the_sequential_one_with_the_same_slips(
    task: Multiplication, seed: int
) -> None:
    task = replace(task, form="digits", demonstration_noise=0.3)
    for problem in task.problems("train"):
        sequential = task.sequential_demonstration(problem, seed)
        assert "<" not in sequential
        threads = without_threads(task.demonstration(problem, seed))
        assert sorted(threads.split("\n")) == sorted(sequential.split("\n"))


def test_about_the_share_parallelise_of_the_blocks_is_written_in_threads() -> None:
    task = Multiplication(form="digits", parallelise=0.3, digits=3, train_size=400)
    with_threads = sum("<Parallel>" in task.demonstration(problem, 1) for problem in task.problems("train"))
    assert 80 < with_threads < 160


def test_the_teachers_value_of_products_digit_by_digit_is_exact_and_of_threads_unknown() -> None:
    task = Multiplication(detail="digits", demonstration_noise=0.1)
    problem = problem_of(task, 23, 47)
    assert task.teacher_value(problem, "20*40=800\n3*40=120\n") == pytest.approx(0.9**5)
    for otherwise in ({"form": "digits"}, {"factors": 3}, IN_WORDS):
        with pytest.raises(ValueError, match="only known for form 'sequential' and wording 'symbols'"):
            replace(task, **otherwise).teacher_value(problem, "")
