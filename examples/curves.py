"""Draws a metric of runs over their iterations: `python examples/curves.py PICTURE METRIC RUN…`."""

import sys

import matplotlib.pyplot as plt

import treetune

picture, metric, *runs = sys.argv[1:]
figure, axes = plt.subplots(figsize=(5, 3))
for run in runs:
    metrics = treetune.open(run).metrics.dropna(subset=[metric])
    axes.plot(metrics["iteration"] + 1, metrics[metric], label=run.split("/")[-1])
axes.set(xlabel="iteration", ylabel=metric)
axes.legend()
figure.savefig(picture, dpi=80, bbox_inches="tight")
