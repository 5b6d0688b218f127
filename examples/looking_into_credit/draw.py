"""Draws the answer whose steps differ most in credit: the value before each step, and its advantage."""

import matplotlib.pyplot as plt

import treetune

run = treetune.open("experiments/examples/looking_into_credit/vineppo")
values = run.values
spread = values.groupby(["iteration", "answer"])["advantage"].agg(lambda own: own.max() - own.min())
iteration, answer = spread.idxmax()
steps = values[(values["iteration"] == iteration) & (values["answer"] == answer)]
episodes = run.episodes
text = episodes[(episodes["iteration"] == iteration) & (episodes["answer"] == answer)]["text"].iloc[0]
lines = [text[start:end].strip() for start, end in zip(steps["start"], steps["end"])]
figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7, 2.5))
for one, name in zip(axes, ("value", "advantage")):
    one.barh(lines, steps[name])
    one.set_title(name)
axes[0].invert_yaxis()
figure.savefig("credit.png", dpi=80, bbox_inches="tight")
