"""The canary's verdict: how far the engine's log-probs lie from the trainer's, and whose weights it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from treetune.engine.base import Tolerance
from treetune.vocabulary import TokenIds

FEWEST_TOKENS = 16
"""Tokens below which old weights are not told from new ones."""

SIGNIFICANT = 4.0
"""Standard errors that a difference must lie above 0 to be more than rounding."""


@dataclass(frozen=True)
class Probe:
    """A prompt, the engine's sample, and the log-probs of the sample's tokens by engine and trainer."""

    prompt_ids: TokenIds
    token_ids: TokenIds
    engine_logprobs: Sequence[float]
    trainer_logprobs: Sequence[float]


@dataclass(frozen=True)
class Gap:
    """The mean and the largest gap over all tokens of some probes (inf where one is no number), and the
    problem with them, if any."""

    mean: float
    largest: float
    problem: str | None = None


def judge(probes: Sequence[Probe], before: Sequence[Probe], tolerance: Tolerance) -> Gap:
    """Compares engine and trainer. `before` are the probes of the weights before these, for the same prompts
    and seeds, or nothing."""
    gaps = [
        abs(engine - trainer)
        for probe in probes
        for engine, trainer in zip(probe.engine_logprobs, probe.trainer_logprobs, strict=True)
    ]
    if not gaps:
        return Gap(0.0, 0.0)
    if not all(map(math.isfinite, gaps)):
        return Gap(math.inf, math.inf, "some of the engine's or the trainer's log-probs are no numbers")
    mean, largest = sum(gaps) / len(gaps), max(gaps)
    problem = None
    if largest > tolerance.largest:
        problem = (
            f"the engine's log-probs differ from the trainer's by up to {largest:.3g}, more than the"
            f" {tolerance.largest:.3g} that engines.policy.canary_tolerance allows"
        )
    elif _is_positive([gap - tolerance.mean for gap in gaps]):  # not by the draw of these few tokens
        problem = (
            f"the engine's log-probs differ from the trainer's by {mean:.3g} in the mean (and by up to"
            f" {largest:.3g}), more than the engines.policy.canary_tolerance of {tolerance.mean:.3g}"
        )
    elif is_stale(probes, before):
        problem = (
            f"the engine still answers as with the weights before these: its log-probs are nearer to those"
            f" of the trainer then than to those now ({mean:.3g} in the mean), and have not moved with them"
        )
    return Gap(mean, largest, problem)


def is_stale(probes: Sequence[Probe], before: Sequence[Probe]) -> bool:
    """Returns whether the engine has the weights before these, beyond doubt.

    The same prompts and seeds give the same tokens until the policies part, and up to there both have
    log-probs of the same tokens. Two differences must be significantly positive over these:

    * \\|engine - trainer\\| less \\|engine - trainer before\\|: the old weights explain it better. Where the
      weights hardly moved both are rounding, and alike.
    * \\|trainer - trainer before\\| less \\|engine - engine before\\|: the engine stayed where it was. A bias
      that the engine has against the trainer at all times, which could make the first one positive, is not
      in it.
    """
    nearer, stayed = [], []
    for now, then in zip(probes, before, strict=False):
        if now.prompt_ids.tolist() != then.prompt_ids.tolist():
            continue
        both = zip(now.token_ids.tolist(), then.token_ids.tolist(), strict=False)
        same_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        for token in range(same_tokens):
            engine, trainer = now.engine_logprobs[token], now.trainer_logprobs[token]
            engine_before, trainer_before = then.engine_logprobs[token], then.trainer_logprobs[token]
            nearer.append(abs(engine - trainer) - abs(engine - trainer_before))
            stayed.append(abs(trainer - trainer_before) - abs(engine - engine_before))
    return len(nearer) >= FEWEST_TOKENS and _is_positive(nearer) and _is_positive(stayed)


def _is_positive(values: Sequence[float]) -> bool:
    """Returns whether the mean lies `SIGNIFICANT` standard errors above 0."""
    count = len(values)
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1))
    return mean > 0 and mean >= SIGNIFICANT * deviation / math.sqrt(count)
