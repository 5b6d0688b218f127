"""A language of turns, in which the bias of baselines for turn rewards has a closed form.

After each turn t the policy chooses, with probability c_t, to take another turn; after turn K it must end. A
turn earns 1 with a probability that the policy chooses, too, else 0. Credit for turn t of an answer is the
sum of its rewards from turn t on, minus a baseline from the group's other answers:

* by index: for each turn k ≥ t *that the answer has*, the mean reward of turn k among those of the other
  answers that have a turn k. So the number of subtracted terms depends on the policy's choice to go on;
* padded: for each turn k from t to K, the mean reward of turn k among all other answers, of which those that
  ended earlier earn 0. Each answer subtracts the same terms;
* by return: the mean return from turn t on, among those of the other answers that have a turn t.

The baseline by index generalises that of MT-GRPO (2505.11821, which has two turns in every answer) to answers
with different numbers of turns. It is biased, as verl's issue 7244 points out. Let ρ_k = P(the answer has a
turn k), let m_k be the mean reward of turn k, and let a group have n answers. The gradient by the logit of
c_t is then

    true:      (1 − c_t) Σ_{k>t} ρ_k m_k
    by index:  (1 − c_t) Σ_{k>t} ρ_k m_k (1 − ρ_k)^(n−1)

because E[1(turn k exists) ∇ log π] = ρ_k (1 − c_t) for k > t. The baseline of turn k has the mean
m_k (1 − (1 − ρ_k)^(n−1)), since it is 0 where no other answer has that turn. In large groups nothing is left
of the gradient by index: the policy learns nothing from the rewards of further turns about whether to take
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from treetune.credit.base import TokenCredit
from treetune.vocabulary import Trajectory


class TurnAnswer(NamedTuple):
    """An answer. Example of an answer of three turns, the second of which earned nothing:
    ``TurnAnswer(rewards=(1.0, 0.0, 1.0), probability=0.04)``."""

    rewards: tuple[float, ...]
    """The reward of each turn."""
    probability: float


Baseline: TypeAlias = Callable[[TurnAnswer, Sequence[TurnAnswer], int], float]
"""A function that returns the baseline of a turn. Its arguments are the answer, the group's other answers,
and the number of the turn, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class TurnLanguage:
    """A language of answers of up to K turns.

    Example, for K = 3: ``TurnLanguage(goes_on=(0.5, 0.5), earns=(0.5, 0.5, 0.5))``."""

    goes_on: tuple[float, ...]
    """c_t: the probability of another turn after each turn but the last."""
    earns: tuple[float, ...]
    """m_t: the probability that a turn earns 1."""

    @property
    def turns(self) -> int:
        """K: the largest number of turns of an answer."""
        return len(self.earns)

    @property
    def reached(self) -> NDArray[np.float64]:
        """ρ_t for each turn t: the probability that an answer has a turn t."""
        return np.cumprod([1.0, *self.goes_on])

    def answers(self) -> list[TurnAnswer]:
        """Returns all possible answers: each number of turns, with each combination of their rewards."""
        answers = []
        for turns in range(1, self.turns + 1):
            # The probability that an answer with `turns` turns takes no further one. After the last possible
            # turn, there is no further one.
            ends_here = 1.0 if turns == self.turns else 1 - self.goes_on[turns - 1]
            for rewards in itertools.product((0.0, 1.0), repeat=turns):
                # m is the probability that a turn earns 1.
                chances = [m if reward else 1 - m for m, reward in zip(self.earns, rewards)]
                # `reached[turns - 1]` is the probability that an answer has `turns` turns or more.
                probability = self.reached[turns - 1] * ends_here * math.prod(chances)
                answers.append(TurnAnswer(rewards, float(probability)))
        return answers

    def true_gradient(self) -> NDArray[np.float64]:
        """Returns the derivative of the expected sum of rewards by the logit of each choice to go on.

        There are K − 1 such choices, so this gradient has K − 1 numbers, as all gradients of this file have.
        """
        # A turn must be reached, and then earn 1.
        expected_rewards_K = self.reached * self.earns
        return self._derivative_by_choices(expected_rewards_K)

    def gradient_by_index(self, answers: int) -> NDArray[np.float64]:
        """Returns the expected gradient with the baseline by index, in groups of `answers` answers."""
        # The probability that no other answer of the group has the turn.
        no_other_reached_K = (1 - self.reached) ** (answers - 1)
        return self._derivative_by_choices(self.reached * self.earns * no_other_reached_K)

    def _derivative_by_choices(self, terms_K: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns (1 − c_t) Σ_{k>t} terms_k for each choice t to go on.

        An answer has later turns only if it goes on after turn t. The factor 1 − c_t is the derivative of
        log c_t by its logit.
        """
        sums_K = np.cumsum(terms_K[::-1])[::-1]  # from each turn on, itself included
        return (1 - np.array(self.goes_on)) * sums_K[1:]


def by_index(answer: TurnAnswer, others: Sequence[TurnAnswer], turn: int) -> float:
    """Returns the baseline "by index": a sum over the answer's own turns from `turn` on.

    A turn adds the mean reward that the other answers have in their turn of the same number. It adds 0 if no
    other answer has that turn.
    """
    total = 0.0
    for number in range(turn, len(answer.rewards)):
        rewards = [other.rewards[number] for other in others if len(other.rewards) > number]
        total += sum(rewards) / len(rewards) if rewards else 0.0
    return total


def padded(answer: TurnAnswer, others: Sequence[TurnAnswer], turn: int) -> float:
    """Returns the padded baseline: the sum of the mean rewards of all turns from `turn` on.

    The means are over all other answers. An answer that ended earlier earns 0 in a turn that it doesn't have.
    `answer` is not used: all baselines have the same arguments (`Baseline`).
    """
    return sum(sum(other.rewards[turn:]) for other in others) / len(others)


def by_return(answer: TurnAnswer, others: Sequence[TurnAnswer], turn: int) -> float:
    """Returns the baseline "by return": the mean return from `turn` on of the other answers that have this
    turn, or 0 if none has."""
    returns = [sum(other.rewards[turn:]) for other in others if len(other.rewards) > turn]
    return sum(returns) / len(returns) if returns else 0.0


@dataclass(frozen=True, kw_only=True)
class TurnRewardCredit(TokenCredit):
    """Gives each turn the sum of its reward and the later ones, minus a baseline for turn rewards.

    It is not registered, so no configuration can choose it: it exists only to be measured."""

    baseline: Baseline

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        # The second field of `TurnAnswer` is the answer's probability, which no baseline reads.
        turn_answers = [TurnAnswer(_turn_rewards(answer), math.nan) for answer in answers]
        rows = []
        for number, (answer, turn_answer) in enumerate(zip(answers, turn_answers, strict=True)):
            others = turn_answers[:number] + turn_answers[number + 1 :]
            row: list[float] = []
            for turn, end in enumerate(answer.step_ends):
                baseline = self.baseline(turn_answer, others, turn)
                advantage = sum(turn_answer.rewards[turn:]) - baseline
                tokens_of_turn = end - len(row)
                row += [advantage] * tokens_of_turn
            rows.append(row)
        return rows


def _turn_rewards(answer: Trajectory) -> tuple[float, ...]:
    """Returns the reward of each turn."""
    if answer.step_rewards:
        return answer.step_rewards
    # Without step rewards, the last turn earns all.
    earlier_turns = len(answer.step_ends) - 1
    return (*[0.0] * earlier_turns, answer.reward)
