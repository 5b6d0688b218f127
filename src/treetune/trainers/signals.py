"""From an iteration's tensors to what is kept of each episode's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from treetune.rollouts.token_signals import TokenSignals
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.tokens import Sequences
from treetune.vocabulary import Episode

TellSignals = Callable[[Sequence[TokenSignals]], None]


@dataclass
class Telling:
    """Tells once what the policy said of an iteration's tokens before the first update, as soon as that is
    known, if anybody wants to be told."""

    tell: TellSignals | None
    episodes: Collection[Episode]
    sequences: Sequences
    is_told: bool = False

    def say(self, tensors: IterationTensors) -> None:
        if self.is_told or tensors.old_logprobs_N is None:
            return
        self.is_told = True
        if self.tell is not None:
            self.tell(token_signals(self.episodes, self.sequences, tensors))


def token_signals(
    episodes: Iterable[Episode], sequences: Sequences, tensors: IterationTensors
) -> list[TokenSignals]:
    """One row for each episode, of what the policy said before the first update."""
    assert tensors.old_logprobs_N is not None and tensors.entropies_N is not None
    columns = [tensors.old_logprobs_N, tensors.entropies_N]
    if (gap_N := tensors.gap_N()) is not None:
        columns.append(gap_N)
    if (known_N := tensors.old_logprobs_mask_N) is not None:
        columns = [column_N.masked_fill(~known_N, math.nan) for column_N in columns]
    rows = []
    for number, episode in enumerate(episodes):
        own = slice(sequences.starts[number], sequences.starts[number + 1])
        logprobs, entropies, *gaps = (column_N[own].numpy() for column_N in columns)
        rows.append(TokenSignals(episode.trajectory, logprobs, entropies, gaps[0] if gaps else None))
    return rows
