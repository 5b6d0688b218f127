"""Runs the quickstart with several seeds and writes down what came out.

    python benchmarks/quickstart_seeds.py [--seeds 1 2 3] [--directory DIR] [--output FILE]

Each seed is one ``./run.sh`` in a folder of its own (``DIRECTORY/seed-1`` …); one that is finished is
only read. Standard library alone, so that it can time a run that starts without an environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PHASES = ("generation", "credit", "training", "waiting", "sync", "evaluation", "commit", "other")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--directory", type=Path, default=ROOT / "experiments")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "quickstart.md")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        folder = arguments.directory.resolve() / f"seed-{seed}"
        if not (folder / "seconds.json").is_file():
            run(seed, folder)
    folders = {seed: arguments.directory.resolve() / f"seed-{seed}" for seed in arguments.seeds}
    text = report(folders)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text)
    print(text)
    return 0


def run(seed: int, folder: Path) -> None:
    set_up = (ROOT / ".venv").is_dir()
    start = time.monotonic()
    environment = os.environ | {"APP_SEED": str(seed), "APP_DIRECTORY": str(folder)}
    done = subprocess.run([str(ROOT / "run.sh")], env=environment, check=False)
    if done.returncode:
        sys.exit(f"./run.sh with seed {seed} ended with {done.returncode}; the same command continues it")
    record = {"seconds": time.monotonic() - start, "installation_included": not set_up}
    (folder / "seconds.json").write_text(json.dumps(record))


def report(folders: dict[int, Path]) -> str:
    lines = [
        "# The quickstart, as it came out",
        "",
        f"`python benchmarks/quickstart_seeds.py` on {len(os.sched_getaffinity(0))} cores, no GPU,"
        f" {platform.machine()}, Python {platform.python_version()}. Held-out problems, sampled as in"
        " training (temperature 1); intervals are 95 % bootstraps over problems.",
        "",
        "| seed | SFT pass@1 | VinePPO pass@1 | difference | problems × samples | `./run.sh` |",
        "|---|---|---|---|---|---|",
    ]
    for seed, folder in folders.items():
        table = json.loads((folder / "quickstart" / "table.json").read_text())
        sft, vine = table["sft"], table["vineppo"]
        took = json.loads((folder / "seconds.json").read_text())
        note = " with installation" if took["installation_included"] else ""
        lines.append(
            f"| {seed} | {interval(sft)} | {interval(vine)} | {vine['pass_at_1'] - sft['pass_at_1']:+.3f}"
            f" | {vine['n_problems']} × {vine.get('samples', '?')} | {took['seconds']:.0f} s{note} |"
        )
    lines += ["", "## Where VinePPO's time went, and how well engine and trainer agreed", ""]
    lines += [
        "| seed | seconds | " + " | ".join(PHASES) + " | other, worst iteration |",
        "|---|" + "---|" * (len(PHASES) + 2),
    ]
    rows = {seed: metrics(folder / "quickstart" / "vineppo") for seed, folder in folders.items()}
    for seed, of_run in rows.items():
        total = sum(row["seconds/total"] for row in of_run)
        shares = [sum(row[f"seconds/{phase}"] for row in of_run) / total for phase in PHASES]
        worst = max(row["seconds/other"] / row["seconds/total"] for row in of_run)
        cells = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {seed} | {total:.0f} | {cells} | {worst:.1%} |")
    lines += [
        "",
        "(tokens/s is the median over iterations of rollout and credit together.)",
        "",
        "| seed | sync, mean and worst | canary gap, worst | log-prob gap, mean and worst | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for seed, of_run in rows.items():
        sync = [row["seconds/sync"] for row in of_run if row["seconds/sync"]]
        speed = sorted(row["engine/tokens_per_second"] for row in of_run)
        gap = sum(row["engine/logprob_gap_mean"] for row in of_run) / len(of_run)
        lines.append(
            f"| {seed} | {sum(sync) / len(sync):.2f} s, {max(sync):.2f} s"
            f" | {max(row.get('engine/canary_gap', 0.0) for row in of_run):.1e}"
            f" | {gap:.1e}, {max(row['engine/logprob_gap_max'] for row in of_run):.1e}"
            f" | {speed[len(speed) // 2]:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def interval(row: dict[str, Any]) -> str:
    return f"{row['pass_at_1']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
