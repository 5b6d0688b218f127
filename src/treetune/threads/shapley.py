"""Credit for threads by Shapley values: what a thread adds to the reward, averaged over the sets of other
threads that the text after the join could have seen.

The players are the threads of one block of an answer. The worth v(S) of a set S of them is the mean reward of
answers in which only the threads in S are joined, and the text after the join is sampled again. The Shapley
value of thread i of n threads N (L. Shapley, "A value for n-person games", 1953) is::

    φ_i = Σ over S ⊆ N∖{i} of |S|! (n − |S| − 1)! / n! · (v(S ∪ {i}) − v(S))

With more than a few threads, the value is estimated: as the mean over random orders of the threads of what a
thread adds to the worth of the threads before it (Castro, Gómez and Tejada, "Polynomial calculation of the
Shapley value based on sampling", 2009). In both cases the values of a block's threads sum to v(N) − v(∅).

Example: two threads, each of which is enough by itself for a correct answer::

    v(∅) = 0, v({1}) = 1, v({2}) = 1, v({1, 2}) = 1       φ_1 = φ_2 = ½ · (1 − 0) + ½ · (1 − 1) = 0.5

Shapley values of parallel threads are the subject of arXiv:2607.18979. Its text was not available when this
file was written, so its estimator may differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Advantages, Answers, Continuations, Feature, Forks, Need, UseOfAdvantages
from treetune.credit.base import UNUSED_ADVANTAGES_REMEDY, ContinuingCredit, Credit
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.rloo import leave_one_out_advantages
from treetune.credit.states.base import AnswerPrefix
from treetune.engine.requests import CONTINUATION_PRIORITY
from treetune.rollouts.answers import Start, require_growing_rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed, derived_random
from treetune.threads.parallel_threads import ParallelThreads
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, Segment, Trajectory

Threads = frozenset[int]
"""A set of threads of a block, by their positions among the block's outlines."""

THREADS_OF_A_BLOCK = 3
"""The number of threads of a block that `treetune plan` assumes."""


class Block(NamedTuple):
    """A block of threads on the main text of an answer.

    Example: the second block of an answer, whose outlines 0, 1 and 2 were sampled, and whose thread 1 was
    left out of the answer as a straggler: ``Block(number=1, threads=(0, 2), segments_so_far=(...))``.
    """

    number: int
    """The number of the block on the main text, from 0."""
    threads: tuple[int, ...]
    """The positions of its threads among its outlines."""
    segments_so_far: tuple[Segment, ...]
    """All segments of the answer up to the end of the block's last thread."""


class Counterfactual(NamedTuple):
    """A block of an answer, and the set of its threads that are kept. Its worth is v(threads)."""

    answer: Trajectory
    block: Block
    threads: Threads
    """The threads that are kept."""


class ValuedBlock(NamedTuple):
    """A block whose threads get values, and the sets of its threads whose worth is needed for that."""

    block: Block
    orders: list[tuple[int, ...]]
    """Random orders of the threads; empty if the values are computed without orders."""
    sets: list[Threads]


@Credit.register("thread_shapley")
@dataclass(frozen=True, kw_only=True)
class ThreadShapley(ContinuingCredit):
    """Gives the tokens of a thread the Shapley value of the thread in its block. Tokens outside of threads
    get RLOO's advantage: the reward minus the mean reward of the other answers to the problem. Threads within
    threads belong to the outer thread.

    For each set of a block's threads, `samples` answers are sampled from the join to their end. The worth of
    the set of all threads also counts the answer's own reward. A block of n threads has 2^n sets. If n
    exceeds `exact_threads`, only the sets of `permutations` random orders are sampled: at most
    2 + (n − 1) · `permutations`. If that is not fewer than 2^n, all sets are sampled nevertheless.
    ``credit/value_tokens`` counts the sampled tokens.

    If `weights` is ``leave_one_out``, a thread gets v(N) − v(N∖{i}) instead (a difference reward). This
    credit is **unbiased**: a thread's text depends neither on its siblings nor on what is sampled without it.
    Shapley values are **biased**, since they also reward what a thread adds to answers without some of the
    others: in the tests' language with a fork into two threads, the expected gradient of the threads' tokens
    is off by 33 % of its length (cosine 0.967).

    The worth is the grader's score, without shaping, so an experiment with shaping is refused."""

    samples: Annotated[int, Gt(0)] = 3
    """The number of answers that are sampled for each set of threads, from the join to their end."""
    weights: Literal["shapley", "leave_one_out"] = "shapley"
    """The sets of other threads to which a thread is added to measure its value: all sets (``shapley``), or
    only the set of all other threads (``leave_one_out``)."""
    exact_threads: Annotated[int, Gt(0)] = 4
    """The largest number of threads of a block for which Shapley values are always exact: they go through all
    sets. In larger blocks, they are means over `permutations` if these need fewer sets."""
    permutations: Annotated[int, Gt(0)] = 8
    """The number of random orders of the threads of a block with more than `exact_threads`."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return Advantages(before_training=True), Continuations()

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(Forks(), "it values the threads of answers"),
            Need(Answers(2), "it compares the text outside of threads with the other answers"),
            Need(
                UseOfAdvantages(),
                "it samples answers with fewer threads to compute advantages",
                UNUSED_ADVANTAGES_REMEDY,
            ),
        )

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        return self.weights == "leave_one_out"

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        # A usual answer is taken to have one block with a usual number of threads.
        usual_sets = self._most_sets(THREADS_OF_A_BLOCK)
        # `limit` is the largest length of an answer in tokens, so all blocks of an answer together have at
        # most `limit` threads. The number of sets per thread depends on the size of a block. So `limit` times
        # the largest number of sets per thread bounds the number of sets, however the threads are divided
        # into blocks.
        most_sets = max(limit * self._most_sets(size) // size for size in self._block_sizes(limit))
        expected, largest = answers * usual_sets * self.samples, answers * most_sets * self.samples
        return expected, largest

    def _block_sizes(self, most_threads: int) -> list[int]:
        """Returns a few block sizes. One of them has the most sets per thread of all sizes up to
        `most_threads`.

        Exact values need 2^n sets for n threads, which are 2, 2, 8/3, 4, … sets per thread. So of the blocks
        with exact values, the largest has the most. Larger blocks need a·n + b sets, which are a + b / n sets
        per thread. This number only rises or only falls as n grows. So of these blocks, the smallest or the
        largest has the most.
        """
        if self.weights == "leave_one_out":
            return [1]  # n threads need n + 1 sets, which are 2, 3/2, 4/3, … sets per thread
        largest_exact = 1
        while largest_exact < most_threads and self._has_exact_values(largest_exact + 1):
            largest_exact += 1
        smallest_estimated = min(largest_exact + 1, most_threads)
        return [largest_exact, smallest_estimated, most_threads]

    def _most_sets(self, threads: int) -> int:
        """Returns the largest number of sets whose worth is needed for a block of this many threads."""
        if self.weights == "leave_one_out":
            return threads + 1
        return 2**threads if self._has_exact_values(threads) else self._most_sets_of_orders(threads)

    def _most_sets_of_orders(self, threads: int) -> int:
        """Returns the largest number of sets of threads that the random orders go through: the empty set, the
        set of all threads, and in each order the sets between these two."""
        return 2 + (threads - 1) * self.permutations

    def _has_exact_values(self, threads: int) -> bool:
        """Returns whether Shapley values go through all sets of this number of threads."""
        return threads <= self.exact_threads or 2**threads <= self._most_sets_of_orders(threads)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Sets the advantages. The tokens of a thread on the main text get the thread's value in its block.
        The tokens outside of threads get RLOO's advantage."""
        answers = answers_of(trees)
        outcome_advantages: list[float] = []
        for tree in trees:
            outcome_advantages += leave_one_out_advantages([leaf.reward for leaf in tree.leaves])

        # The value of a thread is computed from the worth of some sets of its block's threads: the mean
        # reward of answers that have only these threads. The sets of all blocks of this rank's answers are
        # sampled together.
        blocks_by_answer: list[list[ValuedBlock]] = []
        counterfactuals: list[Counterfactual] = []
        for answer in answers:
            valued_blocks = []
            for block in find_blocks(answer):
                orders = self._draw_orders(context, answer, block)
                sets = self._choose_sets(block.threads, orders)
                valued_blocks.append(ValuedBlock(block, orders, sets))
                counterfactuals += [Counterfactual(answer, block, threads) for threads in sets]
            blocks_by_answer.append(valued_blocks)
        rewards, metrics = self._sample_answers(context, counterfactuals)

        upcoming_rewards = iter(rewards)  # in the order of the counterfactuals
        episodes = []
        unknown_blocks = 0
        for answer, outcome_advantage, valued_blocks in zip(
            answers, outcome_advantages, blocks_by_answer, strict=True
        ):
            # The value of each thread, by the number of its block on the main text (`Block.number`) and its
            # position in the block.
            values: dict[tuple[int, int], float] = {}
            for block, orders, sets in valued_blocks:
                rewards_of_sets = {threads: next(upcoming_rewards) for threads in sets}
                worth = _mean_rewards(rewards_of_sets, block, answer)
                if worth is None:
                    unknown_blocks += 1
                    continue
                value_of_thread = self._compute_values(block.threads, orders, worth)
                values |= {(block.number, thread): value for thread, value in value_of_thread.items()}
            episodes.append(_make_episode_of_answer(context, answer, outcome_advantage, values))
        unknown = sum(context.ranks.exchange("blocks without a worth", unknown_blocks))
        if unknown:
            metrics["credit/value_unknown"] = float(unknown)
        return episodes, metrics | advantage_metrics(context, episodes)

    def _draw_orders(
        self, context: RolloutContext, answer: Trajectory, block: Block
    ) -> list[tuple[int, ...]]:
        """Returns random orders of a block's threads. Returns an empty list if the threads' values are
        computed without orders: with the weights ``leave_one_out``, and for few threads, from all sets."""
        if self.weights == "leave_one_out" or self._has_exact_values(len(block.threads)):
            return []
        draw = derived_random(context.seed, context.iteration, answer.id, "orders of threads", block.number)
        orders = []
        for _ in range(self.permutations):
            order = list(block.threads)
            draw.shuffle(order)
            orders.append(tuple(order))
        return orders

    def _choose_sets(self, threads: Sequence[int], orders: Sequence[Sequence[int]]) -> list[Threads]:
        """Returns the sets of a block's threads whose worth is needed for the values of the threads, each
        set once. The worth of a set is the mean reward of answers with only these threads in the block."""
        if self.weights == "leave_one_out":
            all_threads = frozenset(threads)
            return [all_threads, *(all_threads - {thread} for thread in threads)]
        if not orders:  # the Shapley values are exact, so they need the worth of every set
            return subsets(threads)
        # Along each random order, a thread's value is the worth that it adds to the threads before it.
        sets: list[Threads] = []
        for order in orders:
            sets += [frozenset(order[:size]) for size in range(len(order) + 1)]
        return list(dict.fromkeys(sets))

    def _compute_values(
        self, threads: Sequence[int], orders: Sequence[Sequence[int]], worth: Mapping[Threads, float]
    ) -> dict[int, float]:
        """Returns the value of each of a block's threads, from the worth of sets of these threads."""
        if self.weights == "leave_one_out":
            all_threads = frozenset(threads)
            return {thread: worth[all_threads] - worth[all_threads - {thread}] for thread in threads}
        if not orders:  # the Shapley values are exact: `worth` has all sets
            return shapley_values(threads, worth.__getitem__)
        return mean_marginals(orders, worth.__getitem__)

    def _sample_answers(
        self, context: RolloutContext, counterfactuals: Sequence[Counterfactual]
    ) -> tuple[list[list[float]], Metrics]:
        """Samples `samples` answers for each counterfactual. Returns the rewards of each counterfactual, and
        metrics of the cost. Collective.

        A sampled answer that could not be graded is left out of the rewards. The metrics are over all ranks.
        """
        assert context.engine is not None, "counterfactual answers need an engine"
        rollout = require_growing_rollout(context)
        assert isinstance(rollout, ParallelThreads), "only this rollout has threads"
        starts: list[Start] = []
        block_numbers: list[int] = []  # the number of the block at which each start ends
        for answer, block, threads in counterfactuals:
            segments = segments_with(block, threads)
            # The seed depends on the answer so far (`prefix`), and not on the rank and the order of sampling.
            prefix = AnswerPrefix(answer.problem, answer.prompt_ids, segments)
            seed = derive_seed(context.seed, context.iteration, prefix.key.hex(), block.number, "shapley")
            for number in range(self.samples):
                starts.append(Start(answer.problem, answer.prompt_ids, derive_seed(seed, number), segments))
                block_numbers.append(block.number)
        # In the engine's queue, answers of the rollout come before counterfactual answers. The log-probs of
        # counterfactual answers are not read, since these answers are never trained on.
        settings = replace(context.settings, reads_logprobs=False, priority=CONTINUATION_PRIORITY)
        sampling_context = replace(context, settings=settings)
        sampled: list[Trajectory] = []
        if starts:
            sampled = context.engine.run(
                rollout.answers_without_threads(sampling_context, starts, block_numbers)
            )

        rewards: list[list[float]] = [[] for _ in counterfactuals]
        tokens = unfinished = ungraded = 0
        for index, (start, answer) in enumerate(zip(starts, sampled, strict=True)):
            tokens += _count_sampled_tokens(answer.segments) - _count_sampled_tokens(start.segments)
            unfinished += answer.unfinished
            if answer.grade.is_known:
                # Each counterfactual has `samples` starts, one after the other.
                rewards[index // self.samples].append(answer.reward)
            else:
                ungraded += 1
        counts = context.ranks.exchange(
            "counterfactuals", (len(counterfactuals), len(sampled), tokens, unfinished, ungraded)
        )
        totals = [sum(counts_of_ranks) for counts_of_ranks in zip(*counts, strict=True)]
        all_sets, all_samples, all_tokens, all_unfinished, all_ungraded = totals
        metrics: Metrics = {}
        if all_samples:
            metrics["credit/value_states"] = float(all_sets)
            metrics["credit/value_samples"] = float(all_samples)
            metrics["credit/value_tokens"] = float(all_tokens)
            metrics["credit/value_unfinished"] = all_unfinished / all_samples
        if all_ungraded:
            metrics["credit/value_unavailable"] = float(all_ungraded)
        return rewards, metrics


# The values of a game


def subsets(players: Sequence[int]) -> list[Threads]:
    """Returns all sets of players, the smallest first."""
    sets: list[Threads] = []
    for size in range(len(players) + 1):
        sets += map(frozenset, itertools.combinations(players, size))
    return sets


def shapley_values(players: Sequence[int], worth: Callable[[Threads], float]) -> dict[int, float]:
    """Returns the Shapley value of each player (Shapley, 1953).

    The value is a sum over all sets S of the other players. The term of a set is
    |S|! (n − |S| − 1)! / n! · (worth(S with the player) − worth(S)).
    """
    n = len(players)
    values = {}
    for player in players:
        other_players = [other_player for other_player in players if other_player != player]
        terms = []
        for group in subsets(other_players):
            weight = math.factorial(len(group)) * math.factorial(n - len(group) - 1) / math.factorial(n)
            terms.append(weight * (worth(group | {player}) - worth(group)))
        values[player] = math.fsum(terms)
    return values


def mean_marginals(orders: Sequence[Sequence[int]], worth: Callable[[Threads], float]) -> dict[int, float]:
    """Returns the mean over orders of what each player adds to the players before it (Castro et al., 2009).

    The mean over all orders is the Shapley value, and so is the expectation of the mean over random orders.
    """
    marginals: dict[int, list[float]] = {player: [] for player in orders[0]}
    for order in orders:
        for position, player in enumerate(order):
            earlier_players = frozenset(order[:position])
            marginals[player].append(worth(earlier_players | {player}) - worth(earlier_players))
    return {
        player: math.fsum(contributions) / len(contributions) for player, contributions in marginals.items()
    }


# Answers and their blocks


def find_blocks(answer: Trajectory) -> list[Block]:
    """Returns the blocks in the main text of an answer, in their order.

    A block is a place where the answer splits into parallel threads. A thread may have blocks of its own,
    which aren't returned.
    """
    threads: dict[int, list[int]] = {}  # the positions of each block's threads
    last_segment: dict[int, int] = {}
    for index, segment in enumerate(answer.segments):
        if not segment.branch:
            continue
        block, position = segment.branch[0]  # the outermost block, and the thread's position in this block
        positions = threads.setdefault(block, [])
        if position not in positions:
            positions.append(position)
        last_segment[block] = index
    blocks = []
    for number, positions in threads.items():
        segments_so_far = answer.segments[: last_segment[number] + 1]
        blocks.append(Block(number, tuple(positions), segments_so_far))
    return blocks


def segments_with(block: Block, threads: Threads) -> tuple[Segment, ...]:
    """Returns an answer's segments up to the end of a block, with only the given threads of this block.

    The segments have no log-probs, since counterfactual answers are never trained on.
    """
    segments = []
    for segment in block.segments_so_far:
        # `branch[0]` is the outermost block, and the thread's position in this block.
        is_in_block = bool(segment.branch) and segment.branch[0][0] == block.number
        if not is_in_block or segment.branch[0][1] in threads:
            segments.append(replace(segment, logprobs=None))
    return tuple(segments)


def _mean_rewards(
    rewards_of_sets: Mapping[Threads, Sequence[float]], block: Block, answer: Trajectory
) -> dict[Threads, float] | None:
    """Returns the worth of each set of a block's threads: the mean reward of answers with only these threads.
    Returns None if a set has no graded answer.

    Args:
        rewards_of_sets: The rewards of the sampled answers with each set of threads.
        block: The block.
        answer: The answer that has the block.
    """
    worth = {}
    for threads, rewards in rewards_of_sets.items():
        graded_rewards = list(rewards)
        if len(threads) == len(block.threads):  # the set of all threads
            # The answer itself is one more sample with all threads. Its `score` is its reward without
            # shaping. The rewards of the sampled answers are without shaping as well.
            graded_rewards.append(answer.score)
        if not graded_rewards:
            return None
        worth[threads] = math.fsum(graded_rewards) / len(graded_rewards)
    return worth


def _make_episode_of_answer(
    context: RolloutContext,
    answer: Trajectory,
    outcome_advantage: float,
    values: Mapping[tuple[int, int], float],
) -> Episode:
    """Returns the training row of an answer.

    Args:
        context: The context of the credit phase.
        answer: The answer.
        outcome_advantage: The advantage of the tokens outside of threads.
        values: The value of each thread on the main text, by the number of its block and the thread's
            position in this block. The tokens of threads without a value get no advantage.
    """
    import numpy as np

    parts = []
    for segment in answer.segments:
        # A thread inside a thread has the value of the outer one, `branch[0]`.
        advantage = values.get(segment.branch[0], 0.0) if segment.branch else outcome_advantage
        parts.append(np.full(len(segment.token_ids), advantage))
    return replace(make_episode(context, answer), advantages=np.concatenate(parts))


def _count_sampled_tokens(segments: Iterable[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments if segment.origin == "sampled")
