"""The gain of a credit method: how much it reduces the variance of the policy gradient, and at what cost.

Let g be the gradient of one problem, and V = tr Cov(g). Different problems are independent, so the gradient
of a batch of N problems has the covariance Cov(g) / N. All unbiased credits have the same mean gradient, so
their V can be compared directly:

* gain per answer = V(RLOO) / V(credit), on the same answers;
* cost = (tokens sampled by rollout and credit) / (tokens of eight answers a problem);
* gain per token = gain / cost;
* gain at ρ = gain × (1 + ρ) / (cost + ρ), where ρ is what training a token costs, in units of sampling one.

A biased credit is compared after scaling it, which a learning rate could do as well. With g its mean
gradient and t the true one, it is multiplied by s = |t|² / (g·t), so that the part of s·g along t is t
itself. The part of s·g across t is its bias, and counts as noise of a batch of `BATCH_OF_PROBLEMS` problems:

    V(biased credit) = s² V + BATCH · |s·g − t|²
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treetune.lab.analyzers.figures import (
    FIGURE_COLOURS,
    MARKERS,
    NUMBER_OF_RESAMPLES,
    draw_legend_below,
    draw_points_with_bars,
    make_panels,
)
from treetune.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Gradients: TypeAlias = NDArray[np.float32]
"""The gradient of each problem, [problems, parameters]."""
TRUE_ADVANTAGES = "true advantages"
"""The name of the method that takes its advantages from exact values. No result recommends it."""
BATCH_OF_PROBLEMS = 64
"""The number of problems of the batch in which a bias counts as noise."""
TRAINING_COST_RATIOS = (0.25, 1.0, 3.0, 10.0)
"""The values of ρ for which tables have a column. ρ is about 0.25 on a small CPU. For the VinePPO paper's
models and settings on H100s, `treetune plan` gives about 2 for one epoch without a reference model, and 3 to
4 for two epochs with one."""


def measure_gain(
    reference_ND: Gradients,
    true_ND: Gradients,
    credit_ND: Gradients,
    cost: float,
    unbiased: bool,
    seed: int,
) -> dict[str, Any]:
    """Returns the gain of a credit, with its cost and bias.

    Row n of the three arrays of gradients is of the same problem. If the three rows are also of the same
    answers, their common noise cancels out.

    Args:
        reference_ND: The gradient of each problem with RLOO.
        true_ND: The gradient of each problem with true advantages, or with RLOO again where there are none.
        credit_ND: The gradient of each problem with the credit. It may have fewer problems than the others.
        cost: The tokens that rollout and credit sampled, in units of the tokens of RLOO's answers.
        unbiased: Whether the credit is unbiased, so its gradient needs no scaling and has no bias.
        seed: The seed of the bootstrap.

    Returns:
        ``gain``, the gain per answer, and ``gain_per_token``, each with its interval (95 %, bootstrap over
        problems); ``cost``; ``bias``; and ``problems``, the number of problems. The gain per answer is
        V(RLOO) / V(credit), where V is the variance of a problem's policy gradient; a bias counts as
        variance, too. ``bias`` is the share of the mean gradient's squared length that isn't along the true
        gradient. The numbers of both gains are None where the mean gradient has no part along the true one,
        or where noise hides that part.
    """
    # `credit_ND` may have fewer problems than the other two arrays. Then only these problems are compared.
    problems = len(credit_ND)
    reference_ND, true_ND = reference_ND[:problems], true_ND[:problems]
    # The target is an unbiased estimate of the true gradient, with which the mean gradient of a biased credit
    # is compared. The more noise the two share, the more exactly the bias is measured. So for a biased credit
    # the target is a mixture of RLOO's and the true gradients, which are both unbiased: the mixture whose
    # noise correlates most with the credit's.
    target_ND = true_ND if unbiased else _mix_like(reference_ND, true_ND, credit_ND)
    moments_NM = _measure_pairs(reference_ND, target_ND, credit_ND)
    (value,), (bias,) = _gain_and_bias(moments_NM.mean(0)[:, None], unbiased).tolist()
    low, high = _bootstrap_gain(moments_NM, unbiased, seed)
    # A biased credit is scaled by the true gradient's length. Where noise hides that length, the scale is
    # noise, too, and the gain lies outside of its own interval.
    # An interval without width contains the gain except for rounding: hence the thousandth.
    is_measurable = np.isfinite(value) and (unbiased or 0.999 * low <= value <= 1.001 * high)
    interval: dict[str, float | None] = {"value": None, "low": None, "high": None}
    if is_measurable:
        interval = {"value": value, "low": low, "high": high}
    return {
        "gain": interval,
        "cost": cost,
        "gain_per_token": {
            name: None if number is None else number / cost for name, number in interval.items()
        },
        "bias": None if np.isnan(bias) else bias,
        "problems": problems,
    }


class _Split(NamedTuple):
    """Gradients of problems, split into their mean and the deviations from it."""

    mean_D: Gradients
    deviations_ND: Gradients
    """The rows minus their mean, scaled by √(N / (N − 1)) so that their mean square is the variance."""


def _split_mean(rows_ND: Gradients) -> _Split:
    """Returns the mean of the rows and the rows' deviations from it.

    The deviations of N rows are scaled by √(N / (N − 1)), so that their mean square is the unbiased variance.
    """
    # The mean is summed up in float64: in float32 the sum of many problems would lose digits.
    mean_D = rows_ND.mean(0, dtype=np.float64).astype(np.float32)
    scale = np.float32((len(rows_ND) / (len(rows_ND) - 1)) ** 0.5)
    return _Split(mean_D, (rows_ND - mean_D) * scale)


def _covariance_and_product(first: _Split, second: _Split) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns two numbers for each problem, whose means over the problems estimate two quantities.

    The first quantity is the covariance of the two kinds of gradients (the variance, if both are the same
    kind). The second is the inner product of their expectations (the squared length).
    """
    covariance_N = np.einsum("nd,nd->n", first.deviations_ND, second.deviations_ND, dtype=np.float64)
    # The product of two means over N problems is on average too large by 1/N of the covariance.
    product = first.mean_D @ second.mean_D - covariance_N.mean() / len(covariance_N)
    # A resample of the bootstrap changes both means. To first order, the product then changes by the mean of
    # the two terms that are added here. Over all problems, their mean is 0.
    product_N = product + first.deviations_ND @ second.mean_D + second.deviations_ND @ first.mean_D
    return covariance_N, product_N


def _measure_pairs(
    reference_ND: Gradients, target_ND: Gradients, credit_ND: Gradients
) -> NDArray[np.float64]:
    """Returns the eight numbers of each problem from whose means `_gain_and_bias` computes, [N, 8].

    There are two numbers (`_covariance_and_product`) for each of these pairs: RLOO with itself, the target
    with itself, the target with the credit, and the credit with itself.
    """
    reference, target, credit = map(_split_mean, (reference_ND, target_ND, credit_ND))
    columns: list[NDArray[np.float64]] = []
    for first, second in ((reference, reference), (target, target), (target, credit), (credit, credit)):
        columns += _covariance_and_product(first, second)
    return np.stack(columns, 1)


def _bootstrap_gain(moments_NM: NDArray[np.float64], unbiased: bool, seed: int) -> tuple[float, float]:
    """Returns the ends of the gain's interval (95 %), from resamples of the problems."""
    problems = len(moments_NM)
    generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
    # A resample is given by how often it contains each problem.
    counts_RN = generator.multinomial(problems, np.full(problems, 1 / problems), size=NUMBER_OF_RESAMPLES)
    gains_R, _ = _gain_and_bias((counts_RN @ moments_NM).T / problems, unbiased)
    # A resample whose gain is not defined (NaN) counts as a gain of 0.
    gains_R = np.nan_to_num(gains_R)
    return float(np.percentile(gains_R, 2.5)), float(np.percentile(gains_R, 97.5))


def _mix_like(reference_ND: Gradients, true_ND: Gradients, credit_ND: Gradients) -> Gradients:
    """Returns the mix of RLOO's and the true gradients whose noise correlates most with a biased credit's.

    RLOO's and the true gradients are unbiased, so any mixture of the two is unbiased. The more noise the
    mixture shares with the credit's gradients, the more exactly the credit's bias is measured. GRPO shares
    noise with RLOO, and smoothed values share noise with true advantages.
    """
    # Inner products of the noise of r (RLOO's), t (the true ones) and c (the credit's).
    r, t, c = ((rows_ND - rows_ND.mean(0)).ravel() for rows_ND in (reference_ND, true_ND, credit_ND))
    rr, rt, rc, tt, tc = (float(a @ b) for a, b in ((r, r), (r, t), (r, c), (t, t), (t, c)))
    # The least squares fit of c by r and t, by Cramer's rule. Only the ratio of the weights matters, so they
    # aren't divided by the determinant. A negative weight is set to 0.
    weight_r = max(rc * tt - tc * rt, 0.0)
    weight_t = max(tc * rr - rc * rt, 0.0)
    total_weight = weight_r + weight_t
    # Where both weights are 0, the mixture has only the true gradients.
    share_of_reference = np.float32(weight_r / total_weight if total_weight else 0.0)
    return true_ND + share_of_reference * (reference_ND - true_ND)


def _gain_and_bias(means_MR: NDArray[np.float64], unbiased: bool) -> NDArray[np.float64]:
    """Returns two rows, the gains and the biases, with a column for each resample.

    `means_MR` has the means over problems of the eight numbers of `_measure_pairs`.
    """
    reference_variance_R, _ = means_MR[0:2]  # RLOO with itself
    _, target_squared_R = means_MR[2:4]  # the target with itself
    _, inner_product_R = means_MR[4:6]  # the target with the credit
    credit_variance_R, credit_squared_R = means_MR[6:8]  # the credit with itself
    with np.errstate(divide="ignore", invalid="ignore"):
        if unbiased:
            scale_R = np.ones_like(target_squared_R)
            squared_bias_R = np.zeros_like(target_squared_R)
        else:
            # The credit's mean gradient g has a part along the true gradient t, and a part across it. Scaled
            # by |t|² / (g·t), the part along t is t itself. The scale is not defined if it isn't positive.
            is_positive_R = target_squared_R * inner_product_R > 0
            scale_R = np.where(is_positive_R, target_squared_R / inner_product_R, np.nan)
            # The scaled part across t is the bias. By Pythagoras' theorem, its squared length is that of the
            # whole scaled gradient minus |t|².
            squared_bias_R = np.maximum(scale_R**2 * credit_squared_R - target_squared_R, 0)
        # The bias counts as noise of a batch of `BATCH_OF_PROBLEMS` problems. The variances here are those of
        # one problem: they are `BATCH_OF_PROBLEMS` times as large as a batch's. So the bias is multiplied by
        # `BATCH_OF_PROBLEMS`, too.
        noise_R = scale_R**2 * credit_variance_R + BATCH_OF_PROBLEMS * squared_bias_R
        gain_R = reference_variance_R / noise_R
        bias_R = np.where(target_squared_R > 0, squared_bias_R / (target_squared_R + squared_bias_R), np.nan)
        return np.stack([gain_R, bias_R])


def at_ratio(gain: float, cost: float, rho: float) -> float:
    """Returns the gain over RLOO at equal cost of sampling and training, where training a token costs `rho`
    times as much as sampling one."""
    return gain * (1 + rho) / (cost + rho)


def half_width(score: Mapping[str, Any]) -> float:
    """Returns half the width of the gain's interval as a share of the gain, or infinity where there is no
    gain. `score` is what `measure_gain` returns."""
    interval = score["gain"]
    if not interval["value"]:
        return float("inf")
    return (interval["high"] - interval["low"]) / 2 / interval["value"]


TABLE_COLUMNS = ["method", "gain per answer ↑", "cost ↓", "gain per token ↑"]
TABLE_COLUMNS += [f"at ρ = {rho:g} ↑" for rho in TRAINING_COST_RATIOS]


def gain_table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table in Markdown, with a row for each method. The method with the largest gain
    per token comes first."""
    rows = []
    # A method without a gain comes last.
    by_gain = sorted(methods.items(), key=lambda item: -(item[1]["gain_per_token"]["value"] or 0.0))
    for name, score in by_gain:
        value, cost, bias = score["gain"]["value"], score["cost"], score["bias"]
        # The gain at each ρ. ρ is the cost of training a token, in units of sampling one.
        at_ratios = [
            "–" if value is None else f"{at_ratio(value, cost, rho):.2f}" for rho in TRAINING_COST_RATIOS
        ]
        bias_text = "–"
        if bias is not None:
            bias_text = f"{bias:.3f}" if bias else "0"  # an unbiased credit has a bias of exactly 0
        rows.append(
            [
                name,
                with_interval(score["gain"]),
                f"{cost:.2f}",
                with_interval(score["gain_per_token"]),
                *at_ratios,
                bias_text,
                score["problems"],
            ]
        )
    return markdown_table([*TABLE_COLUMNS, "bias → 0", "problems"], rows)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns a table in Markdown as lines. The first column is aligned to the left, the others to the
    right."""
    alignment = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, alignment, *rows)]


def with_interval(number: Mapping[str, float | None]) -> str:
    """Returns a number and its interval, rounded to three digits: ``1.23 [1.1, 1.35]``."""
    if number["value"] is None:
        return "–"
    return f"{number['value']:.3g} [{number['low']:.3g}, {number['high']:.3g}]"


def draw_gain(by_panel: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Draws gain per answer over cost, a panel for each task, a point for each method.

    ρ is the cost of training a token, in units of sampling one. A line for each ρ joins the points that are
    worth as much as RLOO; a method above the line is worth more. Gains below 0.05 are outside of the figure.
    """
    rows = math.ceil(len(by_panel) / 4)  # at most four panels in a row
    figure, axes = make_panels(list(by_panel), rows=rows)
    ordered_methods: dict[str, None] = {}  # a dictionary as an ordered set
    for scores in by_panel.values():
        ordered_methods |= dict.fromkeys(scores)
    methods = list(ordered_methods)
    for panel, scores in zip(axes, by_panel.values(), strict=True):
        highest_cost = 2 * max(1.0, *(score["cost"] for score in scores.values()))
        costs = np.geomspace(1.0, highest_cost, 50)
        for rho, line_style in zip(TRAINING_COST_RATIOS, ("-", "--", "-.", ":"), strict=True):
            # These gains solve gain × (1 + ρ) / (cost + ρ) = 1, where 1 is RLOO's own gain at this ρ.
            gains_like_rloo = (costs + rho) / (1 + rho)
            panel.plot(costs, gains_like_rloo, color="#999999", linewidth=0.8, linestyle=line_style)
            end = (costs[-1], gains_like_rloo[-1])
            panel.annotate(f"ρ = {rho:g}", end, fontsize=6, color="#777777", ha="right")
        for name, score in scores.items():
            number = methods.index(name)
            style = {
                "color": FIGURE_COLOURS[number % len(FIGURE_COLOURS)],
                # Methods that share a colour have different marks.
                "marker": MARKERS[(number // len(FIGURE_COLOURS) + number) % len(MARKERS)],
                "linestyle": "none",
                "label": name,
            }
            draw_points_with_bars(panel, [score["cost"]], [score["gain"]], **style)
        panel.set(xscale="log", yscale="log", xlim=(0.7, highest_cost))
        panel.set_ylim(bottom=max(0.05, panel.get_ylim()[0]))
        panel.set_xlabel("cost: sampled tokens over RLOO's", fontsize=8)
        panel.set_ylabel("gain per answer: V(RLOO) / V", fontsize=8)
    columns_by_panels = {1: 3, 2: 4}  # a figure of one or two panels is narrow
    draw_legend_below(figure, axes, columns=columns_by_panels.get(len(by_panel), 6))
    return figure


def best_at(methods: Mapping[str, Mapping[str, Any]], rho: float, by: str = "value") -> tuple[str, float]:
    """Returns the name of the method with the highest gain at a given ρ, and that gain.

    ρ is the cost of training a token, in units of sampling one. With `by` "low", methods are compared by the
    low ends of their intervals. True advantages don't take part: no result recommends them.
    """
    gains = {
        name: at_ratio(score["gain"][by], score["cost"], rho)
        for name, score in methods.items()
        if name != TRUE_ADVANTAGES and score["gain"]["value"] is not None
    }
    best = max(gains, key=lambda name: gains[name])
    return best, gains[best]
