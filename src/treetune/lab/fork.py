"""Forks a run: another experiment, the branch, continues from its state with the same problems and seeds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.credit.reward_models import RewardModelCredit
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import CONFIG, MANIFEST, ExperimentDirectory
from treetune.runtime.manifest import describe_command, find_changed_keys, read_config, read_manifest
from treetune.store.checksums import config_hash, refuse_damaged, write_record
from treetune.store.files import make_folder_atomically, write_json

KEYS_THAT_MAY_DIFFER = (
    *("credit", "selection", "shaping", "trainer", "rollout", "presets", "overlap", "on_empty_selection"),
    *("engines", "experiment_name"),
)
"""The keys of the configuration in which a branch may differ from the run, besides the keys that may change
when a run is resumed."""


def fork(path: Path, iteration: int | None, config: PolicyIteration, plain: Mapping[str, Any]) -> Path:
    """Creates the folder of a branch with a run's state, and returns it. `treetune run` continues it.

    The folder's checkpoints, iterations and evaluations are the run's files (hard links, or else copies).
    Seeds of problems, answers and continuations derive from the run's seed, iteration and problem, not
    from the credit (`treetune.seeds`). So branches start with the same answers, and differ by what they
    learn from them. A branch with the run's configuration computes what the run would have computed.

    Args:
        path: the run's directory.
        iteration: the number of the run's finished iterations after which the branch begins. None takes the
            largest number after which the run can be continued.
        config: the branch's experiment.
        plain: the configuration from which `config` was built, as a dictionary.

    Raises ValueError where the run's state after that iteration is not stored, or lacks a model that the
    branch's credit needs; where the branch's configuration differs in a key that must be the run's; and where
    the branch's folder already has an experiment.
    """
    run, branch = ExperimentDirectory(path), ExperimentDirectory.of(config)
    if branch.path.exists() and (branch.path.samefile(path) or branch.has_work()):
        raise ValueError(
            f"{branch.path} already has an experiment: give the branch another name, such as"
            " --override \"{experiment_name+: '_vineppo'}\""
        )
    stored = read_config(path)
    finished = run.newest_resumable() if iteration is None else iteration
    if finished not in run.resumable_checkpoints():
        possible_iterations = ", ".join(map(str, run.resumable_checkpoints())) or "none"
        raise ValueError(
            f"{path} can't be forked after iteration {finished}: the trainer's state was deleted (only the"
            f" two newest are kept), and it can be forked after {possible_iterations}"
        )
    _refuse_changed_keys(stored, plain, config)
    checkpoint = run.checkpoint_folder(finished)
    _refuse_missing_models(path, checkpoint, config)
    # The weights of policy, critic and reward model, and the trainer's state, each with checksums.
    for model_folder in filter(Path.is_dir, checkpoint.iterdir()):
        refuse_damaged(model_folder, "fork after another iteration")
    with make_folder_atomically(branch.path) as unfinished:
        _copy_files(run, finished, unfinished)
        origin = {"run": str(path), "after": finished, "config": config_hash(stored)}
        changes = {
            "config": config_hash(plain),
            "command": describe_command(),
            "continued": [],
            "forked": origin,
        }
        write_record(unfinished / MANIFEST, read_manifest(run) | changes)
        write_json(unfinished / CONFIG, plain)
    return branch.path


def _refuse_changed_keys(
    stored: Mapping[str, Any], plain: Mapping[str, Any], config: PolicyIteration
) -> None:
    """Raises ValueError if the branch's configuration differs in a key that must be the run's."""
    refused = []
    for difference in find_changed_keys(stored, plain):
        if not difference.changeable and difference.key[0] not in KEYS_THAT_MAY_DIFFER:
            refused.append(str(difference))
    if refused:
        raise ValueError(
            f"a branch continues with the run's problems and state, but {'; '.join(refused)}: only"
            f" {', '.join(KEYS_THAT_MAY_DIFFER)} may differ"
        )
    # The reason, if there is one, why the results of an iteration depend on the number of iterations.
    why_length_matters = config.length_matters
    if stored.get("iterations") != plain.get("iterations") and why_length_matters is not None:
        raise ValueError(f"the branch can't have another number of iterations: {why_length_matters}")


def _refuse_missing_models(path: Path, checkpoint: Path, config: PolicyIteration) -> None:
    """Raises ValueError if the run's checkpoint lacks a model that the branch's credit needs, or has a critic
    with another loss."""
    if config.credit.needs_critic and not (checkpoint / "critic").is_dir():
        raise ValueError(f"the run in {path} trained no critic, which the branch's credit needs")
    if isinstance(config.credit, RewardModelCredit) and not (checkpoint / "reward_model").is_dir():
        raise ValueError(f"the run in {path} trained no reward model, which the branch's credit needs")
    if (critic := config.credit.critic_settings) is not None:
        from treetune.trainer.update import refuse_other_critic_loss

        refuse_other_critic_loss(checkpoint / "trainer", critic.loss)


def _copy_files(run: ExperimentDirectory, finished: int, folder: Path) -> None:
    """Copies the run's files up to the iteration after which the branch begins."""
    # Iterations are numbered from 0; checkpoints and evaluations by finished iterations, from 1.
    folders = [run.iteration_folder(i) for i in run.iterations() if i < finished]
    folders += [run.checkpoint_folder(i) for i in run.checkpoints() if i <= finished]
    folders += [run.evaluation_folder(i, label) for i, label in run.evaluations() if i <= finished]
    for source in folders:
        copy = folder / source.relative_to(run.path)
        shutil.copytree(source, copy, copy_function=_link_or_copy)
    for file in run.path.glob("*.arrow"):  # the texts of tokens, which readers of episodes look up there
        _link_or_copy(str(file), str(folder / file.name))


def _link_or_copy(source: str, target: str) -> str:
    """Makes `target` a hard link to the file `source`, or a copy where hard links are not possible.

    A shared file is safe, because runs replace files and never modify them. Returns `target`, as
    `shutil.copy2` does, in whose place `shutil.copytree` calls this function."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target
