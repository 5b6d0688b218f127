"""The embedded games: what they say, what they pay, and that a good player wins them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.vocabulary import Problem
from treetune_domains.environments.base import EnvironmentTask, Game, Turn
from treetune_domains.environments.games import DIRECTIONS, GuessNumber, Maze

LEVELS = st.integers(0, 10_000)


def halved(game: GuessNumber, problem: Problem) -> list[Turn]:
    """The turns of a player who halves what is left."""
    state, low, high, turns = game.reset(problem, 0), 0, game.most, []
    while not turns or not turns[-1].done:
        guess = (low + high) // 2
        turns.append(game.step(state, f"{guess}\n"))
        if turns[-1].observation in ("<", "My number is lower."):
            high = guess - 1
        else:
            low = guess + 1
    return turns


@given(LEVELS, st.sampled_from(["symbols", "words"]))
def test_halving_finds_each_number(level: int, form: str) -> None:
    game = GuessNumber(most=99, guesses=7, form=form)  # type: ignore[arg-type]
    problem = game.problem("x/0", level)
    assert 0 <= int(problem.gold) <= 99
    assert halved(game, problem)[-1].reward == 1.0


def test_what_is_no_number_costs_a_guess_and_the_last_guess_ends_it() -> None:
    game = GuessNumber(most=9, guesses=3)
    state = game.reset(Problem("", "", "7"), 0)
    turns = [game.step(state, action) for action in ("seven", "٧", "9" * 5000)]
    assert [turn.observation for turn in turns] == ["!", "!", "<"]
    assert [turn.done for turn in turns] == [False, False, True]
    assert not any(turn.reward for turn in turns)


def shortest(maze: Maze, level: int) -> list[str]:
    """A way to all gems, one after the other."""
    walk = maze._walk(level)
    at, way = walk.at, ""
    for gem in walk.gems:
        seen, edge = {at}, [(at, "")]
        while edge[0][0] != gem:
            here, steps = edge.pop(0)
            for name, (dx, dy) in DIRECTIONS.items():
                there = here[0] + dx, here[1] + dy
                if (here, there) in walk.passages and there not in seen:
                    seen.add(there)
                    edge.append((there, steps + name))
        at, way = gem, way + edge[0][1]
    return list(way)


@given(LEVELS, st.sampled_from([0.0, 0.5, 1.0]))
def test_every_gem_can_be_reached_and_all_of_them_earn_one(level: int, walls: float) -> None:
    maze = Maze(size=4, gems=2, steps=100, walls=walls)
    problem = maze.problem("x/0", level)
    state = maze.reset(problem, 0)
    assert problem.prompt.startswith(f"{maze._position(state)} ")
    turns: list[Turn] = []
    for way in shortest(maze, level):  # which may have come by the last gem earlier
        turns.append(maze.step(state, way))
        if turns[-1].done:
            break
    assert sum(turn.reward for turn in turns) == 1.0 and turns[-1].done


@given(LEVELS)
def test_a_wall_and_what_is_no_way_leave_one_where_one_is(level: int) -> None:
    maze = Maze(size=3, gems=1, steps=4, walls=1.0)
    state = maze.reset(maze.problem("x/0", level), 0)
    place = maze._position(state)
    closed = [way for way in DIRECTIONS if way not in place.partition(":")[2]]
    for way in [*closed, "up"][:3]:
        assert maze.step(state, way).observation == place
    assert state.steps == len([*closed, "up"][:3])


@pytest.mark.parametrize("game", [GuessNumber(), Maze(), Maze(size=8, gems=5)], ids=str)
def test_problems_are_the_same_every_time_and_no_level_is_in_two_splits(game: Game) -> None:
    task = EnvironmentTask(environment=game, train_size=50, validation_size=10, test_size=20)
    larger = EnvironmentTask(environment=game, train_size=60, validation_size=10, test_size=20)
    for split, size in (("train", 50), ("validation", 10), ("test", 20)):
        problems = task.problems(split)
        assert len(problems) == task.size(split) == size
        assert list(larger.problems(split))[:size] == list(problems), "train_size moves no held-out level"
    alphabet = set(game.alphabet())
    said = itertools.chain.from_iterable(
        (one.prompt, game.step(game.reset(one, 0), "N").observation) for one in task.problems("train")
    )
    assert set("".join(said)) <= alphabet
