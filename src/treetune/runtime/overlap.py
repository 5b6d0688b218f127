"""Whose seconds and tokens are whose, where continuations are sampled among answers."""

from __future__ import annotations

import time
from itertools import zip_longest

from treetune.inference.base import CONTINUATIONS
from treetune.inference.journal import JournaledEngine
from treetune.inference.pipelined import Call, PipelinedEngine
from treetune.runtime.clock import Clock
from treetune.trainers.ranks import Ranks
from treetune.vocabulary import Metrics


def give_to_credit(ranks: Ranks, clock: Clock, engine: PipelinedEngine) -> Metrics:
    """Takes from generation what is credit's: the tokens of continuations, and the seconds in which no rank
    sampled answers any more.

    ``credit/value_overlap_seconds``: for how long continuations were asked for while answers were still
    sampled, the longest of all ranks; these seconds are generation's. Collective.
    """
    assert isinstance(engine.engine, JournaledEngine), "a run's answers are kept"
    own = engine.engine.sampled[CONTINUATIONS], engine.calls
    everyones = ranks.exchange("continuations among answers", own)
    tokens = sum(of_rank for of_rank, _ in everyones)
    made = time.time() - engine.now()
    stretches = [
        (made + max(one.own_end for one in calls), made + max(one.end for one in calls))
        for calls in zip_longest(*(of_rank for _, of_rank in everyones), fillvalue=Call(0.0, 0.0, 0.0))
    ]
    clock.give("generation", "credit", stretches, tokens)
    for one in engine.calls:
        if one.overlap:
            clock.beside("credit", "generation", made + one.own_end - one.overlap, made + one.own_end)
    overlap = max(sum(one.overlap for one in of_rank) for _, of_rank in everyones)
    return {"credit/value_overlap_seconds": overlap}
