"""What training recorded, a chart for each quantity."""

from __future__ import annotations

from collections.abc import Sequence

from treetune_view.report.charts import Series, line_chart
from treetune_view.report.directions import better_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.sections.base import ReportSection

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rounds of sampling until enough problems had answers of different scores", ("rollout/rounds",)),
    ("share of problems whose answers all have the same score", ("rollout/groups_dropped",)),
    ("share of trained tokens whose advantage is 0", ("credit/advantage_zero",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("entropy (nats per token)", ("train/entropy",)),
    ("gradient norm", ("train/grad_norm",)),
    ("clip fraction", ("train/clip_fraction",)),
    ("share of pairs that the policy prefers as it should", ("preference/accuracy",)),
    (
        "implicit reward of the better answers, and in grey of the others",
        ("preference/chosen_reward", "preference/rejected_reward"),
    ),
    ("response length (tokens)", ("episodes/response_tokens",)),
    ("share unfinished", ("episodes/unfinished",)),
    ("learning rate", ("train/learning_rate",)),
    ("critic: mean squared error of its values", ("critic/mse",)),
    ("engine: sampled tokens per second", ("engine/tokens_per_second",)),
    (
        "|engine − trainer log-prob|: mean, and in grey the largest",
        ("engine/logprob_gap_mean", "engine/logprob_gap_max"),
    ),
    (
        "canary after each weight sync, |engine − trainer log-prob|: mean, and in grey the largest",
        ("engine/canary_mean_gap", "engine/canary_gap"),
    ),
)
"""Title and the metrics in it, behind the reward. What an experiment did not record has no chart."""

SHAPING = "shaping/"
"""Its metrics are named after the parts of `shaping`, which may be anyone's: a chart for each."""

NOTE = (
    "What each iteration recorded: it samples answers or takes demonstrations, gives them credit and trains"
    " on them. A point says its number when the pointer rests on it."
)

FROM_ZERO = {
    "share unfinished",
    "clip fraction",
    "engine: sampled tokens per second",
    "rounds of sampling until enough problems had answers of different scores",
    "share of problems whose answers all have the same score",
    "share of trained tokens whose advantage is 0",
}


def titled(experiments: Sequence[Experiment]) -> Sequence[tuple[str, tuple[str, ...]]]:
    """The reward of what they train on, a chart for each part of shaping that they recorded, and `CURVES`."""
    things = " and ".join(sorted({one.trained_on for one in experiments}))
    recorded = {key for one in experiments for row in one.metrics for key in row if key.startswith(SHAPING)}
    shaping = [(f"what shaping added: {key.removeprefix(SHAPING)}", (key,)) for key in sorted(recorded)]
    return [(f"reward of the {things}", ("episodes/reward",)), *shaping, *CURVES]


class TrainingSection(ReportSection):
    title = "Training"

    def applies(self, experiment: Experiment) -> bool:
        return bool(experiment.metrics)

    def html(self, experiment: Experiment) -> str:
        charts = "".join(_curves(experiment))
        return f'<p class="note">{NOTE}</p><div class="charts">{charts}</div>' if charts else ""


def _curves(one: Experiment) -> list[str]:
    charts = []
    for title, keys in titled([one]):
        # A second metric in one chart has the neutral colour: mean and largest.
        series = [
            Series(key.split("/", 1)[1], one.curve(key), "own" if n == 0 else "soft")
            for n, key in enumerate(keys)
        ]
        if any(each.points for each in series):
            charts.append(line_chart(title, series, better_of(keys[0]), from_zero=title in FROM_ZERO))
    return charts
