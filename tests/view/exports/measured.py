"""An experiment with evaluations and a checkpoint, written without a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treetune.store.checksums import write_record

RUN = Path(__file__).parent / "run"
"""The experiment's configuration, manifest and metrics, and the answers of each of its evaluations.

These are two answers to each of two problems: one was never graded, one is cut off, and one has bytes that
are no text.
"""
ANSWERS: tuple[dict[str, Any], ...] = tuple(map(json.loads, (RUN / "answers.jsonl").read_text().splitlines()))


def write_experiment(
    path: Path, answers: Sequence[Any] = ANSWERS, sets: Sequence[str] = ("test",), **config: Any
) -> Path:
    """Writes a finished experiment, with evaluations before training and at its end."""
    shutil.copytree(RUN, path, ignore=shutil.ignore_patterns("answers.jsonl"))
    settings = json.loads((RUN / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(settings))
    for iteration in (0, 4):
        share = 0.25 + iteration / 8
        summary = {
            "iteration": iteration, "n_problems": 2, "samples": 2, "pass_at_1": share,
            "ci_low": share - 0.125, "ci_high": share + 0.125, "pass_at_k": {"1": share, "2": 0.5},
            "majority_vote": None, "unfinished": 0.25, "mean_tokens": 12.5, "unavailable": 1, "too_long": 0,
            "temperature": 0.5, "top_p": 0.9, "seed": 0,
        }  # fmt: skip
        for label in sets:
            folder = path / "evaluations" / f"{iteration:04d}" / label
            folder.mkdir(parents=True)
            (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
            write_record(folder / "summary.json", {"split": label, **summary})
    return path


def write_checkpoint(experiment: Path, iteration: int = 4) -> Path:
    """Writes a checkpoint: files with the right names, whose weights no library could load."""
    policy = experiment / "checkpoints" / f"{iteration:04d}" / "policy"
    policy.mkdir(parents=True)
    (policy.parent / "state.json").write_text("{}")
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (policy / "config.json").write_text(json.dumps(model))
    (policy / "tokenizer.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(b"\0" * 64)
    return policy
