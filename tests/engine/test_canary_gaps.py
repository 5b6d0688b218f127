"""The canary tells weights that aren't there from rounding, in every precision.

The noise has the size that was measured on bfloat16 policies elsewhere: between engine and trainer a standard
deviation of 0.05, 95 % below 0.11, a largest of 0.48. It is drawn anew for every policy; most tokens of a
trained one have next to none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from treetune.engine.base import Tolerance
from treetune.engine.canary import Probe, is_stale, judge
from treetune.engine.settings import VllmSettings
from treetune.vocabulary import token_array

BF16 = VllmSettings().tolerance("cuda")
FP32 = VllmSettings().tolerance("cpu")
PROMPTS, TOKENS = 4, 16
DRAWS = 300

Noise = Callable[[random.Random], float]


def bf16(draw: random.Random) -> float:
    """Of either side, heavy-tailed."""
    return draw.gauss(0, 0.033) + (draw.gauss(0, 0.1) if draw.random() < 0.03 else 0.0)


def mostly_sure(draw: random.Random) -> float:
    """A trained policy's: three of four tokens are certain, and exact."""
    return bf16(draw) if draw.random() < 0.25 else 0.0


def fp32(draw: random.Random) -> float:
    return draw.gauss(0, 1e-6)


def policy(draw: random.Random) -> list[float]:
    return [-draw.expovariate(1.0) for _ in range(PROMPTS * TOKENS)]


def moved(draw: random.Random, policy: Sequence[float], by: float) -> list[float]:
    return [logprob + draw.gauss(0, by) for logprob in policy]


def probes(engine: Sequence[float], trainer: Sequence[float]) -> list[Probe]:
    def part(values: Sequence[float], prompt: int) -> list[float]:
        return list(values[prompt * TOKENS :][:TOKENS])

    return [
        Probe(token_array((p, 1)), token_array(range(TOKENS)), part(engine, p), part(trainer, p))
        for p in range(PROMPTS)
    ]


def seen(draw: random.Random, engine: Sequence[float], trainer: Sequence[float], noise: Noise) -> list[Probe]:
    """What both say of a policy each, with noise of their own."""
    return probes([lp + noise(draw) for lp in engine], [lp + noise(draw) for lp in trainer])


@pytest.mark.parametrize(
    ("noise", "tolerance", "move"),
    [(bf16, BF16, 0.0), (bf16, BF16, 0.02), (bf16, BF16, 0.3), (mostly_sure, BF16, 0.01), (fp32, FP32, 1e-4)],
)
def test_new_weights_are_accepted_however_far_they_moved(
    noise: Noise, tolerance: Tolerance, move: float
) -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        old = policy(draw)
        new = moved(draw, old, move)
        found = judge(seen(draw, new, new, noise), seen(draw, old, old, noise), tolerance)
        assert found.problem is None


def test_a_bias_between_engine_and_trainer_is_not_taken_for_old_weights() -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        old = policy(draw)
        new = [logprob - 0.01 for logprob in old]  # every token moved towards the engine's bias

        def biased(of: list[float]) -> list[float]:
            return [logprob + 0.03 for logprob in of]

        found = judge(seen(draw, biased(new), new, bf16), seen(draw, biased(old), old, bf16), BF16)
        assert found.problem is None


@pytest.mark.parametrize(("noise", "tolerance", "move"), [(bf16, BF16, 0.2), (fp32, FP32, 3e-5)])
def test_old_weights_are_found_though_the_gap_is_within_what_is_tolerated(
    noise: Noise, tolerance: Tolerance, move: float
) -> None:
    """The engine's log-probs are those that it gave before, as no weight of it changed."""
    draw = random.Random(0)
    loose = tolerance._replace(mean=1e9, largest=1e9)
    for _ in range(DRAWS):
        old = policy(draw)
        before = seen(draw, old, old, noise)
        new = moved(draw, old, move)
        engine = [logprob for probe in before for logprob in probe.engine_logprobs]
        found = judge(probes(engine, [lp + noise(draw) for lp in new]), before, loose)
        assert found.problem is not None
        assert "the previous weights" in found.problem


def test_half_loaded_weights_are_above_the_mean_though_no_token_is_above_the_largest() -> None:
    draw = random.Random(0)
    new = policy(draw)
    found = judge(seen(draw, moved(draw, new, 0.3), new, bf16), [], BF16)
    assert found.largest < BF16.largest
    assert found.problem is not None
    assert "in the mean" in found.problem


def test_one_token_far_off_is_refused_in_float32_and_rounding_in_bfloat16() -> None:
    found = judge(probes([0.0] * 64, [0.6] + [0.0] * 63), [], BF16)
    assert (found.problem, found.largest) == (None, 0.6)
    assert judge(probes([0.0] * 64, [2e-4] + [0.0] * 63), [], FP32).problem is not None


def test_the_mean_of_too_few_tokens_is_not_judged() -> None:
    def judged(tokens: int, gap: float) -> str | None:
        probe = Probe(token_array((1,)), token_array(range(tokens)), [0.0] * tokens, [gap] * tokens)
        return judge([probe], [], BF16).problem

    assert judged(1, 1.1 * BF16.mean) is None
    assert judged(15, 1.1 * BF16.mean) is None
    assert judged(16, 1.1 * BF16.mean) is not None
    assert judged(1, 1.1 * BF16.largest) is not None


def test_log_probs_that_are_no_numbers_are_refused() -> None:
    found = judge(probes([math.nan] + [0.0] * 63, [0.0] * 64), [], BF16)
    assert found.problem is not None
    assert found.largest == math.inf


def test_policies_are_compared_up_to_where_their_answers_part() -> None:
    draw = random.Random(0)
    old, new = policy(draw), policy(draw)
    before = probes(old, old)
    now = [
        Probe(probe.prompt_ids, token_array([*range(3), *range(100, 113)]), probe.engine_logprobs, [9.0] * 16)
        for probe in probes(old, new)
    ]
    assert not is_stale(now, before), "12 tokens tell nothing"
    assert is_stale(probes(old, new), before)
