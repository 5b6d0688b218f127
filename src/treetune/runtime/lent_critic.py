"""The critic of a run, as whoever gives credit is lent it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from treetune.rollouts.base import Critic
from treetune.rollouts.credit import scoring_row
from treetune.runtime.columns_of_ranks import episodes_everywhere
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.vocabulary import Column, Trajectory, are_sampled

if TYPE_CHECKING:
    from torch import Tensor

    from treetune.trainers.tokens import Sequences


def lent_critic(session: Session, server: PolicyServer, values: Callable[[Sequences], Tensor]) -> Critic:
    """`values` gives those of all ranks' answers, of the state before each trained token, to all ranks.

    The engine gives its memory up while they are computed, if so configured.
    """

    def critic(answers: Sequence[Trajectory]) -> list[Column]:
        from treetune.trainers.tokens import Sequences

        ranks = session.ranks
        counts = [count for (count,) in ranks.exchange("critic-counts", [len(answers)])]
        rows = episodes_everywhere(ranks, "critic-answers", [scoring_row(answer) for answer in answers])
        if not rows:
            return []
        sequences = Sequences.of(rows)
        with server.asleep():
            values_N = values(sequences).double().numpy()
        first = sum(counts[: ranks.rank])
        bounds = list(pairwise(sequences.starts))[first : first + len(answers)]
        return [
            _spread(answer, values_N[start:end]) for answer, (start, end) in zip(answers, bounds, strict=True)
        ]

    return Critic(critic)


def _spread(answer: Trajectory, values: Column) -> Column:
    """Values of trained tokens, by their place in the answer."""
    import numpy as np

    trained = are_sampled(answer.segments)
    result = np.full(len(trained), np.nan)
    result[trained] = values
    return result
