"""Makes a folder with an experiment of one's own: configurations, rows, reward, the next commands."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune.cli.command import built, evaluated
from treetune.config.jsonnet import CONFIGS, find_file
from treetune.data.scoring import score_responses
from treetune.store.files import whole_folder, write_text
from treetune.tasks.row_values import text_of_value
from treetune.tasks.rows import missing
from treetune.tasks.sources import read_rows

PROBLEM_FIELDS = ("problem", "question", "prompt", "query", "instruction", "input", "text")
GOLD_FIELDS = ("answer", "gold", "ground_truth", "target", "label", "solution", "output", "response")
"""What the fields of rows are usually called, the likeliest first."""

HELD_OUT = 10
"""One row in so many is for tests, and another for validation."""

TEMPLATES = CONFIGS.parent / "examples/new"


def make(options: argparse.Namespace) -> Iterator[str]:
    """Makes the folder `options.name`, whole or not at all, and yields what there is to say of it."""
    folder, method = Path(options.name), options.method
    if options.hardware not in ("in_process", "cpu", "gpu"):
        raise ValueError(f"hardware is {options.hardware!r}: give in_process, cpu or gpu")
    if folder.exists():
        raise ValueError(f"{folder} is there already: give another name, or remove it")
    rows, fields = _rows(Path(options.data), options.fields) if Path(options.data).suffix else ([], [])
    if rows:
        yield f"{options.data}: {len(rows)} rows; the problem is {fields[0]!r}, the gold {fields[1]!r}"
    # Random weights have to learn the form of answers before an answer can be right.
    stages = ["sft", method] if options.model == "tiny" and method != "sft" else [method]
    wanted = [("check", method), ("plan", stages[0]), *(("run", stage) for stage in stages)]
    commands = [f"treetune {word} --configs {stage}.jsonnet" for word, stage in wanted]
    with whole_folder(folder) as made:
        readme, about_reward = TEMPLATES.joinpath("README.template").read_text().split("\n## The reward", 1)
        readme += f"\n## The reward{about_reward}" if rows else ""
        write_text(made / "README.md", readme.format(**vars(options), next_commands="\n".join(commands)))
        for stage in stages:
            write_text(made / f"{stage}.jsonnet", _configuration(options, stage, rows, fields))
        if rows:
            _write_rows(made, rows, *fields)
        with contextlib.chdir(made):
            for stage in stages:
                options.configs = [f"{stage}.jsonnet"]
                root: Any = built(evaluated(options), "check", "an experiment")
            if rows:
                yield from _graded_examples(root.task)
    yield "\n".join([f"made {folder}. Next:", f"  cd {folder}", *(f"  {command}" for command in commands)])


def _rows(path: Path, fields: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the rows of a file, and its fields of problem and gold. Raises ValueError."""
    if path.suffix == ".csv" and path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        rows = [row for _, row in read_rows(path)]
    if len(rows) < 2 * HELD_OUT:
        raise ValueError(f"{path} has {len(rows)} rows: give at least {2 * HELD_OUT}")
    likely = [
        next((name for name in names if name in rows[0]), "") for names in (PROBLEM_FIELDS, GOLD_FIELDS)
    ]
    chosen = fields.split(",") if fields else likely
    if len(chosen) != 2 or not all(chosen):
        there = ", ".join(map(repr, rows[0]))
        raise ValueError(
            f"which fields of {path} are problem and gold? Give --fields PROBLEM,GOLD of {there}"
        )
    faults = []
    for number, row in enumerate(rows, start=1):
        for name in chosen:
            fault = missing(row, name)
            if fault:
                faults.append((number, fault))
    if faults:
        number, fault = faults[0]
        raise ValueError(
            f"{path}, row {number}: {fault} (so in {len(faults)} places): mend it, or give --fields"
        )
    return rows, chosen


def _configuration(
    options: argparse.Namespace, stage: str, rows: list[dict[str, Any]], fields: list[str]
) -> str:
    gpu, tiny = options.hardware == "gpu", options.model == "tiny"
    preset = (CONFIGS / "presets" / f"{stage}.jsonnet").is_file()
    method = "grpo" if preset else stage
    large = "sft_rho1b_GSM8K" if method == "sft" else f"polIter_rho1bSft2_{method}_GSM8K"
    known = (CONFIGS / "models" / f"{options.model}.jsonnet").is_file()
    files = [large if gpu else f"quickstart/{method}"]
    files += [] if rows else [f"tasks/{options.data}"]
    files += [f"models/{options.model}"] if known and not tiny else []
    files += ["engines/in_process"] if options.hardware == "in_process" else []
    lines = [f"// {options.name}: {stage}. What stands further down wins."]
    for file in files:
        find_file(f"{file}.jsonnet", CONFIGS)  # says what was meant
        lines.append(f"{'+ ' if len(lines) > 1 else ''}(import '{file}.jsonnet')")
    lines += ["+ {", f"  experiment_name: '{options.name}/{stage}',"]
    if tiny and stage != "sft":
        lines += [
            f"  model+: {{ name_or_path: $.directory + '/{options.name}/sft/checkpoints/last/policy' }},"
        ]
    elif not known:
        dtype = ", dtype: 'bfloat16'" if gpu else ""
        lines += [f"  model: {{ type: 'pretrained', name_or_path: {json.dumps(options.model)}{dtype} }},"]
    lines += ["}"]
    if rows:
        problems, golds = ([text_of_value(row[name]) for row in rows] for name in fields)
        held_out = len(rows[::HELD_OUT])
        about = {
            "problem": fields[0],
            "gold": fields[1],
            "rows": len(rows) - 2 * held_out,
            "held_out": held_out,
            "longest_problem": max(map(len, problems)),
            "longest_gold": max(map(len, golds)),
            "alphabet": "".join(sorted({"\n", *"".join(problems + golds)})) if tiny else None,
            "supervised": stage == "sft",
        }
        lines += [f"+ (import 'lib/own_rows.libsonnet')({json.dumps(about, indent=2, ensure_ascii=False)})"]
    lines += [f"+ (import 'presets/{stage}.jsonnet')"] if preset else []
    return "\n".join([*lines, ""])


def _write_rows(folder: Path, rows: list[dict[str, Any]], problem: str, gold: str) -> None:
    """Writes rows for training and for tests, the reward, and answers to three problems to try it on."""
    train = [row for number, row in enumerate(rows) if number % HELD_OUT]
    other = next((text_of_value(row[gold]) for row in train if row[gold] != train[1][gold]), "")
    examples = [
        {"problem": row[problem], "gold": row[gold], "response": response}
        for row, response in zip(train, [text_of_value(train[0][gold]), other, ""], strict=False)
    ]
    for name, some in {"train": train, "test": rows[::HELD_OUT], "examples": examples}.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in some]
        write_text(folder / f"{name}.jsonl", "".join(lines))
    write_text(folder / "reward.py", TEMPLATES.joinpath("reward.py").read_text())


def _graded_examples(task: Any) -> Iterator[str]:
    score_responses(task, Path("examples.jsonl"), Path("graded.jsonl"))
    graded = [json.loads(line) for line in Path("graded.jsonl").read_text(encoding="utf-8").splitlines()]
    yield "three answers, graded by reward.py (the gold itself, another row's gold, nothing):"
    for row in graded:
        verdict = f"{row['reward']} ({row['outcome']})"
        yield f"  {verdict:<18} {row['response']!r:.24} to {row['problem']!r:.40}, gold {row['gold']!r:.24}"
    if graded[0]["reward"] != 1:
        yield "note: the gold itself doesn't earn 1: mend reward.py before you train"
