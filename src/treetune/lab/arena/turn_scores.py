"""Exact bias, noise and audit of credits in languages of turns, without sampling an answer.

A credit gets a group of answers, or a tree of them, and makes an advantage for each turn. The gradient of a
group is the mean over its answers of Σ advantage × ∇ log π(action). This file goes through all groups (or
trees) that a language can make, with their probabilities, and returns for each credit (`TurnScore`):

* error and cosine: |g − G| / |G| and the cosine of g with G, where g is the expected gradient and G the true
  one;
* variance: the trace of the gradient's covariance;
* turns: the expected number of turns that the policy takes, continuations included;
* the audit of C3 (2603.06859): fidelity, spread and noise of the credit, see `Audit`.

The audit's third number, influence, says how much an action changes the next one. It belongs to the policy
and not to a credit: `measure_influence`.

Shapes. In the names of arrays, K stands for the turns of an answer and P for the policy's logits.

Groups. Credits don't depend on the order of the answers, so only distinct groups are gone through.

Replayed alternatives. `score_replays` has the credits that continue states by fresh answers. These are
independent of the answers' later turns, so their noise is added in closed form: the mean return of the n
continuations of a state s enters the gradient linearly, with a vector c_s, and adds
|c_s|² Var(return | s) / n.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetune.credit.base import Credit
from treetune.credit.trees import TreeCredit
from treetune.lab.arena.languages import context_of, decision
from treetune.lab.arena.turn_tables import (
    TOKENS_OF_TURN,
    Distribution,
    PlayedAnswer,
    PlayedTurn,
    TurnTable,
)
from treetune.rollouts.context import RolloutContext
from treetune.tree import Sharing, Tree, trees_of
from treetune.vocabulary import Episode, Fork, Trajectory

COMPARED_DIGITS = 9
"""Credits that agree in this many digits count as equal. If not, rounding would decide their ranks."""
GROUPS_AT_ONCE = 1000
"""Groups that a credit gets in one call, as answers to as many problems. A call for each group would be slow,
and one for all of them would need much memory."""


class TurnScore(NamedTuple):
    """What a credit is worth in a language. Example, for true advantages of four answers in "first turn
    decides": ``TurnScore(error=0.0, cosine=1.0, variance=0.0234, turns=12.0, fidelity=1.0, …)``."""

    error: float
    """|g − G| / |G|."""
    cosine: float
    """The cosine of g and G."""
    variance: float
    """The trace of the covariance of a group's gradient."""
    turns: float
    """The expected number of turns that the policy takes for a group."""
    fidelity: float
    """See `Audit.fidelity`."""
    spread: float
    """See `Audit.spread`."""
    noise: float
    """See `Audit.noise`."""
    share_of_length: float
    """The length of the expected gradient along the true one, divided by the true one's."""

    def gain(self, reference: TurnScore) -> float:
        """Returns the variance of an unbiased reference, divided by the variance of this credit when scaled.

        The expected gradient of this credit may be too long or too short along the true gradient. So the
        credit is divided by `share_of_length`. An unbiased reference needs no scaling.
        """
        if self.share_of_length <= 0:  # the expected gradient doesn't point along the true one
            return 0.0
        if not self.variance:
            return math.inf
        # Dividing a gradient by a number divides its variance by the number's square.
        return reference.variance * self.share_of_length**2 / self.variance


@dataclass
class Audit:
    """The credits of single turns, and what the audit of C3 (2603.06859) computes of them.

    The paper's text was read in its two abstracts; the definitions are those of its public code
    (`c3/analysis/metrics.py`), with exact values in place of estimates:

    * fidelity: Spearman's rank correlation of a turn's credit with its true advantage, over all turns of all
      answers. The public code compares with an estimate from the same replays that make the credit; here the
      advantage is exact. 0 if either is the same everywhere;
    * spread: the variance of the credits of the actions in the same context, averaged over contexts (its
      "within-group variance"). A context is the whole answer before the turn;
    * noise: the part of the spread that doesn't come from the action, E[Var(credit | context, action)]. The
      rest of the spread is signal. The public code does not have this number.
    """

    # Columns, with an entry for each credit that was added.
    _credits: list[float] = field(default_factory=list)
    _truths: list[float] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _contexts: list[int] = field(default_factory=list)
    """The number of the credit's context."""
    _decisions: list[int] = field(default_factory=list)
    """The number of the credit's decision: an action in a context."""
    # Contexts and decisions are numbered as they occur.
    _number_of_context: dict[tuple[PlayedTurn, ...], int] = field(default_factory=dict)
    _number_of_decision: dict[tuple[tuple[PlayedTurn, ...], int], int] = field(default_factory=dict)

    def add(
        self, turns_before: tuple[PlayedTurn, ...], action: int, truth: float, credit: float, weight: float
    ) -> None:
        """Adds the credit of an action.

        Args:
            turns_before: The turns before the action, which are its context.
            action: The number of the action.
            truth: The true advantage of the action in this context.
            credit: The credit.
            weight: The probability of this credit.
        """
        self._credits.append(credit)
        self._truths.append(truth)
        self._weights.append(weight)
        # A context or decision that wasn't there before gets the next number.
        contexts, decisions = self._number_of_context, self._number_of_decision
        self._contexts.append(contexts.setdefault(turns_before, len(contexts)))
        self._decisions.append(decisions.setdefault((turns_before, action), len(decisions)))

    @property
    def fidelity(self) -> float:
        """The rank correlation (Spearman's, weighted) of the credits with the true advantages."""
        weights = np.array(self._weights)
        credit_ranks = _middle_ranks(np.array(self._credits), weights)
        truth_ranks = _middle_ranks(np.array(self._truths), weights)
        centred_credits = credit_ranks - weights @ credit_ranks / weights.sum()
        centred_truths = truth_ranks - weights @ truth_ranks / weights.sum()
        scale = math.sqrt((weights @ centred_credits**2) * (weights @ centred_truths**2))
        return float(weights @ (centred_credits * centred_truths) / scale) if scale > 0 else 0.0

    @property
    def spread(self) -> float:
        """The mean variance of the credits in the same context."""
        return self._mean_variance(self._contexts)

    @property
    def noise(self) -> float:
        """The mean variance of the credits of the same action in the same context."""
        return self._mean_variance(self._decisions)

    def _mean_variance(self, number_of_set: Sequence[int]) -> float:
        """Returns the mean of the variances of the credits within sets, in proportion to the sets' weights.

        Args:
            number_of_set: The number of the set that each credit is in.
        """
        weights, credits = np.array(self._weights), np.array(self._credits)
        weight_S = np.bincount(number_of_set, weights)
        sum_S = np.bincount(number_of_set, weights * credits)
        # A set whose credits all have weight 0 has no mean, and doesn't count below.
        mean_S = np.zeros_like(weight_S)
        np.divide(sum_S, weight_S, out=mean_S, where=weight_S > 0)
        squares = weights * (credits - mean_S[number_of_set]) ** 2
        return float(squares.sum() / weights.sum())


def _middle_ranks(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each value: the weight of all smaller values, plus half that of all equal values.

    So equal values have the same rank. With the weights 0.2, 0.3 and 0.5, the values 7, 7 and 9 have the
    ranks 0.25, 0.25 and 0.75.
    """
    _, number_of_value = np.unique(np.round(values, COMPARED_DIGITS), return_inverse=True)
    weights_of_distinct = np.bincount(number_of_value, weights)
    ranks_of_distinct = np.cumsum(weights_of_distinct) - weights_of_distinct / 2
    return ranks_of_distinct[number_of_value]


@dataclass
class _Expectation:
    """Collects the expectations of a group's gradient: sums over all possible groups (or trees), each
    weighted by its probability."""

    table: TurnTable
    audit: Audit = field(default_factory=Audit)
    """The credits of single turns, which callers of `add` add here."""
    probability: float = 0.0
    """The sum of all probabilities so far."""
    squared_length: float = 0.0
    """E|gradient|²."""
    expected_turns: float = 0.0
    """The expected number of turns that the policy takes."""

    def __post_init__(self) -> None:
        self.gradient_P = np.zeros_like(self.table.true_gradient)

    def add(
        self, probability: float, gradient_P: NDArray[np.float64], turn_count: float, noise: float = 0.0
    ) -> None:
        """Adds the gradient of a group.

        Args:
            probability: The probability of the group.
            gradient_P: The gradient. If a credit samples continuations, the gradient of fixed answers is
                still random, and this is its mean over the continuations.
            turn_count: The number of turns that the policy took, those of continuations included.
            noise: The variance of the gradient of fixed answers; 0 without continuations.
        """
        self.probability += probability
        self.gradient_P += probability * gradient_P
        self.squared_length += probability * (float(gradient_P @ gradient_P) + noise)
        self.expected_turns += probability * turn_count

    def score(self) -> TurnScore:
        """Returns the score. Everything that can happen must have been added before."""
        assert math.isclose(self.probability, 1.0, rel_tol=1e-9), "everything that can happen has been added"
        true_P, mean_P = self.table.true_gradient, self.gradient_P
        true_squared = float(true_P @ true_P)
        mean_squared = float(mean_P @ mean_P)
        along_true = float(mean_P @ true_P)
        product_of_lengths = math.sqrt(true_squared * mean_squared)
        variance = self.squared_length - mean_squared
        return TurnScore(
            error=float(np.linalg.norm(mean_P - true_P)) / math.sqrt(true_squared),
            cosine=along_true / product_of_lengths if product_of_lengths > 0 else 0.0,
            # A difference of the size of rounding is 0.
            variance=variance if variance > 1e-12 * self.squared_length else 0.0,
            turns=self.expected_turns,
            fidelity=self.audit.fidelity,
            spread=self.audit.spread,
            noise=self.audit.noise,
            share_of_length=along_true / true_squared,
        )


# Groups of independent answers


class _Group(NamedTuple):
    """Several draws from a list of answers, or from a list of what may grow from a state, in any order.

    Example: of two draws from two answers with the probabilities 0.75 and 0.25, each is drawn once with the
    probability ``2 · 0.75 · 0.25``: ``_Group(indices=(0, 1), probability=0.375)``.
    """

    indices: tuple[int, ...]
    """Indices into the list."""
    probability: float


def possible_groups(probabilities: Sequence[float], size: int) -> Iterator[_Group]:
    """Yields each multiset of `size` items, with the probability of drawing it in any order."""
    for group in itertools.combinations_with_replacement(range(len(probabilities)), size):
        orders = math.factorial(size)  # the number of different orders: 3 for the group (0, 0, 1)
        for count in Counter(group).values():
            orders //= math.factorial(count)
        probability_in_order = math.prod(probabilities[index] for index in group)
        yield _Group(group, orders * probability_in_order)


def _blocks_of(groups: Iterator[_Group]) -> Iterator[list[_Group]]:
    """Yields the groups in lists of `GROUPS_AT_ONCE`."""
    while block := list(itertools.islice(groups, GROUPS_AT_ONCE)):
        yield block


def context_for_credits() -> RolloutContext:
    """Returns a context for credits that sample nothing."""
    return context_of(decision(2, 0), problems=1, seed=1)


def score_group_credit(table: TurnTable, credit: Credit, size: int) -> TurnScore:
    """Returns the score of a credit that needs nothing but the answers to a problem.

    Args:
        table: The language: the turns that a policy can take, with their probabilities and rewards.
        credit: The credit.
        size: The number of answers in a group.
    """
    answers = table.answers
    scores_by_answer = [table.scores_KP(answer.turns) for answer in answers]
    truths_by_answer = [table.true_advantages(answer.turns) for answer in answers]
    expectation = _Expectation(table)
    context = context_for_credits()
    groups = possible_groups([answer.probability for answer in answers], size)
    for block in _blocks_of(groups):  # the credit gets many groups in one call, each as one problem's answers
        trajectories = []
        for number, group in enumerate(block):
            for sample, index in enumerate(group.indices):
                trajectory = table.trajectory(answers[index].turns, problem=str(number), sample=sample)
                trajectories.append(trajectory)
        episodes, _ = credit.assign(context, trees_of(trajectories))
        remaining_episodes = iter(episodes)
        for group in block:
            gradient_P = np.zeros_like(table.true_gradient)
            turns_taken = 0
            for index in group.indices:
                episode = next(remaining_episodes)
                assert episode.advantages is not None
                advantages_K = episode.advantages[episode.trained]  # each turn is one sampled token
                gradient_P += advantages_K @ scores_by_answer[index] / size
                turns_taken += len(answers[index].turns)
                # The audit compares the credits of single answers with the truth. A group has `size` answers.
                weights_K = np.full(len(advantages_K), group.probability / size)
                _add_to_audit(
                    expectation.audit, answers[index].turns, advantages_K, truths_by_answer[index], weights_K
                )
            expectation.add(group.probability, gradient_P, turns_taken)
    return expectation.score()


def _add_to_audit(
    audit: Audit,
    turns: tuple[PlayedTurn, ...],
    credits: Sequence[float] | NDArray[np.float64],
    truths: Sequence[float] | NDArray[np.float64],
    weights: Sequence[float] | NDArray[np.float64],
) -> None:
    """Adds the credits of an answer's turns.

    A turn of weight 0 is left out, such as one that another answer of the tree trains: that answer adds it.
    """
    for number, turn in enumerate(turns):
        if weights[number] > 0:
            audit.add(turns[:number], turn.action, truths[number], float(credits[number]), weights[number])


def score_true_advantages(table: TurnTable, size: int) -> TurnScore:
    """Returns the score of the exact advantages in groups of `size` answers.

    Nothing is sampled for these advantages, so `TurnScore.turns` has only the turns of the answers.
    """
    expectation = _Expectation(table)
    for answer in table.answers:
        advantages_K = table.true_advantages(answer.turns)
        gradient_P = advantages_K @ table.scores_KP(answer.turns)
        expectation.add(answer.probability, gradient_P, len(answer.turns))
        weights_K = np.full(len(answer.turns), answer.probability)
        _add_to_audit(
            expectation.audit, answer.turns, credits=advantages_K, truths=advantages_K, weights=weights_K
        )
    score = expectation.score()
    # So far a group is one answer. The gradient of `size` independent answers is the mean of their gradients.
    return score._replace(variance=score.variance / size, turns=score.turns * size)


# Credits that replay alternatives from the states of an answer


def score_replays(table: TurnTable, size: int, alternatives: int, lam: float) -> TurnScore:
    """Returns the score of the credit `monte_carlo` with a state at each turn.

    V̂(s) is the mean return of `alternatives` continuations of the state s. Equal states of a group are
    continued once.

    Args:
        table: The language: the turns that a policy can take, with their probabilities and rewards.
        size: The number of answers in a group.
        alternatives: The number of continuations of a state, n.
        lam: 0 for VinePPO, A = r + V̂(s') − V̂(s); 1 for C3's replay (2603.06859), A = the answer's own
            return − V̂(s). C3 compares candidates for a turn in a fixed context: here the answer's turn with
            n alternatives, whose mean return is V̂(s).
    """
    assert lam in (0.0, 1.0), "the audit has no mixture of both"
    answers = table.answers
    expectation = _Expectation(table)
    for group in possible_groups([answer.probability for answer in answers], size):
        answers_of_group = [answers[index] for index in group.indices]
        gradient_P, factor_by_state = _mean_gradient_of_replays(table, answers_of_group, lam)
        noise, turns_of_continuations = 0.0, 0.0
        # A state s is identified by the turns before it. The gradient contains `factor_P` · V̂(s).
        for turns_before, factor_P in factor_by_state.items():
            state = turns_before[-1].reply.state if turns_before else table.start
            turns_left = table.max_turns - len(turns_before)
            # V̂(s) is a mean of independent returns, so its variance is that of a return / `alternatives`.
            # Continuations of different states are independent, so the variances add up.
            squared_factor = float(factor_P @ factor_P)
            variance_of_return = _variance_of(table.returns(state, turns_left))
            noise += squared_factor * variance_of_return / alternatives
            turns_of_continuations += alternatives * table.expected_turns(state, turns_left)
        turns_of_answers = sum(len(answer.turns) for answer in answers_of_group)
        turns_taken = turns_of_answers + turns_of_continuations
        expectation.add(group.probability, gradient_P, turns_taken, noise)
    for answer in answers:
        _audit_replays(table, expectation.audit, answer, alternatives, lam)
    return expectation.score()


def _mean_gradient_of_replays(
    table: TurnTable, answers: Sequence[PlayedAnswer], lam: float
) -> tuple[NDArray[np.float64], dict[tuple[PlayedTurn, ...], NDArray[np.float64]]]:
    """Returns the mean of a group's gradient over all continuations: the gradient with exact values.

    Also returns the factor c_s of V̂(s) in the gradient, a vector, for each state s that is continued. V̂(s)
    is the mean return of the state's continuations. A state is identified by the turns before it, so that
    equal states of several answers are one state.
    """
    size = len(answers)
    gradient_P = np.zeros_like(table.true_gradient)
    factor_by_state: dict[tuple[PlayedTurn, ...], NDArray[np.float64]] = defaultdict(
        lambda: np.zeros_like(table.true_gradient)
    )
    for answer in answers:
        turns = answer.turns
        for number, (turn, score_P) in enumerate(zip(turns, table.scores_KP(turns), strict=True)):
            turns_before, turns_after = turns[:number], turns[: number + 1]
            turns_left = table.max_turns - number
            baseline = table.value(turn.state, turns_left)
            is_last = number + 1 == len(turns)
            if lam == 1.0 or is_last:  # the last turn's return is its reward, for any λ
                outcome = answer.return_from(number)
            else:
                outcome = turn.reply.reward + table.value(turn.reply.state, turns_left - 1)
                factor_by_state[turns_after] += score_P / size
            gradient_P += (outcome - baseline) * score_P / size
            factor_by_state[turns_before] -= score_P / size
    return gradient_P, factor_by_state


def _audit_replays(
    table: TurnTable, audit: Audit, answer: PlayedAnswer, alternatives: int, lam: float
) -> None:
    """Adds all credits that the turns of an answer may have, each with its probability.

    The credit of a turn is an outcome minus a baseline, V̂(s). The baseline comes from continuations of s. The
    outcome comes from continuations of another state, or from the answer itself. So outcome and baseline are
    independent, and the probability of a pair is a product.
    """
    truths = table.true_advantages(answer.turns)
    for number, turn in enumerate(answer.turns):
        turns_left = table.max_turns - number
        is_last = number + 1 == len(answer.turns)
        baselines = mean_distribution(table.returns(turn.state, turns_left), alternatives)
        outcomes: Distribution = {answer.return_from(number): 1.0}
        # For λ = 0 the outcome is r + V̂(s'). For λ = 1 it is the answer's own return, as for the last turn.
        if lam == 0.0 and not is_last:
            values_after = mean_distribution(table.returns(turn.reply.state, turns_left - 1), alternatives)
            outcomes = {turn.reply.reward + value: chance for value, chance in values_after.items()}
        for outcome, outcome_chance in outcomes.items():
            for baseline, baseline_chance in baselines.items():
                weight = answer.probability * outcome_chance * baseline_chance
                audit.add(answer.turns[:number], turn.action, truths[number], outcome - baseline, weight)


def mean_distribution(distribution: Distribution, size: int) -> Distribution:
    """Returns the distribution of the mean of `size` independent draws.

    Example: of two draws from ``{0: 0.5, 1: 0.5}`` it is ``{0: 0.25, 0.5: 0.5, 1: 0.25}``.
    """
    sums: Distribution = {0.0: 1.0}  # of the draws so far
    for _ in range(size):
        sums_with_next: Distribution = defaultdict(float)
        for total, total_chance in sums.items():
            for number, chance in distribution.items():
                sums_with_next[total + number] += total_chance * chance
        sums = sums_with_next
    return {total / size: chance for total, chance in sums.items()}


def _variance_of(distribution: Distribution) -> float:
    mean = sum(number * chance for number, chance in distribution.items())
    return sum((number - mean) ** 2 * chance for number, chance in distribution.items())


# Trees


class BranchedAnswer(NamedTuple):
    """An answer of a tree of turns. Example: ``BranchedAnswer(turns, parent=0, shared_turns=2)`` begins with
    the first two turns of answer 0."""

    turns: tuple[PlayedTurn, ...]
    parent: int | None = None
    """The number of the answer from which this one branched off; None for an answer from the prompt."""
    shared_turns: int = 0
    """The number of turns at the beginning that the answer shares with its parent."""


class RootOutcome(NamedTuple):
    """The answers that grew from one root, or from a state within a tree, and their probability.

    The turns of the answers begin at the root or the state. Each `parent` is an index into `answers`.
    """

    answers: tuple[BranchedAnswer, ...]
    probability: float
    dropped_turns: int = 0
    """Turns that were sampled for branches that were dropped."""


def enumerate_full_trees(table: TurnTable, ways: int) -> list[RootOutcome]:
    """Returns every tree of answers that may grow from one root if each reply is continued in `ways` ways.

    Each tree comes with its probability. A root is an independent start at the prompt. C3 (2603.06859, as its
    public code samples and credits) makes such trees: after each reply it samples `ways` alternatives of the
    next turn. The turns before are the fixed context of these alternatives. Each alternative is continued in
    the same way.
    """
    return _enumerate_after_state(table, table.start, table.max_turns, ways)


def _enumerate_after_state(table: TurnTable, state: str, turns_left: int, ways: int) -> list[RootOutcome]:
    """Returns every subtree that may grow from a state within a tree.

    A subtree is one turn, and after the turn's reply `ways` branches. Each branch is again such a subtree.
    """
    outcomes = []
    for turn, chance in table.next_turns(state):
        next_state = turn.reply.state
        if next_state is None or turns_left == 1:
            outcomes.append(RootOutcome((BranchedAnswer((turn,)),), chance))
            continue
        outcomes_of_branch = _enumerate_after_state(table, next_state, turns_left - 1, ways)
        for group in possible_groups([outcome.probability for outcome in outcomes_of_branch], ways):
            branches = [outcomes_of_branch[index].answers for index in group.indices]
            answers = _join_branches((turn,), branches)
            outcomes.append(RootOutcome(answers, chance * group.probability))
    return outcomes


def _join_branches(
    turns_before: tuple[PlayedTurn, ...], branches: Sequence[Sequence[BranchedAnswer]]
) -> tuple[BranchedAnswer, ...]:
    """Returns the answers of several branches after the same turns, as answers of one tree.

    Without turns before, the branches begin at the prompt and share nothing.
    """
    answers: list[BranchedAnswer] = []
    for branch in branches:
        first_of_branch = len(answers)
        for answer in branch:
            turns = (*turns_before, *answer.turns)
            if answer.parent is not None:  # it branched off within its branch
                parent = first_of_branch + answer.parent
                answers.append(BranchedAnswer(turns, parent, len(turns_before) + answer.shared_turns))
            elif answers and turns_before:
                # The first answer of a further branch: its parent is answer 0, with which it shares
                # `turns_before`.
                answers.append(BranchedAnswer(turns, 0, len(turns_before)))
            else:  # the first answer of the tree, or of another root
                answers.append(BranchedAnswer(turns))
    return tuple(answers)


def enumerate_single_branchings(
    table: TurnTable, turn: int, ways: int, only_contrasts: bool = False
) -> list[RootOutcome]:
    """Returns every tree of answers that may grow from one root with one branching, before a given turn.

    Each tree comes with its probability. The root's first answer is sampled from the prompt. The other
    answers have the turns of the first answer before the branching, and their own turns after it.

    Args:
        table: The tables of a policy and of an environment, all of whose answers can be enumerated.
        turn: The number of the turn: 1 for the second, −1 for the answer's last one (BranPO, 2602.03719). An
            answer that has no such turn, or would branch at the prompt, doesn't branch.
        ways: The number of answers after the branching, the first answer included.
        only_contrasts: Whether branches are dropped that earned the same as the first answer, as BranPO's
            public code does.
    """
    outcomes = []
    for answer in table.answers:
        turn_number = turn if turn >= 0 else len(answer.turns) + turn
        if not 0 < turn_number < len(answer.turns):
            outcomes.append(RootOutcome((BranchedAnswer(answer.turns),), answer.probability))
            continue
        turns_before = answer.turns[:turn_number]
        turns_left = table.max_turns - turn_number
        continuations = table.continuations_from(turns_before[-1].reply.state, turns_left)
        chances = [continuation.probability for continuation in continuations]
        for group in possible_groups(chances, ways - 1):  # the first answer is one of the ways
            branched = [BranchedAnswer(answer.turns)]
            dropped_turns = 0
            for index in group.indices:
                later_turns = continuations[index].turns
                turns = (*turns_before, *later_turns)
                reward = sum(played.reply.reward for played in turns)
                if only_contrasts and reward == answer.reward:
                    dropped_turns += len(later_turns)
                else:
                    branched.append(BranchedAnswer(turns, parent=0, shared_turns=turn_number))
            probability = answer.probability * group.probability
            outcomes.append(RootOutcome(tuple(branched), probability, dropped_turns))
    return outcomes


def score_trees(
    table: TurnTable, outcomes: Sequence[RootOutcome], roots: int, credit: TreeCredit
) -> TurnScore:
    """Returns the score of the credit `tree` for trees with `roots` independent roots.

    Args:
        table: The language: the turns that a policy can take, with their probabilities and rewards.
        outcomes: Every tree that may grow from one root, with its probability.
        roots: The number of independent starts at the prompt in each tree.
        credit: The credit, with the weight `reach` or `once`. With `each`, several answers would train the
            same turn, and the audit would count this turn several times.
    """
    assert credit.weight != "each", "turns that several answers train would be counted several times"
    expectation = _Expectation(table)
    context = context_for_credits()
    groups = possible_groups([outcome.probability for outcome in outcomes], roots)
    for block in _blocks_of(groups):  # the credit gets many groups in one call, each as one problem's tree
        trees, answers_of_trees = [], []
        for number, group in enumerate(block):
            # No turns come before a root, so the roots share nothing.
            answers = _join_branches((), [outcomes[index].answers for index in group.indices])
            (tree,) = trees_of(_make_trajectories(table, answers, problem=str(number)))
            trees.append(tree)
            answers_of_trees.append(answers)
        episodes, _ = credit.assign(context, trees)
        remaining_episodes = iter(episodes)
        for group, tree, answers in zip(block, trees, answers_of_trees, strict=True):
            gradient_P = np.zeros_like(table.true_gradient)
            turns_sampled = sum(outcomes[index].dropped_turns for index in group.indices)
            for answer, reach_K in zip(answers, _reach_of_turns(tree), strict=True):
                advantages_K, is_trained_K = _advantages_of_turns(next(remaining_episodes))
                gradient_P += advantages_K @ table.scores_KP(answer.turns) / roots
                # A turn that several answers share was sampled once, and one of them trains it.
                turns_sampled += int(is_trained_K.sum())
                # The audit needs credits without the weights of turns, `reach_K`. A credit whose `weight` is
                # "reach" has multiplied its advantages by them.
                credits_K = advantages_K / reach_K if credit.weight == "reach" else advantages_K
                weights_K = np.where(is_trained_K, group.probability * reach_K / roots, 0.0)
                truths_K = table.true_advantages(answer.turns)
                _add_to_audit(expectation.audit, answer.turns, credits_K, truths_K, weights_K)
            expectation.add(group.probability, gradient_P, turns_sampled)
    return expectation.score()


def _advantages_of_turns(episode: Episode) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the advantage of each turn of a tree's answer, and whether this answer trains the turn.

    If several answers share a turn, an earlier answer may train it. The turn's advantage is then 0 here.
    """
    assert episode.advantages is not None
    # A turn is an action, which the policy samples, and an observation: `TOKENS_OF_TURN` tokens.
    is_action_T = np.arange(len(episode.trained)) % TOKENS_OF_TURN == 0
    is_trained_K = episode.trained[is_action_T]
    return np.where(is_trained_K, episode.advantages[is_action_T], 0.0), is_trained_K


def _make_trajectories(table: TurnTable, answers: Sequence[BranchedAnswer], problem: str) -> list[Trajectory]:
    """Returns the answers of a tree as rollouts make them: each with its fork from its parent."""
    trajectories = []
    for sample, answer in enumerate(answers):
        fork = None
        if answer.parent is not None:
            fork = Fork(answer.parent, TOKENS_OF_TURN * answer.shared_turns)
        trajectories.append(table.trajectory(answer.turns, problem, sample, fork))
    return trajectories


def _reach_of_turns(tree: Tree) -> list[NDArray[np.float64]]:
    """Returns the weight of each turn of each answer, which is smaller after branchings.

    The weight is that of `Sharing.reach_weights`: the product of 1 / (number of branches) over the branchings
    before the turn. In a language, the segments of an answer are an action, an observation, an action and so
    on, with one token each.
    """
    sharing = Sharing.of(tree)
    reach_by_answer = []
    for number, answer in enumerate(tree.leaves):
        reach_of_turns = []
        for first_token in range(0, len(answer.response_ids), TOKENS_OF_TURN):
            # A stretch is a part of the tree without a branching: here that with the turn's action.
            stretch = sharing.stretch_at(number, first_token)
            reach_of_turns.append(sharing.reach_weights[stretch])
        reach_by_answer.append(np.array(reach_of_turns))
    return reach_by_answer


# Influence


END_SYMBOL = -1
"""Stands for "the answer ends" in place of a next action. As an index, it is that of the last column."""


def measure_influence(table: TurnTable) -> float:
    """Returns the mutual information, in nats, of an action and the next one in a fixed context:
    I(A_t; A_{t+1} | turns before t), averaged over the contexts of all turns but the last. The answer's end
    counts as a next action.

    C3 (2603.06859) measures I(J; Y | context): J is the number of a candidate message, Y the next agent's
    message. With more and more candidates, C3's information approaches the information that is returned here.
    """
    weighted_sum = total_weight = 0.0
    for context_weight, joint_AB in _pairs_of_actions(table):
        independent_AB = np.outer(joint_AB.sum(1), joint_AB.sum(0))
        is_possible = joint_AB > 0  # a pair with the probability 0 adds nothing: p log p goes to 0
        ratios = joint_AB[is_possible] / independent_AB[is_possible]
        information = float((joint_AB[is_possible] * np.log(ratios)).sum())
        weighted_sum += context_weight * information
        total_weight += context_weight
    return weighted_sum / total_weight


def expected_influence_estimate(table: TurnTable, candidates: int = 8, smoothing: float = 1.0) -> float:
    """Returns the expectation of the estimate that C3's public code makes of `measure_influence`.

    The public code has one continuation for each candidate by default. Its estimate has P(y | j) = (count of
    y after candidate j + α) / (continuations of j + α · symbols), where y is a next message, and α = 1. The
    symbols are all next messages that occur, and one symbol for all other messages. With one continuation
    each, only the number of candidates with each next message matters. So the estimate can't depend on the
    messages of the candidates themselves.
    """
    contexts = _pairs_of_actions(table)
    # For each context, the probability of each next action; the last column is for the answer's end.
    chances_of_next_CB = np.array([joint_AB.sum(0) for _, joint_AB in contexts])
    occurs_B = chances_of_next_CB.any(0)  # in any context
    symbols = int(occurs_B.sum()) + 1
    weighted_sum = total_weight = 0.0
    for (context_weight, _), chance_of_next in zip(contexts, chances_of_next_CB[:, occurs_B], strict=True):
        expected = 0.0
        # A group is the next message of each candidate, in any order.
        for group in possible_groups(list(chance_of_next), candidates):
            count_S = np.bincount(group.indices, minlength=symbols)
            expected += group.probability * _smoothed_information(count_S, smoothing)
        weighted_sum += context_weight * expected
        total_weight += context_weight
    return weighted_sum / total_weight


def _smoothed_information(count_S: NDArray[np.intp], smoothing: float) -> float:
    """Returns the mutual information of candidate and symbol, if each candidate was continued once.

    Args:
        count_S: The number of candidates that each symbol followed. A symbol stands for a next message.
        smoothing: What is added to each count, α.
    """
    symbols, candidates = len(count_S), int(count_S.sum())
    # P(symbol | candidate) is `high` for the symbol that followed the candidate, and `low` for all others.
    denominator = 1 + smoothing * symbols
    high, low = (1 + smoothing) / denominator, smoothing / denominator
    marginal_S = (count_S * high + (candidates - count_S) * low) / candidates
    information = 0.0
    for symbol, count in enumerate(count_S):
        at_own_symbol = high * math.log(high / marginal_S[symbol])
        at_others = sum(
            low * math.log(low / marginal_S[other]) for other in range(symbols) if other != symbol
        )
        information += count / candidates * (at_own_symbol + at_others)
    return information


def _pairs_of_actions(table: TurnTable) -> list[tuple[float, NDArray[np.float64]]]:
    """Returns, for each context, its probability and the joint probabilities of its action and the next one.

    A context is all turns before an action. The last column is for answers that end after the action. A
    context in which every answer ends after the action is left out.
    """
    actions = max(len(chances) for chances in table.policy.values())  # states may have fewer
    joint_by_context: dict[tuple[PlayedTurn, ...], NDArray[np.float64]] = defaultdict(
        lambda: np.zeros((actions, actions + 1))
    )
    for answer in table.answers:
        for number, turn in enumerate(answer.turns):
            is_last = number + 1 == len(answer.turns)
            following = END_SYMBOL if is_last else answer.turns[number + 1].action
            joint_by_context[answer.turns[:number]][turn.action, following] += answer.probability
    pairs = []
    for joint_AB in joint_by_context.values():
        weight = float(joint_AB.sum())
        if joint_AB[:, :END_SYMBOL].any():  # all columns but the last one: `END_SYMBOL` is −1
            pairs.append((weight, joint_AB / weight))
    return pairs
