"""A credit of one's own: answers are compared by their rank in the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune import Answers, Credit, GroupCredit, Need


@Credit.register("rank")
@dataclass(frozen=True, kw_only=True)
class Rank(GroupCredit):
    """How many answers of its group an answer beats, less how many beat it, divided by how many others
    there are: -1 to 1, whatever the rewards' scale. Every token of the answer gets it.

    With `only_winners`, answers that are beaten more often than they beat get 0.
    """

    only_winners: bool = False

    # What it expects of other parts: `treetune check` compares an experiment with it.
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage for each answer to a problem."""
        others = max(1, len(rewards) - 1)
        balance = [sum((mine > other) - (mine < other) for other in rewards) / others for mine in rewards]
        return [max(0.0, one) for one in balance] if self.only_winners else balance
