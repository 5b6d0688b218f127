"""GiGPO: an answer's advantage in its group, plus the advantage of each turn among the turns that follow the
same observation (arXiv:2505.10978, eq. 8).

Example, with ω = 1: two answers of one turn have the rewards 1 and 0. The prompt is their common anchor
state, so their tokens get 0.5 + 0.5 = 1 and −0.5 − 0.5 = −1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, OneLine, innermost_rollout
from treetune.credit.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.credit.grpo import group_advantages
from treetune.rollouts.base import Rollout
from treetune.vocabulary import Trajectory, concatenate


@Credit.register("gigpo")
@dataclass(frozen=True, kw_only=True)
class GroupInGroup(TokenCredit):
    """GiGPO: A_t = (R − mean R) + ω · (G_t − mean G) (Feng et al., arXiv:2505.10978, eq. 8).

    R is the answer's reward, and mean R is over the group. G_t is the return of turn t: the rewards of this
    turn and of the later ones, discounted by `gamma` per turn. mean G is over the turn's anchor state: all
    turns of the group's answers that follow the same tokens of the environment. If no other turn has this
    anchor state, G_t − mean G is 0. With `std`, both terms are divided by their standard deviations.

    An answer with a single turn has the prompt as its anchor state, so both terms are equal. `check` refuses
    rollouts in which all answers have a single turn. In the authors' code, mean R is over turns, so long
    answers count more; here, as in the paper, it is over answers.

    **Biased**: both means include the answer itself, and the same observation may occur in states of
    different values. With one turn and three answers the expected gradient is a third too long (cosine 1).
    """

    gamma: Annotated[float, Gt(0), Le(1)] = 0.95
    """The discount per turn: for a turn, a reward that comes n turns later counts `gamma` to the power of n.
    The default is that of the authors' scripts."""
    weight: Annotated[float, Ge(0)] = 1.0
    """ω, the weight of the second term."""
    std: bool = False
    """Whether both terms are divided by their standard deviations."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it goes along an answer turn by turn", THREADS_REMEDY),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        rollout = experiment.rollout
        # `OneLine()`, without `turns`, declares that the policy writes whole answers, without replies of an
        # environment. A batch of another trainer (`treetune.credit.advantages`) may have no replies by
        # chance, so it is not refused: there, `rollout` is a substitute that isn't a `Rollout`.
        if isinstance(rollout, Rollout) and OneLine() in rollout.gives:
            _, key = innermost_rollout(rollout)
            yield Finding(
                "it compares turns that follow the same reply of an environment, and answers of this rollout"
                " have no replies: no state but the prompt would recur, and both of its terms would be the"
                " same",
                f"{key}.type",
                "choose the rollout 'multi_turn', or the credit 'group'",
            )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        turns_by_answer = [split_turns(answer) for answer in answers]
        returns_by_answer = [
            self._compute_returns(answer, len(turns))
            for answer, turns in zip(answers, turns_by_answer, strict=True)
        ]
        # A turn's anchor is the tokens of the environment just before the turn. A turn is compared with the
        # turns that have the same anchor. Each turn is represented by a pair: the number of its answer, and
        # its number in the answer.
        turns_by_anchor: dict[bytes, list[tuple[int, int]]] = {}
        for answer_number, turns in enumerate(turns_by_answer):
            for turn_number, turn in enumerate(turns):
                turns_by_anchor.setdefault(turn.anchor, []).append((answer_number, turn_number))
        advantage_by_turn: dict[tuple[int, int], float] = {}
        for compared_turns in turns_by_anchor.values():
            returns = []
            for answer_number, turn_number in compared_turns:
                returns.append(returns_by_answer[answer_number][turn_number])
            compared_advantages = group_advantages(returns, self.std, self.eps)
            advantage_by_turn.update(zip(compared_turns, compared_advantages, strict=True))

        rewards = [answer.reward for answer in answers]
        answer_advantages = group_advantages(rewards, self.std, self.eps)
        rows: list[list[float]] = []
        for answer_number, turns in enumerate(turns_by_answer):
            row: list[float] = []
            for turn_number, turn in enumerate(turns):
                turn_advantage = advantage_by_turn[answer_number, turn_number]
                advantage = answer_advantages[answer_number] + self.weight * turn_advantage
                # The environment's tokens before the turn get this advantage as well; they aren't trained.
                row += [advantage] * (turn.end - len(row))
            rows.append(row)
        return rows

    def _compute_returns(self, answer: Trajectory, turns: int) -> list[float]:
        """Returns each turn's G_t, the discounted sum of rewards from the turn on.

        The reward of the last turn is the answer's reward minus those of the other turns. So it includes what
        reward shaping has added to the answer's reward.
        """
        # An environment that doesn't reward turns leaves `step_rewards` empty.
        early_rewards = list(answer.step_rewards[:-1]) or [0.0] * (turns - 1)
        returns = [answer.reward - sum(early_rewards)]  # from the last turn to the first
        for reward in reversed(early_rewards):
            returns.append(reward + self.gamma * returns[-1])
        return returns[::-1]


class SampledTurn(NamedTuple):
    """A stretch of an answer that the policy sampled."""

    anchor: bytes
    """The environment's token ids just before the turn, as bytes; empty after the prompt."""
    end: int
    """The number of response tokens up to the end of the turn. For the last turn, it is the number of all
    response tokens."""


def split_turns(answer: Trajectory) -> list[SampledTurn]:
    """Returns the turns of an answer, each with its anchor: the environment's tokens just before the turn."""
    turns: list[SampledTurn] = []
    anchor, end = b"", 0
    for origin, segments in groupby(answer.segments, key=lambda segment: segment.origin):
        token_ids = concatenate([segment.token_ids for segment in segments])
        end += len(token_ids)
        if origin == "injected":
            anchor = token_ids.tobytes()
        else:
            turns.append(SampledTurn(anchor, end))
    # The last turn ends where the answer ends. It includes the environment's tokens after it, if there are
    # any, so that each token of the answer is in a turn.
    *earlier, last = turns
    return [*earlier, last._replace(end=end)]
