"""Writes a run's manifest (configuration, versions, code, data), and finds what has changed since then."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config.build import part_at
from treetune.config.explain import as_plain
from treetune.config.folders import own_modules, searched
from treetune.config.schema import keys_of
from treetune.contracts import Part
from treetune.exceptions import Damaged
from treetune.runtime.base import PolicyIteration, Runtime, unsafe_remarks, without_sandbox
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.machine import bits_rest_on, unlike
from treetune.store.checksums import config_hash, read_record, write_record
from treetune.store.files import write_json
from treetune.tasks.base import Task

CONFIG, MANIFEST = "config.json", "manifest.json"

OPTIMISER_PARTS = "*/*zero_pp_rank_*_optim_states.pt"
"""The parts into which ZeRO cuts an optimiser's state, one for each rank, in DeepSpeed's folder of a
policy."""
SPLITS = ("train", "validation", "test")
MODEL_PATH = ("model", "name_or_path")

NOT_SET = object()
SHOWN = 60
"""Characters of a value in a message."""


def begin(
    directory: ExperimentDirectory, config: PolicyIteration, plain: Mapping[str, Any], ranks: int
) -> list[str]:
    """Writes `config.json` and `manifest.json`; of a run that goes on, with the changes.

    A configuration whose run ended before it had made anything is simply replaced.

    Returns:
        Remarks for the user.

    Raises:
        ValueError: The folder holds the results of a configuration that computes something else.
    """
    now = bits_rest_on(ranks, config.engines.policy)
    inputs = inputs_of(config)
    if not (directory.path / CONFIG).is_file() or not directory.has_work():
        write_record(
            directory.path / MANIFEST,
            {
                "config": config_hash(plain),
                "config_is_sealed": True,
                "seed": config.seed,
                "command": command_line(),
                "system": platform.platform(),
                "commit": code_commit(),
                "own_modules": own_modules(),
                "own_folders": searched()[0],
                "without_sandbox": without_sandbox(plain),
                "data": {split: data_hash(config.task, split) for split in SPLITS},
                "inputs": inputs,
                "bits_rest_on": now,
                "continued": [],
            },
        )
        write_json(directory.path / CONFIG, plain)
        return unsafe_remarks(plain)
    refuse_other_ranks(directory, ranks)
    manifest = read_manifest(directory)
    pinned = pinned_inputs(manifest)
    changed = refuse_another(directory.path, plain, config, same_model=_is_same_model(pinned, inputs))
    remarks = unsafe_remarks(plain)
    if pinned is not None and any(changed_key.key[0] == "evaluation" for changed_key in changed):
        # Another evaluation may measure other problems. The changed key says so already: only the splits of
        # the task are compared.
        pinned = {**pinned, "rows": {name: rows for name, rows in pinned["rows"].items() if name in SPLITS}}
    new_inputs = changed_inputs(pinned, inputs, manifest, config)
    if new_inputs and config.changed_inputs == "refuse":
        raise ValueError(
            f"{directory.path} did not begin with what it would go on with: {'; '.join(new_inputs)}. What it"
            " has so far would not belong to what follows: put it back (name the checkpoint by its number in"
            " model.name_or_path, where that has moved on), give this one another name (APP_EXPERIMENT_NAME),"
            " or set changed_inputs to 'accept' to go on with what is there now"
        )
    remarks += [f"accepted, since changed_inputs is 'accept': {what}" for what in new_inputs]
    if pinned is None:
        remarks.append(
            "this run was begun by a version that kept no digest of its start model: whether it is still the"
            " same can't be told; from here on it is kept"
        )
    if modules := changed_modules(manifest):
        remarks.append(
            f"your own code has changed since this experiment began ({', '.join(modules)}): from here on"
            " it is as it is now"
        )
    latest = _entries_of(manifest)[-1]
    unlike_before = unlike(latest.get("bits_rest_on", {}), now)
    if unlike_before:
        remarks.append(
            f"this run began elsewhere, so results may differ in the last bits: {'; '.join(unlike_before)}"
        )
    if changed or unlike_before or new_inputs or pinned is None:
        manifest.setdefault("continued", []).append(
            {
                "after": directory.resumable() or 0,
                "config": config_hash(plain),
                "changed": {changed_key.name: str(changed_key) for changed_key in changed},
                "command": command_line(),
                "bits_rest_on": now,
                "inputs": inputs,
            }
        )
        write_record(directory.path / MANIFEST, manifest)
        write_json(directory.path / CONFIG, plain)
    return remarks


def refuse_other_ranks(directory: ExperimentDirectory, ranks: int) -> None:
    """Raises ValueError if the optimiser's state of the newest checkpoint is cut for another number of ranks.

    Every ZeRO stage above 0 cuts it. This is checked before anything in the folder is changed.
    """
    newest = directory.resumable()
    if newest is None:
        return
    state = directory.checkpoint(newest) / "trainer" / "policy"
    parts = list(state.glob(OPTIMISER_PARTS))
    if parts and len(parts) != ranks:
        raise ValueError(
            f"{directory.path} was trained on {len(parts)} ranks up to iteration {newest}, and its"
            f" optimiser's state is cut for them (trainer.zero_stage), while this start has {ranks}: start it"
            f" with NUM_GPUS={len(parts)}. Nothing was changed"
        )


def command_line() -> dict[str, Any]:
    """Returns the words, folder and variables that this process was started with."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("APP_")}
    return {"words": sys.argv[1:], "folder": os.getcwd(), "variables": variables}


def read_manifest(directory: ExperimentDirectory) -> dict[str, Any]:
    stored = directory.path / MANIFEST
    return read_record(stored, "put it back, or delete it") if stored.is_file() else {}


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration that is stored in an experiment's folder. Raises Damaged if it isn't one of
    those that the manifest has the hash of."""
    remedy = f"put it back from `treetune print_config …` into {path / CONFIG}"
    config = read_record(path / CONFIG, remedy)
    manifest = read_manifest(ExperimentDirectory(path))
    hashes = [entry["config"] for entry in _entries_of(manifest) if "config" in entry]
    if manifest.get("config_is_sealed") and config_hash(config) not in hashes:
        raise Damaged(f"{path / CONFIG} is damaged (it isn't what the manifest was written with): {remedy}")
    return config


def _entries_of(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the manifest itself, and what it has of each time that the run went on with changes."""
    return [manifest, *manifest.get("continued", ())]


def changed_modules(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the user's own modules that have changed since the experiment began, by name."""
    before = manifest.get("own_modules", {})
    return sorted(name for name, now in own_modules().items() if before.get(name, now) != now)


def different_keys(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which two configurations differ so that they compute something else."""
    return [difference.name for difference in differences(stored, plain) if not difference.changeable]


def refuse_another(
    path: Path, plain: Mapping[str, Any], config: PolicyIteration, *, same_model: bool = False
) -> list[ChangedKey]:
    """Returns the keys whose values change from here on.

    With `same_model`, the start model is surely the same, and its path may be another one.

    Raises ValueError if the configuration in `path` has computed something else than `plain` would have.
    """
    changed: list[ChangedKey] = []
    for difference in differences(read_config(path), plain):
        if same_model and difference.key == MODEL_PATH:
            changed.append(replace(difference, changeable=True))
        else:
            changed.append(difference)
    another_name = f"--override \"{{experiment_name: '{config.experiment_name}_2'}}\""
    elsewhere = f" It was not changed: give this one another name ({another_name}), or move that one away"
    unchangeable = [difference for difference in changed if not difference.changeable]
    if unchangeable:
        raise ValueError(
            f"{path} holds an experiment with another configuration: {'; '.join(map(str, unchangeable))}."
            + elsewhere
        )
    longer = next((difference for difference in changed if difference.key == ("iterations",)), None)
    if longer is not None and config.length_matters is not None:
        raise ValueError(
            f"{path} can't continue with another number of iterations: {longer}, and {config.length_matters},"
            " so that the finished ones would have been trained differently." + elsewhere
        )
    return changed


def inputs_of(config: PolicyIteration) -> dict[str, Any]:
    """Returns digests of a run's inputs beside its configuration: start model, reference and rows."""
    models = {"model": config.model, "reference": config.credit.reference}
    rows = {split: rows_digest(config.task, split) for split in SPLITS}
    for held_out in config.evaluation.sets:
        if held_out.task is not None:
            rows[f"evaluation set {held_out.label}"] = rows_digest(held_out.task, held_out.split)
    return {
        **{name: dict(source.identity()) for name, source in models.items() if source is not None},
        "rows": rows,
    }


def pinned_inputs(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest digests of a run's inputs; None if its manifest has none."""
    inputs = [entry["inputs"] for entry in _entries_of(manifest) if "inputs" in entry]
    return inputs[-1] if inputs else None


def changed_inputs(
    pinned: Mapping[str, Any] | None,
    inputs: Mapping[str, Any],
    manifest: Mapping[str, Any],
    config: PolicyIteration,
) -> list[str]:
    """Returns the changes of a run's inputs in words.

    If the run has no digests (`pinned` is None), the fingerprints of its rows' texts are compared.
    """
    changes = []
    if pinned is None:
        for split, before in manifest.get("data", {}).items():
            now = data_hash(config.task, split)
            if before is not None and now != before:
                changes.append(f"the problems of {split} are others (fingerprint {before}, now {now})")
        return changes
    for name in ("model", "reference"):
        before, now = pinned.get(name, {}), inputs.get(name, {})
        for key in ("digest", "commit"):
            if before.get(key) and now.get(key) and before[key] != now[key]:
                where = before.get("path") or before.get("name")
                now_where = now.get("path") or now.get("name")
                what = "start model" if name == "model" else name
                changes.append(
                    f"the {what} was {where} ({key} {before[key][:12]})"
                    f" and is {now_where} ({key} {now[key][:12]})"
                )
    for name, before in pinned.get("rows", {}).items():
        now = inputs["rows"].get(name, before)
        if before is not None and now != before:
            changes.append(f"the problems of {name} were {_counted(before)} and are {_counted(now)}")
    return changes


def _counted(rows: Mapping[str, Any] | None) -> str:
    return "none" if rows is None else f"{rows['count']} (digest {rows['digest'][:12]})"


def _is_same_model(pinned: Mapping[str, Any] | None, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the start model's files are surely those that the run began with."""
    before, now = (pinned or {}).get("model", {}), inputs.get("model", {})
    return "digest" in before and before["digest"] == now.get("digest")


def rows_digest(task: Task, split: Any) -> dict[str, Any] | None:
    """Returns the number of a split's problems and a digest of all that they hold, demonstrations included;
    None for a split that the task doesn't have."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        problems = task.problems(split)
    except ValueError:
        return None
    for problem in problems:
        messages = [[message.role, message.content] for message in problem.messages]
        row = [problem.id, problem.prompt, problem.gold, messages, problem.data]
        digest.update(json.dumps(row, sort_keys=True, default=_stable).encode())
    return {"count": len(problems), "digest": digest.hexdigest()}


def _stable(value: Any) -> str:
    """Returns a text for a value that JSON can't hold: the same in every process."""
    # A set's order differs between processes, and so does an address in memory.
    text = repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def data_hash(task: Task, split: Any) -> str | None:
    """Returns a fingerprint of a split's problems; None for a split that the task doesn't have."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        problems = task.problems(split)
    except ValueError:
        return None
    for problem in problems:
        digest.update(json.dumps([problem.id, problem.prompt, problem.gold]).encode())
    return digest.hexdigest()


def code_commit() -> str | None:
    """Returns the code's git commit, with ``+changes`` where files differ from it; None outside of git."""
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


@dataclass(frozen=True)
class ChangedKey:
    """A key whose value is another one. `changeable` says whether a run goes on with it."""

    key: tuple[str, ...]
    before: Any
    now: Any
    changeable: bool

    @property
    def name(self) -> str:
        return ".".join(self.key)

    @override
    def __str__(self) -> str:
        return f"{self.name} was {_in_words(self.before)} and is {_in_words(self.now)}"


def differences(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[ChangedKey]:
    """Returns the keys whose values differ, as deep as both have the same parts.

    A key that one of them leaves out has its default, so a default that the other spells out is the same.
    """
    return list(_between((), stored, plain, plain, changeable=False))


def _between(
    path: tuple[str, ...], before: Any, now: Any, root: Mapping[str, Any], changeable: bool
) -> Iterator[ChangedKey]:
    """Yields the differences at and below a `path`. `root` is the whole configuration of now."""
    if before == now or _plain(before) == _plain(now):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        if before.get("type") != now.get("type"):
            yield ChangedKey((*path, "type"), before.get("type"), now.get("type"), changeable)
            return
        part = part_at(Runtime, root, path)
        defaults = {} if part is None else {name: key.default for name, key in keys_of(part).items()}
        changeable_keys: frozenset[str] = frozenset()
        if part is not None and issubclass(part, Part):
            changeable_keys = part.changeable(now)
        for key in sorted(before.keys() | now.keys()):
            default = defaults.get(key, NOT_SET)
            value_before, value_now = before.get(key, default), now.get(key, default)
            # A key below a changeable one is changeable, too.
            is_changeable = changeable or key in changeable_keys
            yield from _between((*path, key), value_before, value_now, root, is_changeable)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (item_before, item_now) in enumerate(zip(before, now, strict=True)):
            yield from _between((*path, str(index)), item_before, item_now, root, changeable)
    else:
        yield ChangedKey(path, before, now, changeable)


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types. The values of a configuration have them already, but the defaults of
    keys that are left out are Python objects."""
    if value is NOT_SET or isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    plain = value if isinstance(value, Mapping) else as_plain(value)
    if isinstance(plain, Mapping):
        return {key: _plain(item) for key, item in plain.items()}
    return plain


def _in_words(value: Any) -> str:
    if value is NOT_SET:
        return "not set"
    text = repr(_plain(value))
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
