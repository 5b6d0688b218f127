"""The gain of a credit: how much noise it takes out of the policy's gradient, and at what cost.

Groups of different problems are independent, so a batch of N problems has a gradient with covariance
Cov(g)/N, g being one problem's. V = tr Cov(g). Between credits that are unbiased the mean gradient is the
same, so their V compare directly:

* gain per answer = V(RLOO) / V(credit), on the same answers;
* cost = (tokens sampled by rollout and credit) / (tokens of eight answers a problem);
* gain per token = gain / cost;
* gain at ρ = gain × (1 + ρ) / (cost + ρ), where ρ is what training a token costs, in units of sampling one.

A biased credit is scaled, as a learning rate would, until the part of its mean gradient along the true one is
as long as the true one. The rest of it counts as noise of a batch of `BATCH` problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treetune.lab.analyzers.figures import COLOURS, MARKS, RESAMPLES, legend_below, panels, points_with_bars
from treetune.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = NDArray[np.float32]
"""The gradient of each problem, [problems, parameters]."""
CEILING = "true advantages"
"""The name of the row with the advantages of the true values."""
BATCH = 64
"""Problems of the batch for which a bias is weighed against noise."""
RATIOS = (0.25, 1.0, 3.0, 10.0)
"""ρ: a small CPU, a GPU with one pass, with two epochs and a reference, with long continuations left out."""


def gain(
    reference_ND: Rows, true_ND: Rows, own_ND: Rows, cost: float, unbiased: bool, seed: int
) -> dict[str, Any]:
    """Returns ``gain``, the gain per answer with its interval (95 %, bootstrap over problems), and ``cost``,
    ``gain_per_token``, ``bias``.

    The arrays are the gradients of each problem with RLOO, with true advantages (RLOO again where there are
    none), and with the credit. Problems in equal order are compared pairwise, so that what all have of the
    same answers' luck cancels out. ``bias`` is the share of the mean gradient's squared length that isn't
    along the true one. If none is, or it can't be told, the gain is None.
    """
    reference_ND, true_ND = reference_ND[: len(own_ND)], true_ND[: len(own_ND)]
    held_ND = true_ND if unbiased else _held_to(reference_ND, true_ND, own_ND)
    reference, held, own = map(_centred, (reference_ND, held_ND, own_ND))
    pairs, columns = ((reference, reference), (held, held), (held, own), (own, own)), []
    for (one_D, one_ND), (other_D, other_ND) in pairs:
        noise_N = np.einsum("nd,nd->n", one_ND, other_ND, dtype=np.float64)
        # Of a product of two means, 1 / N of the noise is left. A problem's part is taken to first order.
        product = one_D @ other_D - noise_N.mean() / len(noise_N)
        columns += [noise_N, product + one_ND @ other_D + other_ND @ one_D]
    columns_NM, problems = np.stack(columns, 1), len(own_ND)
    (value,), (bias,) = _gain_and_bias(columns_NM.mean(0)[:, None], unbiased).tolist()
    draws = np.random.default_rng(derive_seed(seed, "bootstrap"))
    often_RN = draws.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    drawn_R = np.nan_to_num(_gain_and_bias((often_RN @ columns_NM).T / problems, unbiased)[0])
    low, high = (float(np.percentile(drawn_R, share)) for share in (2.5, 97.5))
    # Where the true gradient is lost in noise, so is a biased credit's scale: the gain leaves its interval.
    known = np.isfinite(value) and (unbiased or 0.999 * low <= value <= 1.001 * high)
    found = dict(zip(("value", "low", "high"), (value, low, high) if known else (None,) * 3))
    return {
        "gain": found,
        "cost": cost,
        "gain_per_token": {name: None if one is None else one / cost for name, one in found.items()},
        "bias": None if np.isnan(bias) else bias,
        "problems": problems,
    }


def _centred(rows_ND: Rows) -> tuple[Rows, Rows]:
    """Returns the mean, and the rows less the mean, scaled so that their mean square is unbiased."""
    mean_D = rows_ND.mean(0, dtype=np.float64).astype(np.float32)
    return mean_D, (rows_ND - mean_D) * np.float32((len(rows_ND) / (len(rows_ND) - 1)) ** 0.5)


def _held_to(reference_ND: Rows, true_ND: Rows, own_ND: Rows) -> Rows:
    """Returns the mix of two unbiased credits' gradients whose noise correlates most with a biased one's.

    With the same answers a bias stands out best where most luck is in common: GRPO's with RLOO, that of
    smoothed values with true advantages.
    """
    noises = [(one - one.mean(0)).ravel() for one in (reference_ND, true_ND, own_ND)]
    (rr, rt, ro), (_, tt, to), _ = [[float(one @ other) for other in noises] for one in noises]
    of_reference, of_true = max(ro * tt - to * rt, 0.0), max(to * rr - ro * rt, 0.0)
    share = np.float32(of_reference / (of_reference + of_true or 1.0))
    return true_ND + share * (reference_ND - true_ND)


def _gain_and_bias(means_MR: NDArray[np.float64], unbiased: bool) -> NDArray[np.float64]:
    """Returns both rows, from means over problems: noise and squared length of RLOO's gradient, of the true
    one, of what the true and the own one have in common, and of the own one."""
    variance_R, _, _, length_R, _, along_R, own_variance_R, own_length_R = means_MR
    with np.errstate(divide="ignore", invalid="ignore"):
        scale_R = np.where(length_R * along_R > 0, length_R / along_R, np.nan)
        scale_R = np.ones_like(scale_R) if unbiased else scale_R
        missed_R = 0 * scale_R if unbiased else np.maximum(scale_R**2 * own_length_R - length_R, 0)
        gain_R = variance_R / (scale_R**2 * own_variance_R + BATCH * missed_R)
        return np.stack([gain_R, np.where(length_R > 0, missed_R / (length_R + missed_R), np.nan)])


def at_ratio(gain: float, cost: float, rho: float) -> float:
    """Returns how many times more is learnt than with RLOO for the same money, where training a token costs
    `rho` times as much as sampling one."""
    return gain * (1 + rho) / (cost + rho)


def half_width(found: Mapping[str, Any]) -> float:
    """Returns half of the gain's interval as a share of the gain; infinite where there is none."""
    one = found["gain"]
    return (one["high"] - one["low"]) / 2 / one["value"] if one["value"] else float("inf")


COLUMNS = ["method", "gain per answer ↑", "cost ↓", "gain per token ↑"]
COLUMNS += [f"at ρ = {one:g} ↑" for one in RATIOS]


def gain_table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns lines of Markdown, one method in each, the best gain per token first."""
    rows = []
    for name, one in sorted(methods.items(), key=lambda item: -(item[1]["gain_per_token"]["value"] or 0.0)):
        value, cost, bias = one["gain"]["value"], one["cost"], one["bias"]
        worth = ["–" if value is None else f"{at_ratio(value, cost, rho):.2f}" for rho in RATIOS]
        cells = [name, with_interval(one["gain"]), f"{cost:.2f}", with_interval(one["gain_per_token"])]
        told = "–" if bias is None else f"{bias:.3f}" if bias else "0"
        rows.append([*cells, *worth, told, one["problems"]])
    return markdown([*COLUMNS, "bias → 0", "problems"], rows)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns lines of Markdown."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(map(str, one))} |" for one in lines]


def with_interval(number: Mapping[str, float | None]) -> str:
    """Returns three digits of a number and of its interval."""
    if number["value"] is None:
        return "–"
    return f"{number['value']:.3g} [{number['low']:.3g}, {number['high']:.3g}]"


def draw_gain(by_panel: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Draws gain per answer over cost, a panel for each task, a point for each method. On a line a method is
    worth what RLOO is, for one ρ: above it, it is worth more. Gains below 0.05 lie outside."""
    figure, axes = panels(list(by_panel), rows=-(-len(by_panel) // 4))
    methods = list(dict.fromkeys(name for found in by_panel.values() for name in found))
    for one, found in zip(axes, by_panel.values(), strict=True):
        most = 2 * max(1.0, *(numbers["cost"] for numbers in found.values()))
        costs = np.geomspace(1.0, most, 50)
        for rho, style in zip(RATIOS, ("-", "--", "-.", ":"), strict=True):
            worth = (costs + rho) / (1 + rho)
            one.plot(costs, worth, color="#999999", linewidth=0.8, linestyle=style)
            one.annotate(f"ρ = {rho:g}", (costs[-1], worth[-1]), fontsize=6, color="#777777", ha="right")
        for name, numbers in found.items():
            place = methods.index(name)
            mark = MARKS[(place // len(COLOURS) + place) % len(MARKS)]
            colour = COLOURS[place % len(COLOURS)]
            drawn = {"color": colour, "marker": mark, "linestyle": "none", "label": name}
            points_with_bars(one, [numbers["cost"]], [numbers["gain"]], **drawn)
        one.set(xscale="log", yscale="log", xlim=(0.7, most))
        one.set_ylim(bottom=max(0.05, one.get_ylim()[0]))
        one.set_xlabel("cost: sampled tokens over RLOO's", fontsize=8)
        one.set_ylabel("gain per answer: V(RLOO) / V", fontsize=8)
    legend_below(figure, axes[0], columns={1: 3, 2: 4}.get(len(by_panel), 6))
    return figure


def best_at(methods: Mapping[str, Mapping[str, Any]], rho: float, by: str = "value") -> tuple[str, float]:
    """Returns the method that is worth most at this ρ, and its worth; `by` "low": at intervals' low ends."""
    worth = {
        name: at_ratio(one["gain"][by], one["cost"], rho)
        for name, one in methods.items()
        if name != CEILING and one["gain"]["value"] is not None
    }
    best = max(worth, key=lambda name: worth[name])
    return best, worth[best]
