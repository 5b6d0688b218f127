"""Computes how the gain of true advantages depends on the share of decisive steps, without sampling.

    python benchmarks/decisive_share.py --output docs/results

It takes seconds. "Drowning in Routine" (2606.22164) derives that the signal-to-noise ratio of credit by
turns, divided by that of credit by answers, is proportional to the inverse root of the share of decisive
turns. The gain is the square of this quotient, so it should be proportional to the inverse of the share.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from treetune.lab.analyzers.figures import Bootstrap, NumberWithInterval, correlation, mean_of  # noqa: E402
from treetune.lab.arena.diluted import by_luck, dilute  # noqa: E402
from treetune.lab.arena.exact import exact_variance  # noqa: E402
from treetune.lab.arena.gain import markdown_table  # noqa: E402
from treetune.lab.arena.languages import (  # noqa: E402
    LANGUAGES,
    Language,
    decision,
    every_choice,
    language_of,
    luck,
    majority,
)

TIMES_AS_LONG = (1, 2, 4, 8, 16, 32)
"""By how many times routine steps make an answer longer."""
STEPS = 32
"""Steps of an answer where the length is fixed."""
CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of decisive steps where the length is fixed."""
ODD_CHOICES = (1, 3, 5, 9, 17, 31)
"""The same for majorities, which have an odd number of choices."""
EFFECT = 0.01
"""How much each right choice adds to the chance of success where luck decides most."""

DECISIVE: Mapping[str, Callable[[], Language]] = {
    "one choice, 25 % correct": lambda: decision(1, 0),
    "one choice, 5 % correct": lambda: decision(1, 0, success=0.05),
    "one choice, 40 % correct": lambda: decision(1, 0, success=0.4),
    "majority of 3 choices": lambda: majority(3),
    "majority of 9 choices": lambda: majority(9),
    "all of 4 choices": lambda: every_choice(4),
    "all of 8 choices": lambda: every_choice(8),
    "luck of 2 choices": lambda: luck(2),
}
"""Languages without routine steps, by their names on the page."""
ROUTINES: Mapping[str, Mapping[str, int]] = {
    "1 token, 2 wordings": {"wordings": 2, "tokens": 1},
    "1 token, 4 wordings": {"wordings": 4, "tokens": 1},
    "3 tokens, 4 wordings each": {"wordings": 4, "tokens": 3},
}
"""The kinds of steps in longer answers: the wordings of a routine token, and the tokens of every step."""


class Family(NamedTuple):
    """Languages that differ in the share of decisive steps, and the exact gain in each."""

    name: str
    decisive: str
    """The kind of the decisive steps. Families of the same kind are similar, so the bootstrap draws them
    together."""
    shares: list[float]
    gains: list[float]

    @property
    def exponent(self) -> float:
        """The slope of log gain over log share, by least squares; infinite gains are left out."""
        is_finite = np.isfinite(self.gains)
        log_shares, log_gains = np.log(self.shares)[is_finite], np.log(self.gains)[is_finite]
        return float(np.polyfit(log_shares, log_gains, 1)[0])

    @property
    def last_exponent(self) -> float:
        """The slope between the two smallest shares."""
        (larger, smaller), (gain_of_larger, gain_of_smaller) = self.shares[-2:], self.gains[-2:]
        return math.log(gain_of_smaller / gain_of_larger) / math.log(smaller / larger)

    @property
    def line(self) -> tuple[float, float, float]:
        """The a and b of gain = a + b / share, by least squares, and the line's largest relative error."""
        inverse_shares = 1 / np.array(self.shares)
        b, a = np.polyfit(inverse_shares, self.gains, 1)
        errors = np.abs((a + b * inverse_shares) / self.gains - 1)
        return float(a), float(b), float(errors.max())


def make_family(
    name: str, decisive: str, languages: Sequence[Language], environment: Sequence[int] = ()
) -> Family:
    """Returns the exact gains of some languages.

    Args:
        name: The name of the family on the page.
        decisive: The kind of the decisive steps.
        languages: The languages, in the order of their shares.
        environment: The steps at which the environment chooses, counted from 0.
    """
    shares, gains = [], []
    for language in languages:
        variance = exact_variance(language, environment=environment)
        shares.append(variance.decisive_share)
        gains.append(variance.gain)
    return Family(name, decisive, shares, gains)


def lengthen_answers() -> list[Family]:
    """Returns a family for each kind of decisive steps and of routine steps. The choices stay the same, and
    routine steps are added."""
    families = []
    for decisive, make_language in DECISIVE.items():
        choices = make_language()
        for routine, settings in ROUTINES.items():
            lengths = [times * choices.length for times in TIMES_AS_LONG]
            languages = [dilute(choices, steps, **settings) for steps in lengths]
            families.append(make_family(f"{decisive}; {routine}", decisive, languages))
    return families


def replace_decisive_steps() -> list[Family]:
    """Returns families of answers of equal length, in which routine steps take the place of decisive ones."""
    majorities = [dilute(majority(number), STEPS) for number in ODD_CHOICES]
    all_choices = [dilute(every_choice(number), STEPS) for number in CHOICES]
    by_environment = [by_luck(STEPS, number, EFFECT) for number in CHOICES]
    return [
        make_family("majority of the decisive choices", "majority", majorities),
        make_family("all decisive choices", "all", all_choices),
        make_family("mostly luck; each right choice adds 1 point", "luck", by_environment, [STEPS]),
    ]


def measure_arena() -> Family:
    """Returns the languages of the arena, which differ in much more than the share."""
    return make_family("languages of the arena", "arena", [language_of(name) for name in LANGUAGES])


def mean_with_interval(values: Sequence[float], clusters: Sequence[str]) -> NumberWithInterval:
    """Returns the mean of exponents with its 95 % bootstrap interval. Clusters are drawn as a whole."""
    return Bootstrap(clusters, seed=1)(mean_of(values))


def exponent_with_interval(family: Family) -> tuple[NumberWithInterval, float]:
    """Returns the slope of log gain over log share with its 95 % bootstrap interval over languages, and R²,
    the share of the variance of log gains that the line explains."""
    log_shares, log_gains = np.log(family.shares), np.log(family.gains)

    def slope(rows: Any) -> float:
        if np.ptp(log_shares[rows]) == 0:
            return math.nan
        return float(np.polyfit(log_shares[rows], log_gains[rows], 1)[0])

    r_squared = correlation(log_shares, log_gains) ** 2
    return Bootstrap(range(len(log_gains)), seed=1)(slope), r_squared


def format_number(number: float) -> str:
    """Returns a number with two decimals and a proper minus sign."""
    return f"{number:.2f}".replace("-", "−")


def format_interval(number: NumberWithInterval, scale: float = 1.0) -> str:
    """Returns a number with its interval, multiplied by `scale`: ``−1.01 [−1.02, −1.00]``."""
    value, low, high = number["value"], number["low"], number["high"]
    assert value is not None and low is not None and high is not None
    bounds = f"[{format_number(low * scale)}, {format_number(high * scale)}]"
    return f"{format_number(value * scale)} {bounds}"


def format_gain(gain: float) -> str:
    """Returns a gain with about three digits."""
    if math.isinf(gain):
        return "∞"
    if gain < 10:
        return f"{gain:.2f}"
    if gain < 100:
        return f"{gain:.1f}"
    return f"{gain:,.0f}"


def write_page(longer: Sequence[Family], fixed: Sequence[Family], arena: Family) -> str:
    """Returns the page in Markdown.

    Args:
        longer: Families in which routine steps are added.
        fixed: Families in which routine steps take the place of decisive ones.
        arena: The languages of the arena.
    """
    clusters = [family.decisive for family in longer]
    mean_exponent = mean_with_interval([family.exponent for family in longer], clusters)
    mean_last_exponent = mean_with_interval([family.last_exponent for family in longer], clusters)
    largest_error = max(family.line[2] for family in longer)
    arena_exponent, r_squared = exponent_with_interval(arena)
    languages = sum(len(family.gains) for family in [*longer, *fixed, arena])

    longer_rows = []
    for family in longer:
        gains = [format_gain(gain) for gain in family.gains]
        exponents = [format_number(family.exponent), format_number(family.last_exponent)]
        longer_rows.append([family.name, *gains, *exponents])
    times = [f"× {number}" for number in TIMES_AS_LONG]
    longer_heads = ["decisive steps; each step", *times, "exponent", "at the smallest shares"]

    fixed_rows = []
    for family in fixed:
        cells = []
        for gain, share in zip(family.gains, family.shares, strict=True):
            cells.append(f"{format_gain(gain)} ({share:.2f})")
        fixed_rows.append([family.name, *cells, format_number(family.exponent)])
    fixed_heads = ["what decides", *(f"{number}" for number in CHOICES), "exponent"]

    arena_rows = []
    for name, share, gain in zip(LANGUAGES, arena.shares, arena.gains, strict=True):
        arena_rows.append([name, f"{share:.3f}", format_gain(gain)])
    lengths = [language_of(name).length for name in LANGUAGES]

    return PAGE.format(
        languages=languages,
        longer="\n".join(markdown_table(longer_heads, longer_rows)),
        fixed="\n".join(markdown_table(fixed_heads, fixed_rows)),
        arena="\n".join(markdown_table(["language", "ρ", "gain"], arena_rows)),
        of_all=format_interval(mean_exponent),
        of_last=format_interval(mean_last_exponent),
        of_ratio=format_interval(mean_last_exponent, 0.5),
        of_arena=format_interval(arena_exponent),
        r_squared=r_squared,
        r_squared_of_length=correlation(np.log(lengths), np.log(arena.gains)) ** 2,
        families=len(longer),
        kinds=len(DECISIVE),
        largest_error=largest_error,
        steps=STEPS,
    )


PAGE = """# The share of decisive steps

```bash
python benchmarks/decisive_share.py --output docs/results
```

How much can credit for single steps gain, if only some of the steps matter?
[2606.22164](https://arxiv.org/abs/2606.22164) ("Drowning in Routine") derives a law. ρ is the share of
*decisive* steps, those whose choice changes the expected reward; the others are *routine*. The law compares
the signal-to-noise ratio of the gradient with credit by steps to that with credit by answers: their
quotient is proportional to ρ^(−1/2). This page compares the law with exact values in {languages} toy
languages.

**What is computed.** *Gain*: the variance of RLOO's gradient with eight answers to a problem, divided by
the variance with the true advantages of the steps. Both gradients have the same mean, so the gain is the
square of the law's quotient: it should be proportional to 1/ρ. The *exponent* is the slope of log gain over
log ρ; the law says −1. Nothing is sampled: both variances are sums over the states of a table
(`src/treetune/lab/arena/exact.py`), and tests compare them with sums over all possible groups of answers.
True advantages cost nothing here, so the gain is that of a perfect credit (an optimal baseline can reduce
the variance still more).

## Routine steps are added: the law holds

The decisive choices stay the same. Routine steps are put between them, until an answer is 32 times as long.
A routine step has several equally likely wordings, which have no effect. Gains, by how many times as long
the answer is:

{longer}

* Between the two smallest shares the exponent is {of_last}: the mean over the {families} rows, with a 95 %
  bootstrap interval over the {kinds} kinds of decisive steps. The exponent of the signal-to-noise ratio is
  half of that, {of_ratio}. A row's own values are exact; the intervals say how much tasks differ.
* Over all lengths, it is {of_all}, because the exact relation is a line rather than a power: **gain = a + b
  / ρ**. The largest relative error of the line in all rows is {largest_error:.0e}, which is rounding. The
  reason: each routine step adds the same variance to RLOO's gradient, and none to that of true advantages.
  For small ρ, the constant a no longer matters.
* Without routine steps (× 1, steps of one token) even perfect credit may gain little: 1.02 where one
  answer in twenty is correct, 1.45 where all of 8 choices must be right.

## Decisive steps are replaced by routine ones: it depends

All answers have {steps} steps. The columns are the number of choices that can be decisive (majorities have
an odd number: 1, 3, 5, 9, 17, 31). Each cell has the gain, and ρ in parentheses, which is smaller than the
number of choices divided by {steps} where choices stop mattering after a mistake or a decided majority.

{fixed}

* **Majority**: the gain does not depend on the share. Many decisive steps have small advantages: in
  expectation, the squares of the true advantages of an answer always add up to the variance of the reward.
  So neither variance depends on how many steps share the decision. What matters is the length.
* **All**: the exponent is near −1, for another reason. If many choices must all be right, each is nearly
  certain, and the gradient of a rare mistake's log-probability is large. The cell with two choices is an
  exception: with two options of equal probability, true advantages give a gradient almost without noise.
* **Luck**: after the steps, the environment draws the outcome, and the policy's choices change its
  probability a little. Now most of the reward's variance is the environment's, whatever the share. The gain
  is very large, as true advantages contain none of the luck, and its exponent is near −1.

## Different tasks: the share does not predict the gain

The [arena's](arena.md) languages differ in more than the share. Their exponent is {of_arena} (95 %
bootstrap over languages), and the share explains {r_squared:.0%} of the variance of log gains. The number
of tokens in an answer explains {r_squared_of_length:.0%}.

{arena}

`first of 2`, `of 8` and `of 32` differ in routine steps alone. The arena's sampled gains of true advantages
in these (2.83, 10.7 and 41.7) are 14 to 20 % above the exact ones. They were sampled with the same seeds,
so this is one deviation rather than three; `last of 2`, `of 8` and `of 32` have the same exact values, and
were sampled as 2.36, 9.44 and 39.3.

## What it says

* The law is right about routine steps. Each adds noise to credit by answers and none to exact credit by
  steps. If routine steps make an answer n times as long, exact credit gains about n times as much.
* The share alone is not enough. At equal length, the gain can be the same for every share, and across tasks
  the length predicts it better. The law needs a fixed number of decisive steps, or a reward whose variance
  comes from elsewhere.
* To compare tasks, measure the gain: [`treetune credit_worth`](../credit_laboratory.md#your-own-policy)
  does it for your own policy.

## What it does not say

* Policies are tables with separate parameters for each state. In a language model, steps share weights.
* True advantages are free. VinePPO pays for its values with continuations and has their noise: see the
  [arena](arena.md).
* A lower gradient variance is not faster learning: see [credit in training](credit_training.md).
* The paper's environment is not reproduced. Only its abstract and summaries were read, and its assumptions
  may exclude the majorities above.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for decisive_share.md and its numbers")
    output = parser.parse_args().output
    longer, fixed, arena = lengthen_answers(), replace_decisive_steps(), measure_arena()
    numbers: dict[str, Any] = {
        "longer_answers": [family._asdict() | {"line": family.line} for family in longer],
        "fixed_length": [family._asdict() for family in fixed],
        "arena": arena._asdict(),
    }
    publish(write_page(longer, fixed, arena), numbers, output, "decisive_share")


if __name__ == "__main__":
    main()
