"""Whether the intervals of biased credits' gains say what the gains spread.

    python benchmarks/gain_intervals.py --output docs/results

In two languages of the arena 4,000 problems are credited. From 500 of them, drawn 64 times, the gain is
estimated as the arena does, and once more without the true advantages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import treetune.parts  # noqa: E402, F401  (registers them)
from benchmarks.pairs import publish  # noqa: E402
from treetune.credit.rloo import Rloo  # noqa: E402
from treetune.lab.arena.gain import gain, half_width  # noqa: E402
from treetune.lab.arena.languages import TrueAdvantages, context_of, language_of  # noqa: E402
from treetune.lab.arena.scores import ANSWERS, ScoredMethod, gradients_of, shipped_methods  # noqa: E402
from treetune.rollouts.single_turn import SingleTurn  # noqa: E402

LANGUAGES = ("first of 8", "slips")
PROBLEMS, DRAWN, OFTEN, SEED = 4000, 500, 64, 11
NAMES = ["GRPO", "λ-GRPO", "TEMPO", "siblings, smoothed", "K=1, smoothed", "K=3, smoothed"]
NAMES += ["bisect K=3", "bisect K=9"]


def rows_of(name: str) -> list[dict[str, Any]]:
    language, methods = language_of(name), shipped_methods()
    context = context_of(language, PROBLEMS, SEED)
    rollout = SingleTurn(samples=ANSWERS, max_tokens=language.length + 1)
    trees, _ = rollout.run(context, context.task.problems("train"))

    def gradients(method: ScoredMethod) -> Any:
        parts = (trees[start : start + DRAWN] for start in range(0, PROBLEMS, DRAWN))
        return np.concatenate([gradients_of(language, context, method, part)[0] for part in parts])

    rloo, true = gradients(ScoredMethod(Rloo())), gradients(ScoredMethod(TrueAdvantages()))
    rng, rows, left = np.random.default_rng(SEED), [], (1 - DRAWN / PROBLEMS) ** 0.5
    parts = [
        part
        for _ in range(OFTEN * DRAWN // PROBLEMS)
        for part in rng.permutation(PROBLEMS).reshape(-1, DRAWN)
    ]
    for method in NAMES:
        own = gradients(methods[method])
        whole = gain(rloo, true, own, 1.0, False, SEED)["gain"]["value"]
        row = {"language": name, "credit": method, "gain": whole}
        for held_to, held in (("mix", true), ("RLOO", rloo)):
            found = [gain(rloo[one], held[one], own[one], 1.0, False, SEED) for one in parts]
            gains = [one["gain"] for one in found]
            row[held_to] = {
                "spread": float(np.std([one["value"] or 0.0 for one in gains], ddof=1) / whole / left),
                "said": float(np.mean([half_width(one) for one in found]) / 1.96),
                "covers": float(np.mean([(one["low"] or 0) <= whole <= (one["high"] or 0) for one in gains])),
            }
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for gain_intervals.md and its numbers")
    output = parser.parse_args().output
    rows = [row for name in LANGUAGES for row in rows_of(name)]
    lines = ["# Do intervals of biased credits' gains say what the gains spread?", ""]
    lines += [(__doc__ or "").split("\n\n", 1)[1], ""]
    lines += [
        "*Spread* is the standard deviation of the 64 gains (over √⅞, as each has an eighth of all problems),"
        " *said* half an interval over 1.96, both as shares of the gain that all problems give; *covers* is"
        " the share of intervals that have that gain in them.",
        "",
        "| language | credit | gain | spread | said | covers | spread without true advantages | said |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        mix, alone = row["mix"], row["RLOO"]
        lines.append(
            f"| {row['language']} | {row['credit']} | {row['gain']:.3g} | {mix['spread']:.3f} |"
            f" {mix['said']:.3f} | {mix['covers']:.0%} | {alone['spread']:.3f} | {alone['said']:.3f} |"
        )
    publish("\n".join([*lines, ""]), {"rows": rows}, output, "gain_intervals")


if __name__ == "__main__":
    main()
