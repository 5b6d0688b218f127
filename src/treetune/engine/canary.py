"""Judges a canary: compares the engine's log-probs with the trainer's, to see whether it has the new
weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from treetune.engine.base import Tolerance
from treetune.vocabulary import TokenIds

FEWEST_TOKENS = 16
"""The fewest tokens whose mean difference is judged. With fewer tokens, the standard error of the mean is
unreliable (for a single token it is 0). `Tolerance.largest` judges every token, however many there are."""

SIGNIFICANT_STANDARD_ERRORS = 4.0
"""A mean difference counts as positive if it is at least this many standard errors above 0."""


@dataclass(frozen=True)
class Probe:
    """A prompt, the engine's sample, and the log-probs of the sample's tokens by engine and trainer."""

    prompt_ids: TokenIds
    token_ids: TokenIds
    engine_logprobs: Sequence[float]
    trainer_logprobs: Sequence[float]


@dataclass(frozen=True)
class Gap:
    """The differences between log-probs of engine and trainer, over all tokens of a canary."""

    mean: float
    """The mean absolute difference; inf if a log-prob is NaN or infinite."""
    largest: float
    problem: str | None = None
    """The reason why the engine doesn't have the new weights; None if it has."""


def judge_gap(probes: Sequence[Probe], previous_probes: Sequence[Probe], tolerance: Tolerance) -> Gap:
    """Compares the log-probs of engine and trainer.

    Args:
        probes: The probes of the new weights, which the engine should have.
        previous_probes: The probes of the previous weights, for the same prompts and seeds; empty if there
            are none.
        tolerance: The accepted difference.
    """
    gaps = []
    for probe in probes:
        for engine, trainer in zip(probe.engine_logprobs, probe.trainer_logprobs, strict=True):
            gaps.append(abs(engine - trainer))
    if not gaps:  # nothing was sampled here, since another rank checks this server
        return Gap(mean=0.0, largest=0.0)
    if not all(map(math.isfinite, gaps)):
        return Gap(math.inf, math.inf, "some log-probs of the engine or the trainer are NaN or infinite")
    mean, largest = sum(gaps) / len(gaps), max(gaps)
    problem = None
    if largest > tolerance.largest:
        problem = (
            f"the engine's log-probs differ from the trainer's by up to {largest:.3g}, more than the"
            f" {tolerance.largest:.3g} that engines.policy.canary_tolerance allows"
        )
    # Not `mean > tolerance.mean`: the mean of so few tokens may exceed the bound by chance.
    elif len(gaps) >= FEWEST_TOKENS and _is_mean_surely_positive([gap - tolerance.mean for gap in gaps]):
        problem = (
            f"the engine's log-probs differ from the trainer's by {mean:.3g} in the mean (and by up to"
            f" {largest:.3g}), more than the engines.policy.canary_tolerance of {tolerance.mean:.3g}"
        )
    elif is_stale(probes, previous_probes):
        problem = (
            "the engine still has the previous weights: its log-probs are nearer to the trainer's previous"
            f" ones than to its present ones ({mean:.3g} in the mean), and have not changed with them"
        )
    return Gap(mean, largest, problem)


def is_stale(probes: Sequence[Probe], previous_probes: Sequence[Probe]) -> bool:
    """Returns whether the engine certainly still has the previous weights.

    Probes are the engine's samples after a few prompts, with the log-probs of their tokens by engine and
    trainer. `probes` are of the new weights, which the engine should have, and `previous_probes` of the
    previous ones.

    Old and new weights sample the same tokens for the same prompts and seeds, until one token differs. Up to
    there, both have log-probs of the same tokens. Two differences must be significantly positive over these
    tokens:

    * ``abs(engine - trainer) - abs(engine - trainer_before)``: the old weights explain the engine's log-probs
      better than the new ones. If the weights hardly changed, this difference is about 0.
    * ``abs(trainer - trainer_before) - abs(engine - engine_before)``: the trainer's log-probs changed more
      than the engine's. A constant difference between engine and trainer, which could make the first
      difference positive, cancels out here.
    """
    # The two differences of the docstring, for each common token.
    nearer_to_old, engine_stayed = [], []
    # `previous_probes` is empty at first.
    for probe, previous_probe in zip(probes, previous_probes, strict=False):
        if probe.prompt_ids.tolist() != previous_probe.prompt_ids.tolist():
            continue  # the caller has chosen other prompts than for the previous weights
        token_pairs = zip(probe.token_ids.tolist(), previous_probe.token_ids.tolist(), strict=False)
        n_common_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], token_pairs))
        for token in range(n_common_tokens):
            engine, trainer = probe.engine_logprobs[token], probe.trainer_logprobs[token]
            engine_before = previous_probe.engine_logprobs[token]
            trainer_before = previous_probe.trainer_logprobs[token]
            nearer_to_old.append(abs(engine - trainer) - abs(engine - trainer_before))
            engine_stayed.append(abs(trainer - trainer_before) - abs(engine - engine_before))
    has_enough_tokens = len(nearer_to_old) >= FEWEST_TOKENS
    return (
        has_enough_tokens
        and _is_mean_surely_positive(nearer_to_old)
        and _is_mean_surely_positive(engine_stayed)
    )


def _is_mean_surely_positive(values: Sequence[float]) -> bool:
    """Returns whether the mean lies `SIGNIFICANT_STANDARD_ERRORS` standard errors above 0."""
    count = len(values)
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1))
    # Without `mean > 0`, values that are all 0 would count as positive: their deviation is 0, too.
    return mean > 0 and mean >= SIGNIFICANT_STANDARD_ERRORS * deviation / math.sqrt(count)
