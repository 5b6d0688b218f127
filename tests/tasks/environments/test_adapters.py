"""Environments that others have written are played through their `reset` and `step`, as theirs are."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from treetune_domains.environments.base import EnvironmentTask, Turn
from treetune_domains.environments.games import Gem, Gymnasium
from treetune_domains.environments.pool import Moment, Worlds


class Corridor:
    """Five cells; 0 goes left and 1 right, and the right end is the goal."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.at = seed % (self.length - 1)
        return self.at, {"suffix": "Which way?"}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at = max(0, self.at + (1 if action in (1, "right") else -1))
        won = self.at == self.length - 1
        return self.at, float(won), won, False, {}

    def render(self) -> str:
        return "." * self.at + "x"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gymnasium", "gem"):
        library = ModuleType(name)
        library.make = lambda id, **arguments: {"corridor": Corridor}[id](**arguments)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, library)


def test_numbers_have_words_and_a_word_that_is_none_costs_a_turn() -> None:
    game = Gymnasium(
        id="corridor",
        arguments={"length": 4},
        actions=("left", "right"),
        observe="rendered",
        instructions="Go right.\n",
    )
    problem = game.problem("train/0", 1)
    assert problem.prompt == "Go right.\n.x"
    state = game.reset(problem, 99)
    turns = [game.step(state, word) for word in ("right\n", "up", "right")]
    assert turns == [
        Turn("..x"),
        Turn("There is no action 'up'."),
        Turn("...x", done=True, reward=1.0),
    ]


def test_texts_go_as_they_are_and_a_suffix_is_shown() -> None:
    game = Gem(id="corridor")
    problem = game.problem("train/0", 2)
    assert problem.prompt == "2\nWhich way?"
    state = game.reset(problem, 0)
    assert game.step(state, "right") == Turn("3")
    assert game.step(state, "right") == Turn("4", done=True, reward=1.0)


def test_one_that_is_copied_goes_on_from_its_copy_and_is_not_played_again() -> None:
    game = Gem(id="corridor")
    problem = game.problem("train/0", 0)
    worlds = Worlds(game)
    assert worlds.answer(Moment(0, problem, 0, from_start=True)).turns == ()
    snapshot = worlds.answer(Moment(0, problem, 0, ("right",))).snapshot
    assert snapshot is not None and snapshot[0] == 1
    moment = Moment(1, problem, 0, ("right", "right"), snapshot, from_start=True)
    assert Worlds(game).answer(moment).turns == (Turn("2"),)
    lost = Worlds(game).answer(Moment(1, problem, 0, ("right", "right"), from_start=True))
    assert lost.turns[-1].outcome == "unavailable"
    of_a_class_that_is_gone = (1, b"ca_package_that_is_gone\nCalls\n.")
    moment = Moment(1, problem, 0, ("right", "right"), of_a_class_that_is_gone, from_start=True)
    (turn,) = Worlds(game).answer(moment).turns
    assert turn.outcome == "unavailable" and "state can't be read" in (turn.message or "")


def test_a_configuration_is_checked_without_making_an_environment() -> None:
    task = EnvironmentTask(environment=Gymnasium(id="corridor"), train_size=5, validation_size=2, test_size=3)
    assert task.examples(4) == ()
    assert [problem.prompt for problem in task.problems("train")] == ["1", "2", "3", "0", "1"]


def test_a_package_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gymnasium")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (told,) = Gymnasium(id="corridor").missing()
    assert told == "the package 'gymnasium' isn't installed, which the environment 'corridor' needs"
