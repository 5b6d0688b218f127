"""Promises of answers in several turns:

* each sampled token is trained once, with its log-prob, and no token of the environment is;
* an answer depends on its seeds alone: neither on the order of requests, nor on other answers, nor on where
  the environment runs, nor on a kill;
* an environment that fails, hangs or dies ends its answer and no other, with an outcome that says so;
* budgets, deadlines and stop strings end turns and answers as they say;
* states are copied for environments that allow it, and stored with the answer.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import turns
from tests.support.columns import plain
from tests.support.trees import answered
from tests.support.turns import (
    CODEC,
    Fleeting,
    LadderElsewhere,
    Letters,
    Mute,
    Obedient,
    Unsteady,
    UnsteadyHere,
    decode,
    played,
    rollout,
)
from tests.support.unruly_environment import Unruly
from treetune.config.build import build
from treetune.credit.episodes import make_episode
from treetune.domains.conversation import Conversation, TurnLimits, unpack_snapshot
from treetune.domains.environments.base import Environment, Turn
from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.domains.mixture import Domain, Mixture
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.exceptions import ConfigError, EngineError, Unavailable, WorkerStartError
from treetune.rollouts.base import Rollout
from treetune.rollouts.storage import read_trajectories, write_trajectories
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.vocabulary import Grade, Problem, Segment, Trajectory, concatenate, token_array

Sampled = Callable[..., list[Trajectory]]


@pytest.fixture(scope="module")
def sample_answers(environments: EnvironmentPool) -> Sampled:
    """Return a function that samples answers to a task's problems by a rollout with some settings."""

    def sample(
        task: Task, engine: Engine | None = None, turn_journal: TurnJournal | None = None, **settings: object
    ) -> list[Trajectory]:
        multi_turn = rollout(**settings)
        context = turns.lent(
            task, engine or turns.engine(), environments, rollout=multi_turn, turn_journal=turn_journal
        )
        return answered(multi_turn.run(context, task.problems("train")))[0]

    return sample


def rewards_of_letters(text: str) -> list[float]:
    return [turn.reward for turn in played(text[::2])]


class LastLetter(FinalAnswer):
    """The whole turn is the answer."""

    def extract(self, response: str, problem: Problem) -> str:
        return response


def test_each_sampled_token_is_trained_once_with_its_logprob_and_no_injected_one_is(
    sample_answers: Sampled, environments: EnvironmentPool
) -> None:
    engine = turns.engine()
    answers = sample_answers(Letters(), engine)
    prompts_and_seeds = {(plain(request.prompt_ids), request.seed) for request in engine.asked}
    assert len(prompts_and_seeds) == len(engine.asked), "no two turns share their draws"
    prompts = []
    for answer in answers:
        before = [answer.prompt_ids]
        for segment in answer.segments:
            if segment.origin == "sampled":
                prompts.append(plain(concatenate(before)))
            else:
                assert segment.logprobs is None and decode(segment.token_ids) in "+-"
            before.append(segment.token_ids)
        row = make_episode(turns.lent(Letters(), engine, environments), answer)
        of_engine = [segment.logprobs for segment in answer.segments if segment.origin == "sampled"]
        assert plain(row.behaviour_logprobs[row.trained]) == plain(concatenate(of_engine))
        assert decode(row.response_ids[row.trained]) == answer.text.replace("+", "").replace("-", "")
    assert sorted(prompts) == sorted(plain(request.prompt_ids) for request in engine.asked)


def test_an_answer_earns_the_sum_of_its_turns(sample_answers: Sampled) -> None:
    for answer in sample_answers(Letters()):
        rewards = rewards_of_letters(answer.text)
        assert (answer.reward, answer.finish_reason) == (sum(rewards), "stop")
        assert answer.step_ends == (*range(2, len(answer.text), 2), len(answer.text))
        assert answer.step_rewards == (tuple(rewards) if any(rewards[:-1]) else ())


@pytest.mark.parametrize("order", range(4))
def test_answers_depend_neither_on_the_order_nor_on_where_the_environment_runs_nor_on_others(
    order: int, sample_answers: Sampled
) -> None:
    shuffle = random.Random(order)
    engine = turns.engine(order=lambda count: shuffle.sample(range(count), count))
    expected = sample_answers(Letters())
    assert sample_answers(Letters(environment=LadderElsewhere()), engine) == expected
    few = sample_answers(Letters(golds=("",) * (order + 1)))
    assert few == expected[: len(few)]


@dataclass(frozen=True)
class Closed(Grader):
    """A grader that is unavailable."""

    isolation: ClassVar[Isolation] = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        raise Unavailable("nobody judges here")


def test_the_reward_of_an_unfinished_answer_needs_no_grader(sample_answers: Sampled) -> None:
    answers = sample_answers(Letters(grader=Closed()), reward="grader", max_turns=2, unfinished_reward=-1.0)
    ends = {(answer.finish_reason, answer.grade.outcome, answer.reward) for answer in answers}
    assert ends == {("length", "no_answer", -1.0), ("stop", "unavailable", 0.0)}


def test_a_turn_at_its_bound_of_tokens_is_cut_and_an_answer_at_its_bound_ends(
    sample_answers: Sampled,
) -> None:
    for answer in sample_answers(Letters(), turn_tokens=2, max_turns=2, unfinished_reward=-1.0):
        assert answer.numbers["turns/cut"] == answer.numbers["turns/count"]
        assert len(answer.segments[0].token_ids) == 2
    for answer in sample_answers(Letters(), max_turns=1, unfinished_reward=-1.0):
        assert (answer.finish_reason, answer.reward, answer.step_rewards) == ("length", -1.0, ())
        assert answer.numbers["turns/turns_spent"] == 1 and len(answer.text) == 1
    for answer in sample_answers(Letters(), max_tokens=3, unfinished_reward=None):
        if answer.unfinished:
            assert answer.reward == 0.25 * (answer.text[0] == "a"), "it keeps what it has earned"
            assert len(answer.response_ids) <= 3 and answer.numbers["turns/tokens_spent"] == 1


def test_stop_strings_end_turns_and_are_not_for_the_environment(sample_answers: Sampled) -> None:
    def letter_and_line(ids: tuple[int, ...], version: int) -> list[float]:
        chances = {"\n": 1.0} if turns.ALPHABET[ids[-1]] in "ab" else turns.likes(ids)
        return [chances.get(character, 0.0) for character in turns.ALPHABET] + [0.0]

    engine = turns.engine()
    engine._probabilities = letter_and_line
    for answer in sample_answers(Letters(), engine, turn_tokens=None, stop=("\n",)):
        assert answer.text[1] == "\n" and not answer.numbers["turns/cut"]
        letters = "".join(letter for letter in answer.text if letter in "ab")
        assert answer.reward == sum(turn.reward for turn in played(letters))


OUTCOMES = {
    "hang": ("timeout", "no result within 1 s"),
    "halfway": ("timeout", "no result within 1 s"),
    "die": ("error", "the worker process ended with exit code 3"),
    "raise": ("error", "RuntimeError: nobody expected this"),
    "leave": ("error", "SystemExit: goodbye"),
    "strange": ("error", "substring not found"),
    "nan": ("error", "ValueError: a reward of nan"),
    "gone": ("unavailable", "the shop is closed"),
    "no beginning": ("unavailable", "the environment did not begin: RuntimeError: out of order"),
}


def test_an_environment_that_fails_ends_its_answer_and_no_other(sample_answers: Sampled) -> None:
    golds = (*OUTCOMES, "fine", "fine", "fine", "fine")
    for answer in sample_answers(Letters(golds=golds, environment=Obedient()), samples=1):
        outcome, message = OUTCOMES.get(answer.problem.gold, ("ok", None))
        grade = answer.grade
        assert (grade.outcome, grade.message, grade.is_known) == (outcome, message, outcome != "unavailable")
        if outcome == "ok":
            assert (answer.reward, len(answer.step_ends)) == (0.375, 3)
        else:
            assert (answer.reward, answer.step_rewards) == (0.0, ())


def test_a_megabyte_is_cut_to_the_bound_and_counted(sample_answers: Sampled) -> None:
    task = Letters(golds=("megabyte",), environment=Obedient())
    (answer,) = sample_answers(task, samples=1, observation_characters=5)
    assert answer.text[3:8] == "xxxxx" and answer.text[8] in "ab"
    assert answer.numbers["turns/observations_cut"] == 1, "nobody reads what is said to the last turn"


def test_answers_keep_copies_of_states_where_the_environment_allows_copies(
    sample_answers: Sampled, tmp_path: Path
) -> None:
    for environment, has_copies in ((Unsteady(), True), (Fleeting(), False)):
        answers = sample_answers(Letters(environment=environment))
        for answer in answers:
            assert (answer.reward, len(answer.step_ends)) == (0.75, 3)
            injected = [segment for segment in answer.segments if segment.origin == "injected"]
            assert [segment.snapshot is not None for segment in injected] == [has_copies] * 2
        write_trajectories(tmp_path / "trajectories.arrow", answers)
        stored_answers = read_trajectories(tmp_path / "trajectories.arrow")
        assert stored_answers == answers and any(answer.step_rewards for answer in stored_answers)
        # Equality of answers leaves snapshots out.
        for answer, stored in zip(answers, stored_answers, strict=True):
            snapshots = [segment.snapshot for segment in answer.segments]
            assert [segment.snapshot for segment in stored.segments] == snapshots


def test_a_copied_environment_that_says_nothing_leaves_its_copy_with_the_turn(
    sample_answers: Sampled,
) -> None:
    for answer in sample_answers(Letters(environment=Mute())):
        assert [segment.origin for segment in answer.segments] == ["sampled"] * 3
        assert [segment.snapshot is not None for segment in answer.segments] == [True, True, False]
        rewards, observed, state = unpack_snapshot(answer.segments[:2])
        assert rewards == [0.25, 0.25] and len(observed) == 2 and state is not None and state[0] == 2


@pytest.mark.parametrize("killed_after", [1, 9, 17])
def test_a_killed_rollout_goes_on_to_the_same_answers_and_asks_nothing_twice(
    killed_after: int, sample_answers: Sampled, tmp_path: Path
) -> None:
    for task in (Letters(), Letters(environment=LadderElsewhere())):
        undisturbed, killed, resumed = turns.engine(), turns.engine(fail_after=killed_after), turns.engine()
        journal = tmp_path / f"{type(task.environment).__name__}.jsonl"
        with pytest.raises(EngineError):
            sample_answers(task, JournaledEngine(killed, journal))
        assert sample_answers(task, JournaledEngine(resumed, journal)) == sample_answers(task, undisturbed)
        assert (len(killed.asked), len(resumed.asked)) == (
            killed_after,
            len(undisturbed.asked) - killed_after,
        )


def test_observations_before_a_kill_are_read_from_the_journal(
    tmp_path: Path, sample_answers: Sampled
) -> None:
    journal = tmp_path / "0.turns"

    def answers_of_run(engine: Engine) -> list[Trajectory]:
        journaled = JournaledEngine(engine, tmp_path / "0.jsonl")
        return sample_answers(
            Letters(environment=UnsteadyHere()), journaled, turn_journal=TurnJournal(journal)
        )

    with pytest.raises(EngineError):
        answers_of_run(turns.engine(fail_after=40))
    lines_before = journal.read_bytes()
    journal.write_bytes(lines_before[:-3])  # the kill cuts the last line short
    answers = answers_of_run(turns.engine())
    complete_lines = lines_before[: lines_before.rindex(b"\n", 0, -1) + 1]
    assert journal.read_bytes().startswith(complete_lines + b'{"crc32"')
    engine_of_third_run = turns.engine()
    assert answers_of_run(engine_of_third_run) == answers and not engine_of_third_run.asked, (
        "though no seed decides what is said"
    )


def test_an_error_is_not_tried_again_after_a_kill_and_an_unavailable_environment_is(
    tmp_path: Path, sample_answers: Sampled
) -> None:
    def outcomes(*golds: str) -> list[tuple[str, str]]:
        task = Letters(golds=golds, environment=Obedient())
        answers = sample_answers(task, turn_journal=TurnJournal(tmp_path / "0.turns"), samples=1)
        return [(answer.grade.outcome, str(answer.grade.message)) for answer in answers]

    before_kill = outcomes("raise", "gone")
    assert [outcome for outcome, _ in before_kill] == ["error", "unavailable"]
    # The journal decides, although the environment would answer both now.
    assert outcomes("fine", "fine") == [before_kill[0], ("ok", "None")]


def test_a_grader_may_judge_the_last_turn_in_place_of_or_in_addition_to_the_environment(
    sample_answers: Sampled,
) -> None:
    task = Letters(golds=("a",) * 4, grader=LastLetter(marker="#"))
    alone = {answer.text: answer for answer in sample_answers(task)}
    for answer in sample_answers(task, reward="grader"):
        assert (answer.reward, answer.step_rewards) == (float(answer.text[-1] == "a"), ())
    for answer in sample_answers(task, reward="sum"):
        assert answer.reward == alone[answer.text].reward + float(answer.text[-1] == "a")


@dataclass(frozen=True, kw_only=True)
class Measuring(Environment):
    """An environment of one turn that gives two numbers."""

    isolation: ClassVar[Isolation] = "inline"

    def reset(self, problem: Problem, seed: int) -> None:
        return None

    def step(self, state: None, action: str) -> Turn:
        return Turn(done=True, numbers={"rewards/speed": 2.0, "rewards/format": 0.0})


@dataclass(frozen=True)
class FormatGrader(Grader):
    """A grader that gives a number."""

    isolation: ClassVar[Isolation] = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=1.0, outcome="ok", numbers={"rewards/format": 1.0})


def test_an_answer_that_a_grader_grades_keeps_the_numbers_of_its_environment(sample_answers: Sampled) -> None:
    task = Letters(environment=Measuring(), grader=FormatGrader())
    for answer in sample_answers(task):
        assert answer.grade.numbers == {"rewards/speed": 2.0, "rewards/format": 0.0}
    for reward in ("grader", "sum"):
        for answer in sample_answers(task, reward=reward):
            # The grader's number replaces the environment's number of the same name.
            assert answer.grade.numbers == {"rewards/speed": 2.0, "rewards/format": 1.0}


def test_in_a_mixture_a_domain_has_its_own_environment_or_one_turn_and_its_grader(
    sample_answers: Sampled,
) -> None:
    games = Letters(golds=("",) * 2)
    questions = Letters(golds=("a",) * 2, environment=None, grader=LastLetter(marker="#"))
    task = Mixture(domains={"games": Domain(task=games), "questions": Domain(task=questions)})
    for answer in sample_answers(task):
        if answer.problem.domain == "games":
            assert len(answer.step_ends) > 1 and answer.reward in {i / 4 for i in range(8)}
        else:
            assert (len(answer.text), answer.reward) == (1, float(answer.text == "a"))


def test_the_format_of_observations_is_a_setting(sample_answers: Sampled) -> None:
    for answer in sample_answers(Letters(), observation_format="x{observation}y", max_tokens=30):
        injected = [segment for segment in answer.segments if segment.origin == "injected"]
        observations = {decode(segment.token_ids) for segment in injected}
        assert observations and observations <= {"x+y", "x-y"}
    assert replace(rollout(), observation_format=None).frame(CODEC)("+") == "\n+\n"


def test_a_failure_while_turns_are_replayed_leaves_out_the_events_of_the_replayed_turns() -> None:
    limits = TurnLimits(turn_tokens=3, max_turns=9, observation_characters=1, stop=())
    conversation = Conversation(CODEC, lambda text: text, limits, token_array(turns.encode("?")), budget=30)
    texts_with_origins = (("a", "sampled"), ("+", "injected"), ("b", "sampled"))
    segments = [Segment(turns.encode(text), origin=origin) for text, origin in texts_with_origins]
    # The observation is cut after its first character.
    conversation.replay(segments, [Turn(observation="++"), Turn(outcome="error")])
    assert conversation.outcome == "unavailable" and conversation.segments == segments
    assert conversation.events.total() == 0


def test_turns_that_are_replayed_share_the_deadline_of_one_turn(environments: EnvironmentPool) -> None:
    unruly = Unruly(moods=("hangs",), deadline=0.2)
    play = environments.begin(unruly, unruly.problem("p", 0), seed=0, actions=("1", "2"))
    (last,) = play.begin().result(timeout=60).turns
    assert last.message == "no result within 0.2 s"


def test_a_slow_turn_costs_its_own_answer_alone(sample_answers: Sampled) -> None:
    golds = ("hang", *["slow"] * 11)
    sample_answers(Letters(golds=("fine",), environment=Obedient()), samples=1)  # its module is loaded
    begun = time.monotonic()
    answers = sample_answers(Letters(golds=golds, environment=Obedient()), samples=1)
    assert [answer.grade.outcome for answer in answers] == ["timeout", *["ok"] * 11]
    # One by one, eleven turns of half a second and one of a second take 6.5 seconds.
    assert time.monotonic() - begun < 4.0


def test_an_answer_whose_turns_take_longer_than_its_deadline_ends_as_a_timeout(
    sample_answers: Sampled,
) -> None:
    task = Letters(golds=("slow", "fine"), environment=Obedient())
    sample_answers(Letters(golds=("fine",), environment=Obedient()), samples=1)  # its module is loaded
    slow, fine = sample_answers(task, samples=1, answer_deadline=0.2)
    assert (slow.grade.outcome, slow.reward, slow.step_rewards) == ("timeout", 0.0, ())
    assert slow.grade.message == "the time for the answer's turns ran out" and len(slow.step_ends) == 2
    assert (fine.grade.outcome, fine.reward) == ("ok", 0.375)
    with pytest.raises(ConfigError, match=r"answer_deadline.*greater than 0"):
        build(Rollout, {"type": "multi_turn", "max_tokens": 9, "max_turns": 3, "answer_deadline": 0})


@dataclass(frozen=True, kw_only=True)
class Counted(turns.LadderElsewhere):
    """The ladder, which has a file for each answer in flight and rewards turns with the number of files."""

    folder: str

    def reset(self, problem: Problem, seed: int) -> list[str]:
        (Path(self.folder) / f"{os.getpid()}").touch()
        return super().reset(problem, seed)

    def step(self, state: list[str], action: str) -> Turn:
        turn = super().step(state, action)
        time.sleep(0.05)
        at_work = len(os.listdir(self.folder))
        if turn.done:
            (Path(self.folder) / f"{os.getpid()}").unlink()
        return replace(turn, reward=float(at_work))


def test_no_more_answers_are_in_flight_than_the_rollout_says(sample_answers: Sampled, tmp_path: Path) -> None:
    texts, most_in_flight = [], []
    for in_flight in (3, None):
        task = Letters(environment=Counted(folder=str(tmp_path)))
        answers = sample_answers(task, in_flight=in_flight)
        texts.append([answer.text for answer in answers])
        most_in_flight.append(max(max(answer.step_rewards, default=0) for answer in answers))
    assert most_in_flight[0] <= 3 < most_in_flight[1] and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [(False, "its process died of"), (True, "its process cannot load it: OSError: Stale file handle")],
)
@pytest.mark.parametrize("kills", [1, 2])
def test_a_process_that_fails_when_it_loads_the_environment_is_started_once_more(
    kills: int, raises: bool, reason: str, tmp_path: Path, environments: EnvironmentPool
) -> None:
    environment = turns.KilledAtStart(notes=str(tmp_path / "notes"), kills=kills, raises=raises)
    play = environments.begin(environment, Problem("", "?", "fine"), 0)
    if kills == 1:
        (turn,) = play.act("a").result(timeout=60).turns
        assert (turn.outcome, turn.observation) == ("ok", "+")
    else:
        with pytest.raises(WorkerStartError, match=f"no environment could be started: {reason}"):
            play.act("a").result(timeout=60)
    play.end()
    assert len((tmp_path / "notes").read_text().split()) == 2


def test_processes_of_answers_end_with_the_pool() -> None:
    with EnvironmentPool() as pool:
        play = pool.begin(Obedient(), Problem("p", "?", "pid"), 0)
        pid = int(play.act("a").result(timeout=60).turns[0].observation)
        assert Path(f"/proc/{pid}").exists()
        play.end()
        assert not Path(f"/proc/{pid}").exists(), "with its answer, too"
        play = pool.begin(Obedient(), Problem("p", "?", "pid"), 0)
        (turn,) = play.act("a").result(timeout=60).turns
    deadline = time.monotonic() + 10
    while Path(f"/proc/{turn.observation}").exists():
        assert time.monotonic() < deadline
