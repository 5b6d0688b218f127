"""What turns are worth, against the exact values of an environment small enough to enumerate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.columns import plain
from tests.fake_engine import FakeEngine
from tests.rollouts import turns
from tests.rollouts.turns import (
    EOS,
    Ladder,
    LadderElsewhere,
    Letters,
    Unsteady,
    lent,
    rollout,
)
from treetune.inference.base import Completion, SamplingParams
from treetune.inference.journal import JournaledEngine
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Group, Rloo, gae
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.values import AnswerPrefix, ContinuationPlan, FixedBudget
from treetune.tasks.graders.base import Unavailable
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Problem, Trajectory, logprob_array, token_array
from treetune_domains.environments.base import Environment, Turn
from treetune_domains.environments.pool import EnvironmentPool, TurnJournal
from treetune_domains.multi_turn import TurnStates

CONTINUATIONS = 64
"""Every probability of what may follow a state is a multiple of 1/16."""


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(workers=2) as environments:
        yield environments


def played(letters: str) -> list[Turn]:
    state = Ladder().reset(Problem("", "", ""), 0)
    return [Ladder().step(state, letter) for letter in letters]


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


def rolled_out(pool: EnvironmentPool, environment: Environment, **given: object) -> tuple[list[Tree], object]:
    asked = rollout(**given)
    task = Letters(environment=environment)
    context = lent(task, turns.engine(), pool, rollout=asked)
    return asked.run(context, task.problems("train"))[0], context


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_continuations_of_a_turns_beginning_earn_its_exact_value(
    environment: Environment, pool: EnvironmentPool
) -> None:
    trees, _ = rolled_out(pool, environment)
    beginnings = {"": AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())}
    for answer in answers_of(trees):
        for turn in range(1, len(answer.step_ends)):
            segments = tuple(replace(one, logprobs=None) for one in answer.segments[: 2 * turn])
            beginnings[answer.text[: 2 * turn : 2]] = AnswerPrefix(
                answer.problem, answer.prompt_ids, segments
            )
    assert set(beginnings) == {"", "a", "b", "aa", "ab", "ba"}
    for letters, beginning in beginnings.items():
        context = lent(Letters(environment=environment), DealtEngine(), pool)
        (estimate,) = TurnStates().estimate(
            context, [beginning], ContinuationPlan(FixedBudget(CONTINUATIONS), context.settings.sampling)
        )
        assert estimate.value == pytest.approx(in_all(letters), abs=1e-12), letters


def credited(
    pool: EnvironmentPool, environment: Environment, samples: int
) -> list[tuple[Trajectory, Episode]]:
    trees, context = rolled_out(pool, environment)
    episodes, _ = MonteCarlo(samples=samples, states=TurnStates()).assign(context, trees)
    return list(zip(answers_of(trees), episodes, strict=True))


def test_a_turns_advantage_is_its_reward_and_what_it_changed_for_later_ones(pool: EnvironmentPool) -> None:
    samples = 300
    for answer, episode in credited(pool, Ladder(), samples):
        letters = answer.text[::2]
        assert episode.step_values is not None and episode.advantages is not None
        deviation = 4 * (0.5 / samples) ** 0.5
        for turn, end in enumerate(episode.step_ends):
            before, after = letters[:turn], letters[: turn + 1]
            exact = played(after)[-1].reward + to_come(after) - to_come(before)
            start = (0, *episode.step_ends)[turn]
            for advantage in episode.advantages[start:end]:
                assert advantage == pytest.approx(exact, abs=2 * deviation)
        total = sum(episode.advantages[start] for start in (0, *episode.step_ends[:-1]))
        assert total == pytest.approx(answer.reward - episode.step_values[0])


def test_only_what_follows_a_state_is_sampled_and_no_injected_token_is_trained(pool: EnvironmentPool) -> None:
    trees, context = rolled_out(pool, LadderElsewhere())
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


def test_an_environment_that_no_seed_decides_goes_on_from_its_copies(pool: EnvironmentPool) -> None:
    for answer, episode in credited(pool, Unsteady(), 3):
        assert answer.reward == 0.75
        assert episode.step_values == (0.75, 0.75, 0.75), "what was earned before the copy counts too"


def test_an_environment_that_is_not_what_it_says_when_played_again_is_told(pool: EnvironmentPool) -> None:
    with pytest.raises(ValueError, match="something else when an answer is played again"):
        credited(pool, Unreliable(), 3)


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
    trees, _ = context.get(Rollout).run(context if early is None else early.attached(context), problems)
    return trees, credit.assign(context.with_services(*[early] if early else []), trees)[0]


@pytest.mark.parametrize("environment", [Ladder(), LadderElsewhere()], ids=["inline", "process"])
def test_begun_with_each_answer_turns_are_worth_the_same_and_nothing_more_is_sampled(
    environment: Environment, pool: EnvironmentPool
) -> None:
    def made(pipelined: bool) -> tuple[list[Episode], Counter[tuple[tuple[int, ...], int]]]:
        engine = turns.engine()
        credit = MonteCarlo(samples=3, states=TurnStates(), pipelined=pipelined)
        _, episodes = begun_with_answers(lent(Letters(environment=environment), engine, pool), credit)
        return episodes, Counter((plain(one.prompt_ids), one.seed) for one in engine.asked)

    assert made(True) == made(False)


def test_what_environments_said_to_continuations_among_answers_outlives_a_crash(
    pool: EnvironmentPool, tmp_path: Path
) -> None:
    task, credit = Letters(environment=Unsteady()), MonteCarlo(samples=3, states=TurnStates())

    def journaled(engine: FakeEngine, name: str, *others: str) -> RolloutContext:
        kept = JournaledEngine(engine, tmp_path / name, continuations=tmp_path / "credit")
        said = TurnJournal(tmp_path / f"{name}.turns", [tmp_path / f"{one}.turns" for one in others])
        return lent(task, kept, pool, services=[said])

    trees, episodes = begun_with_answers(journaled(turns.engine(), "rollout"), credit)
    again = journaled(turns.engine(fail_after=0), "credit", "rollout")
    assert credit.assign(again.with_services(credit.early_continuations(again)), trees)[0] == episodes


def test_continuations_that_nobody_could_judge_are_no_part_of_a_value(pool: EnvironmentPool) -> None:
    trees, context = rolled_out(pool, Ladder())
    beginning = AnswerPrefix(trees[0].problem, trees[0].prompt_ids, ())
    context = replace(context, task=Letters(environment=OftenClosed()))
    (estimate,) = TurnStates().estimate(
        context, [beginning], ContinuationPlan(FixedBudget(9), context.settings.sampling)
    )
    assert (len(estimate.rewards), estimate.unavailable) == (6, 3)


@pytest.mark.parametrize("credit", [Group(), Group(std=False), Rloo()], ids=str)
def test_whole_answers_are_compared_by_what_all_their_turns_earn(
    credit: Group | Rloo, pool: EnvironmentPool
) -> None:
    trees, context = rolled_out(pool, Ladder())
    episodes, _ = credit.assign(context, trees)
    for tree in trees:
        wanted = credit.advantages([sum(t.reward for t in played(leaf.text[::2])) for leaf in tree.leaves])
        found = [one.advantages[0] for one in episodes if one.group == tree.problem.id]
        assert found == pytest.approx(list(wanted))


def test_a_critics_advantages_have_each_reward_at_the_end_of_its_turn(pool: EnvironmentPool) -> None:
    from treetune.trainers.preparation import token_rewards
    from treetune.trainers.tokens import Sequences

    trees, context = rolled_out(pool, Ladder())
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
