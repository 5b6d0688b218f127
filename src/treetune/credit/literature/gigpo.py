"""GiGPO: an answer's advantage in its group, plus each turn's among the turns after the same observation
(arXiv:2505.10978, eq. 8).

Example, with ω = 1: two answers of one turn with the rewards 1 and 0 have the prompt as their common anchor
state, so that their tokens get 0.5 + 0.5 = 1 and −1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.credit.grpo import group_advantages
from treetune.rollouts.base import Rollout
from treetune.vocabulary import Trajectory, joined


@Credit.register("gigpo")
@dataclass(frozen=True, kw_only=True)
class GroupInGroup(TokenCredit):
    """GiGPO: A_t = (R − mean R) + ω · (G_t − mean G) (Feng et al., arXiv:2505.10978, eq. 8).

    R is the answer's reward, and its mean is over the group. G_t is the return of turn t: the rewards of this
    turn and the later ones, discounted by `gamma` a turn. Its mean is over the anchor state: all turns of the
    group's answers that follow the same tokens of the environment. A turn that is alone in its anchor state
    has G_t − mean G = 0. With `std`, both terms are divided by their standard deviations.

    An answer with a single turn has the prompt as its anchor state, so that both terms are equal; `check`
    refuses rollouts in which all answers are such. The authors' code takes the mean of R over turns, so that
    long answers count more; here, as in the paper, it is over answers.

    **Biased**: both means include the answer itself, and the same observation may occur in states of
    different value. With one turn and three answers the expected gradient is a third too long (cosine 1).
    """

    gamma: Annotated[float, Gt(0), Le(1)] = 0.95
    """Discount of a reward for each turn until it comes; the default is the authors' scripts'."""
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
        # Another trainer's answers (`treetune.credit.advantages`) aren't checked: by chance, none of a batch
        # may have a reply.
        if isinstance(rollout, Rollout) and OneLine() in rollout.gives:
            yield Finding(
                "it compares turns that follow the same reply of an environment, and answers of this rollout"
                " have no replies: no state but the prompt would recur, and both of its terms would be the"
                " same",
                "$.rollout.type",
                "choose the rollout 'multi_turn', or the credit 'group'",
            )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        turns_by_answer = [split_turns(answer) for answer in answers]
        returns_by_answer = [
            self._returns(answer, len(turns)) for answer, turns in zip(answers, turns_by_answer, strict=True)
        ]
        # A turn's anchor is the tokens of the environment just before the turn. A turn is compared with the
        # turns that have the same anchor.
        returns_by_anchor: dict[bytes, list[float]] = {}
        for turns, returns in zip(turns_by_answer, returns_by_answer, strict=True):
            for turn, turn_return in zip(turns, returns, strict=True):
                returns_by_anchor.setdefault(turn.anchor, []).append(turn_return)

        rewards = [answer.reward for answer in answers]
        advantage_by_answer = group_advantages(rewards, self.std, self.eps)
        # An anchor's advantages are taken one by one below, in the order in which its returns were put in.
        turn_advantages_by_anchor = {
            anchor: iter(group_advantages(returns, self.std, self.eps))
            for anchor, returns in returns_by_anchor.items()
        }
        rows: list[list[float]] = []
        for turns, answer_advantage in zip(turns_by_answer, advantage_by_answer, strict=True):
            row: list[float] = []
            for turn in turns:
                turn_advantage = next(turn_advantages_by_anchor[turn.anchor])
                advantage = answer_advantage + self.weight * turn_advantage
                # The environment's tokens before the turn get this advantage as well; they aren't trained.
                row += [advantage] * (turn.end - len(row))
            rows.append(row)
        return rows

    def _returns(self, answer: Trajectory, turns: int) -> list[float]:
        """Returns each turn's G_t, the discounted sum of rewards from the turn on.

        The last turn's reward is the answer's minus those of the other turns, so that it includes the bonus
        of shaping.
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
    """The number of response tokens up to the turn's end; for the last turn, of all response tokens."""


def split_turns(answer: Trajectory) -> list[SampledTurn]:
    """Returns the turns of an answer, each with its anchor: the environment's tokens just before the turn."""
    turns: list[SampledTurn] = []
    anchor, end = b"", 0
    for origin, segments in groupby(answer.segments, key=lambda segment: segment.origin):
        token_ids = joined([segment.token_ids for segment in segments])
        end += len(token_ids)
        if origin == "injected":
            anchor = token_ids.tobytes()
        else:
            turns.append(SampledTurn(anchor, end))
    # The last turn ends with the answer: it includes the environment's tokens after it, so that each token of
    # the answer is in a turn.
    *earlier, last = turns
    return [*earlier, last._replace(end=end)]
