"""Which experiments may sample an iteration while the one before is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from treetune.contracts import Finding, StaleAnswers

if TYPE_CHECKING:
    from treetune.runtime.base import PolicyIteration

Overlap = Literal["none", "one_step"]

ONE_AFTER_THE_OTHER = "or leave overlap at 'none'"


def unfit_overlap(experiment: PolicyIteration) -> Iterator[Finding]:
    """What is wrong with an overlap of one step: whatever needs trainer and engine in turn, or the weights
    that training is just changing, can't be had while both are at work."""
    if not experiment.rollout.needs_engine:
        yield Finding(
            "overlap 'one_step' samples while it trains, and this rollout samples nothing",
            "overlap",
            "set it to 'none'",
        )
        return
    if StaleAnswers() not in experiment.trainer.gives:
        yield Finding(
            "overlap 'one_step' trains on answers of the version before, and nothing in the loss corrects for"
            " that",
            "trainer.objective.importance_cap",
            f"{StaleAnswers.remedy}, {ONE_AFTER_THE_OTHER}",
        )
    if experiment.credit.asks_critic:
        yield Finding(
            "the credit asks the trainer's critic, which is being trained while overlap 'one_step' samples",
            "credit",
            f"choose values that the engine gives, such as {{type: 'continuations'}}, {ONE_AFTER_THE_OTHER}",
        )
    if experiment.choose_checkpoint is not None:
        yield Finding(
            "choose_checkpoint measures candidates in the middle of training, on the engine that overlap"
            " 'one_step' samples the next iteration with",
            "choose_checkpoint",
            f"leave it out, {ONE_AFTER_THE_OTHER}",
        )
    if getattr(experiment.engines.policy, "sleep", False):
        yield Finding(
            "engines.policy.sleep gives the engine's memory to the trainer, and overlap 'one_step' has both"
            " at work at once",
            "engines.policy.sleep",
            f"set it to false and let both fit, or give the engine devices of its own, {ONE_AFTER_THE_OTHER}",
        )
