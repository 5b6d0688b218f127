"""Puzzles have one answer, splits share none, and what the teacher writes is what its slips make of it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune_domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader, read_grid, written
from treetune_domains.graders.tagged import OneWord
from treetune_domains.puzzles.grid_puzzles import GridPuzzles, Rule, applied, explanations, rules_of
from treetune_domains.puzzles.logic_puzzles import GraphPaths, OrderingPuzzles
from treetune_domains.puzzles.zebra_puzzles import (
    KINDS,
    Shape,
    ZebraPuzzles,
    arrangements,
    kinds_of,
    random_arrangement,
)

SMALL: dict[str, Any] = {"train_size": 60, "validation_size": 10, "test_size": 20}
SYMBOLS: dict[str, Any] = {"opening": "#", "closing": "\n", "unclosed": True}


def orderings(**keys: Any) -> OrderingPuzzles:
    return OrderingPuzzles(**{"wording": "symbols", "grader": OrderingGrader(**SYMBOLS), **SMALL, **keys})


def grids(**keys: Any) -> GridPuzzles:
    return GridPuzzles(**{"wording": "symbols", "grader": GridGrader(**SYMBOLS), **SMALL, **keys})


def zebras(**keys: Any) -> ZebraPuzzles:
    return ZebraPuzzles(**{"wording": "symbols", "grader": ZebraGrader(**SYMBOLS), **SMALL, **keys})


def paths(**keys: Any) -> GraphPaths:
    return GraphPaths(**{"wording": "symbols", "grader": OneWord(**SYMBOLS), **SMALL, **keys})


_CLUE = re.compile(r"([a-l])([</0-9])([a-l])")


def _orders_that_fit(prompt: str) -> list[str]:
    """By trying all, from the text of the prompt alone."""
    names, clues = re.fullmatch(r"([a-l]+):(.*)>\n", prompt).groups()  # type: ignore[union-attr]
    fitting = []
    for order in map("".join, itertools.permutations(names)):
        for one, sign, other in _CLUE.findall(clues):
            distance = order.index(other) - order.index(one)
            if not (
                distance > 0
                if sign == "<"
                else distance == 1
                if sign == "/"
                else abs(distance) == int(sign) + 1
            ):
                break
        else:
            fitting.append(order)
    return fitting


@given(
    st.sampled_from([(2, 3), (3, 4), (5, 5)]),
    st.sampled_from([("left",), ("next",), ("left", "next", "between"), ("between", "next")]),
    st.integers(0, 1000),
)
@settings(max_examples=25)
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


def test_clues_that_every_order_fits_with_its_mirror_image_are_refused() -> None:
    with pytest.raises(ValueError, match="mirror image"):
        orderings(clues=("between",))


def test_too_few_puzzles_are_told() -> None:
    with pytest.raises(ValueError, match="ask for fewer, or for larger or more varied puzzles"):
        orderings(objects=(2, 2), letters=2, train_size=100).problems("train")


GRID = ((1, 2, 0), (0, 3, 1))


@pytest.mark.parametrize(
    ("rule", "after"),
    [
        (Rule("mirror"), "021/130"),
        (Rule("flip"), "031/120"),
        (Rule("transpose"), "10/23/01"),
        (Rule("turn"), "01/32/10"),
        (Rule("shift_right"), "012/103"),
        (Rule("shift_down"), "031/120"),
        (Rule("fall"), "020/131"),
        (Rule("recolour", (1, 2)), "210/032"),
        (Rule("double"), "112200/112200/003311/003311"),
        (Rule("fill", (3,)), "123/331"),
    ],
)
def test_rules_do_what_their_names_say(rule: Rule, after: str) -> None:
    assert written(rule(GRID)) == after


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
        assert question != written(read_grid(problem.gold))  # type: ignore[arg-type]


def test_doubled_grids_that_no_grader_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="rule 'double' makes grids of 120 cells"):
        grids(rules=("double",), rows=(2, 30), steps=(1, 2))


def _item(letter: str, table: Sequence[str]) -> int:
    """The position of a letter in a table such as ``am/bn``, from 1."""
    return next(place for place, row in enumerate(table, start=1) if letter in row)


def _clue_holds(clue: str, table: Sequence[str]) -> bool:
    """By reading the clue's text, as the task's docstring and the symbols say."""

    def at(letter: str) -> int:
        return _item(letter, table)

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
    shape = Shape(objects, attributes)
    every = [tuple(map(tuple, shape.rows(number))) for number in range(arrangements(objects, attributes))]
    assert len(set(every)) == len(every)
    wanted = data.draw(st.sets(st.integers(0, len(every) - 1), min_size=1, max_size=5))
    among, draw = sum(1 << number for number in wanted), random.Random(1)
    assert {random_arrangement(draw, among) for _ in range(200)} == wanted


def test_puzzles_that_take_too_long_to_make_are_refused() -> None:
    with pytest.raises(ValueError, match="choose fewer objects or attributes"):
        zebras(objects=(6, 6), attributes=(3, 3))


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


def test_more_nodes_than_letters_are_refused() -> None:
    with pytest.raises(ValueError, match="choose fewer paths or a smaller lookahead"):
        paths(paths=10, lookahead=(6, 6))
