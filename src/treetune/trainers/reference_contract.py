"""Which experiments may score answers under the reference while others are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from treetune.contracts import Experiment, Finding, Turns

if TYPE_CHECKING:
    from treetune.trainers.base import Trainer

KEY = "reference_scores"
REMEDY = "leave it at 'before_training'"


def unfit_reference_scores(trainer: Trainer, experiment: Experiment) -> Iterator[Finding]:
    """What is wrong with ``reference_scores: 'while_sampling'``: it needs a reference that each rank runs by
    itself, on a device that has the time and the memory for it while the engine samples."""
    if trainer.reference_scores == "before_training":
        return
    while_sampling = "reference_scores is 'while_sampling', and"
    if not trainer.keeps_reference:
        yield Finding(f"{while_sampling} nothing here needs a reference", KEY, REMEDY)
    if not experiment.rollout.needs_engine:
        yield Finding(f"{while_sampling} this rollout samples nothing", KEY, REMEDY)
    for held, why in (
        (
            Turns() in experiment.rollout.gives,
            "an answer's turns are asked for one by one and trained together: none would be scored ahead",
        ),
        (trainer.deals_weights_out, "the reference is dealt out over the ranks, which run it together"),
        (trainer.sequence_parallel_size > 1, "ranks run each sequence together"),
        (trainer.lora is not None, "the reference is the policy without its adapters"),
        (trainer.offload_reference, "the reference is on the CPU while the engine samples"),
        (getattr(experiment.engines.policy, "sleep", False), "the engine has the trainer's memory meanwhile"),
        (
            getattr(experiment, "overlap", "none") != "none",
            "with overlap 'one_step' the trainer is at work on the iteration before meanwhile",
        ),
    ):
        if held:
            yield Finding(f"{while_sampling} {why}", KEY, REMEDY)
