"""What holds for every task that makes its problems on the spot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tasks.test_logic_and_grid_puzzles import grids, orderings, paths, zebras
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import GeneratedTask, Split
from treetune.tasks.countdown import Countdown
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.multiplication import Multiplication
from treetune_domains.environments.base import EnvironmentTask
from treetune_domains.environments.games import GuessNumber, Maze
from treetune_domains.puzzles.grid_puzzles import GridPuzzles
from treetune_domains.puzzles.logic_puzzles import GraphPaths, OrderingPuzzles
from treetune_domains.puzzles.reasoning_gym import ReasoningGym
from treetune_domains.puzzles.short_programs import ShortPrograms
from treetune_domains.puzzles.zebra_puzzles import ZebraPuzzles
from treetune_lab.signposts import Signposts

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SMALL: dict[str, Any] = {"train_size": 30, "validation_size": 5, "test_size": 10}
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
