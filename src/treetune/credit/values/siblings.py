"""Values from the other answers to a problem: the mean reward of those that went through a state.

TEMPO, arXiv:2509.18314; RTMC, arXiv:2604.11037. Example: of four answers, three begin with the tokens
``1+1=`` and earned 1, 1 and 0. In the first of these three, the state after these tokens has the value 0.5,
the mean of the other two rewards.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.credit.base import THREADS_REMEDY
from treetune.credit.states.base import FixedBudget
from treetune.credit.values.base import StepValues, Valuation, ValueEstimator, value_of_rewards
from treetune.tree import State


@ValueEstimator.register("siblings")
@dataclass(frozen=True, kw_only=True)
class Siblings(ValueEstimator):
    """The mean reward of the other answers through a state, without the answer's own (TEMPO,
    arXiv:2509.18314; RTMC, arXiv:2604.11037). Nothing is sampled.

    After the last state that an answer shares with another one there are no values. The remaining steps are
    credited as one step, which earned the answer's reward. If answers share no state but the prompt, this is
    RLOO. Unbiased: the rewards of other answers that went through a state are samples of its value. Where
    there are no other answers, the answer's own reward is such a sample.

    In a sampled tree (rollout ``tree``) each other branch at a state counts as one sample."""

    unbiased = True

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @property
    @override
    def continues(self) -> bool:
        return False

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns for each state the mean reward of the other answers that went through it."""
        rewards = valuation.sibling_rewards()
        values: list[StepValues] = []
        for answer in valuation.answers:
            # None where no other answer went through the state.
            values.append([value_of_rewards(rewards[answer_state]) for answer_state in answer.states])
        return values


@ValueEstimator.register("topped_up")
@dataclass(frozen=True, kw_only=True)
class ToppedUp(ValueEstimator):
    """The mean reward of the other answers through a state and, where these are fewer than the credit's
    `samples`, of as many fresh continuations as are missing.

    Continuations of the prompt would be the longest. Usually there are none, since all answers of the group
    go through the prompt. Unbiased: the number of other answers through a state does not depend on what they
    earned after it."""

    unbiased = True

    needs = (Need(Answers(2), "it counts the other answers"),)

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns for each state the mean over the rewards of the other answers that went through it, and of
        so many continuations that there are at least `samples` rewards."""
        rewards = valuation.sibling_rewards()
        # The number of continuations that each state needs: each reward of another answer that went through
        # the state replaces one of the `samples` continuations. `rewards` has an entry for each answer that
        # goes through the state. The entry with the fewest rewards decides.
        missing: dict[State, int] = {}
        for answer_state, sibling_rewards in rewards.items():
            count = max(0, valuation.samples - len(sibling_rewards))
            missing[answer_state.state] = max(missing.get(answer_state.state, 0), count)
        local_counts = sorted({count for count in missing.values() if count})
        counts_by_rank = valuation.context.ranks.exchange("value-missing", local_counts)
        # `sample` is collective, so each rank has to call it for every count that occurs on any rank.
        all_counts = sorted(set(itertools.chain.from_iterable(counts_by_rank)))
        for count in all_counts:
            incomplete = [
                answer_state for answer_state in valuation.states if missing[answer_state.state] == count
            ]
            valuation.sample(incomplete, FixedBudget(count))
        return valuation.values_with(rewards)
