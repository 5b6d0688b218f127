"""A credit of your own: the advantage of an answer depends on its rank in the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune import Answers, Credit, GroupCredit, Need


@Credit.register("rank")
@dataclass(frozen=True, kw_only=True)
class Rank(GroupCredit):
    """The advantage of an answer is (answers with less reward − answers with more) / (other answers), within
    its group. It is between -1 and 1, whatever the scale of the rewards. Every token of the answer gets it.

    With `only_winners`, negative advantages become 0.
    """

    only_winners: bool = False

    # A requirement on the other parts. `treetune check` compares it with the experiment.
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Returns an advantage for each answer to a problem."""
        others = max(1, len(rewards) - 1)
        advantages = []
        for reward in rewards:
            worse = sum(other < reward for other in rewards)
            better = sum(other > reward for other in rewards)
            advantages.append((worse - better) / others)
        if self.only_winners:
            return [max(0.0, advantage) for advantage in advantages]
        return advantages
