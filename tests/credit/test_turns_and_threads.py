"""Credit for turns and threads.

These tests promise:

* The value of a state is its exact value, in an environment and in a small language with a fork.
* An advantage is the change of that value, with each reward at the end of its turn.
* Continuations that begin with each answer give the same values, and sample nothing more.
* A credit that was killed goes on to the values of an undisturbed one.
"""

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

from tests.support import turns
from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_engine import ScriptedEngine
from tests.support.threads import TextPool, decode, sampling_context
from tests.support.turns import (
    EOS,
    Ladder,
    LadderElsewhere,
    Letters,
    Unsteady,
    lent,
    played,
    rollout,
)
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

GrowTrees = Callable[[Environment], tuple[list[Tree], RolloutContext]]

CONTINUATIONS = 64
"""Every probability of what may follow a state is a multiple of 1/16."""


@cache
def expected_later(letters: str) -> float:
    """Returns what is earned on average after these letters."""
    turns_so_far = played(letters)
    if turns_so_far and turns_so_far[-1].done:
        return 0.0
    observation = turns_so_far[-1].observation if turns_so_far else "?"
    chances = turns.likes(turns.encode(observation))
    expected = 0.0
    for letter, chance in chances.items():
        next_reward = played(letters + letter)[-1].reward
        expected += chance * (next_reward + expected_later(letters + letter))
    return expected


def expected_total(letters: str) -> float:
    """Returns what is earned with these letters and, on average, after them."""
    return sum(turn.reward for turn in played(letters)) + expected_later(letters)


class EngineOfExactShares(FakeEngine):
    """Gives letters after each text in exactly the shares that are their probabilities."""

    def __init__(self) -> None:
        super().__init__(turns.probabilities, EOS)
        self._samples_by_prompt: Counter[tuple[int, ...]] = Counter()

    def _sample(
        self, prompt: tuple[int, ...], seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        letters = ""
        for letter, chance in turns.likes(prompt).items():
            letters += letter * round(4 * chance)
        letter = letters[self._samples_by_prompt[prompt] % 4]
        self._samples_by_prompt[prompt] += 1
        logprob = logprob_array([-1.0])
        return Completion(token_array(turns.encode(letter)), logprob, "length", self.version)


@pytest.fixture
def grow_trees(environments: EnvironmentPool) -> GrowTrees:
    """Returns a function that grows trees in an environment, and gives the context that they grew in."""

    def grow(environment: Environment) -> tuple[list[Tree], RolloutContext]:
        multi_turn, task = rollout(), Letters(environment=environment)
        context = lent(task, turns.engine(), environments, rollout=multi_turn)
        return multi_turn.run(context, task.problems("train"))[0], context

    return grow


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_continuations_from_the_beginning_of_a_turn_earn_its_exact_value(
    environment: Environment, environments: EnvironmentPool, grow_trees: GrowTrees
) -> None:
    trees, _ = grow_trees(environment)
    beginnings = {"": AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())}
    for answer in answers_of(trees):
        for turns_before in range(1, len(answer.step_ends)):
            segments = tuple(
                replace(segment, logprobs=None) for segment in answer.segments[: 2 * turns_before]
            )
            beginnings[answer.text[: 2 * turns_before : 2]] = AnswerPrefix(
                answer.problem, answer.prompt_ids, segments
            )
    assert set(beginnings) == {"", "a", "b", "aa", "ab", "ba"}
    for letters, beginning in beginnings.items():
        context = lent(Letters(environment=environment), EngineOfExactShares(), environments)
        plan = ContinuationPlan(FixedBudget(CONTINUATIONS), context.settings.sampling)
        (estimate,) = TurnStates().estimate(context, [beginning], plan)
        assert estimate.value == pytest.approx(expected_total(letters), abs=1e-12), letters


def assign_to_turns(
    grow_trees: GrowTrees, environment: Environment, samples: int
) -> list[tuple[Trajectory, Episode]]:
    trees, context = grow_trees(environment)
    episodes, _ = MonteCarlo(samples=samples, states=TurnStates()).assign(context, trees)
    return list(zip(answers_of(trees), episodes, strict=True))


def test_the_advantage_of_a_turn_is_its_reward_and_the_change_of_later_ones(grow_trees: GrowTrees) -> None:
    samples = 300
    deviation = 4 * (0.5 / samples) ** 0.5
    for answer, episode in assign_to_turns(grow_trees, Ladder(), samples):
        letters, starts = answer.text[::2], (0, *episode.step_ends[:-1])
        for turn, (start, end) in enumerate(zip(starts, episode.step_ends, strict=True)):
            before, after = letters[:turn], letters[: turn + 1]
            expected = played(after)[-1].reward + expected_later(after) - expected_later(before)
            assert episode.advantages[start:end] == pytest.approx(
                [expected] * (end - start), abs=2 * deviation
            )
        total = sum(episode.advantages[start] for start in starts)
        assert total == pytest.approx(answer.reward - episode.step_values[0])


def test_c3_compares_a_turn_with_replayed_alternatives_in_the_same_context(grow_trees: GrowTrees) -> None:
    trees, context = grow_trees(Ladder())
    episodes, _ = MonteCarlo(samples=3, states=TurnStates(), lam=1.0).assign(context, trees)
    for answer, episode in zip(answers_of(trees), episodes, strict=True):
        starts = (0, *episode.step_ends[:-1])
        for start in starts:
            alternatives = episode.continuations[start]
            assert len(alternatives) == 3
            assert episode.advantages[start] == pytest.approx(answer.reward - sum(alternatives) / 3)


def test_only_what_follows_a_state_is_sampled_and_no_injected_token_is_trained(grow_trees: GrowTrees) -> None:
    trees, context = grow_trees(LadderElsewhere())
    engine = turns.engine()
    episodes, metrics = MonteCarlo(samples=2, states=TurnStates()).assign(
        replace(context, engine=engine), trees
    )
    turns_before = {(len(request.prompt_ids) - 1) // 2 for request in engine.asked}
    assert turns_before == {0, 1, 2}
    assert metrics["credit/value_samples"] == 2 * metrics["credit/value_states"]
    for episode in episodes:
        is_letter = [turns.decode([token]) in "ab" for token in episode.response_ids]
        assert list(plain(episode.trained)) == is_letter


def test_an_environment_that_cannot_be_replayed_goes_on_from_its_copies(grow_trees: GrowTrees) -> None:
    for answer, episode in assign_to_turns(grow_trees, Unsteady(), 3):
        assert answer.reward == 0.75
        assert episode.step_values == (0.75, 0.75, 0.75), "what was earned before the copy counts too"


def test_an_environment_that_replies_differently_when_replayed_is_an_error(grow_trees: GrowTrees) -> None:
    with pytest.raises(ValueError, match="replies differently when an answer is played again"):
        assign_to_turns(grow_trees, RepliesDifferently(), 3)


class RepliesDifferently(Ladder):
    """Claims that it can be replayed, and replies differently each time."""

    def step(self, state: list[str], action: str) -> Turn:
        turn = super().step(state, action)
        COUNT["steps"] += 1
        return replace(turn, observation="+-"[COUNT["steps"] % 3 % 2])


COUNT: Counter[str] = Counter()


class UnavailableEveryThird(Ladder):
    """Is unavailable at every third beginning."""

    def reset(self, problem: Problem, seed: int) -> list[str]:
        COUNT["beginnings"] += 1
        if COUNT["beginnings"] % 3 == 0:
            raise Unavailable("closed")
        return super().reset(problem, seed)


def credit_begun_with_answers(
    context: RolloutContext, credit: MonteCarlo
) -> tuple[list[Tree], list[Episode]]:
    """Grows trees and assigns credit as a run does, with continuations that begin with each answer."""
    early = credit.early_continuations(context)
    problems = context.task.problems("train")
    rollout_context = context if early is None else early.attach(context)
    assert context.rollout is not None
    trees, _ = context.rollout.run(rollout_context, problems)
    episodes, _ = credit.assign(replace(context, early_continuations=early), trees)
    return trees, episodes


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_begun_with_each_answer_turns_are_worth_the_same_and_nothing_more_is_sampled(
    environment: Environment, environments: EnvironmentPool
) -> None:
    def assign(pipelined: bool) -> tuple[list[Episode], Counter[tuple[tuple[int, ...], int]]]:
        engine = turns.engine()
        credit = MonteCarlo(samples=3, states=TurnStates(), pipelined=pipelined)
        _, episodes = credit_begun_with_answers(
            lent(Letters(environment=environment), engine, environments), credit
        )
        return episodes, Counter((plain(request.prompt_ids), request.seed) for request in engine.asked)

    assert assign(True) == assign(False)


def test_replies_of_environments_to_continuations_among_answers_outlive_a_crash(
    environments: EnvironmentPool, tmp_path: Path
) -> None:
    task, credit = Letters(environment=Unsteady()), MonteCarlo(samples=3, states=TurnStates())

    def journaled_context(engine: FakeEngine, name: str, *earlier: str) -> RolloutContext:
        journaled_engine = JournaledEngine(engine, tmp_path / name, continuations=tmp_path / "credit")
        turn_journal = TurnJournal(
            tmp_path / f"{name}.turns", [tmp_path / f"{earlier_name}.turns" for earlier_name in earlier]
        )
        return lent(task, journaled_engine, environments, turn_journal=turn_journal)

    trees, episodes = credit_begun_with_answers(journaled_context(turns.engine(), "rollout"), credit)
    after_crash = journaled_context(turns.engine(fail_after=0), "credit", "rollout")
    after_crash = replace(after_crash, early_continuations=credit.early_continuations(after_crash))
    assert credit.assign(after_crash, trees)[0] == episodes


@pytest.mark.parametrize("killed_after", [12, 30, 48])
def test_a_killed_credit_goes_on_to_the_values_of_one_that_was_not(
    killed_after: int, grow_trees: GrowTrees, tmp_path: Path
) -> None:
    trees, context = grow_trees(Ladder())
    credit = MonteCarlo(samples=3, states=TurnStates())
    uninterrupted = credit.assign(context, trees)

    def assign(**engine_settings: int) -> tuple[list[Episode], Metrics]:
        journaled_engine = JournaledEngine(turns.engine(**engine_settings), tmp_path / "0.jsonl")
        turn_journal = TurnJournal(tmp_path / "0.turns")
        return credit.assign(replace(context, turn_journal=turn_journal, engine=journaled_engine), trees)

    with pytest.raises(EngineError):
        assign(fail_after=killed_after)
    assert assign() == uninterrupted


def test_continuations_that_nobody_could_judge_do_not_count_in_a_value(grow_trees: GrowTrees) -> None:
    trees, context = grow_trees(Ladder())
    beginning = AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())
    context = replace(context, task=Letters(environment=UnavailableEveryThird()))
    plan = ContinuationPlan(FixedBudget(9), context.settings.sampling)
    (estimate,) = TurnStates().estimate(context, [beginning], plan)
    assert (len(estimate.rewards), len(estimate.all_rewards), estimate.all_rewards.count(None)) == (6, 9, 3)
    assert estimate.rewards == tuple(reward for reward in estimate.all_rewards if reward is not None)


@pytest.mark.parametrize("credit", [Group(), Group(std=False), Rloo()], ids=str)
def test_whole_answers_are_compared_by_what_all_their_turns_earn(
    credit: Group | Rloo, grow_trees: GrowTrees
) -> None:
    trees, context = grow_trees(Ladder())
    episodes, _ = credit.assign(context, trees)
    for tree in trees:
        rewards = [sum(turn.reward for turn in played(leaf.text[::2])) for leaf in tree.leaves]
        expected = credit.advantages(rewards)
        advantages = [episode.advantages[0] for episode in episodes if episode.group == tree.problem.id]
        assert advantages == pytest.approx(list(expected))


def test_a_critics_advantages_have_each_reward_at_the_end_of_its_turn(grow_trees: GrowTrees) -> None:
    trees, context = grow_trees(Ladder())
    sequences = Sequences.of(Group().assign(context, trees)[0])
    rewards_N = token_rewards(sequences.starts, sequences.rewards, sequences.early_rewards)
    for number, answer in enumerate(answers_of(trees)):
        letters = answer.text[::2]
        prefixes = [letters[:turn] for turn in range(len(letters) + 1)]
        turn_rewards = rewards_N[sequences.starts[number] : sequences.starts[number + 1]].tolist()
        assert turn_rewards == [turn.reward for turn in played(letters)]
        advantages, _ = gae(
            turn_rewards, [expected_later(before) for before in prefixes[:-1]], gamma=1.0, lam=0.0
        )
        exact = [expected_total(after) - expected_total(before) for before, after in pairwise(prefixes)]
        assert advantages == pytest.approx(exact)


def test_a_reward_before_the_first_trained_token_is_credited_to_no_token(grow_trees: GrowTrees) -> None:
    """In particular, the answer before it doesn't get that reward."""
    trees, context = grow_trees(Ladder())
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
    unchanged_rewards_N = token_rewards(unchanged.starts, unchanged.rewards, unchanged.early_rewards)
    assert torch.equal(rewards_N[:before], unchanged_rewards_N[: unchanged.starts[number]])


FORK = "<Parallel><Outlines><Outline>1:;</Outline><Outline>2:;</Outline></Outlines>"
PARTS = ("main", "1", "2", "end")
"""The four samples of an answer: before the fork, in each of its threads, and after it."""
CHANCE = {"main": 0.5, "1": 0.3, "2": 0.8, "end": 0.6}
"""The probability that a part is written as ``?1`` rather than ``?0``."""


def script(before: str, request: Request) -> str:
    part = {"1:": "1", "2:": "2", ">\n": "end"}.get(before[-2:], "main")
    bit_text = "?1" if random.Random(request.seed).random() < CHANCE[part] else "?0"
    return {"main": f"{bit_text}{FORK}", "end": f"</Parallel>{bit_text}$"}.get(part, f"{bit_text}\n</Thread>")


def reward(bits: tuple[int, ...]) -> float:
    """Returns a reward in which no part's effect is independent of the others."""
    main, first, second, end = bits
    return float((main and first) or (second and end))


def value(known_bits: tuple[int, ...]) -> float:
    """Returns the mean reward over all bits that may follow these."""
    total = 0.0
    for unknown_bits in itertools.product((0, 1), repeat=4 - len(known_bits)):
        chance = 1.0
        for part, bit in zip(PARTS[len(known_bits) :], unknown_bits, strict=True):
            chance *= CHANCE[part] if bit else 1 - CHANCE[part]
        total += chance * reward((*known_bits, *unknown_bits))
    return total


def bits_written(text: str) -> tuple[int, ...]:
    return tuple(int(text[position + 1]) for position, letter in enumerate(text) if letter == "?")


def reward_of_text(text: str) -> float:
    return reward(bits_written(text))


def context_of_threads(engine: ScriptedEngine, rollout: ParallelThreads) -> RolloutContext:
    return sampling_context(engine, rollout, TextPool(reward_of_text))


def assign_to_threads(
    samples: int, answers: int = 4
) -> tuple[list[Trajectory], list[Episode], ScriptedEngine]:
    rollout, engine = ParallelThreads(samples=answers, max_tokens=300), ScriptedEngine(script)
    context = context_of_threads(engine, rollout)
    trees, _ = rollout.run(context, [Problem(id="train/0", prompt=";", gold="")])
    engine.requests.clear()
    episodes, metrics = MonteCarlo(samples=samples, states=ThreadStates()).assign(context, trees)
    assert metrics["credit/value_samples"] == samples * metrics["credit/value_states"]
    return answers_of(trees), episodes, engine


def test_values_of_partly_written_answers_come_close_to_the_exact_ones() -> None:
    samples = 700
    trajectories, episodes, _ = assign_to_threads(samples)
    assert len({bits_written(trajectory.text) for trajectory in trajectories}) > 2
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        bits = bits_written(trajectory.text)
        exact = [value(bits[:known]) for known in range(5)]
        sampled = [
            part for part, part_segment in enumerate(trajectory.segments) if part_segment.origin == "sampled"
        ]
        deviation = 4 * (0.25 / samples) ** 0.5
        for part, segment in enumerate(sampled):
            assert episode.step_values[segment] == pytest.approx(exact[part], abs=deviation)
            start, end = (0, *episode.step_ends)[segment : segment + 2]
            expected = [exact[part + 1] - exact[part]] * (end - start)
            assert episode.trained[start:end].all()
            assert episode.advantages[start:end] == pytest.approx(expected, abs=2 * deviation)
        total = sum(episode.advantages[episode.step_ends[segment] - 1] for segment in sampled)
        assert total == pytest.approx(episode.reward - episode.step_values[0])


def test_a_continuation_samples_only_the_missing_parts_and_equal_states_share_it() -> None:
    trajectories, _, engine = assign_to_threads(3, answers=6)
    states = {bits_written(trajectory.text)[:length] for trajectory in trajectories for length in range(4)}
    # After k parts, a continuation writes the other 4 - k.
    assert len(engine.requests) == 3 * sum(4 - len(length) for length in states)
    for request in engine.requests:
        assert decode(request.prompt_ids).startswith(";")


def test_no_value_depends_on_which_other_states_are_estimated() -> None:
    _, alone, _ = assign_to_threads(3, answers=1)
    _, together, _ = assign_to_threads(3, answers=6)
    assert alone == together[:1]


@pytest.mark.parametrize("values", [FreshContinuations(), Sequential(error=0.1, most=6)])
@pytest.mark.parametrize("order", [1, 2])
def test_begun_with_each_answer_the_values_are_the_same_and_nothing_more_is_sampled(
    values: ValueEstimator, order: int
) -> None:
    def assign(pipelined: bool) -> tuple[list[Episode], Metrics, list[tuple[tuple[int, ...], int]], int]:
        credit = MonteCarlo(samples=3, states=ThreadStates(), values=values, pipelined=pipelined)
        rollout = ParallelThreads(samples=4, max_tokens=300)
        engine = ScriptedEngine(script, order if pipelined else 0)
        context = context_of_threads(engine, rollout)
        early = credit.early_continuations(context)
        problems = [Problem(id=f"train/{i}", prompt=";" * (i + 1), gold="") for i in range(2)]
        trees, _ = rollout.run(context if early is None else early.attach(context), problems)
        requests_before = len(engine.requests)
        episodes, metrics = credit.assign(replace(context, early_continuations=early), trees)
        requests = sorted((plain(request.prompt_ids), request.seed) for request in engine.requests)
        return episodes, metrics, requests, len(engine.requests) - requests_before

    *expected, _ = assign(False)
    *pipelined, later_requests = assign(True)
    assert pipelined == expected
    # Fresh continuations ended with the answers. Later rounds of a sequential estimate need their rewards.
    assert (later_requests == 0) == isinstance(values, FreshContinuations)
