"""Promises of the tasks that generate their problems:

* splits have their sizes and share no problem, and held-out problems stay when the training set grows;
* a teacher without noise is always right, a noisy one slips, and demonstrations depend on the seed alone;
* every puzzle has exactly one answer, and without one of its clues it has several (checked by trying all
  answers, from the text of the prompt alone);
* the description, the gold and the demonstration of a short program agree.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.domains.graders.code_grading import needs_sandbox
from treetune.domains.environments.base import EnvironmentTask
from treetune.domains.environments.games import GuessNumber, Maze
from treetune.domains.graders.code import Code
from treetune.domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader, read_grid, write_grid
from treetune.domains.graders.tagged import OneWord
from treetune.domains.puzzles.grid_puzzles import (
    GridPuzzles,
    GridTransformation,
    apply_rules,
    find_explanations,
    rules_of,
)
from treetune.domains.puzzles.logic_puzzles import GraphPaths, OrderingPuzzles
from treetune.domains.puzzles.reasoning_gym import ReasoningGym
from treetune.domains.puzzles.short_programs import INPUTS, STEPS, ShortPrograms, run_steps
from treetune.domains.puzzles.zebra_puzzles import (
    KINDS,
    ZebraPuzzles,
    ZebraShape,
    count_arrangements,
    kinds_of,
    random_arrangement,
)
from treetune.lab.signposts import Signposts
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import GeneratedTask, Split
from treetune.tasks.countdown import Countdown
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.multiplication import Multiplication
from treetune.vocabulary import Problem

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SMALL: dict[str, Any] = {"train_size": 30, "validation_size": 5, "test_size": 10}


def task_in_symbols(kind: type, grader: type, **keys: Any) -> Any:
    answers = grader(opening="#", closing="\n", unclosed=True)
    return kind(**{"wording": "symbols", "grader": answers, **SMALL, **keys})


def ordering_puzzles(**keys: Any) -> OrderingPuzzles:
    return task_in_symbols(OrderingPuzzles, OrderingGrader, **keys)


def grid_puzzles(**keys: Any) -> GridPuzzles:
    return task_in_symbols(GridPuzzles, GridGrader, **keys)


def zebra_puzzles(**keys: Any) -> ZebraPuzzles:
    return task_in_symbols(ZebraPuzzles, ZebraGrader, **keys)


def graph_paths(**keys: Any) -> GraphPaths:
    return task_in_symbols(GraphPaths, OneWord, **keys)


TASKS_WITH_TEACHER: dict[str, GeneratedTask] = {
    "sums": AdditionChain(**SMALL),
    "sums of many digits": AdditionChain(count=2, digits=4, **SMALL),
    "products": Multiplication(**SMALL),
    "products of several factors": Multiplication(factors=(2, 4), **SMALL),
    "products in threads": Multiplication(
        form="tree_digits", factors=4, wording="words", grader=Numeric(without_marker="boxed"), **SMALL
    ),
    "countdown": Countdown(operators=("+", "-"), **SMALL),
    "orders": OrderingPuzzles(**SMALL),
    "orders in symbols": ordering_puzzles(**SMALL),
    "orders by neighbours": ordering_puzzles(clues=("next",), objects=(4, 4), **SMALL),
    "grids": GridPuzzles(**SMALL),
    "grids with rules": GridPuzzles(shown=0, **SMALL),
    "grids in symbols": grid_puzzles(**SMALL),
    "grids with rules in symbols": grid_puzzles(shown=0, steps=(1, 2), **SMALL),
    "zebras": ZebraPuzzles(**SMALL),
    "zebras in symbols": zebra_puzzles(**SMALL),
    "hard zebras": zebra_puzzles(level=20, objects=(3, 3), attributes=(2, 2), **SMALL),
    "paths": GraphPaths(**SMALL),
    "paths in symbols": graph_paths(**SMALL),
    # One in five of its possible questions: draws come twice.
    "reasoning_gym": ReasoningGym(dataset="count_bits", config={"min_n": 1, "max_n": 250}, **SMALL),
}
TASKS = TASKS_WITH_TEACHER | {
    "programs": ShortPrograms(**SMALL),
    "a game": EnvironmentTask(environment=GuessNumber(most=999), **SMALL),
    "signposts": Signposts(**SMALL),
    "a maze": EnvironmentTask(environment=Maze(), **SMALL),
}
every_task = pytest.mark.parametrize("name", TASKS)
every_teacher = pytest.mark.parametrize("name", TASKS_WITH_TEACHER)


@every_task
def test_splits_have_their_sizes_and_share_no_problem(name: str) -> None:
    task = TASKS[name]
    everything = []
    for split in SPLITS:
        problems = task.problems(split)
        assert len(problems) == task.size(split) == SMALL[f"{split}_size"]
        assert [problem.id for problem in problems] == [f"{split}/{index}" for index in range(len(problems))]
        everything += [(problem.prompt, problem.gold, repr(problem.data)) for problem in problems]
    assert len(set(everything)) == sum(SMALL.values())
    with pytest.raises(ValueError, match="no split 'dev'"):
        task.problems("dev")  # type: ignore[arg-type]


@every_task
def test_held_out_problems_stay_when_the_training_set_grows_and_change_with_the_seed(name: str) -> None:
    task = TASKS[name]
    larger = replace(task, train_size=60)
    for split in SPLITS:
        assert list(task.problems(split)) == list(larger.problems(split))[: SMALL[f"{split}_size"]]
    if hasattr(task, "seed"):
        assert task.problems("test") != replace(task, seed=1).problems("test")


@every_teacher
def test_a_teacher_without_noise_is_right_and_one_who_always_slips_is_mostly_wrong(name: str) -> None:
    task = TASKS_WITH_TEACHER[name]
    slipping = replace(task, demonstration_noise=1.0)
    rewards, rewards_of_slipping = [], []
    for problem in task.problems("train"):
        rewards.append(task.grader.grade(task.demonstration(problem, 3), problem).reward)
        rewards_of_slipping.append(task.grader.grade(slipping.demonstration(problem, 3), problem).reward)
    assert set(rewards) == {1.0}
    assert sum(rewards_of_slipping) < len(rewards_of_slipping) / 2


@every_teacher
def test_demonstrations_depend_on_the_seed_alone_and_are_cut_at_the_ends_of_lines(name: str) -> None:
    task = TASKS_WITH_TEACHER[name]
    noisy = replace(task, demonstration_noise=0.5)
    problem = max(task.problems("train"), key=lambda problem: len(task.demonstration(problem, 1)))
    assert noisy.demonstration(problem, 1) == noisy.demonstration(problem, 1)
    assert len({noisy.demonstration(problem, seed) for seed in range(20)}) > 1
    demonstration = task.demonstration(problem, 1)
    ends = task.step_boundaries(demonstration)
    assert ends[0] == 0 and ends[-1] == len(demonstration) and ends == sorted(set(ends))
    assert all(demonstration[end - 1] == "\n" for end in ends[1:-1])
    assert len(ends) == 1 + len(demonstration.removesuffix("\n").split("\n"))


@every_teacher
def test_the_alphabet_has_all_characters_or_asks_for_another_tokenizer(name: str) -> None:
    task = TASKS_WITH_TEACHER[name]
    in_words = name in ("products in threads", "orders", "grids", "grids with rules", "zebras", "paths")
    if in_words:
        with pytest.raises(ValueError, match="no small alphabet: use a real tokenizer"):
            task.alphabet()
    else:
        texts = [problem.prompt + task.demonstration(problem, 1) for problem in task.problems("train")]
        assert set("".join(texts)) <= set(task.alphabet())


@pytest.mark.parametrize(
    "kind", [OrderingPuzzles, GridPuzzles, ZebraPuzzles, GraphPaths, ShortPrograms, Countdown]
)
def test_the_smaller_end_of_a_range_comes_first(kind: type[GeneratedTask]) -> None:
    for name in kind.ranges:
        with pytest.raises(ValueError, match=f"{name} is .*: give the smaller one first"):
            kind(**{name: (4, 2)})


@pytest.mark.parametrize(
    ("make_task", "settings", "message"),
    [
        (ordering_puzzles, {"clues": ("between",)}, "mirror image"),
        (
            ordering_puzzles,
            {"objects": (2, 2), "letters": 2, "train_size": 100},
            "ask for fewer, or for larger or more varied puzzles",
        ),
        (
            grid_puzzles,
            {"rules": ("double",), "rows": (2, 30), "steps": (1, 2)},
            "rule 'double' makes grids of 120 cells",
        ),
        (zebra_puzzles, {"objects": (6, 6), "attributes": (3, 3)}, "choose fewer objects or attributes"),
        (graph_paths, {"paths": 10, "lookahead": (6, 6)}, "choose fewer paths or a smaller lookahead"),
    ],
)
def test_settings_for_which_no_puzzle_can_be_made_are_refused(
    make_task: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(**settings).problems("train")


# Puzzles have one answer.


_CLUE = re.compile(r"([a-l])([</0-9])([a-l])")


def orders_that_fit(prompt: str) -> list[str]:
    """Try all orders against the clues in the text of a prompt, and list those that fit."""
    names, clues = re.fullmatch(r"([a-l]+):(.*)>\n", prompt).groups()  # type: ignore[union-attr]
    fitting = []
    for order in map("".join, itertools.permutations(names)):
        for name, sign, other_name in _CLUE.findall(clues):
            distance = order.index(other_name) - order.index(name)
            # "<" is left of, "/" is immediately left of, a digit is the number of names between.
            has_that_many_between = sign.isdigit() and abs(distance) == int(sign) + 1
            if not {"<": distance > 0, "/": distance == 1}.get(sign, has_that_many_between):
                break
        else:
            fitting.append(order)
    return fitting


@given(
    st.sampled_from([(2, 3), (3, 4), (5, 5)]),
    st.sampled_from([("left",), ("next",), ("left", "next", "between"), ("between", "next")]),
    st.integers(0, 1000),
)
@settings(max_examples=15)
def test_exactly_one_order_fits_all_clues_and_more_fit_all_but_one(
    objects: tuple[int, int], clues: Sequence[Any], seed: int
) -> None:
    task = ordering_puzzles(
        objects=objects, clues=clues, seed=seed, train_size=3, validation_size=1, test_size=1
    )
    for problem in task.problems("train"):
        assert orders_that_fit(problem.prompt) == ["".join(json.loads(problem.gold))]
        head, _, tail = problem.prompt.removesuffix(">\n").partition(":")
        all_clues = tail.split(",")
        for left_out in range(len(all_clues)):
            other_clues = ",".join(all_clues[:left_out] + all_clues[left_out + 1 :])
            assert len(orders_that_fit(f"{head}:{other_clues}>\n")) > 1


def test_clues_in_words_say_the_same_as_the_solution() -> None:
    side_clue = r"- (\w+) is (immediately|somewhere) to the (left|right) of (\w+)\."
    between_clue = r"- (\d) of them \w+ between (\w+) and (\w+)\."
    for problem in OrderingPuzzles(**SMALL).problems("train"):
        order = json.loads(problem.gold)
        for name, exactly, side, other_name in re.findall(side_clue, problem.prompt):
            distance = order.index(other_name) - order.index(name)
            distance_to_that_side = distance if side == "left" else -distance
            assert distance_to_that_side == 1 if exactly == "immediately" else distance_to_that_side > 0
        for between, name, other_name in re.findall(between_clue, problem.prompt):
            assert abs(order.index(name) - order.index(other_name)) == int(between) + 1


GRID = ((1, 2, 0), (0, 3, 1))


@pytest.mark.parametrize(
    ("rule", "after"),
    [
        (GridTransformation("mirror"), "021/130"),
        (GridTransformation("flip"), "031/120"),
        (GridTransformation("transpose"), "10/23/01"),
        (GridTransformation("turn"), "01/32/10"),
        (GridTransformation("shift_right"), "012/103"),
        (GridTransformation("shift_down"), "031/120"),
        (GridTransformation("fall"), "020/131"),
        (GridTransformation("recolour", (1, 2)), "210/032"),
        (GridTransformation("double"), "112200/112200/003311/003311"),
        (GridTransformation("fill", (3,)), "123/331"),
    ],
)
def test_rules_do_what_their_names_say(rule: GridTransformation, after: str) -> None:
    assert write_grid(rule(GRID)) == after


def test_all_rules_that_explain_the_examples_have_the_same_answer() -> None:
    task = grid_puzzles(steps=(1, 2), shown=1)
    for problem in task.problems("test"):
        shown, question = problem.prompt.removesuffix(">\n").rsplit(";", 1)
        pairs = [tuple(map(read_grid, pair.split("="))) for pair in shown.split(";")]
        steps = len(problem.data["rules"])
        rules = rules_of(task.rules, task.colours)
        answers = set()
        for chain in find_explanations(rules, steps, pairs):  # type: ignore[arg-type]
            answers.add(apply_rules(chain, read_grid(question)))  # type: ignore[arg-type]
        assert answers == {read_grid(problem.gold)}


def test_rules_that_the_prompt_names_lead_to_the_gold() -> None:
    task = grid_puzzles(shown=0, steps=(2, 2))
    symbols = {rule.symbol: rule for rule in rules_of(task.rules, task.colours)}
    for problem in task.problems("test"):
        named_rules, _, question = problem.prompt.removesuffix(">\n").partition(":")
        chain = [symbols[symbol] for symbol in re.findall(r"[a-z]\d*", named_rules)]
        assert apply_rules(chain, read_grid(question)) == read_grid(problem.gold)  # type: ignore[arg-type]
        assert question != write_grid(read_grid(problem.gold))  # type: ignore[arg-type]


def clue_holds(clue: str, table: Sequence[str]) -> bool:
    """Say whether a table fits a clue, by reading its text as the task's docstring explains the symbols."""

    def house(letter: str) -> int:
        """Return the number, from 1 on, of the row in which a letter stands."""
        return next(number for number, row in enumerate(table, start=1) if letter in row)

    if match := re.fullmatch(r"(\w)@(\d)", clue):
        return house(match[1]) == int(match[2])
    if match := re.fullmatch(r"(\w)([=~<!])(\w)", clue):
        a, b = house(match[1]), house(match[3])
        return {"=": a == b, "~": abs(a - b) == 1, "<": a < b, "!": a != b}[match[2]]
    if match := re.fullmatch(r"(\w)([|^])", clue):
        last = len(table)
        if match[2] == "|":  # at an end
            return house(match[1]) in (1, last)
        return house(match[1]) == (last + 1) / 2  # in the middle
    if match := re.fullmatch(r"(\w)_(\w)_(\w)", clue):
        a, b, c = house(match[1]), house(match[2]), house(match[3])
        return a < b < c or a > b > c
    if match := re.fullmatch(r"(\w)%(\d)", clue):
        return house(match[1]) % 2 == int(match[2])
    match = re.fullmatch(r"(-?)(\w)(\d)([+;]?)(\w)(\d)", clue)
    assert match is not None, clue
    first_is_so, second_is_so = house(match[2]) == int(match[3]), house(match[5]) == int(match[6])
    if match[1]:  # neither
        return not (first_is_so or second_is_so)
    if match[4] == "+":  # exactly one of them
        return first_is_so != second_is_so
    return first_is_so or second_is_so


@pytest.mark.parametrize("level", [2, 5, 8, 12, 16, 20])
def test_exactly_one_table_fits_all_clues_and_more_fit_all_but_one(level: int) -> None:
    task = zebra_puzzles(level=level, objects=(3, 3), attributes=(2, 2), train_size=12)
    for problem in task.problems("train"):
        attributes, _, listed_clues = problem.prompt.removesuffix(">\n").partition(":")
        first_attribute, second_attribute = attributes[1:].split(",")
        tables = []
        for first_column in itertools.permutations(first_attribute):
            for second_column in itertools.permutations(second_attribute):
                tables.append(["".join(row) for row in zip(first_column, second_column, strict=True)])
        clues = listed_clues.split(",")
        fitting = [table for table in tables if all(clue_holds(clue, table) for clue in clues)]
        gold_table = ["".join(row[1:]) for row in json.loads(problem.gold)["rows"]]
        assert fitting == [gold_table]
        for left_out in range(len(clues)):
            other_clues = clues[:left_out] + clues[left_out + 1 :]
            assert sum(all(clue_holds(clue, table) for clue in other_clues) for table in tables) > 1


def test_clues_of_every_kind_come_up_and_none_of_an_easier_level() -> None:
    assert kinds_of(1) == ("at",) and kinds_of(12) == KINDS and kinds_of(20) == KINDS[8:]
    for level in (8, 12, 15):
        task = zebra_puzzles(level=level, objects=(3, 5), attributes=(2, 2), train_size=150)
        kinds = {clue.kind for problem in task.problems("train") for clue in problem.data["clues"]}
        assert kinds == set(kinds_of(level))


@given(st.integers(2, 4), st.integers(1, 2), st.data())
def test_arrangements_are_numbered_and_drawn_from_their_set(objects: int, attributes: int, data: Any) -> None:
    shape = ZebraShape(objects, attributes)
    count = count_arrangements(objects, attributes)
    tables = {tuple(map(tuple, shape.rows(number))) for number in range(count)}
    assert len(tables) == count
    numbers = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=5))
    mask = sum(1 << number for number in numbers)
    rng = random.Random(1)
    assert {random_arrangement(rng, mask) for _ in range(200)} == numbers


def reaches(node: str, goal: str, edges: Sequence[tuple[str, str]]) -> bool:
    return node == goal or any(reaches(after, goal, edges) for before, after in edges if before == node)


def test_one_neighbour_of_the_start_alone_leads_to_the_goal() -> None:
    task = graph_paths(lookahead=(2, 4), paths=4, extra=5, parents=2)
    for problem in task.problems("train"):
        match = re.fullmatch(r"(.*):(.)>(.)\n", problem.prompt)
        listed_edges, start, goal = match.groups()  # type: ignore[union-attr]
        edges = [(edge[0], edge[1]) for edge in listed_edges.split(",")]
        neighbours = [after for before, after in edges if before == start]
        assert len(neighbours) == 4
        assert [node for node in neighbours if reaches(node, goal, edges)] == [problem.gold]
        targets = [after for _, after in edges]
        assert max(map(targets.count, targets)) <= 2
        assert len(edges) == len(set(edges)) > 4 * 2


# Short programs: descriptions, golds and demonstrations agree.


def run_on_inputs(program: str) -> list[int]:
    outputs = []
    for value in INPUTS:
        printed: list[int] = []
        exec(program, {"x": value, "print": printed.append})
        outputs += printed
    return outputs


def expected_outputs(problem: Problem) -> list[int]:
    step_of = {step.symbols: step for step in STEPS}
    steps = [step_of[symbols] for symbols in problem.data["steps"]]
    return [run_steps(steps, value) for value in INPUTS]


def test_a_demonstration_without_slips_does_what_the_description_says() -> None:
    task = ShortPrograms(wording="symbols", train_size=100, validation_size=10, test_size=10)
    for problem in task.problems("train"):
        assert problem.prompt == ",".join(problem.data["steps"]) + ":\n"
        assert run_on_inputs(task.demonstration(problem, seed=1)) == expected_outputs(problem)
        gold = json.loads(problem.gold)
        assert gold["inputs"] == [str(value) for value in INPUTS]
        assert gold["outputs"] == [str(value) for value in expected_outputs(problem)]
        assert problem.data["prefix"] == "x=int(input())"


def test_the_python_line_of_each_step_does_what_the_step_does_and_no_two_steps_agree_on_all_inputs() -> None:
    results = {step.symbols: [step.apply(value) for value in INPUTS] for step in STEPS}
    assert {step.symbols: run_on_inputs(f"{step.line}\nprint(x)") for step in STEPS} == results
    assert len(set(map(tuple, results.values()))) == len(STEPS)


def test_a_teacher_who_slips_is_right_about_as_often_as_no_line_slips() -> None:
    task = ShortPrograms(wording="symbols", steps=(3, 3), demonstration_noise=0.2, train_size=400)
    right = []
    for seed, problem in enumerate(task.problems("train")):
        right.append(run_on_inputs(task.demonstration(problem, seed)) == expected_outputs(problem))
    # Each of three lines is right with chance 0.8. The standard deviation over 400 programs is 0.025, and the
    # upper bound is wider, since slips can cancel each other.
    assert 0.8**3 - 0.07 < sum(right) / len(right) < 0.8**3 + 0.1


def test_programs_in_symbols_stay_in_the_alphabet_and_programs_in_words_are_asked_for_in_english() -> None:
    task = ShortPrograms(wording="symbols", demonstration_noise=0.5, train_size=200)
    for problem in task.problems("train"):
        assert not set(problem.prompt + task.demonstration(problem, 0)) - set(task.alphabet())
    in_words = ShortPrograms(train_size=5)
    (problem, *_) = in_words.problems("train")
    assert problem.prompt.startswith("Write a Python program")
    assert in_words.demonstration(problem, 0).startswith("```python\nx=int(input())\n")
    with pytest.raises(ValueError, match="real tokenizer"):
        in_words.alphabet()


@needs_sandbox
@pytest.mark.parametrize("wording", ["symbols", "words"])
def test_programs_are_graded_by_running_them_in_the_sandbox(wording: Any) -> None:
    grader = Code(blocks="whole" if wording == "symbols" else "all")
    task = ShortPrograms(
        wording=wording, steps=(2, 2), train_size=2, validation_size=1, test_size=1, grader=grader
    )
    problem, other_problem = task.problems("train")
    assert grader.grade(task.demonstration(problem, 0), problem).correct
    assert not grader.grade(task.demonstration(other_problem, 0), problem).correct
    assert grader.grade("\n", problem).outcome == "no_answer"
