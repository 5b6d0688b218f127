"""Credit methods against the true values of real language models, on tasks of which it is known what decides.

    python benchmarks/credit_bench_models.py --output docs/results

Three tasks (`signposts`: the first of four choices decides, the last does, the first does between two
directions), each with a model of 0.2 million weights that learns to write by demonstrations and then to
choose by GRPO, with a KL to its start; its policies at the run's start, after two thirds and at its end; and
two of a fourth task, where each of four choices has to be right. 8,192 answers of each policy, by the vLLM
server (of the third task in process), and the methods of configs/analyzers/credit_bench.jsonnet. True values
take both ways wherever something is decided, so that they are exact but for what the model makes of the
chatter between. What is done is left as it is, and what was interrupted goes on."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.lab.analyzers.figures import save
from treetune.lab.arena.gain import draw_gain, gain_table

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("fork", "late", "coin", "every", "wandering", "slips", "repair")
SOONER = {"coin": (33, 11, [0, 22, 33]), "every": (8, 2, [0, 2])}
"""Of what is learnt sooner: iterations, those from checkpoint to checkpoint, and the policies taken."""
IN_PROCESS = ("coin",)
"""What is sampled in the run's own process, which is faster with so small a model."""
STARTS = {"late": "fork"}
"""Whose start model a variant has, where it isn't its own."""
PICTURE = "credit_bench_models"


def run(directory: Path, configs: str, *arguments: str) -> None:
    main = ROOT / "src/treetune/main.py"
    subprocess.run(
        [sys.executable, str(main), "--configs", configs, *arguments],
        cwd=ROOT,
        env=os.environ | {"APP_DIRECTORY": str(directory)},
        check=True,
    )


def benched(directory: Path, variant: str) -> Mapping[str, Any]:
    """The result of the analysis, which is made where it isn't there."""
    run(directory, f"configs/signposts/{STARTS.get(variant, variant)}_sft.jsonnet", "run_iteration_loop")
    configs = f"configs/signposts/{variant}_grpo.jsonnet,configs/overlays/signposts_bench.jsonnet"
    if variant in IN_PROCESS:
        configs += ",configs/engines/in_process.jsonnet"
    overrides = []
    if variant in SOONER:
        iterations, every, points = SOONER[variant]
        kept = f"checkpoints: {{ every: {every}, keep_every: {every} }}"
        taken = f"analyzers: [super.analyzers[0] {{ checkpoints: {points} }}]"
        overrides = ["--override", f"{{ iterations: {iterations}, {kept}, {taken} }}"]
    for command in ("run_iteration_loop", "run_analyzers"):
        run(directory, configs, *overrides, command)
    found = directory / f"signposts/{variant}/grpo_bench/analyses/credit_bench/result.json"
    result: Mapping[str, Any] = json.loads(found.read_text())
    return result


def panels_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {
        f"{variant}, after {point} iterations": of_point
        for variant, result in results.items()
        for point, of_point in result["numbers"]["by_checkpoint"].items()
    }


def page(panels: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Credit methods against the true values of language models", ""]
    lines += [(__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += [f"![gain over cost]({PICTURE}.png)", ""]
    for panel, found in panels.items():
        reliable = found["truth_reliability"]
        lines += [
            f"## {panel} ({found['solved']:.0%} solved)",
            "",
            f"Reliability of the true advantages {reliable:.4f}.",
            "",
            *gain_table(found["methods"]),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {PICTURE}.md, .json, .png")
    parser.add_argument("--directory", type=Path, default=ROOT / "experiments", help="where runs are kept")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS[:4]), choices=VARIANTS)
    options = parser.parse_args()
    panels = panels_of({variant: benched(options.directory, variant) for variant in options.variants})
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{PICTURE}.md").write_text(page(panels))
    (options.output / f"{PICTURE}.json").write_text(json.dumps(panels, indent=1) + "\n")
    save(
        draw_gain({panel: found["methods"] for panel, found in panels.items()}),
        options.output,
        PICTURE,
    )


if __name__ == "__main__":
    main()
