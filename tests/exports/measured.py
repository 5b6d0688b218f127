"""An experiment with evaluations, as a run would leave it, without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.store.checksums import write_record

CONFIG: Mapping[str, Any] = {
    "type": "policy_iteration",
    "experiment_name": "small/vineppo",
    "seed": 3,
    "iterations": 4,
    "model": {"type": "pretrained", "name_or_path": "someone/base-1b"},
    "task": {
        "type": "math",
        "grader": {"type": "math"},
        "source": {"type": "hub", "name": "someone/sums", "revision": "v2"},
    },
    "rollout": {"type": "single_turn", "samples": 8},
    "credit": {"type": "monte_carlo"},
    "selection": {"type": "all"},
    "trainer": {"learning_rate": 1e-6, "objective": {"type": "ppo"}},
}

MANIFEST: Mapping[str, Any] = {
    "config": "0123456789abcdef",
    "seed": 3,
    "commit": "a" * 40 + "+changes",
    "data": {"train": "1111", "test": "2222"},
    "bits_rest_on": {"packages": {"torch": "2.13.0", "treetune": "0.1.0"}, "ranks": 2},
}


def answer(problem: str, sample: int, text: str, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "problem": problem,
        "sample": sample,
        "prompt": "1+1=",
        "gold": "2",
        "text": text,
        "reward": reward,
        "outcome": "ok" if reward is not None else "unavailable",
        "extracted": "2",
        "finish_reason": "stop",
        "tokens": len(text),
    } | more


ANSWERS = (
    answer("test/0", 0, "it is 2", turns={"count": 2.0}),
    answer("test/0", 1, "\ud800 half, \x00 null, \x1b[31m escape, </script>", 0.0, finish_reason="length"),
    answer("test/1", 0, "nobody knows", None, message="the judge is down"),
    answer("test/1", 1, "3", 0.0, extracted=None, grade={"tests": 0.5}),
)


def write_experiment(
    path: Path, answers: Sequence[Mapping[str, Any]] = ANSWERS, sets: Sequence[str] = ("test",)
) -> Path:
    """Finished, with the evaluations of its start and of its end."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "manifest.json").write_text(json.dumps(MANIFEST))
    rows = [{"iteration": i, "wall_time": 1.7e9 + i, "seconds/total": 5.0} for i in range(4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for iteration in (0, 4):
        for label in sets:
            folder = path / "evaluations" / f"{iteration:04d}" / label
            folder.mkdir(parents=True)
            (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
            write_record(folder / "summary.json", summary(label, iteration))
    return path


def summary(label: str, iteration: int) -> dict[str, Any]:
    return {
        "split": label,
        "iteration": iteration,
        "n_problems": 2,
        "samples": 2,
        "pass_at_1": 0.25 + iteration / 8,
        "ci_low": 0.125 + iteration / 8,
        "ci_high": 0.375 + iteration / 8,
        "pass_at_k": {"1": 0.25 + iteration / 8, "2": 0.5},
        "majority_vote": None,
        "unfinished": 0.25,
        "mean_tokens": 12.5,
        "unavailable": 1,
        "too_long": 0,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 0,
    }


def write_checkpoint(experiment: Path, iteration: int = 4) -> Path:
    """Weights that no library could load, in files of the right names."""
    folder = experiment / "checkpoints" / f"{iteration:04d}"
    policy = folder / "policy"
    policy.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (policy / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    (policy / "tokenizer.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(b"\0" * 64)
    return policy
