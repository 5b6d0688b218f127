"""Writes a run's manifest (configuration, versions, code, data), and compares a resumed run with it.

Example of a manifest, shortened::

    {"config": "9f2c…", "seed": 0, "command": {…}, "commit": "5f3a…+changes",
     "inputs": {"model": {"path": "…", "digest": "77aa…"}, "rows": {"train": {"count": 7473, "digest": "…"}}},
     "bits_rest_on": {"processor": "…", "ranks": 2, "packages": {"torch": "2.13.0", …}},
     "continued": [{"after": 12, "changed": {"iterations": "iterations was 40 and is 80"}, …}]}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config.build import part_at
from treetune.config.explain import as_plain
from treetune.config.folders import own_modules, search_folders_and_names
from treetune.config.layers import shorten_path
from treetune.config.remedies import override_option
from treetune.config.schema import keys_of
from treetune.contracts import Part
from treetune.credit.reward_models import reward_model_of
from treetune.exceptions import Damaged, FolderRefused
from treetune.runtime.base import PolicyIteration, Runtime, describe_unsafe_keys, find_keys_without_sandbox
from treetune.runtime.directory import CONFIG, ExperimentDirectory
from treetune.runtime.machine import describe_different_bits, facts_that_decide_bits
from treetune.store.checksums import config_hash, read_record, write_record
from treetune.store.files import write_json
from treetune.tasks.base import Task

OPTIMISER_SHARDS = "*/*zero_pp_rank_*_optim_states.pt"
"""The shards of an optimiser's state under ZeRO, one for each rank, in DeepSpeed's folder of a policy."""
SPLITS = ("train", "validation", "test")
MODEL_PATH = ("model", "name_or_path")

NOT_SET = object()
"""Stands for the value of a key that is left out and has no known default."""
MOST_VALUE_CHARACTERS = 60
"""Most characters of a value in a message."""


def begin_or_resume(
    directory: ExperimentDirectory, config: PolicyIteration, plain: Mapping[str, Any], ranks: int
) -> list[str]:
    """Writes `config.json` and `manifest.json` of a new run. For a resumed run, writes into both what has
    changed.

    If the run in the folder has not sampled or trained anything yet, its files are replaced.

    Returns:
        Messages for the user.

    Raises:
        FolderRefused: The folder holds the results of a configuration that computes something else.
    """
    bits_now = facts_that_decide_bits(ranks, config.engines.policy)
    inputs = inputs_of(config)
    if not directory.config_file.is_file() or not directory.has_work():
        write_record(directory.manifest_file, _first_manifest(config, plain, inputs, bits_now))
        write_json(directory.config_file, plain)
        return describe_unsafe_keys(plain)
    refuse_other_ranks(directory, ranks)
    return _resume(directory, config, plain, inputs, bits_now)


def _resume(
    directory: ExperimentDirectory,
    config: PolicyIteration,
    plain: Mapping[str, Any],
    inputs: Mapping[str, Any],
    bits_now: Mapping[str, Any],
) -> list[str]:
    """Compares a resumed run with its manifest, writes down what has changed, and returns messages.

    The arguments are those of `_first_manifest`. Raises FolderRefused if the run can't be resumed.
    """
    # Find what has changed.
    manifest = read_manifest(directory)
    earlier_inputs = newest_inputs(manifest)
    # The start model may be in another folder now: only its content counts.
    is_same_model = _is_same_model(earlier_inputs, inputs)
    changed_keys = refuse_changed_settings(directory.path, plain, config, same_model=is_same_model)
    has_another_evaluation = any(changed_key.key[0] == "evaluation" for changed_key in changed_keys)
    if earlier_inputs is not None and has_another_evaluation:
        # Another evaluation may measure other problems. `changed_keys` reports that already, so the rows of
        # evaluation sets are left out of the comparison, and only those of the task's splits remain.
        rows_of_task = {name: rows for name, rows in earlier_inputs["rows"].items() if name in SPLITS}
        earlier_inputs = {**earlier_inputs, "rows": rows_of_task}
    input_changes = describe_changed_inputs(earlier_inputs, inputs, manifest, config)
    if input_changes and config.changed_inputs == "refuse":
        raise FolderRefused(
            f"{directory.path} was begun with other inputs: {'; '.join(input_changes)}. The results so far"
            " would not belong to those that follow: put the earlier inputs back (if model.name_or_path is a"
            " checkpoint of a run that has continued, name it by its number), give this experiment another"
            " name (APP_EXPERIMENT_NAME), or set changed_inputs to 'accept' to resume with the present inputs"
        )
    changed_files = find_changed_code(manifest)
    last_entry = entries_of_starts(manifest)[-1]
    bit_changes = describe_different_bits(last_entry.get("bits_rest_on", {}), bits_now)

    # Write it down.
    if changed_keys or bit_changes or input_changes or changed_files or earlier_inputs is None:
        manifest.setdefault("continued", []).append(
            {
                "after": directory.newest_resumable() or 0,
                "config": config_hash(plain),
                "changed": {changed_key.name: str(changed_key) for changed_key in changed_keys},
                "command": describe_command(),
                "bits_rest_on": bits_now,
                "inputs": inputs,
                "own_modules": own_modules(),
                "changed_code": changed_files,
            }
        )
        write_record(directory.manifest_file, manifest)
        write_json(directory.config_file, plain)

    # Tell the user.
    messages = describe_unsafe_keys(plain)
    messages += [f"accepted, since changed_inputs is 'accept': {change}" for change in input_changes]
    if earlier_inputs is None:
        messages.append(
            "this run was begun by a version that recorded no digest of the start model, so whether the model"
            " is still the same is unknown; its present digest is recorded now"
        )
    if changed_files:
        messages.append(_warn_of_changed_code(changed_files, directory, config))
    if bit_changes:
        messages.append(
            "this run was begun on another machine or with other software, so results may differ in the last"
            f" bits: {'; '.join(bit_changes)}"
        )
    return messages


def _first_manifest(
    config: PolicyIteration,
    plain: Mapping[str, Any],
    inputs: Mapping[str, Any],
    bits: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the content of a new run's `manifest.json`.

    Args:
        config: The configuration.
        plain: The same configuration before it was built, as `config.json` has it.
        inputs: The digests of the inputs, such as the start model and the rows (`inputs_of`).
        bits: The facts that decide the last bits of a result, such as the processor
            (`facts_that_decide_bits`).
    """
    return {
        "config": config_hash(plain),
        "config_is_sealed": True,  # `read_config` compares the stored configuration with the hash `config`
        "seed": config.seed,
        "command": describe_command(),
        "system": platform.platform(),
        "commit": read_code_commit(),
        "own_modules": own_modules(),
        "own_folders": search_folders_and_names()[0],  # where the user's own modules are looked for
        "without_sandbox": find_keys_without_sandbox(plain),
        "data": {split: data_hash(config.task, split) for split in SPLITS},
        "inputs": inputs,
        "bits_rest_on": bits,
        "continued": [],
    }


def refuse_other_ranks(directory: ExperimentDirectory, ranks: int) -> None:
    """Raises FolderRefused if the optimiser's state of the newest checkpoint is sharded over another number
    of ranks.

    Every ZeRO stage above 0 shards it. This is checked before anything in the folder is changed.
    """
    newest = directory.newest_resumable()
    if newest is None:
        return
    state_folder = directory.checkpoint_folder(newest) / "trainer" / "policy"
    n_shards = len(list(state_folder.glob(OPTIMISER_SHARDS)))  # 0 if the state is not sharded
    if n_shards not in (0, ranks):
        raise FolderRefused(
            f"{directory.path} was trained on {n_shards} ranks up to iteration {newest}, and its optimiser's"
            f" state is sharded over them (trainer.zero_stage), but this start has {ranks} ranks: start it"
            f" with NUM_GPUS={n_shards}. Nothing was changed"
        )


def describe_command() -> dict[str, Any]:
    """Returns the arguments, the folder and the APP_ variables that this process was started with."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("APP_")}
    return {"words": sys.argv[1:], "folder": os.getcwd(), "variables": variables}


def read_manifest(directory: ExperimentDirectory) -> dict[str, Any]:
    """Returns a run's manifest; empty if it has none."""
    path = directory.manifest_file
    return read_record(path, "put it back, or delete it") if path.is_file() else {}


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration that is stored in an experiment's folder.

    Raises:
        Damaged: The manifest doesn't have the configuration's hash.
    """
    remedy = f"put it back from `treetune print_config …` into {path / CONFIG}"
    config = read_record(path / CONFIG, remedy)
    manifest = read_manifest(ExperimentDirectory(path))
    # A start that changes the configuration adds the new hash to the manifest before it writes the
    # configuration. If it is killed in between, the stored configuration still has an earlier hash.
    hashes = [entry["config"] for entry in entries_of_starts(manifest) if "config" in entry]
    # Manifests of earlier versions have no `config_is_sealed`, and their hashes aren't checked.
    if manifest.get("config_is_sealed") and config_hash(config) not in hashes:
        raise Damaged(f"{path / CONFIG} is damaged (the manifest has other hashes): {remedy}")
    return config


def entries_of_starts(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the entry of the run's start, which is the manifest itself, and those of each start that
    resumed the run with changes."""
    return [manifest, *manifest.get("continued", ())]


def list_resumes(manifest: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    """Returns the resumes that a manifest records, each with the finished iterations before it and a message
    for each change. A resume without changes is not recorded.

    Example: ``[(12, ["iterations was 40 and is 80", "the code of reward.py has changed"])]``.
    """

    def read(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        return entry.get(key) or {}  # earlier versions wrote fewer keys

    resumes = []
    for earlier, entry in pairwise(entries_of_starts(manifest)):
        changes = list(read(entry, "changed").values())
        changes += describe_different_bits(read(earlier, "bits_rest_on"), read(entry, "bits_rest_on"))
        changes += _describe_different_digests(read(earlier, "inputs"), read(entry, "inputs"))
        changes += [f"the code of {file} has changed" for file in read(entry, "changed_code").values()]
        if not changes and "inputs" not in earlier:
            # The resume was recorded only because an earlier version had recorded no digests.
            changes = ["the digests of its inputs are recorded from here on"]
        resumes.append((int(entry.get("after") or 0), changes))
    return resumes


def find_changed_code(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns the user's modules whose code differs from the code that the manifest recorded last.

    Example: ``{"reward": "reward.py"}``, with each module's file.
    """
    hashes_before: Mapping[str, str] = {}
    for entry in entries_of_starts(manifest):
        if "own_modules" in entry:
            hashes_before = entry["own_modules"]
    changed_files = {}
    for name, hash_now in sorted(own_modules().items()):
        # A module that the run has not imported before counts as unchanged.
        if hashes_before.get(name, hash_now) != hash_now:
            changed_files[name] = shorten_path(sys.modules[name].__file__ or name)
    return changed_files


def _warn_of_changed_code(
    changed_files: Mapping[str, str], directory: ExperimentDirectory, config: PolicyIteration
) -> str:
    """Returns the warning that a resumed run has other code than before, and what that means for results.

    It is not an error, unlike changed rows: a run that ended because of a mistake in a reward function
    resumes with the corrected function.
    """
    files = ", ".join(changed_files.values())
    finished_iterations = directory.newest_resumable() or 0
    new_name = json.dumps(f"{config.experiment_name}_2", ensure_ascii=False)
    return (
        f"warning: your own code has changed since this run was last started: {files}. Iterations up to"
        f" {finished_iterations} were computed with the earlier code, and the following ones are computed"
        " with the present code. Their rewards and metrics can't be compared with each other, nor this run"
        " with others. To have one code in all iterations, put the earlier code back, or start a new run:"
        f" {override_option(('experiment_name',), new_name)}"
    )


def find_different_keys(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which two configurations differ and that change results, such as
    ``["trainer.learning_rate"]``."""
    return [difference.name for difference in find_changed_keys(stored, plain) if not difference.changeable]


def refuse_other_configuration(
    directory: ExperimentDirectory, config: PolicyIteration, plain: Mapping[str, Any]
) -> None:
    """Raises FolderRefused if the folder holds a run with another configuration.

    It imports no PyTorch, reads two small files, and looks whether the folder has any work, so `treetune
    check` and the beginning of a start can call it. The path of the start model isn't compared: another
    folder may hold the same model, which only `begin_or_resume` finds out.

    Args:
        directory: The experiment's folder.
        config: The present configuration.
        plain: The same configuration before it was built.
    """
    holds_a_run = directory.config_file.is_file() and directory.has_work()
    # The files of a run still change while another process runs it, so they are not read then. `Session.open`
    # refuses to start a second process anyway.
    if holds_a_run and not directory.is_running():
        refuse_changed_settings(directory.path, plain, config, same_model=True)


def refuse_changed_settings(
    path: Path, plain: Mapping[str, Any], config: PolicyIteration, *, same_model: bool = False
) -> list[ChangedKey]:
    """Returns the keys whose values differ from those of the run in `path`. None of these keys changes
    results.

    Args:
        plain: The present configuration, before it was built.
        config: The present configuration.
        same_model: Whether the start model has the same content as before. Its path may then have changed.

    Raises:
        FolderRefused: A changed key would have changed the results so far.
    """
    changed: list[ChangedKey] = []
    for difference in find_changed_keys(read_config(path), plain):
        if same_model and difference.key == MODEL_PATH:
            changed.append(replace(difference, changeable=True))
        else:
            changed.append(difference)
    name = json.dumps(f"{config.experiment_name}_2", ensure_ascii=False)
    another_name = override_option(("experiment_name",), name)
    remedy = (
        f" The run in that folder was not changed: give this experiment another name ({another_name}), or"
        " move the folder away"
    )
    unchangeable = [difference for difference in changed if not difference.changeable]
    if unchangeable:
        raise FolderRefused(
            f"{path} holds an experiment with another configuration: {'; '.join(map(str, unchangeable))}."
            + remedy
        )
    # The number of iterations may change, unless the iterations so far depend on it, as by a learning rate
    # that decays to the end of the run.
    number_of_iterations = next((change for change in changed if change.key == ("iterations",)), None)
    if number_of_iterations is not None and config.length_matters is not None:
        raise FolderRefused(
            f"{path} can't be resumed with another number of iterations: {number_of_iterations}, and"
            f" {config.length_matters}, so that the iterations so far would have been trained"
            " differently." + remedy
        )
    return changed


def inputs_of(config: PolicyIteration) -> dict[str, Any]:
    """Returns digests of a run's inputs other than its configuration: start model, reference, start of the
    reward model, and rows."""
    inputs: dict[str, Any] = {"model": dict(config.model.identity())}
    reference = config.credit.trainer_scores.reference_model
    if reference is not None:
        inputs["reference"] = dict(reference.identity())
    reward_model = reward_model_of(config.credit)
    if reward_model is not None and reward_model.start is not None:
        inputs["reward_model"] = dict(reward_model.start.identity())
    rows = {split: rows_digest(config.task, split) for split in SPLITS}
    for evaluation_set in config.evaluation.sets:
        if evaluation_set.task is not None:
            name = f"evaluation set {evaluation_set.label}"
            rows[name] = rows_digest(evaluation_set.task, evaluation_set.split)
    inputs["rows"] = rows
    return inputs


def newest_inputs(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest digests of a run's inputs (`inputs_of`); None if its manifest has none."""
    inputs = [entry["inputs"] for entry in entries_of_starts(manifest) if "inputs" in entry]
    return inputs[-1] if inputs else None


def describe_changed_inputs(
    earlier_inputs: Mapping[str, Any] | None,
    inputs: Mapping[str, Any],
    manifest: Mapping[str, Any],
    config: PolicyIteration,
) -> list[str]:
    """Returns a message for each input that has changed.

    If an earlier version recorded no digests (`earlier_inputs` is None), the fingerprints of the rows' texts
    are compared.
    """
    changes = []
    if earlier_inputs is None:
        for split, before in manifest.get("data", {}).items():
            now = data_hash(config.task, split)
            if before is not None and now != before:
                changes.append(f"the problems of {split} have changed (fingerprint {before}, now {now})")
        return changes
    return _describe_different_digests(earlier_inputs, inputs)


def _describe_different_digests(earlier_inputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    """Returns a message for each input whose digest (`inputs_of`) has changed."""
    changes = []
    for name, label in (
        ("model", "start model"),
        ("reference", "reference"),
        ("reward_model", "start of the reward model"),
    ):
        before, now = earlier_inputs.get(name, {}), inputs.get(name, {})
        for key in ("digest", "commit"):
            are_recorded = before.get(key) and now.get(key)
            if are_recorded and before[key] != now[key]:
                path_before = before.get("path") or before.get("name")
                path_now = now.get("path") or now.get("name")
                changes.append(
                    f"the {label} was {path_before} ({key} {before[key][:12]})"
                    f" and is {path_now} ({key} {now[key][:12]})"
                )
    for name, before in earlier_inputs.get("rows", {}).items():
        # Rows that the run no longer reads, such as those of a removed evaluation set, haven't changed.
        now = inputs.get("rows", {}).get(name, before)
        if before is not None and now != before:
            changes.append(
                f"the problems of {name} were {_describe_rows(before)} and are {_describe_rows(now)}"
            )
    return changes


def _describe_rows(rows: Mapping[str, Any] | None) -> str:
    """Returns a digest of rows as text: ``7473 (digest 0f3b9c2d11aa)``."""
    return "none" if rows is None else f"{rows['count']} (digest {rows['digest'][:12]})"


def _is_same_model(earlier_inputs: Mapping[str, Any] | None, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the start model has the digest that the manifest recorded last. Returns False if one of
    the two digests is unknown."""
    before, now = (earlier_inputs or {}).get("model", {}), inputs.get("model", {})
    return "digest" in before and before["digest"] == now.get("digest")


def rows_digest(task: Task, split: Any) -> dict[str, Any] | None:
    """Returns the number of a split's problems and a digest of their whole content, demonstrations included;
    None for a split that the task doesn't have.

    Example: ``{"count": 7473, "digest": "0f3b9c2d11aa…"}``.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        problems = task.problems(split)
    except ValueError:
        return None
    for problem in problems:
        messages = [[message.role, message.content] for message in problem.messages]
        row = [problem.id, problem.prompt, problem.gold, messages, problem.data]
        digest.update(json.dumps(row, sort_keys=True, default=_make_stable_text).encode())
    return {"count": len(problems), "digest": digest.hexdigest()}


def _make_stable_text(value: Any) -> str:
    """Returns a text for a value that JSON can't hold. The text is the same in every process."""
    # The order of a set differs between processes, and so does an address in memory.
    text = repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def data_hash(task: Task, split: Any) -> str | None:
    """Returns a fingerprint of the texts of a split's problems; None for a split that the task doesn't have.

    Manifests of earlier versions have only this fingerprint, and not the digest of `rows_digest`.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        problems = task.problems(split)
    except ValueError:
        return None
    for problem in problems:
        digest.update(json.dumps([problem.id, problem.prompt, problem.gold]).encode())
    return digest.hexdigest()


def read_code_commit() -> str | None:
    """Returns the git commit of this code, with ``+changes`` if tracked files differ from it. Returns None if
    the code is not in a git checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return process.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        has_changes = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if has_changes else head


@dataclass(frozen=True)
class ChangedKey:
    """A key whose value differs between two configurations.

    Example: ``ChangedKey(("trainer", "learning_rate"), before=1e-6, now=1e-5, changeable=False)``, which
    reads ``trainer.learning_rate was 1e-06 and is 1e-05``.
    """

    key: tuple[str, ...]
    before: Any
    now: Any
    changeable: bool
    """Whether a run can be resumed with the new value, since it changes no result."""

    @property
    def name(self) -> str:
        return ".".join(self.key)

    @override
    def __str__(self) -> str:
        return f"{self.name} was {_shorten(self.before)} and is {_shorten(self.now)}"


def find_changed_keys(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[ChangedKey]:
    """Returns the keys whose values differ between a run's stored configuration and the present one.

    Parts of the same type are compared key by key. A key that a configuration leaves out counts with its
    default.
    """
    # `changeable` says whether a resumed run may have another value. Below a key that allows it, it is true.
    return list(_differences_at(path=(), before=stored, now=present, root=present, changeable=False))


def _differences_at(
    path: tuple[str, ...], before: Any, now: Any, root: Mapping[str, Any], changeable: bool
) -> Iterator[ChangedKey]:
    """Yields the differences at and below a key.

    Args:
        path: The key, such as ``("trainer", "objective")``.
        before: Its value in the stored configuration.
        now: Its value in the present configuration.
        root: The whole present configuration.
        changeable: Whether a run can be resumed with another value of the key, since the key changes no
            result.
    """
    if _as_json_types(before) == _as_json_types(now):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        # Parts of different types aren't compared key by key: only their types are reported.
        if before.get("type") != now.get("type"):
            yield ChangedKey((*path, "type"), before.get("type"), now.get("type"), changeable)
            return
        # The class that the value is built into; `Runtime` is the family of the root's classes.
        part = part_at(Runtime, root, path)
        defaults: dict[str, Any] = {}
        changeable_keys: frozenset[str] = frozenset()
        if part is not None:
            defaults = {name: key.default for name, key in keys_of(part).items()}
            if issubclass(part, Part):
                changeable_keys = part.changeable(now)
        for key in sorted(before.keys() | now.keys()):
            default = defaults.get(key, NOT_SET)
            value_before, value_now = before.get(key, default), now.get(key, default)
            # A key below a changeable one is changeable, too.
            is_changeable = changeable or key in changeable_keys
            yield from _differences_at((*path, key), value_before, value_now, root, is_changeable)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (item_before, item_now) in enumerate(zip(before, now, strict=True)):
            yield from _differences_at((*path, str(index)), item_before, item_now, root, changeable)
    else:
        yield ChangedKey(path, before, now, changeable)


def _as_json_types(value: Any) -> Any:
    """Returns a value in JSON's types. The values of a configuration have these types already, but the
    defaults of keys that are left out are Python objects. `NOT_SET`, which stands for a key without a value
    and without a default, stays as it is."""
    if value is NOT_SET or isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_as_json_types(item) for item in value]
    plain = value if isinstance(value, Mapping) else as_plain(value)
    if isinstance(plain, Mapping):
        return {key: _as_json_types(item) for key, item in plain.items()}
    return plain


def _shorten(value: Any) -> str:
    """Returns a value for a message, of at most `MOST_VALUE_CHARACTERS` characters."""
    if value is NOT_SET:
        return "not set"
    text = repr(_as_json_types(value))
    return text if len(text) <= MOST_VALUE_CHARACTERS else text[: MOST_VALUE_CHARACTERS - 1] + "…"
