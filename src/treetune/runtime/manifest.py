"""The manifest of a run (configuration, versions, code, data), and in what another configuration differs from
it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.config.build import part_at
from treetune.config.explain import as_plain
from treetune.config.folders import own_modules, searched
from treetune.config.schema import keys_of
from treetune.contracts import Part
from treetune.runtime.base import PolicyIteration, Runtime, unsafe_remarks, without_sandbox
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.machine import bits_rest_on, unlike
from treetune.store.checksums import Damaged, config_hash, read_record, write_record
from treetune.store.files import write_json
from treetune.tasks.base import Task

CONFIG, MANIFEST = "config.json", "manifest.json"

OPTIMISER_PARTS = "*/*zero_pp_rank_*_optim_states.pt"
"""The parts into which ZeRO cuts an optimiser's state, one for each rank, in DeepSpeed's folder of a
policy."""

NOT_SET = object()
SHOWN = 60
"""Characters of a value in a message."""


def begin(
    directory: ExperimentDirectory, config: PolicyIteration, plain: Mapping[str, Any], ranks: int
) -> list[str]:
    """Writes `config.json` and `manifest.json`, with the changes where a run goes on. Returns remarks for a
    person.

    Raises ValueError if the folder holds the results of a configuration that computes something else. A
    mistake that ended the run before it had made anything binds nobody."""
    now = bits_rest_on(ranks, config.engines.policy)
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
                "data": {split: data_hash(config.task, split) for split in ("train", "validation", "test")},
                "bits_rest_on": now,
                "continued": [],
            },
        )
        write_json(directory.path / CONFIG, plain)
        return unsafe_remarks(plain)
    changed = refuse_another(directory.path, plain, config)
    refuse_other_ranks(directory, ranks)
    manifest = read_manifest(directory)
    remarks = unsafe_remarks(plain)
    if modules := changed_modules(manifest):
        remarks.append(
            f"your own code has changed since this experiment began ({', '.join(modules)}): from here on"
            " it is as it is now"
        )
    latest = (manifest, *manifest.get("continued", ()))[-1]
    unlike_before = unlike(latest.get("bits_rest_on", {}), now)
    if unlike_before:
        remarks.append(
            f"this run began elsewhere, so results may differ in the last bits: {'; '.join(unlike_before)}"
        )
    if changed or unlike_before:
        manifest.setdefault("continued", []).append(
            {
                "after": directory.resumable() or 0,
                "config": config_hash(plain),
                "changed": {one.name: str(one) for one in changed},
                "command": command_line(),
                "bits_rest_on": now,
            }
        )
        write_record(directory.path / MANIFEST, manifest)
        write_json(directory.path / CONFIG, plain)
    return remarks


def refuse_other_ranks(directory: ExperimentDirectory, ranks: int) -> None:
    """Raises ValueError where the optimiser's state of the newest checkpoint is cut for another number of
    ranks, as every ZeRO stage above 0 cuts it. Asked before anything in the folder is changed."""
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
    """Returns the configuration that is stored in an experiment's folder. Raises Damaged where the manifest
    says that it was another one."""
    remedy = f"put it back from `treetune … print_config` into {path / CONFIG}"
    config = read_record(path / CONFIG, remedy)
    manifest = read_manifest(ExperimentDirectory(path))
    known = [one["config"] for one in (manifest, *manifest.get("continued", ())) if "config" in one]
    if manifest.get("config_is_sealed") and config_hash(config) not in known:
        raise Damaged(f"{path / CONFIG} is damaged (it isn't what the manifest was written with): {remedy}")
    return config


def changed_modules(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the user's own modules that have changed since the experiment began, by name."""
    before = manifest.get("own_modules", {})
    return sorted(name for name, now in own_modules().items() if before.get(name, now) != now)


def different_keys(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which two configurations differ so that they compute something else."""
    return [one.name for one in differences(stored, plain) if not one.changeable]


def refuse_another(path: Path, plain: Mapping[str, Any], config: PolicyIteration) -> list[Difference]:
    """Raises ValueError if the configuration in `path` computed something else than `plain` would have so
    far; otherwise returns the keys whose values change from here on."""
    found = differences(read_config(path), plain)
    elsewhere = " It was left as it is: give this one another name (APP_EXPERIMENT_NAME), or move that away"
    if different := [one for one in found if not one.changeable]:
        raise ValueError(
            f"{path} holds an experiment with another configuration: {'; '.join(map(str, different))}."
            + elsewhere
        )
    longer = next((one for one in found if one.key == ("iterations",)), None)
    if longer is not None and config.length_matters is not None:
        raise ValueError(
            f"{path} can't go on with another number of iterations: {longer}, and {config.length_matters}, so"
            " that those which are there would have been trained otherwise." + elsewhere
        )
    return found


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
class Difference:
    """A key whose value is another one. `changeable` says whether a run goes on with it."""

    key: tuple[str, ...]
    before: Any
    now: Any
    changeable: bool

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{self.name} was {_in_words(self.before)} and is {_in_words(self.now)}"


def differences(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[Difference]:
    """Returns the keys whose values differ, as deep as both have the same parts. A default that one of them
    spells out is no difference."""
    return list(_between((), stored, plain, plain, changeable=False))


def _between(
    path: tuple[str, ...], before: Any, now: Any, root: Mapping[str, Any], changeable: bool
) -> Iterator[Difference]:
    if before == now or _plain(before) == _plain(now):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        if before.get("type") != now.get("type"):
            yield Difference((*path, "type"), before.get("type"), now.get("type"), changeable)
            return
        part = part_at(Runtime, root, path)
        defaults = {} if part is None else {name: key.default for name, key in keys_of(part).items()}
        free = part.changeable(now) if part is not None and issubclass(part, Part) else frozenset()
        for key in sorted(before.keys() | now.keys()):
            default = defaults.get(key, NOT_SET)
            pair = before.get(key, default), now.get(key, default)
            yield from _between((*path, key), *pair, root, changeable or key in free)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, pair in enumerate(zip(before, now, strict=True)):
            yield from _between((*path, str(i)), *pair, root, changeable)
    else:
        yield Difference(path, before, now, changeable)


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types: defaults are Python's objects."""
    if value is NOT_SET or isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    described = value if isinstance(value, Mapping) else as_plain(value)
    if isinstance(described, Mapping):
        return {key: _plain(item) for key, item in described.items()}
    return described


def _in_words(value: Any) -> str:
    if value is NOT_SET:
        return "not set"
    text = repr(_plain(value))
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
