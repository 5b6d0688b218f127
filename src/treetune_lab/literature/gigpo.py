"""GiGPO: an answer's advantage in its group and, at each turn, one among all turns that saw the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le

from treetune.contracts import Advantages, Answers, CreditForRewards, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.vocabulary import Trajectory


class AnchoredTurn(NamedTuple):
    """A turn: what the policy had been told just before it, and the tokens up to its end."""

    anchor: bytes
    end: int


@Credit.register("gigpo")
@dataclass(frozen=True, kw_only=True)
class GroupInGroup(TokenCredit):
    """A = (R − mean R) + ω · (G_t − mean G), the second mean over all turns of the group's answers that come
    behind the same words of the environment: an anchor state (Feng et al., arXiv:2505.10978, eq. 8). G_t is
    what a turn and later ones earned, discounted by `gamma` a turn. A state that was seen once has no second
    part. With `std`, both are divided by the standard deviation.

    Where an answer has one turn, its anchor is the prompt, and the second part the first again. The authors'
    code takes the first mean over turns, so that long answers count more; their paper, as here, over answers.

    **Biased**: both means hold the answer itself, and equal words may come in states that are worth different
    things. In one line, with three answers, the expected gradient is a third too long (cosine 1).
    """

    gamma: Annotated[float, Gt(0), Le(1)] = 0.95
    """Discount of what is earned a turn later: the authors' scripts'."""
    weight: Annotated[float, Ge(0)] = 1.0
    """ω."""
    std: bool = False
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it goes along an answer turn by turn", THREADS_REMEDY),
    )

    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        turns = [turns_of(answer) for answer in answers]
        returns = [self._returns(answer, len(own)) for answer, own in zip(answers, turns, strict=True)]
        by_anchor: dict[bytes, list[float]] = {}
        for own, of_answer in zip(turns, returns, strict=True):
            for turn, earned in zip(own, of_answer, strict=True):
                by_anchor.setdefault(turn.anchor, []).append(earned)
        rewards = [answer.reward for answer in answers]
        rows = []
        for answer, own, of_answer in zip(answers, turns, returns, strict=True):
            row: list[float] = []
            for turn, earned in zip(own, of_answer, strict=True):
                advantage = self._relative(answer.reward, rewards)
                advantage += self.weight * self._relative(earned, by_anchor[turn.anchor])
                row += [advantage] * (turn.end - len(row))
            rows.append(row)
        return rows

    def _relative(self, earned: float, among: Sequence[float]) -> float:
        if len(set(among)) == 1:
            return 0.0
        return (earned - fmean(among)) / (stdev(among) + self.eps if self.std else 1.0)

    def _returns(self, answer: Trajectory, turns: int) -> list[float]:
        """Returns what each turn and later ones earned; the last has earned what isn't another's."""
        early = list(answer.step_rewards)[: turns - 1] or [0.0] * (turns - 1)
        if len(early) != turns - 1:
            raise ValueError(f"answer {answer.id} has {turns} turns and rewards of {len(early) + 1} steps")
        returns = [answer.reward - sum(early)]
        for earned in reversed(early):
            returns.insert(0, earned + self.gamma * returns[0])
        return returns


def turns_of(answer: Trajectory) -> list[AnchoredTurn]:
    """Returns the turns of an answer: stretches that the policy sampled, each behind what it was told."""
    turns: list[AnchoredTurn] = []
    anchor, end = b"", 0
    for origin, stretch in groupby(answer.segments, key=lambda segment: segment.origin):
        segments = list(stretch)
        end += sum(len(segment.token_ids) for segment in segments)
        if origin == "injected":
            anchor = b"".join(segment.token_ids.tobytes() for segment in segments)
        else:
            turns.append(AnchoredTurn(anchor, end))
    return turns[:-1] + [turns[-1]._replace(end=end)] if turns else []
