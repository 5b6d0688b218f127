"""What turns and threads are worth, against the exact values of an environment and of a small language with a
fork."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.columns import plain
from tests.domains import turns
from tests.domains.turns import (
    EOS,
    Ladder,
    LadderElsewhere,
    Letters,
    Unsteady,
    lent,
    played,
    rollout,
)
from tests.fake_engine import FakeEngine
from tests.rollouts.scripted_engine import ScriptedEngine
from tests.threads.threads import TextPool, decode, sampling_context
from treetune.credit.gae import gae
from treetune.credit.grpo import Group
from treetune.credit.rloo import Rloo
from treetune.credit.states.base import AnswerPrefix, ContinuationPlan, FixedBudget
from treetune.credit.values.base import ValueEstimator
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.sequential import Sequential
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.environments.base import Environment, Turn
from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.domains.multi_turn import TurnStates
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.exceptions import EngineError, Unavailable
from treetune.rollouts.context import RolloutContext
from treetune.threads.parallel_threads import ParallelThreads, ThreadStates
from treetune.trainer.preparation import token_rewards
from treetune.trainer.tokens import Sequences
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, Problem, Trajectory, logprob_array, token_array

RolledOut = Callable[[Environment], tuple[list[Tree], RolloutContext]]

CONTINUATIONS = 64
"""Every probability of what may follow a state is a multiple of 1/16."""


@cache
def to_come(letters: str) -> float:
    """What is earned on average behind these letters."""
    so_far = played(letters)
    if so_far and so_far[-1].done:
        return 0.0
    last = so_far[-1].observation if so_far else "?"
    chances = turns.likes(turns.encode(last))
    return sum(
        chance * (played(letters + one)[-1].reward + to_come(letters + one))
        for one, chance in chances.items()
    )


def in_all(letters: str) -> float:
    return sum(turn.reward for turn in played(letters)) + to_come(letters)


class DealtEngine(FakeEngine):
    """Deals letters out behind each text in exactly the shares that are their probabilities."""

    def __init__(self) -> None:
        super().__init__(turns.probabilities, EOS)
        self._dealt: Counter[tuple[int, ...]] = Counter()

    def _sample(
        self, prompt: tuple[int, ...], seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        deck = [letter for letter, chance in turns.likes(prompt).items() for _ in range(round(4 * chance))]
        letter = deck[self._dealt[prompt] % 4]
        self._dealt[prompt] += 1
        logprob = logprob_array([-1.0])
        return Completion(token_array(turns.encode(letter)), logprob, "length", self.version)


@pytest.fixture
def rolled_out(environments: EnvironmentPool) -> RolledOut:
    """Trees, and the context that they grew in."""

    def run(environment: Environment) -> tuple[list[Tree], RolloutContext]:
        asked, task = rollout(), Letters(environment=environment)
        context = lent(task, turns.engine(), environments, rollout=asked)
        return asked.run(context, task.problems("train"))[0], context

    return run


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_continuations_of_a_turns_beginning_earn_its_exact_value(
    environment: Environment, environments: EnvironmentPool, rolled_out: RolledOut
) -> None:
    trees, _ = rolled_out(environment)
    beginnings = {"": AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())}
    for answer in answers_of(trees):
        for turn in range(1, len(answer.step_ends)):
            segments = tuple(replace(one, logprobs=None) for one in answer.segments[: 2 * turn])
            beginnings[answer.text[: 2 * turn : 2]] = AnswerPrefix(
                answer.problem, answer.prompt_ids, segments
            )
    assert set(beginnings) == {"", "a", "b", "aa", "ab", "ba"}
    for letters, beginning in beginnings.items():
        context = lent(Letters(environment=environment), DealtEngine(), environments)
        plan = ContinuationPlan(FixedBudget(CONTINUATIONS), context.settings.sampling)
        (estimate,) = TurnStates().estimate(context, [beginning], plan)
        assert estimate.value == pytest.approx(in_all(letters), abs=1e-12), letters


def credited(
    rolled_out: RolledOut, environment: Environment, samples: int
) -> list[tuple[Trajectory, Episode]]:
    trees, context = rolled_out(environment)
    episodes, _ = MonteCarlo(samples=samples, states=TurnStates()).assign(context, trees)
    return list(zip(answers_of(trees), episodes, strict=True))


def test_a_turns_advantage_is_its_reward_and_what_it_changed_for_later_ones(rolled_out: RolledOut) -> None:
    samples = 300
    deviation = 4 * (0.5 / samples) ** 0.5
    for answer, episode in credited(rolled_out, Ladder(), samples):
        letters, starts = answer.text[::2], (0, *episode.step_ends[:-1])
        for turn, (start, end) in enumerate(zip(starts, episode.step_ends, strict=True)):
            before, after = letters[:turn], letters[: turn + 1]
            exact = played(after)[-1].reward + to_come(after) - to_come(before)
            assert episode.advantages[start:end] == pytest.approx([exact] * (end - start), abs=2 * deviation)
        total = sum(episode.advantages[start] for start in starts)
        assert total == pytest.approx(answer.reward - episode.step_values[0])


def test_c3_compares_a_turn_with_replayed_alternatives_in_the_same_context(rolled_out: RolledOut) -> None:
    trees, context = rolled_out(Ladder())
    episodes, _ = MonteCarlo(samples=3, states=TurnStates(), lam=1.0).assign(context, trees)
    for answer, episode in zip(answers_of(trees), episodes, strict=True):
        starts = (0, *episode.step_ends[:-1])
        for start in starts:
            alternatives = episode.continuations[start]
            assert len(alternatives) == 3
            assert episode.advantages[start] == pytest.approx(answer.reward - sum(alternatives) / 3)


def test_only_what_follows_a_state_is_sampled_and_no_injected_token_is_trained(rolled_out: RolledOut) -> None:
    trees, context = rolled_out(LadderElsewhere())
    engine = turns.engine()
    episodes, metrics = MonteCarlo(samples=2, states=TurnStates()).assign(
        replace(context, engine=engine), trees
    )
    known = {(len(one.prompt_ids) - 1) // 2 for one in engine.asked}
    assert known == {0, 1, 2}
    assert metrics["credit/value_samples"] == 2 * metrics["credit/value_states"]
    for episode in episodes:
        letters = [turns.decode([token]) in "ab" for token in episode.response_ids]
        assert list(plain(episode.trained)) == letters


def test_an_environment_that_no_seed_decides_goes_on_from_its_copies(rolled_out: RolledOut) -> None:
    for answer, episode in credited(rolled_out, Unsteady(), 3):
        assert answer.reward == 0.75
        assert episode.step_values == (0.75, 0.75, 0.75), "what was earned before the copy counts too"


def test_an_environment_that_is_not_what_it_says_when_played_again_is_told(rolled_out: RolledOut) -> None:
    with pytest.raises(ValueError, match="replies differently when an answer is played again"):
        credited(rolled_out, Unreliable(), 3)


class Unreliable(Ladder):
    """Says that it can be played again, and can't."""

    def step(self, state: list[str], action: str) -> Turn:
        turn = super().step(state, action)
        COUNT["steps"] += 1
        return replace(turn, observation="+-"[COUNT["steps"] % 3 % 2])


COUNT: Counter[str] = Counter()


class OftenClosed(Ladder):
    """Isn't there for every third beginning."""

    def reset(self, problem: Problem, seed: int) -> list[str]:
        COUNT["beginnings"] += 1
        if COUNT["beginnings"] % 3 == 0:
            raise Unavailable("closed")
        return super().reset(problem, seed)


def begun_with_answers(context: RolloutContext, credit: MonteCarlo) -> tuple[list[Tree], list[Episode]]:
    """As a run carries it out."""
    early = credit.early_continuations(context)
    problems = context.task.problems("train")
    assert context.rollout is not None
    trees, _ = context.rollout.run(context if early is None else early.attach(context), problems)
    return trees, credit.assign(replace(context, early_continuations=early), trees)[0]


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_begun_with_each_answer_turns_are_worth_the_same_and_nothing_more_is_sampled(
    environment: Environment, environments: EnvironmentPool
) -> None:
    def made(pipelined: bool) -> tuple[list[Episode], Counter[tuple[tuple[int, ...], int]]]:
        engine = turns.engine()
        credit = MonteCarlo(samples=3, states=TurnStates(), pipelined=pipelined)
        _, episodes = begun_with_answers(lent(Letters(environment=environment), engine, environments), credit)
        return episodes, Counter((plain(one.prompt_ids), one.seed) for one in engine.asked)

    assert made(True) == made(False)


def test_what_environments_said_to_continuations_among_answers_outlives_a_crash(
    environments: EnvironmentPool, tmp_path: Path
) -> None:
    task, credit = Letters(environment=Unsteady()), MonteCarlo(samples=3, states=TurnStates())

    def journaled(engine: FakeEngine, name: str, *others: str) -> RolloutContext:
        kept = JournaledEngine(engine, tmp_path / name, continuations=tmp_path / "credit")
        said = TurnJournal(tmp_path / f"{name}.turns", [tmp_path / f"{one}.turns" for one in others])
        return lent(task, kept, environments, turn_journal=said)

    trees, episodes = begun_with_answers(journaled(turns.engine(), "rollout"), credit)
    again = journaled(turns.engine(fail_after=0), "credit", "rollout")
    again = replace(again, early_continuations=credit.early_continuations(again))
    assert credit.assign(again, trees)[0] == episodes


@pytest.mark.parametrize("killed_after", [12, 30, 48])
def test_a_killed_credit_goes_on_to_the_values_of_one_that_was_not(
    killed_after: int, rolled_out: RolledOut, tmp_path: Path
) -> None:
    trees, context = rolled_out(Ladder())
    credit = MonteCarlo(samples=3, states=TurnStates())
    whole = credit.assign(context, trees)

    def assigned(**given: int) -> tuple[list[Episode], Metrics]:
        kept = JournaledEngine(turns.engine(**given), tmp_path / "0.jsonl")
        said = TurnJournal(tmp_path / "0.turns")
        return credit.assign(replace(context, turn_journal=said, engine=kept), trees)

    with pytest.raises(EngineError):
        assigned(fail_after=killed_after)
    assert assigned() == whole


def test_continuations_that_nobody_could_judge_are_no_part_of_a_value(rolled_out: RolledOut) -> None:
    trees, context = rolled_out(Ladder())
    beginning = AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())
    context = replace(context, task=Letters(environment=OftenClosed()))
    plan = ContinuationPlan(FixedBudget(9), context.settings.sampling)
    (estimate,) = TurnStates().estimate(context, [beginning], plan)
    assert (len(estimate.rewards), len(estimate.earned), estimate.earned.count(None)) == (6, 9, 3)
    assert estimate.rewards == tuple(reward for reward in estimate.earned if reward is not None)


@pytest.mark.parametrize("credit", [Group(), Group(std=False), Rloo()], ids=str)
def test_whole_answers_are_compared_by_what_all_their_turns_earn(
    credit: Group | Rloo, rolled_out: RolledOut
) -> None:
    trees, context = rolled_out(Ladder())
    episodes, _ = credit.assign(context, trees)
    for tree in trees:
        wanted = credit.advantages([sum(t.reward for t in played(leaf.text[::2])) for leaf in tree.leaves])
        found = [one.advantages[0] for one in episodes if one.group == tree.problem.id]
        assert found == pytest.approx(list(wanted))


def test_a_critics_advantages_have_each_reward_at_the_end_of_its_turn(rolled_out: RolledOut) -> None:
    trees, context = rolled_out(Ladder())
    sequences = Sequences.of(Group().assign(context, trees)[0])
    rewards_N = token_rewards(sequences.starts, sequences.rewards, sequences.early_rewards)
    for number, answer in enumerate(answers_of(trees)):
        letters = answer.text[::2]
        begun = [letters[:turn] for turn in range(len(letters) + 1)]
        of_answer = rewards_N[sequences.starts[number] : sequences.starts[number + 1]].tolist()
        assert of_answer == [turn.reward for turn in played(letters)]
        advantages, _ = gae(of_answer, [to_come(before) for before in begun[:-1]], gamma=1.0, lam=0.0)
        exact = [in_all(after) - in_all(before) for before, after in pairwise(begun)]
        assert advantages == pytest.approx(exact)


def test_what_is_earned_before_the_first_trained_token_is_credited_to_no_token(rolled_out: RolledOut) -> None:
    """Least of all to the answer before."""
    trees, context = rolled_out(Ladder())
    episodes, _ = Group().assign(context, trees)
    number = next(
        number
        for number, episode in enumerate(episodes)
        if number > 0 and len(episode.step_rewards) > 1 and episode.step_rewards[0] != 0
    )
    untrained = episodes[number]
    trained = untrained.trained.copy()
    trained[: untrained.step_ends[0]] = False
    changed = Sequences.of([*episodes[:number], replace(untrained, trained=trained), *episodes[number + 1 :]])
    rewards_N = token_rewards(changed.starts, changed.rewards, changed.early_rewards)
    before, after = changed.starts[number], changed.starts[number + 1]
    assert float(rewards_N[before:after].sum()) == pytest.approx(sum(untrained.step_rewards[1:]))
    unchanged = Sequences.of(episodes)
    as_before = token_rewards(unchanged.starts, unchanged.rewards, unchanged.early_rewards)
    assert torch.equal(rewards_N[:before], as_before[: unchanged.starts[number]])


FORK = "<Parallel><Outlines><Outline>1:;</Outline><Outline>2:;</Outline></Outlines>"
CHANCE = {"main": 0.5, "1": 0.3, "2": 0.8, "end": 0.6}
"""Of writing ``?1`` rather than ``?0``, in each of the four samples of an answer."""
PARTS = ("main", "1", "2", "end")


def script(before: str, request: Request) -> str:
    part = {"1:": "1", "2:": "2", ">\n": "end"}.get(before[-2:], "main")
    said = "?1" if random.Random(request.seed).random() < CHANCE[part] else "?0"
    return {"main": f"{said}{FORK}", "end": f"</Parallel>{said}$"}.get(part, f"{said}\n</Thread>")


def reward(bits: tuple[int, ...]) -> float:
    """Something in which no part's effect is independent of the others."""
    main, first, second, end = bits
    return float((main and first) or (second and end))


def value(known: tuple[int, ...]) -> float:
    total = 0.0
    for rest in itertools.product((0, 1), repeat=4 - len(known)):
        chance = 1.0
        for part, bit in zip(PARTS[len(known) :], rest, strict=True):
            chance *= CHANCE[part] if bit else 1 - CHANCE[part]
        total += chance * reward((*known, *rest))
    return total


def bits_of(text: str) -> tuple[int, ...]:
    return tuple(int(text[place + 1]) for place, letter in enumerate(text) if letter == "?")


def reward_of_text(text: str) -> float:
    return reward(bits_of(text))


def lent_threads(engine: ScriptedEngine, rollout: ParallelThreads) -> RolloutContext:
    return sampling_context(engine, rollout, TextPool(reward_of_text))


def credited_threads(
    samples: int, answers: int = 4
) -> tuple[list[Trajectory], list[Episode], ScriptedEngine]:
    rollout, engine = ParallelThreads(samples=answers, max_tokens=300), ScriptedEngine(script)
    here = lent_threads(engine, rollout)
    trees, _ = rollout.run(here, [Problem(id="train/0", prompt=";", gold="")])
    engine.requests.clear()
    episodes, metrics = MonteCarlo(samples=samples, states=ThreadStates()).assign(here, trees)
    assert metrics["credit/value_samples"] == samples * metrics["credit/value_states"]
    return answers_of(trees), episodes, engine


def test_values_of_half_written_answers_come_to_the_exact_ones() -> None:
    samples = 700
    trajectories, episodes, _ = credited_threads(samples)
    assert len({bits_of(t.text) for t in trajectories}) > 2
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        bits = bits_of(trajectory.text)
        exact = [value(bits[:known]) for known in range(5)]
        sampled = [place for place, s in enumerate(trajectory.segments) if s.origin == "sampled"]
        deviation = 4 * (0.25 / samples) ** 0.5
        for place, segment in enumerate(sampled):
            assert episode.step_values[segment] == pytest.approx(exact[place], abs=deviation)
            start, end = (0, *episode.step_ends)[segment : segment + 2]
            gained = [exact[place + 1] - exact[place]] * (end - start)
            assert episode.trained[start:end].all()
            assert episode.advantages[start:end] == pytest.approx(gained, abs=2 * deviation)
        total = sum(episode.advantages[episode.step_ends[segment] - 1] for segment in sampled)
        assert total == pytest.approx(episode.reward - episode.step_values[0])


def test_what_is_known_is_not_sampled_again_and_equal_states_are_one() -> None:
    trajectories, _, engine = credited_threads(3, answers=6)
    states = {bits_of(t.text)[:known] for t in trajectories for known in range(4)}
    # Behind k known samples the other 4 - k are written.
    assert len(engine.requests) == 3 * sum(4 - len(known) for known in states)
    for request in engine.requests:
        assert decode(request.prompt_ids).startswith(";")


def test_no_value_depends_on_what_else_is_estimated() -> None:
    alone, together = credited_threads(3, answers=1)[1], credited_threads(3, answers=6)[1]
    assert alone == together[:1]


@pytest.mark.parametrize("values", [FreshContinuations(), Sequential(error=0.1, most=6)])
@pytest.mark.parametrize("order", [1, 2])
def test_begun_with_each_answer_the_values_are_the_same_and_nothing_more_is_sampled(
    values: ValueEstimator, order: int
) -> None:
    def made(pipelined: bool) -> tuple[list[Episode], Metrics, list[tuple[tuple[int, ...], int]], int]:
        credit = MonteCarlo(samples=3, states=ThreadStates(), values=values, pipelined=pipelined)
        rollout = ParallelThreads(samples=4, max_tokens=300)
        engine = ScriptedEngine(script, order if pipelined else 0)
        here = lent_threads(engine, rollout)
        early = credit.early_continuations(here)
        problems = [Problem(id=f"train/{i}", prompt=";" * (i + 1), gold="") for i in range(2)]
        trees, _ = rollout.run(here if early is None else early.attach(here), problems)
        before = len(engine.requests)
        episodes, metrics = credit.assign(replace(here, early_continuations=early), trees)
        asked = sorted((plain(one.prompt_ids), one.seed) for one in engine.requests)
        return episodes, metrics, asked, len(engine.requests) - before

    *expected, _ = made(False)
    *found, later = made(True)
    assert found == expected
    # The first turn was over with the answers; what depends on its rewards comes after all of these.
    assert (later == 0) == isinstance(values, FreshContinuations)
