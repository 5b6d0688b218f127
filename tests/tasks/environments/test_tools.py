"""Tools as an environment: which turns are calls, what they are answered with, and what ends an answer."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from treetune.tasks.graders.base import Unavailable
from treetune.vocabulary import Problem
from treetune_domains.environments.pool import Moment, Worlds
from treetune_domains.environments.tools import Python, Search, Tool, Tools
from treetune_domains.sandbox.base import Outcome, Sandbox, SandboxUnavailable
from treetune_domains.sandbox.python_tool import PythonTool

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


def said(environment: Tools, *actions: str) -> list[str | None]:
    """The observations, None where the answer has ended."""
    state = environment.reset(PROBLEM, 0)
    turns = [environment.step(state, action) for action in actions]
    return [None if turn.done else turn.observation for turn in turns]


def test_a_call_is_answered_and_a_turn_without_one_is_the_answer() -> None:
    tools = Tools(tools=(Upper(), Lower()))
    assert said(
        tools,
        "Let me see. <upper>six\ntimes</upper> and <lower>Later</lower>",
        "<lower>SEVEN",  # the stop string isn't shown
        "It is 42, or <b>so</b>.",
    ) == ["<result>\nSIX\nTIMES\n</result>", "<result>\nseven\n</result>", None]


def test_the_pattern_of_calls_and_the_words_around_results_are_settings() -> None:
    fenced = r"(?s)```python\n(?P<argument>.*?)(?:```|\Z)"
    tools = Tools(tools=(Upper(),), call=fenced, answer="```output\n{result}\n```")
    assert said(tools, "So:\n```python\nx = 1\n```", "<upper>a</upper>") == ["```output\nX = 1\n```", None]
    named = Tools(tools=(Upper(), Lower()), call=r"(?P<tool>\w+)\((?P<argument>.*?)\)", answer="{result}")
    assert said(named, "upper(a)", "lower(B)", "sideways(c)") == [
        "A",
        "b",
        "There is no tool sideways; there is upper, lower.",
    ]


def test_calls_beyond_the_most_are_told_that_there_are_none_left() -> None:
    tools = Tools(tools=(Upper(),), most_calls=1, answer="{result}")
    assert said(tools, "<upper>a</upper>", "<upper>b</upper>", "42") == [
        "A",
        "There are no calls left: give your answer.",
        None,
    ]


def test_an_answer_goes_on_from_a_snapshot_of_version_0_1() -> None:
    pickled = (
        b"\x80\x04\x95K\x00\x00\x00\x00\x00\x00\x00\x8c-treetune.tasks.environments.tools.environment"
        b"\x94\x8c\x05Calls\x94\x93\x94)\x81\x94}\x94\x8c\x04made\x94K\x01sb."
    )
    worlds = Worlds(Tools(tools=(Upper(),), most_calls=1, answer="{result}"))
    calls = ("<upper>a</upper>", "<upper>b</upper>")
    (turn,) = worlds.answer(Moment(0, PROBLEM, 0, calls, (1, pickled), from_start=True)).turns
    assert turn.observation == "There are no calls left: give your answer."


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tools": (Upper(), Upper())}, "two tools are called upper"),
        ({"tools": (Upper(),), "answer": "done"}, "leaves the result out"),
        ({"tools": (Upper(),), "call": "("}, "no regular expression"),
        ({"tools": (Upper(),), "call": "x(?P<tool>y)"}, r"lacks a group \(\?P<argument>"),
        ({"tools": (Upper(), Lower()), "call": "(?P<argument>y)"}, r"lacks a group \(\?P<tool>"),
    ],
)
def test_tools_that_can_not_be_told_apart_are_refused(given: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Tools(**given)


def test_a_tool_that_is_not_there_leaves_the_answer_without_a_verdict() -> None:
    tools = Tools(tools=(Upper(),))
    (turn,) = Worlds(tools).answer(Moment(0, PROBLEM, 0, ("<upper>closed</upper>",), from_start=True)).turns
    assert (turn.outcome, turn.message, turn.done) == ("unavailable", "it has closed", True)


@dataclass(frozen=True, kw_only=True)
class Scripted(Sandbox):
    """Answers as the Python tool's console does, or isn't there."""

    there: bool = True

    def missing(self) -> list[str]:
        return [] if self.there else ["bwrap isn't installed"]

    def run(self, code, *, stdin="", files=None, limits=None) -> Outcome:
        if not self.there:
            raise SandboxUnavailable("bwrap isn't installed")
        return Outcome(stdout="2\n42", stderr="", exit=0, killed_by=None, seconds=0.1)


def test_python_runs_in_its_sandbox_or_not_at_all() -> None:
    tools = Tools(tools=(Python(console=PythonTool(sandbox=Scripted())),))
    assert said(tools, "<python>6 * 7</python>") == ["<result>\n42\n</result>"] and not tools.missing()
    without = Tools(tools=(Python(console=PythonTool(sandbox=Scripted(there=False))),))
    assert without.missing() == ["bwrap isn't installed"]
    with pytest.raises(Unavailable, match="bwrap"):
        without.tools[0].call("6 * 7")


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
    assert not search.missing() and pickle.loads(pickle.dumps(search)) == search
    assert Search(corpus=("nowhere.jsonl",)).missing() == ["nowhere.jsonl isn't there, which is searched"]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"title": "Cats"}) + "\n")
    with pytest.raises(ValueError, match="no text under 'text'"):
        Search(corpus=(str(other),)).prepare()
