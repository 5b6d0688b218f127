"""Runs the quickstart with several seeds, and writes a page with the results.

    python benchmarks/quickstart_seeds.py [--seeds 1 2 3] [--directory DIR] [--output FILE]

Each seed is one ``./run.sh`` in a folder of its own (``DIRECTORY/seed-1`` …). A seed that is finished is
only read. This file needs the standard library alone, so it can also time a run that begins with the
installation.
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

Row = dict[str, Any]
"""A line of metrics.jsonl, such as ``{"iteration": 0, "seconds/total": 4.2, …}``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--directory", type=Path, default=ROOT / "experiments")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "quickstart.md")
    options = parser.parse_args()
    folders = {seed: options.directory.resolve() / f"seed-{seed}" for seed in options.seeds}
    for seed, folder in folders.items():
        if not (folder / "seconds.json").is_file():
            run_quickstart(seed, folder)
    text = write_page(folders)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    print(text)
    return 0


def run_quickstart(seed: int, folder: Path) -> None:
    """Runs ``./run.sh`` and records its seconds. Ends this program if it fails."""
    is_installed = (ROOT / ".venv").is_dir()
    start = time.monotonic()
    environment = os.environ | {"APP_SEED": str(seed), "APP_DIRECTORY": str(folder)}
    code = subprocess.run([str(ROOT / "run.sh")], env=environment, check=False).returncode
    if code:
        sys.exit(f"./run.sh with seed {seed} ended with {code}; the same command continues it")
    record = {"seconds": time.monotonic() - start, "installation_included": not is_installed}
    (folder / "seconds.json").write_text(json.dumps(record))


def write_page(folders: dict[int, Path]) -> str:
    """Returns the page in Markdown.

    Args:
        folders: The folders of finished runs by seed.
    """
    metrics = {seed: read_metrics(folder / "quickstart" / "vineppo") for seed, folder in folders.items()}
    lines = [
        "# The quickstart, as it came out",
        "",
        f"`python benchmarks/quickstart_seeds.py` on {len(os.sched_getaffinity(0))} cores, no GPU,"
        f" {platform.machine()}, Python {platform.python_version()}. Held-out problems, sampled as in"
        " training (temperature 1); intervals are 95 % bootstraps over problems.",
        "",
        "| seed | SFT pass@1 | VinePPO pass@1 | difference | problems × samples | `./run.sh` |",
        "|---|---|---|---|---|---|",
        *(accuracy_line(seed, folder) for seed, folder in folders.items()),
        "",
        "## Where VinePPO's time went, and how well engine and trainer agreed",
        "",
        f"| seed | seconds | {' | '.join(PHASES)} | other, worst iteration |",
        "|---|" + "---|" * (len(PHASES) + 2),
        *(seconds_line(seed, rows) for seed, rows in metrics.items()),
        "",
        "(tokens/s is the median over iterations of rollout and credit together.)",
        "",
        "| seed | sync, mean and worst | canary gap, worst | log-prob gap, mean and worst | tokens/s |",
        "|---|---|---|---|---|",
        *(agreement_line(seed, rows) for seed, rows in metrics.items()),
    ]
    return "\n".join(lines) + "\n"


def accuracy_line(seed: int, folder: Path) -> str:
    """Returns a line with the accuracies before and after VinePPO."""
    results = json.loads((folder / "quickstart" / "table.json").read_text())
    sft, vineppo = results["sft"], results["vineppo"]
    difference = vineppo["pass_at_1"] - sft["pass_at_1"]
    duration = json.loads((folder / "seconds.json").read_text())
    note = " with installation" if duration["installation_included"] else ""
    cells = [
        str(seed),
        accuracy_with_interval(sft),
        accuracy_with_interval(vineppo),
        f"{difference:+.3f}",
        f"{vineppo['n_problems']} × {vineppo.get('samples', '?')}",
        f"{duration['seconds']:.0f} s{note}",
    ]
    return f"| {' | '.join(cells)} |"


def accuracy_with_interval(result: dict[str, Any]) -> str:
    """Returns a text such as ``0.612 [0.590, 0.634]``."""
    return f"{result['pass_at_1']:.3f} [{result['ci_low']:.3f}, {result['ci_high']:.3f}]"


def seconds_line(seed: int, rows: list[Row]) -> str:
    """Returns a line with the share of each phase in the seconds of all iterations."""
    total = sum(row["seconds/total"] for row in rows)
    shares = [sum(row[f"seconds/{phase}"] for row in rows) / total for phase in PHASES]
    largest_other = max(row["seconds/other"] / row["seconds/total"] for row in rows)
    cells = [str(seed), f"{total:.0f}", *(f"{share:.1%}" for share in shares), f"{largest_other:.1%}"]
    return f"| {' | '.join(cells)} |"


def agreement_line(seed: int, rows: list[Row]) -> str:
    """Returns a line with the seconds of weight transfers, the gaps of log-probs, and the sampling speed."""
    sync_seconds = [row["seconds/sync"] for row in rows if row["seconds/sync"]]
    canary_gaps = [row.get("engine/canary_gap", 0.0) for row in rows]
    mean_gap = sum(row["engine/logprob_gap_mean"] for row in rows) / len(rows)
    largest_gap = max(row["engine/logprob_gap_max"] for row in rows)
    speeds = sorted(row["engine/tokens_per_second"] for row in rows)
    cells = [
        str(seed),
        f"{sum(sync_seconds) / len(sync_seconds):.2f} s, {max(sync_seconds):.2f} s",
        f"{max(canary_gaps):.1e}",
        f"{mean_gap:.1e}, {largest_gap:.1e}",
        f"{speeds[len(speeds) // 2]:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def read_metrics(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
