"""Finds signs of collapse in the metrics of a run.

The signs are those that the author of a single-file GRPO on Countdown (github.com/CohleM/RL-GRPO) saw in his
failed runs: entropy and answer length collapse, answers reach the limit, gradients of small batches are too
noisy, and groups of equal rewards teach nothing. All functions depend only on the rows of `metrics.jsonl`, so
that a resumed run finds the same signs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

Sign = Literal["entropy_low", "answers_short", "answers_at_limit", "truncated", "no_spread", "gradient_noise"]
SIGNS: tuple[Sign, ...] = get_args(Sign)

MetricsRow = Mapping[str, Any]
Share = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """The thresholds of signs of collapse, which are checked after every iteration; null switches a check
    off.

    =====================  ============================================================================
    ``entropy_low``        `train/entropy` (nats per trained token) is below `entropy_floor`, or below
                           `entropy_share` of what it was at the beginning
    ``answers_short``      `episodes/response_tokens` is below `length_floor` tokens, or below
                           `length_share` of what it was at the beginning
    ``answers_at_limit``   the mean answer is longer than `limit_share` of the rollout's `max_tokens`
    ``truncated``          `episodes/unfinished` is above `unfinished_ceiling`
    ``no_spread``          `episodes/mixed`, the share of problems whose answers differ in score, is
                           below `mixed_floor`, where there are several answers to a problem; or
                           `credit/advantage_zero`, the share of trained tokens whose advantage is 0,
                           is 1: answers may differ in score and earn the same once they are shaped
    ``gradient_noise``     over the last `window` iterations the standard deviation of `train/grad_norm`
                           is more than `gradient_variation_ceiling` of its mean
    =====================  ============================================================================

    The beginning is the mean of the first `beginning` iterations. A sign counts after it was seen in
    `patience` iterations in a row. Iterations without the sign's metric, for example because they trained
    nothing, are skipped: they neither end a sign nor add to it. `window` and `beginning` count in the same
    way. In supervised training, only ``gradient_noise`` is checked.

    ``gradient_noise`` is a coefficient of variation of the norm, and not the noise scale (tr Σ / |G|²,
    McCandlish et al., 2018, arXiv:1812.06162). The noise scale needs gradients at two batch sizes or of
    single sequences, and so more backward passes in every iteration. The norm is a metric of every run. A
    trend or a single large spike raises the sign as well.

    With `on_collapse` ``stop``, the run ends as soon as one of the signs in `stopping` counts, and keeps the
    newest checkpoint from before the sign was first seen. With the defaults, the quickstart's healthy runs
    have no sign: they end at 0.012 nats (a sixth of the beginning), 0.4 of the groups are mixed, and gradient
    norms vary by 0.4 of their mean.
    """

    entropy_floor: Annotated[float, Gt(0)] | None = 0.002
    entropy_share: Share | None = 0.05
    length_floor: Annotated[float, Gt(0)] | None = None
    length_share: Share | None = 0.25
    limit_share: Share | None = 0.95
    unfinished_ceiling: Annotated[float, Ge(0), Lt(1)] | None = 0.5
    mixed_floor: Annotated[float, Gt(0), Le(1)] | None = 0.1
    gradient_variation_ceiling: Annotated[float, Gt(0)] | None = 1.0
    window: Annotated[int, Ge(3)] = 10
    beginning: Annotated[int, Gt(0)] = 3
    patience: Annotated[int, Gt(0)] = 3
    on_collapse: Literal["warn", "stop"] = "warn"
    stopping: tuple[Sign, ...] = ("entropy_low", "answers_short", "answers_at_limit", "truncated")

    def __post_init__(self) -> None:
        if self.on_collapse == "stop" and not any(sign in self.switched_on for sign in self.stopping):
            raise ValueError(
                "on_collapse is 'stop', but none of the signs that may stop the run is checked"
                f" (stopping: {', '.join(self.stopping) or 'none'}; checked:"
                f" {', '.join(self.switched_on) or 'none'}): set the threshold of one of them, or set"
                " on_collapse to 'warn'"
            )

    @property
    def switched_on(self) -> tuple[Sign, ...]:
        """The signs that are checked."""
        return tuple(sign for sign in SIGNS if self.thresholds(sign))

    def thresholds(self, sign: Sign) -> dict[str, float]:
        """Returns the thresholds of a sign that are set, by their keys."""
        values = {key: getattr(self, key) for key in _THRESHOLDS_OF_SIGN[sign]}
        return {key: value for key, value in values.items() if value is not None}

    def rows_needed(self, sign: Sign) -> int:
        """Returns the number of iterations with the sign's metric that are needed to check the sign."""
        if sign == "gradient_noise":
            return self.window
        # Two signs may compare an iteration with the mean of the first `beginning` iterations.
        share_of_beginning = None
        if sign == "entropy_low":
            share_of_beginning = self.entropy_share
        elif sign == "answers_short":
            share_of_beginning = self.length_share
        return 1 if share_of_beginning is None else self.beginning + 1

    @property
    def stops(self) -> tuple[Sign, ...]:
        """The signs that end the run."""
        if self.on_collapse == "warn":
            return ()
        return tuple(sign for sign in self.switched_on if sign in self.stopping)


_THRESHOLDS_OF_SIGN: Mapping[Sign, tuple[str, ...]] = {
    "entropy_low": ("entropy_floor", "entropy_share"),
    "answers_short": ("length_floor", "length_share"),
    "answers_at_limit": ("limit_share",),
    "truncated": ("unfinished_ceiling",),
    "no_spread": ("mixed_floor",),
    "gradient_noise": ("gradient_variation_ceiling",),
}


@dataclass(frozen=True)
class WatchedRun:
    """The facts of a run's configuration that the checks need."""

    sampled: bool
    """Whether the run samples answers."""
    max_tokens: int | None = None
    """The most tokens of an answer."""


@dataclass(frozen=True)
class CollapseSign:
    """The state of a sign after an iteration.

    Example: ``CollapseSign("truncated", since=11, is_confirmed=True, description="more than 0.5 of the
    answers are cut off (0.62)")``.
    """

    sign: Sign
    since: int | None = None
    """The number, from 0, of the first of the iterations in a row up to the last one that show the sign. None
    if the last iteration doesn't show it."""
    is_confirmed: bool = False
    """Whether enough iterations in a row show it."""
    description: str = ""
    """The values of the last iteration, in words."""
    is_too_early: bool = False
    """Whether there were too few iterations to check it."""


def diagnose(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> dict[Sign, CollapseSign]:
    """Returns the state of every sign that is switched on, and whose metrics the rows have."""
    findings: dict[Sign, CollapseSign] = {}
    for sign in settings.switched_on:
        # Without sampled answers only the gradients can show anything.
        if not watched.sampled and sign != "gradient_noise":
            continue
        rows_with_metric = [row for row in rows if _has_metric(sign, watched, row)]
        if rows_with_metric:
            findings[sign] = _check_sign(sign, settings, watched, rows_with_metric)
    return findings


def _check_sign(
    sign: Sign, settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> CollapseSign:
    """Checks a sign after the last row.

    A sign that the last row shows is confirmed, and may then stop the run, once the last `patience` rows show
    it.
    """
    check = _CHECK_OF_SIGN[sign]
    message = check(settings, watched, rows)
    if message is None:
        # `is_too_early`: there may be no message only because there are too few rows to check the sign.
        return CollapseSign(sign, is_too_early=len(rows) < settings.rows_needed(sign))
    # Goes backwards from the last row. The check of `rows[:-n]` gives the result that the check gave n rows
    # earlier.
    n_rows_with_sign = 1
    while n_rows_with_sign < len(rows) and check(settings, watched, rows[:-n_rows_with_sign]) is not None:
        n_rows_with_sign += 1
    first_iteration = int(rows[-n_rows_with_sign]["iteration"])
    is_confirmed = n_rows_with_sign >= settings.patience
    return CollapseSign(sign, since=first_iteration, is_confirmed=is_confirmed, description=message)


def find_stopping_signs(settings: Diagnostics, findings: Mapping[Sign, CollapseSign]) -> list[CollapseSign]:
    """Returns the findings that stop the run."""
    return [findings[sign] for sign in settings.stops if sign in findings and findings[sign].is_confirmed]


def find_last_good(
    settings: Diagnostics, findings: Mapping[Sign, CollapseSign], iteration: int
) -> int | None:
    """Returns after how many iterations the weights last showed no sign that may stop the run.

    The weights after i iterations sample the answers of iteration i (counted from 0), which the metrics of
    iteration i describe. Example: a sign is seen since iteration 5. The weights after 5 iterations show it,
    and those after 4 iterations are the last good ones.

    Args:
        findings: The signs after the last iteration.
        iteration: The number of the last iteration, from 0.

    Returns:
        None if no sign may stop the run; a number below 0 if the start weights show one.
    """
    stopping_signs = settings.stops
    if not stopping_signs:
        return None
    # The last metrics describe the weights after `iteration` iterations. The last iteration has trained newer
    # weights, which no metrics describe yet.
    last_good = iteration
    for sign in stopping_signs:
        since = findings[sign].since if sign in findings else None
        if since is not None:
            last_good = min(last_good, since - 1)
    return last_good


def describe_good_weights(last_good_number: int, checkpoints: Mapping[int, Path]) -> str:
    """Returns a message that says where the newest weights without a sign of collapse are.

    Args:
        last_good_number: The number of iterations after which the weights were good (`find_last_good`). It is
            below 0 if the start weights, those after 0 iterations, show a sign already.
        checkpoints: The folders of the existing checkpoints, by the number of finished iterations.
    """
    if last_good_number < 0:
        return "the start weights show it already"
    good_numbers = [number for number in checkpoints if number <= last_good_number]
    if good_numbers:
        return f"the last checkpoint from before is {checkpoints[max(good_numbers)] / 'policy'}"
    return "no checkpoint is from before: begin with the start weights again"


# The checks of the signs: each returns what the last row shows, or None if it doesn't show the sign.

METRICS_OF_SIGN: Mapping[Sign, tuple[str, ...]] = {
    "entropy_low": ("train/entropy",),
    "answers_short": ("episodes/response_tokens",),
    "answers_at_limit": ("episodes/response_tokens",),
    "truncated": ("episodes/unfinished",),
    "no_spread": ("episodes/mixed", "credit/advantage_zero"),
    "gradient_noise": ("train/grad_norm",),
}
"""The metrics of each sign; one of them is enough."""


def _has_metric(sign: Sign, watched: WatchedRun, row: MetricsRow) -> bool:
    """Returns whether the row says anything about the sign."""
    if sign == "no_spread":
        return _mixed_share(row) is not None or "credit/advantage_zero" in row  # one of two is enough
    (metric,) = METRICS_OF_SIGN[sign]  # each other sign has a single metric
    if metric not in row:
        return False
    # This sign compares the length of answers with their limit, which may be unknown.
    return sign != "answers_at_limit" or watched.max_tokens is not None


def _mixed_share(row: MetricsRow) -> float | None:
    """Returns the share of problems with both right and wrong answers; None if each has a single answer."""
    has_several_answers = row.get("episodes/count", 0) > row.get("episodes/problems", 0)
    return row.get("episodes/mixed") if has_several_answers else None


def _describe_if_low(
    sign: Sign, rows: Sequence[MetricsRow], floor: float | None, share: float | None, beginning: int
) -> str | None:
    """Returns a text if the sign's metric is below a lower bound; None if it isn't.

    Example: ``below 0.05 of what it was at the beginning (0.02 of 0.7)``.

    Args:
        floor: A lower bound. With None, the metric is not compared with it.
        share: Another lower bound, as a share of the metric's mean over the beginning. With None, the metric
            is not compared with its beginning.
        beginning: The number of first rows that are the beginning.
    """
    (metric,) = METRICS_OF_SIGN[sign]  # only the sign `no_spread` has several metrics
    value = rows[-1][metric]
    if floor is not None and value < floor:
        return f"below {floor:g} ({value:.3g})"
    if share is not None and len(rows) > beginning:
        mean_at_beginning = fmean(row[metric] for row in rows[:beginning])
        if value < share * mean_at_beginning:
            return f"below {share:g} of what it was at the beginning ({value:.3g} of {mean_at_beginning:.3g})"
    return None


def _describe_low_entropy(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    description = _describe_if_low(
        "entropy_low", rows, settings.entropy_floor, settings.entropy_share, settings.beginning
    )
    return None if description is None else f"entropy in nats per token is {description}"


def _describe_short_answers(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    description = _describe_if_low(
        "answers_short", rows, settings.length_floor, settings.length_share, settings.beginning
    )
    return None if description is None else f"the mean length of answers in tokens is {description}"


def _describe_answers_at_limit(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    """Returns a text if the mean answer of the last row has almost as many tokens as an answer may have.
    Returns None if it is shorter."""
    assert watched.max_tokens is not None and settings.limit_share is not None
    tokens = rows[-1]["episodes/response_tokens"]
    if tokens <= settings.limit_share * watched.max_tokens:
        return None
    return (
        f"the mean answer is longer than {settings.limit_share:g} of its limit"
        f" ({tokens:.4g} of {watched.max_tokens} tokens)"
    )


def _describe_truncated_answers(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    share, ceiling = rows[-1]["episodes/unfinished"], settings.unfinished_ceiling
    assert ceiling is not None
    return f"more than {ceiling:g} of the answers are cut off ({share:.3g})" if share > ceiling else None


def _describe_missing_spread(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    """Returns a text if the answers of the last row teach nothing, since they differ too rarely in score or
    all have the advantage 0; None otherwise."""
    row, floor = rows[-1], settings.mixed_floor
    share = _mixed_share(row)
    assert floor is not None
    if share is not None and share < floor:
        reward = row.get("episodes/reward")
        reward_text = "" if reward is None else f", at a mean reward of {reward:.3g}"
        return f"answers differ in score for fewer than {floor:g} of the problems ({share:.3g}{reward_text})"
    # Answers that differ in score may earn the same once they are shaped.
    if row.get("credit/advantage_zero") == 1:
        share_text = ""
        if share is not None:
            share_text = f", though answers differ in score for {share:.3g} of the problems"
        return f"every advantage is 0{share_text}"
    return None


def _describe_gradient_noise(
    settings: Diagnostics, watched: WatchedRun, rows: Sequence[MetricsRow]
) -> str | None:
    """Returns a text if the gradient norms of the last `window` iterations vary too much. Returns None if
    they vary less, if there are fewer iterations, or if the mean norm is 0 or NaN."""
    ceiling = settings.gradient_variation_ceiling
    assert ceiling is not None
    norms = [row["train/grad_norm"] for row in rows[-settings.window :]]
    if len(norms) < settings.window:
        return None
    mean = fmean(norms)
    if not mean > 0:  # 0, or NaN
        return None
    variation = stdev(norms) / mean  # the coefficient of variation
    if variation <= ceiling:
        return None
    return (
        f"the gradient norm does not settle: over {settings.window} iterations it varies by {variation:.3g}"
        f" of its mean ({mean:.3g})"
    )


_CHECK_OF_SIGN: dict[Sign, Callable[[Diagnostics, WatchedRun, Sequence[MetricsRow]], str | None]] = {
    "entropy_low": _describe_low_entropy,
    "answers_short": _describe_short_answers,
    "answers_at_limit": _describe_answers_at_limit,
    "truncated": _describe_truncated_answers,
    "no_spread": _describe_missing_spread,
    "gradient_noise": _describe_gradient_noise,
}

REMEDY_OF_SIGN: Mapping[Sign, str] = {
    "entropy_low": "an entropy bonus, a larger batch or a lower learning rate keeps it up",
    "answers_short": "check that short wrong answers don't earn a reward, or give an entropy bonus",
    "answers_at_limit": "raise the rollout's max_tokens, or penalise length",
    "truncated": "raise the rollout's max_tokens, or penalise length",
    "no_spread": "take problems of another difficulty, or more samples of each; if scores do differ, check"
    " whether shaping makes the rewards equal",
    "gradient_noise": "take more problems per iteration, or more samples of each",
}
"""The remedy for each sign."""
