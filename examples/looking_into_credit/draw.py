"""Draws one answer of the run: the value before each step, and the step's advantage.

It chooses the answer whose largest and smallest advantage are farthest apart.
"""

import matplotlib.pyplot as plt

import treetune

run = treetune.open("experiments/examples/looking_into_credit/vineppo")

# `run.values` has a row per step of each answer.
advantages = run.values.groupby(["iteration", "answer"])["advantage"]
iteration, answer = (advantages.max() - advantages.min()).idxmax()
steps = run.values.query("iteration == @iteration and answer == @answer")

# `run.episodes` has a row per answer, with its text. `start` and `end` of a step count tokens, which are
# characters here.
[text] = run.episodes.query("iteration == @iteration and answer == @answer")["text"]
lines = [text[start:end].strip() for start, end in zip(steps["start"], steps["end"])]

figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7, 2.5))
for column, name in enumerate(["value", "advantage"]):
    axes[column].barh(lines, steps[name])
    axes[column].set_title(name)
axes[0].invert_yaxis()  # the first line on top
figure.savefig("credit.png", dpi=80, bbox_inches="tight")
