"""Promises of Countdown's problems:

* splits share no problem, each problem has the requested shape, and an exhaustive search solves it;
* a shape with too few problems is told;
* demonstrations search until they hit, and a noisy teacher gives a miss as the answer at the rate of its
  noise;
* rows of published data become problems, and a bad row is told with its line.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.data.scoring import score_responses
from treetune.tasks.base import Split
from treetune.tasks.countdown import Countdown, CountdownRows, signed_sums
from treetune.tasks.graders.countdown import CountdownGrader, read_expression, read_gold, write_gold
from treetune.vocabulary import Problem

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SMALL: dict[str, Any] = {"train_size": 60, "validation_size": 10, "test_size": 20}
SUMS: dict[str, Any] = {
    "numbers": (3, 3), "operands": (1, 30), "targets": (1, 90), "operators": ("+", "-"),
    "prompt": "{numbers}>{target}\n",
    "grader": CountdownGrader(opening="#", closing="\n", unclosed=True),
}  # fmt: skip


def solutions(
    terms: Sequence[tuple[Fraction, str]], operators: Sequence[str], natural: bool
) -> Iterator[tuple[Fraction, str]]:
    """Yield every expression of all the numbers with its value, by joining two terms in all ways."""
    if len(terms) == 1:
        yield terms[0]
    for i, j in itertools.permutations(range(len(terms)), 2):
        (a, expression_a), (b, expression_b) = terms[i], terms[j]
        others = [terms[k] for k in range(len(terms)) if k not in (i, j)]
        for operator in operators:
            if (operator in "+*" and i > j) or (operator == "/" and b == 0):
                continue
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[operator]
            if natural and (value <= 0 or value.denominator != 1):
                continue
            joined = (value, f"({expression_a}{operator}{expression_b})")
            yield from solutions([*others, joined], operators, natural)


def find_solution(task: Countdown, problem: Problem) -> str | None:
    target, numbers = read_gold(problem.gold)
    start = [(Fraction(number), str(number)) for number in numbers.elements()]
    for value, expression in solutions(start, task.operators, task.natural):
        if value == target:
            return expression
    return None


random_tasks = st.builds(
    Countdown,
    numbers=st.sampled_from([(3, 3), (3, 4), (2, 4), (4, 4)]),
    operands=st.sampled_from([(1, 99), (1, 30), (5, 25)]),
    targets=st.sampled_from([(10, 99), (1, 999)]),
    operators=st.sampled_from([("+", "-", "*", "/"), ("+", "-"), ("*", "+")]),
    natural=st.booleans(),
    seed=st.integers(),
    train_size=st.integers(1, 30),
    validation_size=st.integers(1, 10),
    test_size=st.integers(1, 10),
)


@given(random_tasks)
@settings(max_examples=15)
def test_splits_share_no_problem_and_problems_are_of_the_shape_that_was_asked_for(task: Countdown) -> None:
    problems_of_all_splits: set[tuple[tuple[int, ...], int]] = set()
    for split in SPLITS:
        for problem in task.problems(split):
            numbers, target = problem.data["numbers"], problem.data["target"]
            assert (target, Counter(numbers)) == read_gold(problem.gold)
            assert task.numbers[0] <= len(numbers) <= task.numbers[1]
            assert all(task.operands[0] <= number <= task.operands[1] for number in numbers)
            assert task.targets[0] <= target <= task.targets[1]
            assert all(str(number) in problem.prompt for number in (*numbers, target))
            problems_of_all_splits.add((tuple(sorted(numbers)), target))
    assert len(problems_of_all_splits) == task.train_size + task.validation_size + task.test_size


@given(random_tasks)
@settings(max_examples=8)
def test_every_problem_has_a_solution_which_the_grader_takes(task: Countdown) -> None:
    for problem in task.problems("test")[:4]:
        solution = find_solution(task, problem)
        assert solution is not None
        assert task.grader.grade(f"<answer>{solution}</answer>", problem).correct


def test_problems_of_six_numbers_have_a_solution() -> None:
    task = Countdown(numbers=(6, 6), operands=(1, 10), targets=(100, 999), **SMALL)
    for problem in task.problems("test")[:2]:
        solution = find_solution(task, problem)
        assert solution is not None and len(read_expression(solution).numbers) == 6


def test_a_problem_of_natural_numbers_has_a_solution_without_fractions_on_the_way() -> None:
    shape: dict[str, Any] = {"numbers": (3, 3), "operands": (1, 9), "targets": (1, 99)}
    natural, any_way = (
        Countdown(natural=natural, operators=("/", "-"), **shape, **SMALL) for natural in (True, False)
    )
    assert all(find_solution(natural, problem) for problem in natural.problems("train"))
    assert all(find_solution(any_way, problem) for problem in any_way.problems("train"))
    assert not all(find_solution(natural, problem) for problem in any_way.problems("train"))


def test_a_shape_with_too_few_problems_is_told_and_all_of_a_small_one_can_be_used() -> None:
    # Pairs of 1 to 3: six sums, and three differences; no two of them the same problem.
    shape: dict[str, Any] = {
        "numbers": (2, 2), "operands": (1, 3), "targets": (1, 99), "operators": ("+", "-"),
        "validation_size": 1, "test_size": 1,
    }  # fmt: skip
    assert len(Countdown(train_size=7, **shape).problems("train")) == 7
    message = r"the splits need 10 problems .* random expressions gave 9, the last"
    with pytest.raises(ValueError, match=message):
        Countdown(train_size=8, **shape).problems("train")


def test_a_shape_without_problems_is_told_and_a_narrow_one_is_searched_for_long() -> None:
    shape: dict[str, Any] = {"numbers": (2, 2), "operators": ("+",), "validation_size": 1, "test_size": 1}
    with pytest.raises(ValueError, match=r"none of .* random expressions has a value within targets"):
        Countdown(operands=(1, 9), targets=(19, 99), train_size=1, **shape).problems("train")
    # One draw in 16,000 hits: 1 + 999, 2 + 998 and so on.
    narrow = Countdown(operands=(1, 4000), targets=(1000, 1000), train_size=20, **shape)
    assert len(narrow.problems("train")) == 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": "{numbers}?"}, "prompt needs"),
        ({"prompt": "{target} {numbers} {numbers}"}, "prompt needs"),
        ({"numbers": (4, 3)}, "numbers is .* smaller one first"),
        ({"targets": (9, 1)}, "targets is .* smaller one first"),
        ({"operators": ("+", "+")}, "an operator twice"),
    ],
)
def test_a_wrong_shape_is_told(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Countdown(**wrong)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_signed_sums_are_complete_and_their_running_totals_are_right(numbers: list[int]) -> None:
    sums = list(signed_sums(numbers))
    values = set()
    for signs in itertools.product((1, -1), repeat=len(numbers)):
        values.add(sum(sign * number for sign, number in zip(signs, numbers, strict=True)))
    assert {value for _, _, value in sums} == {value for value in values if value > 0}
    assert len({expression for expression, _, _ in sums}) == len(sums)
    for expression, running, value in sums:
        parsed = read_expression(expression)
        assert (parsed.value, Counter(parsed.numbers)) == (value, Counter(numbers))
        total: int | None = None
        for piece in running.split("=")[:-1]:
            value_of_piece = int(read_expression(piece).value)
            assert total is None or piece.startswith(str(total))
            total = value_of_piece
            assert total >= 0
        assert running.endswith(f"={value}")


def test_a_teacher_without_noise_searches_until_it_hits() -> None:
    task = Countdown(**SUMS, **SMALL)
    for problem in task.problems("test"):
        *tries, answer = task.demonstration(problem, 0).split("\n")
        target = str(problem.data["target"])
        assert [line.rpartition("=")[2] == target for line in tries] == [False] * (len(tries) - 1) + [True]
        assert task.grader.grade("\n".join([*tries, answer]), problem).correct
        assert set(problem.prompt + "\n".join([*tries, answer])) <= set(task.alphabet())


def test_a_teacher_with_noise_gives_a_miss_as_the_answer_at_that_rate() -> None:
    task = Countdown(demonstration_noise=0.3, **SUMS, **SMALL)
    right = wrong = misses = 0
    for problem in task.problems("train"):
        demonstrations = [task.demonstration(problem, seed) for seed in range(10)]
        assert demonstrations == [task.demonstration(problem, seed) for seed in range(10)]
        expressions = {expression for expression, _, _ in signed_sums(problem.data["numbers"])}
        for demonstration in demonstrations:
            is_right = task.grader.grade(demonstration, problem).correct
            tries = demonstration.count("\n")
            right += is_right
            wrong += not is_right
            misses += tries - is_right
            assert demonstration.rpartition("#")[2] in expressions
    # Each miss is given as the answer with chance 0.3, within four standard deviations.
    assert abs(wrong / misses - 0.3) < 4 * (0.3 * 0.7 / misses) ** 0.5
    assert right + wrong == 600


def test_a_teacher_uses_the_tasks_operators_alone() -> None:
    task = Countdown(**SUMS | SMALL | {"operators": ("+",)}, demonstration_noise=0.5)
    for problem in task.problems("train"):
        demonstration = task.demonstration(problem, 0)
        assert "-" not in demonstration
        assert task.grader.grade(demonstration, problem).correct


@pytest.mark.parametrize("operators", [("+", "-", "*", "/"), ("*",), ("-",)])
def test_products_and_differences_alone_have_no_demonstrations(operators: tuple[Any, ...]) -> None:
    task = Countdown(**SMALL | {"operators": operators})
    (demonstrations,) = task.gives
    assert "only for sums and differences" in demonstrations.why_none
    with pytest.raises(ValueError, match="only for sums and differences"):
        task.demonstration(task.problems("train")[0], 0)


def file_of(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHAT = [{"role": "user", "content": "Using 3, 5 and 7, make 15."}]
SYSTEM = [{"role": "system", "content": "Think."}, *CHAT]


def test_rows_of_published_data_become_problems(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.jsonl", {"messages": CHAT, "target": 15, "nums": [3, 5, 7]})
    (problem,) = CountdownRows(test=(path,)).problems("test")
    data = {"numbers": (3, 5, 7), "target": 15}
    assert problem == Problem("test/0", CHAT[0]["content"], write_gold(15, [3, 5, 7]), data)
    task = CountdownRows(test=(path,), prompt="{target} of {numbers}: <think>")
    assert task.problems("test")[0].prompt == "15 of 3, 5, 7: <think>"
    assert task.grader.grade("<answer>3+5+7</answer>", task.problems("test")[0]).correct


def test_a_row_may_have_a_prompt_of_text_other_field_names_and_the_system_message_of_its_task(
    tmp_path: Path,
) -> None:
    path = file_of(tmp_path / "a.jsonl", {"prompt": "Make 15.", "target": 15, "numbers": [3, 5, 7]})
    task = CountdownRows(test=(path,), numbers_field="numbers", prompt_field="prompt")
    assert task.problems("test")[0].prompt == "Make 15."
    path = file_of(tmp_path / "b.jsonl", {"messages": SYSTEM, "target": 15, "nums": [3, 5, 7]})
    assert CountdownRows(test=(path,), system="Think.").problems("test")[0].prompt == CHAT[0]["content"]
    with pytest.raises(ValueError, match=r"its system message is 'Think\.', and the task's is None"):
        CountdownRows(test=(path,)).problems("test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nums": None}, "'nums' is not a list"),
        ({"nums": []}, "'nums' is not a list"),
        ({"nums": [3, 5.5]}, r"contains 5\.5"),
        ({"nums": [3, True]}, "contains True"),
        ({"nums": [-3, 5]}, "contains -3"),
        ({"nums": [10**15, 5]}, "contains 1000000000000000"),
        ({"target": "15"}, "'target' is '15'"),
        ({"messages": []}, "neither a text nor a chat"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "15"}]}, "neither a text nor a chat"),
        ({"messages": [{"role": "user"}]}, "neither a text nor a chat"),
    ],
)
def test_a_bad_row_is_told_with_its_line_or_left_out(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {"messages": CHAT, "target": 15, "nums": [3, 5, 7]}
    path = file_of(tmp_path / "a.jsonl", good, good | change)
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}.*bad_rows"):
        CountdownRows(test=(path,)).problems("test")
    assert len(CountdownRows(test=(path,), bad_rows="skip").problems("test")) == 1
    path = file_of(tmp_path / "b.jsonl", {"messages": CHAT, "target": 15})
    with pytest.raises(ValueError, match=r"it has no 'nums' .it has 'messages', 'target'"):
        CountdownRows(test=(path,)).problems("test")


def test_answers_of_a_file_are_graded_by_golds_that_name_the_numbers(tmp_path: Path) -> None:
    row = {"problem": "Make 15 of 3, 5, 7.", "gold": write_gold(15, [3, 5, 7])}
    answers = ["<answer>3+5+7</answer>", "<answer>3*5</answer>", "15"]
    source = file_of(tmp_path / "a.jsonl", *({**row, "response": answer} for answer in answers))
    scored = score_responses(Countdown(), Path(source), tmp_path / "graded.jsonl", workers=1)
    assert (scored.rows, scored.correct, scored.no_answer, scored.failed) == (3, 1, 1, 0)
