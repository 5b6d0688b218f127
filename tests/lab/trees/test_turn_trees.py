"""Trees of turns: answers of several turns that branch off after a turn (rollout `turn_tree`).

These tests promise:

* A branch begins with the turns and the environment's state of the answer from which it branched off, hidden
  parts included.
* Each sampled token is trained once.
* A tree depends on its seeds alone, also after a kill.
* The expected gradient is the true one, or as far off as the documents say.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import pytest

from tests.credit.expectations import Choices, DrawnStates
from tests.support import turns
from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from tests.support.turns import Ladder, LadderElsewhere, Letters, Mute, UnsteadyHere, decode, lent
from treetune.credit.trees import TreeCredit
from treetune.credit.values.siblings import Siblings
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.environments.base import Again, Environment, Turn
from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.domains.multi_turn import MultiTurn, TurnStates
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import Completion, SamplingParams
from treetune.exceptions import EngineError, Unavailable
from treetune.lab.trees import branching as branching_module
from treetune.lab.trees.branching import AtStates, Branching, LastStates, RandomStates, UpToWidth
from treetune.lab.trees.turns import TurnTree
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.rollouts.storage import trajectories_from_bytes, trajectories_to_bytes
from treetune.seeds import derived_random
from treetune.tasks.base import Task
from treetune.tree import Sharing, Tree, answers_of, trees_of, with_answers
from treetune.vocabulary import Episode, Fork, Metrics, Problem, Trajectory

STATES = TurnStates()
TWO_WAYS = AtStates(states=STATES, ways=(2,))
TWICE = AtStates(states=STATES, ways=(2, 2))
IN_TAIL = LastStates(states=STATES)
RANDOM = RandomStates(states=STATES, draws=2)
BRANCHINGS = {
    "after the first turn": TWO_WAYS,
    "after both": TWICE,
    "up to a width": UpToWidth(states=STATES, width=5),
    "last turns": IN_TAIL,
    "drawn": RANDOM,
    "drawn twice": RandomStates(states=STATES, draws=1, rounds=2),
}


def rollout(branching: Branching = TWICE, **changed: object) -> TurnTree:
    """Returns a rollout of one letter a turn, with nothing around the environment's reply."""
    settings = {
        "samples": 2,
        "max_tokens": 20,
        "max_turns": 3,
        "turn_tokens": 1,
        "observation_format": "{observation}",
        "branching": branching,
    }
    return TurnTree(**{**settings, **changed})


@pytest.fixture(scope="module")
def environments() -> Iterator[EnvironmentPool]:
    with EnvironmentPool() as pool:
        yield pool


def grow_trees(
    pool: EnvironmentPool,
    rollout: TurnTree,
    task: Task | None = None,
    engine: Engine | None = None,
    journal: TurnJournal | None = None,
) -> tuple[list[Tree], Metrics]:
    task = task or Letters()
    context = lent(task, engine or turns.engine(), pool, rollout=rollout, turn_journal=journal)
    return rollout.run(context, task.problems("train"))


def letters_sampled(answer: Trajectory) -> str:
    """Returns the letters that the policy sampled."""
    return "".join(decode(segment.token_ids) for segment in answer.segments if segment.origin == "sampled")


@pytest.mark.parametrize("branching", BRANCHINGS.values(), ids=BRANCHINGS)
def test_turns_that_answers_share_are_sampled_once_and_trained_once(
    branching: Branching, environments: EnvironmentPool
) -> None:
    engine = turns.engine()
    trees, _ = grow_trees(environments, rollout(branching), engine=engine)
    context = lent(Letters(), engine, environments, rollout=rollout())
    assert any(tree.has_forks for tree in trees)
    trained = 0
    for tree in trees:
        assert len(tree.leaves) <= branching.most_answers(2)
        episodes, _ = TreeCredit().assign(context, [tree])
        for answer, episode in zip(tree.leaves, episodes, strict=True):
            is_letter = [decode([token]) in "ab" for token in episode.response_ids]
            assert not episode.trained[~(episode.behaviour_logprobs < 0)].any(), "replies have no log-probs"
            assert all(
                letter for letter, is_trained in zip(is_letter, episode.trained, strict=True) if is_trained
            )
            if answer.fork is not None:
                origin = tree.leaves[answer.fork.sample]
                shared = answer.fork.tokens
                assert plain(answer.response_ids[:shared]) == plain(origin.response_ids[:shared])
                assert shared in (0, *origin.step_ends[:-1]), "it branched after a turn and its reply"
        trained += sum(int(episode.trained.sum()) for episode in episodes)
    assert trained == engine.tokens
    requests = Counter((plain(is_trained.prompt_ids), is_trained.seed) for is_trained in engine.asked)
    assert set(requests.values()) == {1}, "no two turns share their draws"


def test_answers_earn_the_rewards_of_the_turns_before_their_branch_too(
    environments: EnvironmentPool,
) -> None:
    for tree in grow_trees(environments, rollout())[0]:
        for answer in tree.leaves:
            rewards = [turn.reward for turn in turns.played(letters_sampled(answer))]
            assert answer.reward == sum(rewards)
            assert answer.step_rewards == (tuple(rewards) if any(rewards[:-1]) else ())
            assert answer.numbers["turns/count"] == len(rewards)


def test_without_branches_the_answers_are_those_of_multi_turn(environments: EnvironmentPool) -> None:
    unbranched = answers_of(grow_trees(environments, rollout(UpToWidth(states=STATES, width=2)))[0])
    multi_turn = turns.rollout(samples=2)
    context = lent(Letters(), turns.engine(), environments, rollout=multi_turn)
    assert unbranched == answers_of(multi_turn.run(context, Letters().problems("train"))[0])


@pytest.mark.parametrize("branching", [TWICE, RANDOM], ids=["at states", "drawn"])
def test_the_same_seed_grows_the_same_tree_in_any_order_and_place(
    branching: Branching, environments: EnvironmentPool
) -> None:
    expected = answers_of(grow_trees(environments, rollout(branching))[0])
    for order in range(3):
        shuffle = random.Random(order).sample
        engine = turns.engine(order=lambda count, shuffle=shuffle: shuffle(range(count), count))
        turn_tree = rollout(branching, in_flight=None if order else 1)
        elsewhere = Letters(environment=LadderElsewhere())
        assert answers_of(grow_trees(environments, turn_tree, elsewhere, engine)[0]) == expected
    fewer = answers_of(grow_trees(environments, rollout(branching), Letters(golds=("",)))[0])
    assert fewer == expected[: len(fewer)]


@dataclass(frozen=True, kw_only=True)
class HiddenState(UnsteadyHere):
    """Has a hidden state: a secret that no seed decides, and the letters so far.

    Its replies show nothing of it. The last turn earns both.
    """

    def reset(self, problem: Problem, seed: int) -> list[float]:
        return [float(time.perf_counter_ns() % 10**9)]

    def step(self, state: list[float], action: str) -> Turn:
        state.append("ab".index(action) + 1)
        done = len(state) == 4
        letters = state[1] + 10 * state[2] + 100 * state[3] if done else 0.0
        return Turn("+", done=done, reward=1000 * state[0] + letters if done else 0.0)


@dataclass(frozen=True, kw_only=True)
class HiddenStateReplayed(HiddenState):
    """Has a secret from its seed, and is played again from the beginning."""

    again: ClassVar[Again] = "replay"

    def reset(self, problem: Problem, seed: int) -> list[float]:
        return [float(derived_random(seed, "secret").randrange(10**9))]


@pytest.mark.parametrize("environment", [HiddenState(), HiddenStateReplayed()], ids=["copy", "replay"])
def test_a_branch_has_the_hidden_state_of_its_answer_and_changes_no_other(
    environment: Environment, environments: EnvironmentPool
) -> None:
    trees, _ = grow_trees(environments, rollout(), Letters(environment=environment))
    for tree in trees:
        secrets: dict[int, set[float]] = defaultdict(set)
        for answer, path in zip(tree.leaves, tree.paths, strict=True):
            secret, letters = divmod(answer.reward, 1000)
            secrets[path[0]].add(secret)
            first, second, third = ("ab".index(letter) + 1 for letter in letters_sampled(answer))
            assert letters == first + 10 * second + 100 * third
        assert [len(secrets_of_root) for secrets_of_root in secrets.values()] == [1, 1]
        assert len(tree.leaves) == 8


@dataclass(frozen=True, kw_only=True)
class LongReplies(HiddenState):
    """Replies with two characters."""

    def step(self, state: list[float], action: str) -> Turn:
        return replace(super().step(state, action), observation="++")


@dataclass(frozen=True, kw_only=True)
class LongRepliesReplayed(LongReplies):
    """Replies with two characters, and is played again from the beginning."""

    again: ClassVar[Again] = "replay"


def test_a_branch_counts_no_events_of_the_turns_that_it_shares(environments: EnvironmentPool) -> None:
    counts = {}
    for environment in (LongReplies(), LongRepliesReplayed()):
        trees, _ = grow_trees(
            environments, rollout(observation_characters=1), Letters(environment=environment)
        )
        counts[environment.again] = [
            leaf.numbers["turns/observations_cut"] for tree in trees for leaf in tree.leaves
        ]
    assert counts["replay"] == counts["copy"]
    assert set(counts["copy"]) == {2, 1, 0}, "of two replies that are read, none, one or both are shared"


def test_a_branch_after_a_turn_without_a_reply_begins_from_the_copy_of_that_turn(
    environments: EnvironmentPool,
) -> None:
    for tree in grow_trees(environments, rollout(), Letters(environment=Mute()))[0]:
        assert len(tree.leaves) == 8
        for answer in tree.leaves:
            assert [segment.origin for segment in answer.segments] == [
                "sampled"
            ] * 3 and answer.reward == 0.75


@dataclass(frozen=True, kw_only=True)
class UnavailableEveryThird(Ladder):
    """Is unavailable at every third beginning."""

    beginnings: list[int] = field(default_factory=list, compare=False)

    def reset(self, problem: Problem, seed: int) -> list[str]:
        self.beginnings.append(1)
        if len(self.beginnings) % 3 == 0:
            raise Unavailable("closed")
        return super().reset(problem, seed)


def test_a_branch_without_an_environment_is_left_out_and_its_turns_are_trained_with_another(
    environments: EnvironmentPool,
) -> None:
    turn_tree = rollout(samples=3)
    trees, metrics = grow_trees(environments, turn_tree, Letters(environment=UnavailableEveryThird()))
    context = lent(Letters(), turns.engine(), environments, rollout=turn_tree)
    assert 0 < metrics["episodes/unavailable"] < 1
    for tree in trees:
        graded = [index for index, leaf in enumerate(tree.leaves) if leaf.grade.is_known]
        remaining = tree.select_leaves(graded)
        nodes = {node for path in remaining.paths for node in path}
        sampled = [tree.nodes[node].segment for node in nodes if tree.nodes[node].segment.origin == "sampled"]
        episodes, _ = TreeCredit().assign(context, [remaining])
        trained = sum(int(episode.trained.sum()) for episode in episodes)
        assert trained == sum(len(segment.token_ids) for segment in sampled)


@pytest.mark.parametrize(
    ("branching", "fewest_requests"),
    [
        (TWICE, 2 + 4 + 8),  # one for each turn
        (RANDOM, 6 + 4),  # all turns of the first two answers, and the last turn of each further one
    ],
    ids=["at states", "drawn"],
)
def test_a_killed_rollout_grows_the_same_tree_and_samples_nothing_twice(
    branching: Branching, fewest_requests: int, environments: EnvironmentPool, tmp_path: Path
) -> None:
    """No seed decides the replies of this environment: they come from the journal of turns."""
    task = Letters(golds=("",), environment=UnsteadyHere())
    for fail_after in range(1, fewest_requests):
        journal = tmp_path / f"{fail_after}.jsonl"

        def run(engine: FakeEngine, journal: Path = journal) -> list[Trajectory]:
            turn_journal = TurnJournal(journal.with_suffix(".turns"))
            journaled_engine = JournaledEngine(engine, journal)
            return answers_of(
                grow_trees(environments, rollout(branching), task, journaled_engine, turn_journal)[0]
            )

        first, second, third = turns.engine(fail_after=fail_after), turns.engine(), turns.engine()
        with pytest.raises(EngineError):
            run(first)
        resumed = run(second)
        requests = Counter(
            (plain(request.prompt_ids), request.seed) for request in [*first.asked, *second.asked]
        )
        assert set(requests.values()) == {1}
        assert run(third) == resumed and not third.asked


def test_trees_come_back_from_disk_with_their_shared_turns(environments: EnvironmentPool) -> None:
    trees, _ = grow_trees(environments, rollout())
    read_trees = trees_of(trajectories_from_bytes(trajectories_to_bytes(answers_of(trees))))
    assert answers_of(read_trees) == answers_of(trees)
    assert [Sharing.of(tree) for tree in read_trees] == [Sharing.of(tree) for tree in trees]


def test_metrics_count_branchings_and_sampled_tokens_and_no_replies(environments: EnvironmentPool) -> None:
    engine = turns.engine()
    trees, metrics = grow_trees(environments, rollout(TWO_WAYS), engine=engine)
    answers = answers_of(trees)
    assert metrics["tree/answers"] == len(answers) / 4
    assert metrics["tree/tokens"] == engine.tokens / 4
    assert metrics["tree/tokens_of_chains"] == sum(len(letters_sampled(answer)) for answer in answers) / 4
    assert metrics["tree/shared"] == 1 - metrics["tree/tokens"] / metrics["tree/tokens_of_chains"] > 0
    assert metrics["tree/depth"] == 1
    # Each answer from the prompt has a node of one turn, and two nodes after it.
    assert metrics["tree/nodes"] == 2 * 3


def test_evaluation_samples_independent_answers_with_the_same_settings() -> None:
    sampler = adapt_to_fixed_problems(rollout(temperature=0.5))
    assert sampler == turns.rollout(samples=2, temperature=0.5) and type(sampler) is MultiTurn


def test_random_states_are_the_prompt_and_each_turn_once(environments: EnvironmentPool) -> None:
    branching = RandomStates(states=STATES, draws=3, rounds=2)
    lengths = Counter[int]()
    for tree in grow_trees(environments, rollout(branching), Letters(golds=("",) * 20))[0]:
        assert len(tree.leaves) == branching.most_answers(2) == 14
        for root in (0, 1):
            of_root = [leaf for leaf in tree.leaves[2:] if _number_of_root(tree, leaf) == root]
            assert len(of_root) == 6, "three a round, for each tree"
        lengths += Counter(leaf.fork.tokens for leaf in tree.leaves if leaf.fork is not None)
    assert lengths.keys() == {0, 2, 4}


def _number_of_root(tree: Tree, answer: Trajectory) -> int:
    return answer.sample if answer.fork is None else _number_of_root(tree, tree.leaves[answer.fork.sample])


# Advantages


def make_tree_with_rewards_by_number(pool: EnvironmentPool) -> Tree:
    """Returns the first tree of two roots, with the rewards 0, 1, 2, …"""
    tree = grow_trees(pool, rollout(TWO_WAYS))[0][0]
    answers = []
    for answer in tree.leaves:
        grade = replace(answer.grade, reward=float(answer.sample))
        answers.append(replace(answer, grade=grade, step_rewards=()))
    return trees_of(answers)[0]


@pytest.mark.parametrize("advantage", ["leave_one_out", "local"])
def test_turns_between_two_branchings_have_the_same_advantage(
    advantage: str, environments: EnvironmentPool
) -> None:
    tree = make_tree_with_rewards_by_number(environments)
    context = lent(Letters(), turns.engine(), environments, rollout=rollout())
    episodes, _ = TreeCredit(advantage=advantage, weight="once", prior=0).assign(context, [tree])
    # The answers 0 and 2 share their first turn, and so do 1 and 3.
    first_turns = {"leave_one_out": [-1.0, 1.0, -1.0, 1.0], "local": [-0.5, 0.5, -0.5, 0.5]}[advantage]
    later_turns = {"leave_one_out": [-2.0, -2.0, 2.0, 2.0], "local": [-1.0, -1.0, 1.0, 1.0]}[advantage]
    for answer, episode, first, later in zip(tree.leaves, episodes, first_turns, later_turns, strict=True):
        assert episode.step_ends == answer.step_ends, "the steps of the row are the answer's turns"
        turn_count = len(answer.step_ends)
        starts = [0, *answer.step_ends[:-1]]
        assert [episode.advantages[start] for start in starts] == [first] + [later] * (turn_count - 1)
        value = 1.0 + answer.sample % 2  # of the turn that two answers share
        assert episode.step_values == (1.5, value, *[float(answer.sample)] * (turn_count - 2))


def test_intra_and_inter_is_grpo_within_a_tree_plus_grpo_over_all(environments: EnvironmentPool) -> None:
    tree = make_tree_with_rewards_by_number(environments)
    context = lent(Letters(), turns.engine(), environments, rollout=rollout())
    episodes, _ = TreeCredit(advantage="intra_and_inter", weight="each").assign(context, [tree])
    for answer, episode in zip(tree.leaves, episodes, strict=True):
        # All rewards are 0 to 3, and those of a tree 0 and 2, or 1 and 3.
        inter = (answer.reward - 1.5) / (math.sqrt(5 / 3) + 1e-6)
        intra = (answer.reward - (1.0 + answer.sample % 2)) / (math.sqrt(2) + 1e-6)
        assert episode.advantages == pytest.approx([inter + intra] * len(answer.response_ids))
        assert episode.trained.sum() == len(letters_sampled(answer)), (
            "shared turns are trained in each answer"
        )


def test_answers_that_branched_off_at_the_prompt_belong_to_its_tree(environments: EnvironmentPool) -> None:
    """Also where the answer that they branched off from could not be graded."""
    branching = RandomStates(states=STATES, draws=3)
    (tree,) = grow_trees(environments, rollout(branching), Letters(golds=("",)))[0]
    context = lent(Letters(), turns.engine(), environments, rollout=rollout())
    for leaves in (range(8), range(1, 8)):
        remaining = tree.select_leaves(list(leaves))
        credit = TreeCredit(advantage="intra_and_inter", weight="each")
        episodes, _ = credit.assign(context, [remaining])
        rewards: dict[int, list[float]] = defaultdict(list)
        for leaf in remaining.leaves:
            rewards[_number_of_root(tree, leaf)].append(leaf.reward)
        all_rewards = [leaf.reward for leaf in remaining.leaves]
        for leaf, episode in zip(remaining.leaves, episodes, strict=True):
            groups = (all_rewards, rewards[_number_of_root(tree, leaf)])
            expected = sum(_standardise(leaf.reward, group) for group in groups)
            assert episode.advantages[0] == pytest.approx(expected)


def test_an_answer_whose_origin_was_left_out_stays_in_its_tree(environments: EnvironmentPool) -> None:
    """Answer 4 branched off from answer 2 at the prompt, and answer 5 from answer 4 after a turn."""
    (tree,) = grow_trees(environments, rollout(RandomStates(states=STATES, draws=3)), Letters(golds=("",)))[0]
    answers = [replace(answer, fork=None) for answer in tree.leaves[:6]]
    answers[4] = replace(answers[4], fork=Fork(sample=2, tokens=0))
    answers[5] = replace(answers[5], fork=Fork(sample=4, tokens=3))
    (with_forks,) = with_answers([tree.select_leaves(range(6))], answers)
    remaining = with_forks.select_leaves([0, 1, 2, 3, 5])
    assert remaining.leaves[-1].fork == Fork(sample=2, tokens=0)
    assert with_forks.select_leaves([0, 4, 5]).leaves[1].fork == Fork(sample=2, tokens=0), (
        "no nearer one is there"
    )
    assert with_forks.select_leaves(range(6)).leaves[5] is answers[5]


def _standardise(reward: float, group: Sequence[float]) -> float:
    centre = sum(group) / len(group)
    deviation = math.sqrt(sum((other - centre) ** 2 for other in group) / (len(group) - 1))
    return (reward - centre) / (deviation + 1e-6)


# Expected gradients


class ChoosingEngine(FakeEngine):
    """Goes through all letters that could be sampled."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(turns.probabilities, turns.EOS)
        self._choices = choices

    def _sample(
        self, prompt: tuple[int, ...], seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        likes = turns.likes(prompt)
        letter = list(likes)[self._choices.draw(list(likes.values()))]
        return Completion(turns.encode(letter), (math.log(likes[letter]),), "length", 0)


Gradient = dict[tuple[str, str], float]
"""Derivatives by the logit of each letter after each text."""


def add_gradient(total: Gradient, episode: Episode, weight: float) -> None:
    assert episode.advantages is not None
    text = decode(episode.response_ids)
    for position, letter in enumerate(text):
        if episode.trained[position]:
            before = text[:position]
            prompt = turns.encode("?" + before)
            for other, probability in turns.likes(prompt).items():
                score = float(other == letter) - probability
                key = before, other
                total[key] = total.get(key, 0.0) + weight * episode.advantages[position] * score


def true_gradient(environment: Environment, max_turns: int) -> Gradient:
    """Sums over all answers: their probability times their reward times the score of each turn."""
    total: Gradient = {}

    def add_answers(letters: str, text: str, probability: float, scores: Gradient, reward: float) -> None:
        state = environment.reset(Problem("", "", ""), 0)
        replies = [environment.step(state, letter) for letter in letters]
        if replies and (replies[-1].done or len(replies) == max_turns):
            for key, score in scores.items():
                total[key] = total.get(key, 0.0) + probability * reward * score
            return
        likes = turns.likes(turns.encode("?" + text))
        for letter, chance in likes.items():
            state = environment.reset(Problem("", "", ""), 0)
            reply = [environment.step(state, action) for action in letters + letter][-1]
            new_scores = {(text, other): float(other == letter) - p for other, p in likes.items()}
            next_text = text + letter + reply.observation
            add_answers(
                letters + letter, next_text, probability * chance, scores | new_scores, reward + reply.reward
            )

    add_answers("", "", 1.0, {}, 0.0)
    return total


@cache
def all_trees(branching: Branching, max_turns: int) -> list[tuple[Tree, float]]:
    """Returns all trees that could be grown, with their probabilities.

    An answer that was cut earns what its turns earned.
    """
    trees_and_chances = []
    choices = Choices()
    turn_tree = rollout(branching, max_turns=max_turns, unfinished_reward=None)
    with EnvironmentPool() as pool:
        for _ in choices.ways():
            with patch.object(branching_module, "derived_random", lambda *_: DrawnStates(choices)):
                ((tree,), _) = grow_trees(pool, turn_tree, Letters(golds=("",)), ChoosingEngine(choices))
            trees_and_chances.append((tree, choices.probability))
    return trees_and_chances


def error_and_cosine(
    branching: Branching, credit: TreeCredit | MonteCarlo, max_turns: int
) -> tuple[float, float]:
    """Returns the length of the difference as a share of the true gradient's, and the cosine."""
    total: Gradient = {}
    with EnvironmentPool() as pool:
        context = lent(Letters(), turns.engine(), pool, rollout=rollout())
        for tree, probability in all_trees(branching, max_turns):
            for episode in credit.assign(context, [tree])[0]:
                add_gradient(total, episode, probability / 2)
    exact = true_gradient(Ladder(), max_turns)
    length = math.hypot(*exact.values())
    difference = math.hypot(*(total.get(key, 0.0) - slope for key, slope in exact.items()))
    dot_product = sum(total.get(key, 0.0) * slope for key, slope in exact.items())
    return difference / length, dot_product / (length * math.hypot(*total.values()))


def test_probabilities_of_all_trees_add_up_to_one() -> None:
    assert sum(probability for _, probability in all_trees(TWO_WAYS, 2)) == pytest.approx(1)


@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_leave_one_out_with_reach_has_the_true_gradient(prior: float) -> None:
    assert error_and_cosine(TWO_WAYS, TreeCredit(prior=prior), 2)[0] < 1e-9


def test_siblings_value_the_turns_of_a_tree_without_bias() -> None:
    assert error_and_cosine(TWO_WAYS, MonteCarlo(values=Siblings(), states=STATES), 2)[0] < 1e-9


@pytest.mark.parametrize(
    ("branching", "credit", "max_turns", "error", "cosine"),
    [
        (TWO_WAYS, TreeCredit(advantage="local"), 2, 0.5, 1.0),
        (TWO_WAYS, TreeCredit(advantage="intra_and_inter", weight="each"), 2, 8.0201, 0.9948),
        (RandomStates(states=STATES, draws=1), TreeCredit(), 2, 0.5, 1.0),
        # If all answers have two turns, the last turn is always the second.
        (IN_TAIL, TreeCredit(), 2, 0.0, 1.0),
        # Two turns of `b` end an answer, and others have three: whether a turn is the last depends on itself.
        (IN_TAIL, TreeCredit(), 3, 0.1542, 0.9911),
    ],
    ids=["local", "Tree-GRPO", "drawn", "last of two turns", "last of two or three turns"],
)
def test_the_bias_of_each_other_credit_is_as_stated(
    branching: Branching, credit: TreeCredit, max_turns: int, error: float, cosine: float
) -> None:
    assert error_and_cosine(branching, credit, max_turns) == pytest.approx((error, cosine), abs=1e-4)
