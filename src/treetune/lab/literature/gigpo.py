"""GiGPO: an answer's advantage in its group and, at each turn, one among all turns that saw the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.rollouts.credit import group_advantages
from treetune.vocabulary import Trajectory, joined


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

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it goes along an answer turn by turn", THREADS_REMEDY),
    )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        turns = [turns_of(answer) for answer in answers]
        rewards = [answer.reward for answer in answers]
        returns = []
        for answer, own in zip(answers, turns, strict=True):
            early = list(answer.step_rewards[:-1]) or [0.0] * (len(own) - 1)
            to_come = [answer.reward - sum(early)]  # the last turn has earned what isn't another's
            for earned in reversed(early):
                to_come.insert(0, earned + self.gamma * to_come[0])
            returns.append(to_come)
        by_anchor: dict[bytes, list[float]] = {}
        for own, to_come in zip(turns, returns, strict=True):
            for (anchor, _), earned in zip(own, to_come, strict=True):
                by_anchor.setdefault(anchor, []).append(earned)
        of_answers = group_advantages(rewards, self.std, self.eps)
        of_turns = {one: iter(group_advantages(all_, self.std, self.eps)) for one, all_ in by_anchor.items()}
        rows: list[list[float]] = []
        for own, advantage in zip(turns, of_answers, strict=True):
            rows.append([])
            for anchor, end in own:
                total = advantage + self.weight * next(of_turns[anchor])
                rows[-1] += [total] * (end - len(rows[-1]))
        return rows


def turns_of(answer: Trajectory) -> list[tuple[bytes, int]]:
    """Returns the turns of an answer, stretches that the policy sampled: what it was told just before, and
    how many tokens the answer has up to the turn's end (the last one's: all)."""
    turns: list[tuple[bytes, int]] = []
    anchor, end = b"", 0
    for origin, segments in groupby(answer.segments, key=lambda segment: segment.origin):
        token_ids = joined([segment.token_ids for segment in segments])
        end += len(token_ids)
        if origin == "injected":
            anchor = token_ids.tobytes()
        else:
            turns.append((anchor, end))
    return [*turns[:-1], (turns[-1][0], end)]
