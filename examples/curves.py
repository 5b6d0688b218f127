"""Draws the curve of a metric for one or several runs.

python examples/curves.py PICTURE METRIC RUN…
python examples/curves.py reward.png episodes/reward experiments/examples/own_data/grpo
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import treetune

picture, metric, *runs = sys.argv[1:]
figure, axes = plt.subplots(figsize=(5, 3))
for run in runs:
    # An evaluation has no value in the iterations without one.
    metrics = treetune.open(run).metrics.dropna(subset=[metric])
    axes.plot(metrics["iteration"] + 1, metrics[metric], label=Path(run).name)
axes.set(xlabel="iteration", ylabel=metric)
axes.legend()
figure.savefig(picture, dpi=80, bbox_inches="tight")
