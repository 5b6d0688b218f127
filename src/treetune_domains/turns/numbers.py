"""The named numbers of answers of several turns, which the rollout counts."""

from __future__ import annotations

from treetune.rollouts.numbers import Number, NumberGroup, declare
from treetune_domains.turns.conversation import EVENTS

declare(
    NumberGroup(
        "turns",
        {
            "count": Number("turns of an answer", largest=True, while_training=True, label="turns"),
            "observation_tokens": Number("tokens that the environment added to an answer"),
            **{event: Number(words) for event, words in EVENTS.items()},
        },
    )
)
