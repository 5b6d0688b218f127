"""Runs of a reproduction with made-up results; as a program, a stand-in for main.py that writes them.

As a program it takes ``--configs … COMMAND``, APP_SEED and APP_DIRECTORY as main.py does, and does what
APP_FAKE (a JSON object from ``experiment:seed`` or ``experiment`` to a behaviour) says: by default it
finishes. As Jsonnet takes a while, configurations are evaluated once and kept in the file APP_FAKE_CONFIGS,
with placeholders for the values that differ between seeds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBLEMS, SAMPLES = 40, 4
SEED, DIRECTORY = 777777, "@DIRECTORY@"
"""Placeholders for the values that differ between seeds."""


def recipe_key(configs: str, overrides: Sequence[str]) -> str:
    return "|".join([configs, *overrides])


def filled_in(text: str, seed: str, directory: str) -> dict[str, Any]:
    """Reads a configuration from its JSON with placeholders."""
    return json.loads(text.replace(str(SEED), seed).replace(DIRECTORY, directory))


def metrics_row(iteration: int) -> dict[str, float]:
    """Builds metrics of an iteration: 512 answers of 32 tokens, 10 s (2 s of evaluation); entropy falls."""
    return {
        "iteration": iteration,
        "seconds/total": 10.0,
        "seconds/evaluation": 2.0,
        "train/steps": 3.0,
        "train/entropy": 0.5**iteration,
        "episodes/count": 512.0,
        "episodes/response_tokens": 32.0,
        "credit/value_tokens": 4096.0,
    }


def write_answers(folder: Path, share: float, *, split: str = "test", iteration: int = 2) -> None:
    """Writes an evaluation with pass@1 `share`; the first answers are the right ones."""
    folder.mkdir(parents=True, exist_ok=True)
    right = round(share * PROBLEMS * SAMPLES)
    rows = [
        {
            "problem": f"{split}/{number % PROBLEMS}",
            "sample": number // PROBLEMS,
            "reward": float(number < right),
        }
        for number in range(PROBLEMS * SAMPLES)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"split": split, "iteration": iteration, "n_problems": PROBLEMS, "samples": SAMPLES}
    summary["pass_at_1"] = right / (PROBLEMS * SAMPLES)
    (folder / "summary.json").write_text(json.dumps(summary))


def write_progress(config: Mapping[str, Any], done: int) -> Path:
    """Writes a run that has trained `done` iterations, with a checkpoint if these are all."""
    path = Path(config["directory"]) / config["experiment_name"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    rows = [metrics_row(i) for i in range(done)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "iterations" / "0000").mkdir(parents=True, exist_ok=True)
    (path / "iterations" / "0000" / "metrics.json").write_text("{}")
    if done == config["iterations"]:
        checkpoint = path / "checkpoints" / f"{done:04d}"
        (checkpoint / "trainer").mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text("{}")
    return path


def write_run(
    config: Mapping[str, Any], share: float, *, sets: tuple[str, ...] = ("validation", "test")
) -> Path:
    """Writes a finished run with evaluations on `sets` at its end."""
    done = config["iterations"]
    path = write_progress(config, done)
    for label in sets:
        write_answers(path / "evaluations" / f"{done:04d}" / label, share, split=label, iteration=done)
    return path


def main() -> int:
    arguments = sys.argv[1:]
    # The command is the last argument, except that a fork has a folder behind it.
    command = next(argument for argument in reversed(arguments) if "/" not in argument)
    overrides = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--override"]
    texts = json.loads(Path(os.environ["APP_FAKE_CONFIGS"]).read_text())
    text = texts[recipe_key(arguments[arguments.index("--configs") + 1], overrides)]
    config = filled_in(text, os.environ["APP_SEED"], os.environ["APP_DIRECTORY"])
    name, seed = Path(config["experiment_name"]).name, config["seed"]
    behaviours = json.loads(os.environ.get("APP_FAKE", "{}"))
    behaviour = behaviours.get(f"{name}:{seed}", behaviours.get(name, "finish"))
    with (Path(config["directory"]).parent / "calls.txt").open("a") as calls:
        calls.write(f"{name}:{seed} {command}\n")
    if behaviour == "fail":
        print(f"{command} failed: the moon is in the wrong house")
        return 1
    if behaviour == "hang":
        write_progress(config, 1)
        Path(config["directory"], f"{name}.pid").write_text(str(os.getpid()))
        time.sleep(600)
    if behaviour == "do_nothing":
        return 0
    if command == "fork":
        write_progress(config, config["iterations"] - 1)
        return 0
    shares = json.loads(os.environ.get("APP_FAKE_SHARES", "{}"))
    if behaviour == "unmeasured" and command == "run_iteration_loop":
        sets: tuple[str, ...] = ("validation",)
    else:
        sets = ("validation", "test")
    write_run(config, shares.get(name, 0.5) + 0.02 * seed, sets=sets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
