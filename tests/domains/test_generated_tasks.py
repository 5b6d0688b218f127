"""Tasks that make their problems on the spot: what holds for all, and puzzles that have one answer."""

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

from tests.domains.code_grading import needs_sandbox
from treetune.domains.environments.base import EnvironmentTask
from treetune.domains.environments.games import GuessNumber, Maze
from treetune.domains.graders.code import Code
from treetune.domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader, read_grid, write_grid
from treetune.domains.graders.tagged import OneWord
from treetune.domains.puzzles.grid_puzzles import (
    GridPuzzles,
    GridTransformation,
    applied,
    explanations,
    rules_of,
)
from treetune.domains.puzzles.logic_puzzles import GraphPaths, OrderingPuzzles
from treetune.domains.puzzles.reasoning_gym import ReasoningGym
from treetune.domains.puzzles.short_programs import INPUTS, STEPS, ShortPrograms, result
from treetune.domains.puzzles.zebra_puzzles import (
    KINDS,
    ZebraPuzzles,
    ZebraShape,
    arrangements,
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


def symbols(kind: type, grader: type, **keys: Any) -> Any:
    answers = grader(opening="#", closing="\n", unclosed=True)
    return kind(**{"wording": "symbols", "grader": answers, **SMALL, **keys})


def orderings(**keys: Any) -> OrderingPuzzles:
    return symbols(OrderingPuzzles, OrderingGrader, **keys)


def grids(**keys: Any) -> GridPuzzles:
    return symbols(GridPuzzles, GridGrader, **keys)


def zebras(**keys: Any) -> ZebraPuzzles:
    return symbols(ZebraPuzzles, ZebraGrader, **keys)


def paths(**keys: Any) -> GraphPaths:
    return symbols(GraphPaths, OneWord, **keys)


TAUGHT: dict[str, GeneratedTask] = {
    "sums": AdditionChain(**SMALL),
    "sums of many digits": AdditionChain(count=2, digits=4, **SMALL),
    "products": Multiplication(**SMALL),
    "products of several factors": Multiplication(factors=(2, 4), **SMALL),
    "products in threads": Multiplication(
        form="tree_digits", factors=4, wording="words", grader=Numeric(without_marker="boxed"), **SMALL
    ),
    "countdown": Countdown(operators=("+", "-"), **SMALL),
    "orders": OrderingPuzzles(**SMALL),
    "orders in symbols": orderings(**SMALL),
    "orders by neighbours": orderings(clues=("next",), objects=(4, 4), **SMALL),
    "grids": GridPuzzles(**SMALL),
    "grids with rules": GridPuzzles(shown=0, **SMALL),
    "grids in symbols": grids(**SMALL),
    "grids with rules in symbols": grids(shown=0, steps=(1, 2), **SMALL),
    "zebras": ZebraPuzzles(**SMALL),
    "zebras in symbols": zebras(**SMALL),
    "hard zebras": zebras(level=20, objects=(3, 3), attributes=(2, 2), **SMALL),
    "paths": GraphPaths(**SMALL),
    "paths in symbols": paths(**SMALL),
    # One in five of its possible questions: draws come twice.
    "reasoning_gym": ReasoningGym(dataset="count_bits", config={"min_n": 1, "max_n": 250}, **SMALL),
}
TASKS = TAUGHT | {
    "programs": ShortPrograms(**SMALL),
    "a game": EnvironmentTask(environment=GuessNumber(most=999), **SMALL),
    "signposts": Signposts(**SMALL),
    "a maze": EnvironmentTask(environment=Maze(), **SMALL),
}
every_task = pytest.mark.parametrize("name", TASKS)
every_teacher = pytest.mark.parametrize("name", TAUGHT)


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
    task = TAUGHT[name]
    slipping = replace(task, demonstration_noise=1.0)
    problems = task.problems("train")
    right = [task.grader.grade(task.demonstration(one, 3), one).reward for one in problems]
    wrong = [task.grader.grade(slipping.demonstration(one, 3), one).reward for one in problems]
    assert set(right) == {1.0}
    assert sum(wrong) < len(wrong) / 2


@every_teacher
def test_demonstrations_depend_on_the_seed_alone_and_are_cut_at_the_ends_of_lines(name: str) -> None:
    task = TAUGHT[name]
    noisy = replace(task, demonstration_noise=0.5)
    problem = max(task.problems("train"), key=lambda one: len(task.demonstration(one, 1)))
    assert noisy.demonstration(problem, 1) == noisy.demonstration(problem, 1)
    assert len({noisy.demonstration(problem, seed) for seed in range(20)}) > 1
    text = task.demonstration(problem, 1)
    ends = task.step_boundaries(text)
    assert ends[0] == 0 and ends[-1] == len(text) and ends == sorted(set(ends))
    assert all(text[end - 1] == "\n" for end in ends[1:-1])
    assert len(ends) == 1 + len(text.removesuffix("\n").split("\n"))


@every_teacher
def test_a_character_model_knows_all_that_is_written_or_needs_another_tokenizer(name: str) -> None:
    task = TAUGHT[name]
    in_words = name in ("products in threads", "orders", "grids", "grids with rules", "zebras", "paths")
    if in_words:
        with pytest.raises(ValueError, match="no small alphabet: use a real tokenizer"):
            task.alphabet()
    else:
        texts = [one.prompt + task.demonstration(one, 1) for one in task.problems("train")]
        assert set("".join(texts)) <= set(task.alphabet())


@pytest.mark.parametrize(
    "kind", [OrderingPuzzles, GridPuzzles, ZebraPuzzles, GraphPaths, ShortPrograms, Countdown]
)
def test_the_smaller_end_of_a_range_comes_first(kind: type[GeneratedTask]) -> None:
    for name in kind.ranges:
        with pytest.raises(ValueError, match=f"{name} is .*: give the smaller one first"):
            kind(**{name: (4, 2)})


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (orderings, {"clues": ("between",)}, "mirror image"),
        (
            orderings,
            {"objects": (2, 2), "letters": 2, "train_size": 100},
            "ask for fewer, or for larger or more varied puzzles",
        ),
        (
            grids,
            {"rules": ("double",), "rows": (2, 30), "steps": (1, 2)},
            "rule 'double' makes grids of 120 cells",
        ),
        (zebras, {"objects": (6, 6), "attributes": (3, 3)}, "choose fewer objects or attributes"),
        (paths, {"paths": 10, "lookahead": (6, 6)}, "choose fewer paths or a smaller lookahead"),
    ],
)
def test_puzzles_that_cannot_be_made_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings).problems("train")


# Puzzles have one answer.


_CLUE = re.compile(r"([a-l])([</0-9])([a-l])")


def _orders_that_fit(prompt: str) -> list[str]:
    """By trying all, from the text of the prompt alone."""
    names, clues = re.fullmatch(r"([a-l]+):(.*)>\n", prompt).groups()  # type: ignore[union-attr]
    fitting = []
    for order in map("".join, itertools.permutations(names)):
        for one, sign, other in _CLUE.findall(clues):
            distance = order.index(other) - order.index(one)
            apart = sign.isdigit() and abs(distance) == int(sign) + 1
            if not {"<": distance > 0, "/": distance == 1}.get(sign, apart):
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
    task = orderings(objects=objects, clues=clues, seed=seed, train_size=3, validation_size=1, test_size=1)
    for problem in task.problems("train"):
        assert _orders_that_fit(problem.prompt) == ["".join(json.loads(problem.gold))]
        head, _, tail = problem.prompt.removesuffix(">\n").partition(":")
        parts = tail.split(",")
        for left_out in range(len(parts)):
            rest = ",".join(parts[:left_out] + parts[left_out + 1 :])
            assert len(_orders_that_fit(f"{head}:{rest}>\n")) > 1


def test_clues_in_words_say_the_same_as_the_solution() -> None:
    for problem in OrderingPuzzles(**SMALL).problems("train"):
        order = json.loads(problem.gold)
        for one, exactly, side, other in re.findall(
            r"- (\w+) is (immediately|somewhere) to the (left|right) of (\w+)\.", problem.prompt
        ):
            distance = (order.index(other) - order.index(one)) * (1 if side == "left" else -1)
            assert distance == 1 if exactly == "immediately" else distance > 0
        for apart, one, other in re.findall(r"- (\d) of them \w+ between (\w+) and (\w+)\.", problem.prompt):
            assert abs(order.index(one) - order.index(other)) == int(apart) + 1


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
    task = grids(steps=(1, 2), shown=1)
    for problem in task.problems("test"):
        shown, question = problem.prompt.removesuffix(">\n").rsplit(";", 1)
        pairs = [tuple(map(read_grid, pair.split("="))) for pair in shown.split(";")]
        steps = len(problem.data["rules"])
        answers = {
            applied(chain, read_grid(question))  # type: ignore[arg-type]
            for chain in explanations(rules_of(task.rules, task.colours), steps, pairs)  # type: ignore[arg-type]
        }
        assert answers == {read_grid(problem.gold)}


def test_rules_that_are_told_lead_to_the_gold() -> None:
    task = grids(shown=0, steps=(2, 2))
    symbols = {rule.symbol: rule for rule in rules_of(task.rules, task.colours)}
    for problem in task.problems("test"):
        told, _, question = problem.prompt.removesuffix(">\n").partition(":")
        chain = [symbols[symbol] for symbol in re.findall(r"[a-z]\d*", told)]
        assert applied(chain, read_grid(question)) == read_grid(problem.gold)  # type: ignore[arg-type]
        assert question != write_grid(read_grid(problem.gold))  # type: ignore[arg-type]


def _clue_holds(clue: str, table: Sequence[str]) -> bool:
    """By reading the clue's text, as the task's docstring and the symbols say."""

    def at(letter: str) -> int:
        return next(place for place, row in enumerate(table, start=1) if letter in row)

    if found := re.fullmatch(r"(\w)@(\d)", clue):
        return at(found[1]) == int(found[2])
    if found := re.fullmatch(r"(\w)([=~<!])(\w)", clue):
        one, other = at(found[1]), at(found[3])
        return {"=": one == other, "~": abs(one - other) == 1, "<": one < other, "!": one != other}[found[2]]
    if found := re.fullmatch(r"(\w)([|^])", clue):
        last = len(table)
        return at(found[1]) in ((1, last) if found[2] == "|" else ((last + 1) / 2,))
    if found := re.fullmatch(r"(\w)_(\w)_(\w)", clue):
        return at(found[1]) < at(found[2]) < at(found[3]) or at(found[1]) > at(found[2]) > at(found[3])
    if found := re.fullmatch(r"(\w)%(\d)", clue):
        return at(found[1]) % 2 == int(found[2])
    found = re.fullmatch(r"(-?)(\w)(\d)([+;]?)(\w)(\d)", clue)
    assert found is not None, clue
    one, other = at(found[2]) == int(found[3]), at(found[5]) == int(found[6])
    return not (one or other) if found[1] else one != other if found[4] == "+" else one or other


@pytest.mark.parametrize("level", [2, 5, 8, 12, 16, 20])
def test_exactly_one_table_fits_all_clues_and_more_fit_all_but_one(level: int) -> None:
    task = zebras(level=level, objects=(3, 3), attributes=(2, 2), train_size=12)
    for problem in task.problems("train"):
        groups, _, told = problem.prompt.removesuffix(">\n").partition(":")
        first, second = groups[1:].split(",")
        every = [
            ["".join(pair) for pair in zip(one, other, strict=True)]
            for one in itertools.permutations(first)
            for other in itertools.permutations(second)
        ]
        clues = told.split(",")
        fitting = [table for table in every if all(_clue_holds(clue, table) for clue in clues)]
        assert [["".join(row[1:]) for row in json.loads(problem.gold)["rows"]]] == fitting
        for left_out in range(len(clues)):
            rest = clues[:left_out] + clues[left_out + 1 :]
            assert sum(all(_clue_holds(clue, table) for clue in rest) for table in every) > 1


def test_clues_of_every_kind_come_up_and_none_of_an_easier_level() -> None:
    assert kinds_of(1) == ("at",) and kinds_of(12) == KINDS and kinds_of(20) == KINDS[8:]
    for level in (8, 12, 15):
        task = zebras(level=level, objects=(3, 5), attributes=(2, 2), train_size=150)
        found = {clue.kind for problem in task.problems("train") for clue in problem.data["clues"]}
        assert found == set(kinds_of(level))


@given(st.integers(2, 4), st.integers(1, 2), st.data())
def test_arrangements_are_numbered_and_drawn_from_their_set(objects: int, attributes: int, data: Any) -> None:
    shape = ZebraShape(objects, attributes)
    every = [tuple(map(tuple, shape.rows(number))) for number in range(arrangements(objects, attributes))]
    assert len(set(every)) == len(every)
    wanted = data.draw(st.sets(st.integers(0, len(every) - 1), min_size=1, max_size=5))
    among, draw = sum(1 << number for number in wanted), random.Random(1)
    assert {random_arrangement(draw, among) for _ in range(200)} == wanted


def _reaches(node: str, goal: str, edges: Sequence[tuple[str, str]]) -> bool:
    return node == goal or any(_reaches(after, goal, edges) for before, after in edges if before == node)


def test_one_neighbour_of_the_start_alone_leads_to_the_goal() -> None:
    task = paths(lookahead=(2, 4), paths=4, extra=5, parents=2)
    for problem in task.problems("train"):
        listed, start, goal = re.fullmatch(r"(.*):(.)>(.)\n", problem.prompt).groups()  # type: ignore[union-attr]
        edges = [(edge[0], edge[1]) for edge in listed.split(",")]
        neighbours = [after for before, after in edges if before == start]
        assert len(neighbours) == 4
        assert [node for node in neighbours if _reaches(node, goal, edges)] == [problem.gold]
        entered = [after for _, after in edges]
        assert max(map(entered.count, entered)) <= 2
        assert len(edges) == len(set(edges)) > 4 * 2


# Short programs: descriptions, golds and demonstrations agree.


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
        gold = json.loads(problem.gold)
        assert gold["inputs"] == [str(value) for value in INPUTS]
        assert gold["outputs"] == [str(value) for value in expected(problem)]
        assert problem.data["prefix"] == "x=int(input())"


def test_the_steps_lines_of_python_do_what_the_steps_do_and_the_inputs_tell_any_two_apart() -> None:
    results = {step.symbols: [step.value(value) for value in INPUTS] for step in STEPS}
    assert {step.symbols: run(f"{step.line}\nprint(x)") for step in STEPS} == results
    assert len(set(map(tuple, results.values()))) == len(STEPS)


def test_a_teacher_who_slips_is_right_about_as_often_as_no_line_slips() -> None:
    task = ShortPrograms(wording="symbols", steps=(3, 3), demonstration_noise=0.2, train_size=400)
    problems = task.problems("train")
    right = [run(task.demonstration(one, seed)) == expected(one) for seed, one in enumerate(problems)]
    assert 0.8**3 - 0.07 < sum(right) / len(right) < 0.8**3 + 0.1


def test_in_symbols_all_is_in_the_alphabet_and_in_words_a_program_is_asked_for_in_english() -> None:
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
    (problem, other) = task.problems("train")
    assert grader.grade(task.demonstration(problem, 0), problem).correct
    assert not grader.grade(task.demonstration(other, 0), problem).correct
    assert grader.grade("\n", problem).outcome == "no_answer"
