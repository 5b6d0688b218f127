"""Which of an iteration's tokens a rank keeps: those of the rows that it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from treetune.trainers.base import Trainer
from treetune.trainers.batching import Unit
from treetune.trainers.micro_batches import rows_of_rank
from treetune.trainers.ranks import Ranks
from treetune.trainers.reference_ahead import rows_scored_by
from treetune.trainers.tokens import Sequences
from treetune.vocabulary import Episode

Running = tuple[Sequence[Unit], bool, bool]
"""Rows that all ranks run in micro-batches, whether a unit's rows run together, and whether with gradient."""


def sequences_of_rank(
    episodes: Collection[Episode],
    settings: Trainer,
    ranks: Ranks,
    run: Callable[[Sequences], Iterable[Running]],
) -> Sequences:
    """The episodes' sequences, with the tokens of those that this rank runs; `run` says what all ranks do.
    Prefix trees are cut by their tokens, so that every rank has all of them there."""
    if ranks.world_size == 1 or settings.layout == "tree":
        return Sequences.of(episodes)
    known = Sequences.of(episodes, kept=())
    kept: set[int] = set()
    for units, keep_units, with_gradient in run(known):
        kept |= rows_of_rank(
            known,
            units,
            settings,
            rank=ranks.rank,
            ranks=ranks.world_size,
            keep_units=keep_units,
            with_gradient=with_gradient,
        )
    if settings.reference_scores == "while_sampling":
        kept |= rows_scored_by(known, ranks)
    return Sequences.of(episodes, kept)
