"""Promises of environments in the form of the library verifiers:

* they run unchanged, in a process for each answer, and the rewards of their steps are those of turns;
* one that hangs, dies or raises ends its answer and leaves no process;
* their tools are called in the chat's format, and one that can't be played says why.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.domains.environments.test_native_tools import ScriptedModel, call, message_with_calls
from tests.support.chat_models import bpe_tokenizer, template
from tests.support.contexts import context_of
from tests.support.trees import answered
from treetune.domains.environments.base import EnvironmentTask, Turn
from treetune.domains.environments.pool import EnvironmentPool
from treetune.domains.multi_turn import MultiTurn
from treetune.findings import missing_requirements
from treetune.models.chat import Chat
from treetune.models.tokenizer import codec_of
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Message

sys.path.append(str(Path(__file__).parents[3] / "examples/own_parts"))
from verifiers_environments import Verifiers


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    shutil.copy(Path(__file__).parent / "programs" / "foreign_environments.txt", folder / "my_env.py")
    return folder / "my_env.py"


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool() as pool:
        yield pool


def environment(file: Path, kind: str = "Guess", **settings: Any) -> Verifiers:
    return Verifiers(path=str(file), arguments={"kind": kind}, **settings)


def play_turns(
    pool: EnvironmentPool, played: Verifiers, *actions: str, level: int = 1, seed: int = 7
) -> list[Turn]:
    play = pool.begin(played, played.problem("x", level), seed)
    turns: list[Turn] = []
    for action in actions:
        turns += play.act(action).result().turns
    play.end()
    return turns


def test_an_environment_runs_as_it_is_and_its_steps_rewards_are_those_of_turns(
    file: Path, pool: EnvironmentPool
) -> None:
    guess = environment(file)
    problem = guess.problem("x", 1)
    assert problem.messages == (Message("system", "Guess."), Message("user", "1 to 8?"))
    assert (problem.prompt, problem.gold) == ("Guess.\n\n1 to 8?", "5")
    first, second, last = play_turns(pool, guess, "1", "6", "5")
    assert [first.observation.split()[0], second.observation.split()[0]] == ["higher", "lower"]
    assert [turn.reward for turn in (first, second, last)] == [0.125, 0.125, 0.75], "together the rubric's 1"
    assert last.done and last.numbers == {"rewards/found": 1.0, "rewards/turns": 3.0}
    assert play_turns(pool, guess, "1", "6")[1] == second, "the same chances for the same seed"
    assert play_turns(pool, guess, "1", "6", seed=8)[1] != second


def test_an_environment_that_hangs_dies_or_raises_ends_its_answer_and_leaves_no_process(file: Path) -> None:
    guess = environment(file, deadline=2.0)
    guess.problem("x", 0)  # in a process that this one keeps
    with EnvironmentPool() as pool:
        plays = [pool.begin(guess, guess.problem("x", 0), 0) for _ in range(5)]
        plays[0].act("1").result()  # what is loaded first has no deadline
        actions = ("hang", "die", "exit", "x", "3")
        futures = [play.act(action) for play, action in zip(plays, actions, strict=True)]
        ends = [future.result().turns[-1] for future in futures]
    assert [turn.outcome for turn in ends] == ["timeout", "error", "error", "error", "ok"]
    assert [turn.message for turn in ends][1:3] == [
        "EOFError: the environment's process ended",
        "RuntimeError: SystemExit: bye",
    ]
    assert "invalid literal" in str(ends[3].message) and ends[4].reward == 1.0

    def processes() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if str(file) in command_line_of(each)]

    deadline = time.monotonic() + 10
    while len(processes()) > 1:  # the process that makes problems stays
        assert time.monotonic() < deadline, processes()
        time.sleep(0.02)


def command_line_of(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())  # type: ignore[attr-defined]


def test_tools_of_an_environment_are_called_natively_in_a_rollout(file: Path, pool: EnvironmentPool) -> None:
    sums = environment(file, "Sums", format="hermes")
    task = EnvironmentTask(environment=sums, train_size=1, validation_size=1, test_size=1)
    codec = codec_of(bpe_tokenizer(template=template("tools")), chat=Chat())
    assert codec.with_tools is not None
    rollout = MultiTurn(samples=2, max_turns=4, max_tokens=900)
    codec = codec.with_tools(rollout.tools(task))
    add = call("add", '{"a": 22, "b": 22}')
    engine = ScriptedModel(codec, (message_with_calls(add, add), "It is 44"))
    context = context_of(
        task, engine, GraderPool(task.grader), codec, sampling=rollout.sampling, unfinished_reward=0.0,
        context_length=2048, rollout=rollout, environments=pool,
    )  # fmt: skip
    answers = answered(rollout.run(context, task.problems("train")))[0]
    for answer in answers:
        assert (answer.reward, answer.grade.outcome, len(answer.step_ends)) == (1.0, "ok", 2)
        assert answer.grade.numbers == {"rewards/found": 1.0, "rewards/turns": 2.0}
        assert answer.text.count("44\n") == 2, "each call has a result"
    unreadable = play_turns(pool, sums, "<tool_call>{</tool_call> 42")
    assert unreadable[0].done and unreadable[0].reward == 1.0


def test_an_environment_that_cannot_be_played_says_why(file: Path, pool: EnvironmentPool) -> None:
    (turn,) = play_turns(pool, environment(file, "Changed"), "3")
    assert turn.outcome == "unavailable" and "begins with other messages" in str(turn.message)
    for settings, message in (
        ({"format": "xml"}, "format is 'xml': give hermes, llama, mistral, or leave it out"),
        ({"kind": "Sums"}, "offers tools: set format"),
        ({"kind": "Nothing"}, "can't load"),
    ):
        with pytest.raises(ValueError, match=message):
            environment(file, **settings).offered()
    with pytest.raises(ValueError, match="has 3 rows: lower the sizes"):
        environment(file).problem("x", 3)
    (lacking,) = missing_requirements([environment(file, python="/no/python")])
    assert lacking == "python is '/no/python', which can't be run: give the path of a Python"
