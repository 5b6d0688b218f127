"""Promises of environments:

* the embedded games can be won at every level, read only what follows a thought, and count mistakes as
  turns;
* an environment of another library is played by its `reset` and `step`, and continues from a copy;
* a turn with a call of a tool is answered, a turn without one is the answer, and a missing tool leaves the
  answer ungraded.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.domains.environments.base import EnvironmentTask, Game, Turn
from treetune.domains.environments.games import DIRECTIONS, GuessNumber, Maze
from treetune.domains.environments.tools import Python, Search, Tool, Tools
from treetune.domains.environments.worlds import World
from treetune.domains.sandbox.base import ProgramOutcome, Sandbox
from treetune.domains.sandbox.python_tool import PythonTool
from treetune.exceptions import SandboxUnavailable, Unavailable
from treetune.findings import missing_requirements
from treetune.vocabulary import Problem

sys.path.append(str(Path(__file__).parents[3] / "examples/own_parts"))
from gymnasium_environments import Gem, Gymnasium

LEVELS = st.integers(0, 10_000)


def play_by_halving(game: GuessNumber, problem: Problem) -> list[Turn]:
    """Play as a player who halves the remaining interval, and list the turns."""
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
    assert play_by_halving(game, problem)[-1].reward == 1.0


def test_a_guess_that_is_no_number_counts_and_the_last_guess_ends_the_game() -> None:
    game = GuessNumber(most=9, guesses=3)
    state = game.reset(Problem("", "", "7"), 0)
    turns = [game.step(state, action) for action in ("seven", "٧", "9" * 5000)]
    assert [turn.observation for turn in turns] == ["!", "!", "<"]
    assert [turn.done for turn in turns] == [False, False, True]
    assert not any(turn.reward for turn in turns)


def test_games_read_what_follows_the_thought() -> None:
    game = GuessNumber(most=9, guesses=3)
    state = game.reset(Problem("", "", "7"), 0)
    actions = ("<think>7?</think>\n8", "<think>7", "it is 3</think> 7")
    lower, unreadable, right = [game.step(state, action) for action in actions]
    assert [lower.observation, unreadable.observation] == ["<", "!"]
    assert right.reward == 1.0
    maze = Maze(size=8, gems=5)
    level = maze.problem("x/0", 3)
    direction = way_to_all_gems(maze, 3)[0]
    without_thought = maze.step(maze.reset(level, 0), direction)
    with_thought = maze.step(maze.reset(level, 0), f"<think>N, E?</think> {direction}")
    assert without_thought == with_thought


def way_to_all_gems(maze: Maze, level: int) -> list[str]:
    """Find a way to all gems, one after the other, by breadth-first search."""
    walk = maze._begin_walk(level)
    position, way = walk.at, ""
    for gem in walk.gems:
        reached, queue = {position}, [(position, "")]
        while queue[0][0] != gem:
            cell, directions = queue.pop(0)
            for name, (dx, dy) in DIRECTIONS.items():
                neighbour = cell[0] + dx, cell[1] + dy
                if (cell, neighbour) in walk.passages and neighbour not in reached:
                    reached.add(neighbour)
                    queue.append((neighbour, directions + name))
        position, way = gem, way + queue[0][1]
    return list(way)


@given(LEVELS, st.sampled_from([0.0, 0.5, 1.0]))
def test_every_gem_can_be_reached_and_all_of_them_earn_one(level: int, walls: float) -> None:
    maze = Maze(size=4, gems=2, steps=100, walls=walls)
    problem = maze.problem("x/0", level)
    state = maze.reset(problem, 0)
    assert problem.prompt.startswith(f"{maze._write_position(state)} ")
    turns: list[Turn] = []
    for direction in way_to_all_gems(maze, level):  # which may pass the last gem on the way to another
        turns.append(maze.step(state, direction))
        if turns[-1].done:
            break
    assert sum(turn.reward for turn in turns) == 1.0 and turns[-1].done


@given(LEVELS)
def test_a_wall_or_a_word_that_is_no_direction_costs_a_step_and_moves_nobody(level: int) -> None:
    maze = Maze(size=3, gems=1, steps=4, walls=1.0)
    state = maze.reset(maze.problem("x/0", level), 0)
    position = maze._write_position(state)
    blocked = [direction for direction in DIRECTIONS if direction not in position.partition(":")[2]]
    tried = [*blocked, "up"][:3]
    for direction in tried:
        assert maze.step(state, direction).observation == position
    assert state.steps == len(tried)


@pytest.mark.parametrize("game", [GuessNumber(), Maze(size=8, gems=5)], ids=str)
def test_prompts_and_observations_of_a_game_are_in_its_alphabet(game: Game) -> None:
    task = EnvironmentTask(environment=game, train_size=50, validation_size=10, test_size=20)
    for problem in task.problems("train"):
        observation = game.step(game.reset(problem, 0), "N").observation
        assert set(problem.prompt + observation) <= set(game.alphabet())


# Environments of other libraries


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


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gymnasium", "gem"):
        library = ModuleType(name)
        library.make = lambda id, **arguments: {"corridor": Corridor}[id](**arguments)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, library)


@pytest.mark.usefixtures("libraries")
def test_words_stand_for_numbered_actions_and_an_unknown_word_costs_a_turn() -> None:
    in_words: dict[str, Any] = {"actions": ("left", "right"), "instructions": "Go right.\n"}
    game = Gymnasium(id="corridor", arguments={"length": 4}, observe="rendered", **in_words)
    problem = game.problem("train/0", 1)
    assert problem.prompt == "Go right.\n.x"
    state = game.reset(problem, 99)
    turns = [game.step(state, word) for word in ("right\n", "up", "right")]
    assert turns == [Turn("..x"), Turn("There is no action 'up'."), Turn("...x", done=True, reward=1.0)]


@pytest.mark.usefixtures("libraries")
def test_actions_of_text_are_handed_on_unchanged_and_the_suffix_is_shown() -> None:
    game = Gem(id="corridor")
    problem = game.problem("train/0", 2)
    assert problem.prompt == "2\nWhich way?"
    state = game.reset(problem, 0)
    assert game.step(state, "right") == Turn("3")
    assert game.step(state, "right") == Turn("4", done=True, reward=1.0)


@pytest.mark.usefixtures("libraries")
def test_an_environment_continues_from_its_copy_and_is_not_played_again() -> None:
    game = Gem(id="corridor")
    problem = game.problem("train/0", 0)
    world = World(game)
    assert world.begin(problem, 0).turns == ()
    snapshot = world.step("right").snapshot
    assert snapshot is not None and snapshot[0] == 1
    assert World(game).begin(problem, 0, ("right", "right"), snapshot).turns == (Turn("2"),)
    (lost,) = World(game).begin(problem, 0, ("right",)).turns
    assert lost.outcome == "unavailable"
    of_a_class_that_is_gone = (1, b"ca_package_that_is_gone\nCalls\n.")
    (turn,) = World(game).begin(problem, 0, ("right", "right"), of_a_class_that_is_gone).turns
    assert turn.outcome == "unavailable" and "state can't be read" in (turn.message or "")


@pytest.mark.usefixtures("libraries")
def test_a_configuration_is_checked_without_making_an_environment_and_a_missing_package_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = EnvironmentTask(environment=Gymnasium(id="corridor"), train_size=5, validation_size=2, test_size=3)
    assert task.examples(4) == ()
    assert [problem.prompt for problem in task.problems("train")] == ["1", "2", "3", "0", "1"]
    monkeypatch.delitem(sys.modules, "gymnasium")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (missing,) = missing_requirements([Gymnasium(id="corridor")])
    assert missing == "the package 'gymnasium' isn't installed, which the environment 'corridor' needs"


# Tools

PROBLEM = Problem("x/0", "What is six times seven?", "42")


@dataclass(frozen=True, kw_only=True)
class Upper(Tool):
    """Shouts."""

    name: str = "upper"

    def call(self, argument: str) -> str:
        if argument == "closed":
            raise Unavailable("it has closed")
        return argument.upper() + "\n"


@dataclass(frozen=True, kw_only=True)
class Lower(Upper):
    name: str = "lower"

    def call(self, argument: str) -> str:
        return argument.lower()


def observations(environment: Tools, *actions: str) -> list[str | None]:
    """Play turns, and list their observations, None for a turn that ends the answer."""
    state = environment.reset(PROBLEM, 0)
    turns = [environment.step(state, action) for action in actions]
    return [None if turn.done else turn.observation for turn in turns]


def test_a_call_is_answered_and_a_turn_without_one_is_the_answer() -> None:
    tools = Tools(tools=(Upper(), Lower()))
    assert observations(
        tools,
        "Let me see. <upper>six\ntimes</upper> and <lower>Later</lower>",
        "<lower>SEVEN",  # the stop string isn't shown
        "It is 42, or <b>so</b>.",
    ) == ["<result>\nSIX\nTIMES\n</result>", "<result>\nseven\n</result>", None]


def test_the_pattern_of_calls_and_the_words_around_results_are_settings() -> None:
    fenced = r"(?s)```python\n(?P<argument>.*?)(?:```|\Z)"
    tools = Tools(tools=(Upper(),), call=fenced, answer="```output\n{result}\n```")
    assert observations(tools, "So:\n```python\nx = 1\n```", "<upper>a</upper>") == [
        "```output\nX = 1\n```",
        None,
    ]
    named = Tools(tools=(Upper(), Lower()), call=r"(?P<tool>\w+)\((?P<argument>.*?)\)", answer="{result}")
    assert observations(named, "upper(a)", "lower(B)", "sideways(c)") == [
        "A",
        "b",
        "There is no tool sideways; there is upper, lower.",
    ]


def test_calls_beyond_the_bound_are_refused_also_after_a_snapshot_of_version_0_1() -> None:
    tools = Tools(tools=(Upper(),), most_calls=1, answer="{result}")
    none_left = "There are no calls left: give your answer."
    calls = ("<upper>a</upper>", "<upper>b</upper>")
    assert observations(tools, *calls, "42") == ["A", none_left, None]
    # A state of version 0.1, whose class had another name and another module.
    pickled = (
        b"\x80\x04\x95K\x00\x00\x00\x00\x00\x00\x00\x8c-treetune.tasks.environments.tools.environment"
        b"\x94\x8c\x05Calls\x94\x93\x94)\x81\x94}\x94\x8c\x04made\x94K\x01sb."
    )
    (turn,) = World(tools).begin(PROBLEM, 0, calls, (1, pickled)).turns
    assert turn.observation == none_left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": (Upper(), Upper())}, "two tools are called upper"),
        ({"tools": (Upper(),), "answer": "done"}, "leaves the result out"),
        ({"tools": (Upper(),), "call": "("}, "not a regular expression"),
        ({"tools": (Upper(),), "call": "x(?P<tool>y)"}, r"has no group \(\?P<argument>"),
        ({"tools": (Upper(), Lower()), "call": "(?P<argument>y)"}, r"has no group \(\?P<tool>"),
    ],
)
def test_settings_that_do_not_identify_tool_argument_and_result_are_refused(
    settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tools(**settings)


def test_an_unavailable_tool_leaves_the_answer_ungraded() -> None:
    tools = Tools(tools=(Upper(),))
    world = World(tools)
    assert not world.begin(PROBLEM, 0).turns
    (turn,) = world.step("<upper>closed</upper>").turns
    assert (turn.outcome, turn.message, turn.done) == ("unavailable", "it has closed", True)


@dataclass(frozen=True, kw_only=True)
class Scripted(Sandbox):
    """A sandbox with one answer, or one that isn't installed."""

    is_installed: bool = True

    def missing(self) -> list[str]:
        return [] if self.is_installed else ["bwrap isn't installed"]

    def run(self, code, *, stdin="", files=None, limits=None) -> ProgramOutcome:
        if not self.is_installed:
            raise SandboxUnavailable("bwrap isn't installed")
        return ProgramOutcome(stdout="2\n42", stderr="", exit=0, killed_by=None, seconds=0.1)


def test_python_runs_in_its_sandbox_or_not_at_all() -> None:
    tools = Tools(tools=(Python(console=PythonTool(sandbox=Scripted())),))
    assert observations(tools, "<python>6 * 7</python>") == ["<result>\n42\n</result>"]
    assert not missing_requirements([tools])
    without_sandbox = Tools(tools=(Python(console=PythonTool(sandbox=Scripted(is_installed=False))),))
    assert missing_requirements([without_sandbox]) == ["bwrap isn't installed"]
    with pytest.raises(Unavailable, match="bwrap"):
        without_sandbox.tools[0].call("6 * 7")


def test_a_search_finds_the_passages_that_fit(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [
        {"title": "Cats", "text": "Cats sleep sixteen hours a day."},
        {"text": "The Rhine flows into the North Sea."},
        {"text": "Dogs bark at cats."},
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    search = Search(corpus=(str(corpus),), results=2, characters=20)
    search.prepare()
    assert search.call("how long do cats sleep?") == "(1) Cats: Cats sleep six\n(2) Dogs bark at cats."
    assert search.call("zebras") == "Nothing was found."
    assert search.call("  ") == "Nothing was asked for."
    assert not missing_requirements([search]) and pickle.loads(pickle.dumps(search)) == search
    assert missing_requirements([Search(corpus=("nowhere.jsonl",))]) == [
        "nowhere.jsonl isn't there, which is searched"
    ]
    corpus_without_texts = tmp_path / "other.jsonl"
    corpus_without_texts.write_text(json.dumps({"title": "Cats"}) + "\n")
    with pytest.raises(ValueError, match="no text under 'text'"):
        Search(corpus=(str(corpus_without_texts),)).prepare()
