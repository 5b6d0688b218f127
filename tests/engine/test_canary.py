"""The canary distinguishes weights that weren't loaded from rounding, in bfloat16 and float32.

The noise has the size that was measured on bfloat16 policies elsewhere: between engine and trainer a standard
deviation of 0.05, 95 % below 0.11, a largest of 0.48. It is drawn anew for every policy; most tokens of a
trained policy have next to none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from treetune.engine.base import Tolerance
from treetune.engine.canary import Probe, is_stale, judge_gap
from treetune.engine.settings import VllmSettings
from treetune.vocabulary import token_array

BF16 = VllmSettings().tolerance("cuda")
FP32 = VllmSettings().tolerance("cpu")
PROMPTS, TOKENS = 4, 16
DRAWS = 300

Noise = Callable[[random.Random], float]


def bf16_noise(draw: random.Random) -> float:
    """Draws the heavy-tailed noise of one side, engine or trainer."""
    return draw.gauss(0, 0.033) + (draw.gauss(0, 0.1) if draw.random() < 0.03 else 0.0)


def noise_of_a_trained_policy(draw: random.Random) -> float:
    """Draws the noise of a trained policy: three of four tokens are certain, and exact."""
    return bf16_noise(draw) if draw.random() < 0.25 else 0.0


def fp32_noise(draw: random.Random) -> float:
    return draw.gauss(0, 1e-6)


def draw_policy(draw: random.Random) -> list[float]:
    return [-draw.expovariate(1.0) for _ in range(PROMPTS * TOKENS)]


def move_policy(draw: random.Random, policy: Sequence[float], by: float) -> list[float]:
    return [logprob + draw.gauss(0, by) for logprob in policy]


def probes(engine: Sequence[float], trainer: Sequence[float]) -> list[Probe]:
    """Cuts the log-probs of engine and trainer into answers of `TOKENS` tokens to `PROMPTS` prompts."""
    answer = token_array(range(TOKENS))
    cut = []
    for prompt in range(PROMPTS):
        tokens = slice(prompt * TOKENS, (prompt + 1) * TOKENS)
        cut.append(Probe(token_array((prompt, 1)), answer, list(engine[tokens]), list(trainer[tokens])))
    return cut


def noisy_probes(
    draw: random.Random, engine: Sequence[float], trainer: Sequence[float], noise: Noise
) -> list[Probe]:
    """Builds probes of the log-probs of engine and trainer, each with noise of its own."""
    return probes(
        [logprob + noise(draw) for logprob in engine], [logprob + noise(draw) for logprob in trainer]
    )


@pytest.mark.parametrize(
    ("noise", "tolerance", "move"),
    [
        (bf16_noise, BF16, 0.0),
        (bf16_noise, BF16, 0.02),
        (bf16_noise, BF16, 0.3),
        (noise_of_a_trained_policy, BF16, 0.01),
        (fp32_noise, FP32, 1e-4),
    ],
)
def test_new_weights_are_accepted_however_far_they_moved(
    noise: Noise, tolerance: Tolerance, move: float
) -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        old = draw_policy(draw)
        new = move_policy(draw, old, move)
        judgement = judge_gap(
            noisy_probes(draw, new, new, noise), noisy_probes(draw, old, old, noise), tolerance
        )
        assert judgement.problem is None


def test_a_bias_between_engine_and_trainer_is_not_taken_for_old_weights() -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        old = draw_policy(draw)
        new = [logprob - 0.01 for logprob in old]  # every token moved towards the engine's bias

        def biased(logprobs: list[float]) -> list[float]:
            return [logprob + 0.03 for logprob in logprobs]

        judgement = judge_gap(
            noisy_probes(draw, biased(new), new, bf16_noise),
            noisy_probes(draw, biased(old), old, bf16_noise),
            BF16,
        )
        assert judgement.problem is None


@pytest.mark.parametrize(("noise", "tolerance", "move"), [(bf16_noise, BF16, 0.2), (fp32_noise, FP32, 3e-5)])
def test_old_weights_are_found_though_the_gap_is_tolerated(
    noise: Noise, tolerance: Tolerance, move: float
) -> None:
    """No weight of the engine changed: it gives exactly its log-probs from before."""
    draw = random.Random(0)
    loose = tolerance._replace(mean=1e9, largest=1e9)
    for _ in range(DRAWS):
        old = draw_policy(draw)
        before = noisy_probes(draw, old, old, noise)
        new = move_policy(draw, old, move)
        engine = [logprob for probe in before for logprob in probe.engine_logprobs]
        judgement = judge_gap(probes(engine, [logprob + noise(draw) for logprob in new]), before, loose)
        assert judgement.problem is not None
        assert "the previous weights" in judgement.problem


def test_half_loaded_weights_exceed_the_mean_though_no_token_exceeds_the_largest() -> None:
    draw = random.Random(0)
    new = draw_policy(draw)
    judgement = judge_gap(noisy_probes(draw, move_policy(draw, new, 0.3), new, bf16_noise), [], BF16)
    assert judgement.largest < BF16.largest
    assert judgement.problem is not None
    assert "in the mean" in judgement.problem


def test_one_token_far_off_is_refused_in_float32_and_rounding_in_bfloat16() -> None:
    judgement = judge_gap(probes([0.0] * 64, [0.6] + [0.0] * 63), [], BF16)
    assert (judgement.problem, judgement.largest) == (None, 0.6)
    assert judge_gap(probes([0.0] * 64, [2e-4] + [0.0] * 63), [], FP32).problem is not None


def test_the_mean_of_too_few_tokens_is_not_judged() -> None:
    def problem_of(tokens: int, gap: float) -> str | None:
        probe = Probe(token_array((1,)), token_array(range(tokens)), [0.0] * tokens, [gap] * tokens)
        return judge_gap([probe], [], BF16).problem

    assert problem_of(1, 1.1 * BF16.mean) is None
    assert problem_of(15, 1.1 * BF16.mean) is None
    assert problem_of(16, 1.1 * BF16.mean) is not None
    assert problem_of(1, 1.1 * BF16.largest) is not None


def test_log_probs_that_are_nan_are_refused() -> None:
    judgement = judge_gap(probes([math.nan] + [0.0] * 63, [0.0] * 64), [], BF16)
    assert judgement.problem is not None
    assert judgement.largest == math.inf


def test_policies_are_compared_up_to_where_their_answers_differ() -> None:
    draw = random.Random(0)
    old, new = draw_policy(draw), draw_policy(draw)
    before = probes(old, old)
    # Only the first three tokens of each of the four answers are those of before.
    answer = token_array([*range(3), *range(100, 113)])
    now = []
    for probe in probes(old, new):
        now.append(Probe(probe.prompt_ids, answer, probe.engine_logprobs, [9.0] * 16))
    assert not is_stale(now, before), "12 tokens are too few to tell"
    assert is_stale(probes(old, new), before)
