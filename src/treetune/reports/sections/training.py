"""What training recorded, a chart for each quantity."""

from __future__ import annotations

from treetune.reports.charts import Series, line_chart
from treetune.reports.directions import better_of
from treetune.reports.experiment import Experiment
from treetune.reports.sections.base import ReportSection

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward of the sampled answers", ("episodes/reward",)),
    ("rounds of sampling until enough groups were mixed", ("rollout/rounds",)),
    ("share of sampled groups without spread of score", ("rollout/groups_dropped",)),
    ("share of trained tokens whose advantage is 0", ("credit/advantage_zero",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("entropy (nats per token)", ("train/entropy",)),
    ("gradient norm", ("train/grad_norm",)),
    ("clip fraction", ("train/clip_fraction",)),
    ("share of pairs that the policy prefers as it should", ("preference/accuracy",)),
    (
        "implicit reward: better answers, and in grey the others",
        ("preference/chosen_reward", "preference/rejected_reward"),
    ),
    ("response length (tokens)", ("episodes/response_tokens",)),
    ("share unfinished", ("episodes/unfinished",)),
    ("learning rate", ("train/learning_rate",)),
    ("critic: mean squared error", ("critic/mse",)),
    ("engine: sampled tokens per second", ("engine/tokens_per_second",)),
    (
        "|engine − trainer log-prob|: mean, and in grey the largest",
        ("engine/logprob_gap_mean", "engine/logprob_gap_max"),
    ),
    (
        "canary gap after each sync: mean, and in grey the largest",
        ("engine/canary_mean_gap", "engine/canary_gap"),
    ),
)
"""Title and the metrics in it. What an experiment did not record has no chart."""

SHAPING = "shaping/"
"""Its metrics are named after the parts of `shaping`, which may be anyone's: a chart for each."""

FROM_ZERO = {
    "share unfinished",
    "clip fraction",
    "engine: sampled tokens per second",
    "rounds of sampling until enough groups were mixed",
    "share of sampled groups without spread of score",
    "share of trained tokens whose advantage is 0",
}


class TrainingSection(ReportSection):
    title = "Training"

    def applies(self, experiment: Experiment) -> bool:
        return bool(experiment.metrics)

    def html(self, experiment: Experiment) -> str:
        charts = "".join(_curves(experiment))
        return f'<div class="charts">{charts}</div>' if charts else ""


def _curves(one: Experiment) -> list[str]:
    charts = []
    recorded = sorted({key for row in one.metrics for key in row if key.startswith(SHAPING)})
    shaping = [(f"what shaping added: {key.removeprefix(SHAPING)}", (key,)) for key in recorded]
    for title, keys in (*CURVES[:1], *shaping, *CURVES[1:]):
        # A second metric in one chart has the neutral colour: mean and largest.
        series = [
            Series(key.split("/", 1)[1], one.curve(key), "own" if n == 0 else "soft")
            for n, key in enumerate(keys)
        ]
        if any(each.points for each in series):
            charts.append(line_chart(title, series, better_of(keys[0]), from_zero=title in FROM_ZERO))
    return charts
