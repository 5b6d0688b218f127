"""Forks a run: another experiment goes on from its state, with the same problems and the same seeds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import CONFIG, MANIFEST, command_line, differences, read_config, read_manifest
from treetune.store.checksums import config_hash, refuse_damaged, write_record
from treetune.store.files import whole_folder, write_json

MAY_DIFFER = (
    *("credit", "selection", "shaping", "trainer", "rollout", "presets", "overlap", "on_empty_selection"),
    *("engines", "experiment_name"),
)
"""The keys in which a branch may differ, beside those that any run may change on its way."""


def fork(path: Path, iteration: int | None, config: PolicyIteration, plain: Mapping[str, Any]) -> Path:
    """Makes the folder of the experiment `config`, whose state is that of the run in `path` after `iteration`
    iterations (None: the newest that can go on); `treetune run` continues there. Returns the folder.

    Checkpoints, iterations and measurements are the run's own files (hard links, or else copies). Problems,
    answers and continuations are drawn by seeds that are derived from the run's, the iteration and the
    problem, and not from the credit (`treetune.seeds`): branches begin with the same answers, and part by
    what they learn from them. Without another key, a branch is the run as it would have gone on.

    Raises ValueError where the run lacks that state, the branch would compute something else so far, or its
    folder holds an experiment already."""
    run, branch = ExperimentDirectory(path), ExperimentDirectory.of(config)
    if branch.path.exists() and (branch.path.samefile(path) or branch.has_work()):
        raise ValueError(
            f"{branch.path} holds an experiment already: give the branch a folder of its own, such as"
            " --override \"{experiment_name+: '_vineppo'}\""
        )
    stored = read_config(path)
    begins = run.resumable() if iteration is None else iteration
    if begins not in run.resumables():
        raise ValueError(
            f"{path} can't be forked after iteration {begins}, for the trainer's state isn't there (the two"
            f" newest are kept): it can after {', '.join(map(str, run.resumables())) or 'none'}"
        )
    fixed = [one for one in differences(stored, plain) if not one.changeable]
    if others := [one for one in fixed if one.key[0] not in MAY_DIFFER]:
        raise ValueError(
            f"a branch goes on with the run's problems and state, and {'; '.join(map(str, others))}: it may"
            f" differ in {', '.join(MAY_DIFFER)}"
        )
    if stored.get("iterations") != plain.get("iterations") and config.length_matters is not None:
        raise ValueError(f"the branch can't have another number of iterations: {config.length_matters}")
    checkpoint = run.checkpoint(begins)
    if config.credit.needs_critic and not (checkpoint / "critic").is_dir():
        raise ValueError(f"the run in {path} trained no critic, which the branch's credit asks")
    for part in filter(Path.is_dir, checkpoint.iterdir()):
        refuse_damaged(part, "fork after another iteration")
    with whole_folder(branch.path) as beside:
        for kind, below in (("iterations", 0), ("checkpoints", 1), ("evaluations", 1)):
            for folder in sorted((path / kind).glob("[0-9]*")):
                if folder.name.isdigit() and int(folder.name) < begins + below:
                    shutil.copytree(folder, beside / kind / folder.name, copy_function=_linked)
        for file in path.glob("*.arrow"):
            _linked(str(file), str(beside / file.name))
        origin = {"run": str(path), "after": begins, "config": config_hash(stored)}
        changes = {"config": config_hash(plain), "command": command_line(), "continued": [], "forked": origin}
        write_record(beside / MANIFEST, read_manifest(run) | changes)
        write_json(beside / CONFIG, plain)
    return branch.path


def _linked(source: str, target: str) -> str:
    """Makes `target` another name of a file, which a run replaces and never writes into."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target
