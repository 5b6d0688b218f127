"""Does a domain help another? From the experiments of configs/tables/domains_tiny.jsonnet.

    python benchmarks/domains_compared.py experiments/domains_tiny [--output docs/results/domains_help.md]

Each number is a difference in accuracy on held-out problems. Runs of one seed begin with the same weights and
answer the same problems, so that a difference is taken problem by problem. Intervals are of 95 %, over
problems and the seeds that have both runs; where that is one seed, over problems alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from treetune.tables.statistics import over_seeds_and_problems
from treetune.vocabulary import CORRECT_SCORE

ROOT = Path(__file__).parents[1]
Accuracies = dict[str, float]
"""Of each problem, over its answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "domains_help.md")
    arguments = parser.parse_args()
    runs = read(arguments.directory)
    text = page(runs, arguments.directory)
    arguments.output.write_text(text)
    print(text)


def read(directory: Path) -> dict[str, dict[str, Accuracies]]:
    """By run (``grpo``) and seed (``seed-1``): every test problem's accuracy at the end of the run."""
    runs: dict[str, dict[str, Accuracies]] = defaultdict(dict)
    for run in sorted(directory.glob("seed-*/domains/tiny_*")):
        measured = sorted(run.glob("evaluations/*/test/answers.jsonl"))
        if not measured or not (measured[-1].parent / "summary.json").is_file():
            continue
        right: dict[str, list[bool]] = defaultdict(list)
        for line in measured[-1].read_text().splitlines():
            row = json.loads(line)
            if row["outcome"] != "unavailable":
                right[row["problem"]].append(row["reward"] >= CORRECT_SCORE)
        seed, name = run.parts[-3], run.name.removeprefix("tiny_")
        runs[name][seed] = {problem: sum(some) / len(some) for problem, some in right.items()}
    return runs


def difference(one: dict[str, Accuracies], other: dict[str, Accuracies], domain: str) -> str:
    """``one - other`` on a domain, over the seeds that have both."""
    by_seed = [
        {name: one[seed][name] - other[seed][name] for name in one[seed] if name.startswith(f"{domain}/")}
        for seed in sorted(one.keys() & other.keys())
    ]
    if not by_seed:
        return "–"
    found = over_seeds_and_problems(by_seed, "student")
    interval = "" if found.low is None else f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return f"{100 * found.mean:+.1f}{interval}"


def page(runs: dict[str, dict[str, Accuracies]], directory: Path) -> str:
    domains = sorted({name.partition("/")[0] for of_seed in runs["sft"].values() for name in of_seed})
    alone = [domain for domain in domains if f"alone_{domain}" in runs]
    lines = [
        "# Does a domain help another?",
        "",
        f"`python benchmarks/domains_compared.py {directory}`: differences in accuracy on held-out problems,"
        " in points, with 95 % intervals over seeds and problems (of one seed: over problems alone). Runs and"
        " settings: [domains_tiny.md](domains_tiny.md). Seeds with each run: "
        + ", ".join(f"{name} {len(of_seed)}" for name, of_seed in runs.items())
        + ".",
        "",
        "## What a domain gains beside the others",
        "",
        "GRPO on all less GRPO on this domain alone, after the same problems of it in the same iterations:"
        " above 0, the others helped.",
        "",
        "| domain | all, less the start model | alone, less the start model | all, less alone |",
        "|---|---|---|---|",
    ]
    for domain in domains:
        cells = [difference(runs["grpo"], runs["sft"], domain)]
        if domain in alone:
            cells.append(difference(runs[f"alone_{domain}"], runs["sft"], domain))
            cells.append(difference(runs["grpo"], runs[f"alone_{domain}"], domain))
        lines.append(f"| {domain} | {' | '.join(cells + ['–'] * (3 - len(cells)))} |")
    lines += [
        "",
        "## What training on one domain does to the others",
        "",
        "GRPO on the row's domain alone less the start model, on the column's domain.",
        "",
        "| trained on | " + " | ".join(domains) + " |",
        "|---|" + "---|" * len(domains),
    ]
    for domain in alone:
        cells = [difference(runs[f"alone_{domain}"], runs["sft"], other) for other in domains]
        lines.append(f"| {domain} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
