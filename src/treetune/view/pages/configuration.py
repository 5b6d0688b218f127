"""The page of an experiment's evaluated configuration, or of several configurations side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.responses import Response

from treetune.cli.completion import BASE_SUFFIX, CONFIGURATION_SUFFIXES
from treetune.config.explain import key_paths, value_at
from treetune.config.jsonnet import ENVIRONMENT_KEYS
from treetune.runtime.directory import CONFIG
from treetune.view.experiment import CREDITED_LOG, StoredExperiment
from treetune.view.page import Page, PageRequest


def flatten_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the value of each key as JSON: {"trainer.lora": "null", …}.

    Keys that have further keys below them are left out.
    """
    values = {".".join(path): value_at(config, path) for path in key_paths(config)}
    leaves = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in leaves.items()}


def explain_command(experiment: StoredExperiment, key: str) -> str | None:
    """Returns the shell command that shows everything that sets a key of an experiment's configuration.

    Example: ``cd trials && treetune explain seed --configs grpo.jsonnet --override '{seed: 3}'``. The
    result is None if the experiment's own command names no configuration files.
    """
    if experiment.command is None or experiment.config.get("type") == CREDITED_LOG:
        return None
    words, folder = experiment.command["words"], experiment.command["folder"]
    variables = dict(experiment.command.get("variables", {}))
    files, overrides = _find_files_and_overrides(words)
    if experiment.forked is not None and "fork" in words and not files:
        # Without files, `treetune fork` changes the configuration that the other run has stored, in which
        # the variables of `ENVIRONMENT_KEYS` have no effect.
        files = [str(Path(experiment.forked["run"]) / CONFIG)]
        for name in ENVIRONMENT_KEYS.values():
            variables.pop(name, None)
    if not files:
        return None
    explain = ["treetune", "explain", key]
    for names in files:
        explain += ["--configs", names]
    for override in overrides:
        explain += ["--override", override]
    if variables:
        assignments = [f"{name}={value}" for name, value in variables.items()]
        explain = ["env", *assignments, *explain]
    # The names of files are relative to the folder in which the experiment's command was started.
    return f"cd {shlex.quote(folder)} && {shlex.join(explain)}"


def _find_files_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the configuration files and the overrides of a command line.

    Example: ``run a.jsonnet --num_gpus 2 --override '{seed: 3}'`` gives a.jsonnet and {seed: 3}.
    """
    files: list[str] = []
    overrides: list[str] = []
    remaining_words = iter(words)
    for word in remaining_words:
        option, equals_sign, value = word.partition("=")
        if option in ("--configs", "--override"):
            if not equals_sign:
                value = next(remaining_words, "")
            values = files if option == "--configs" else overrides
            values.append(value)
        elif word.endswith((*CONFIGURATION_SUFFIXES, BASE_SUFFIX)):
            files.append(word)
    return files, overrides


def show(view: PageRequest) -> Response:
    """Shows the settings of one run, or of several runs side by side.

    The address has `?run=` (also several), `?search=` (a text in names and values) and `?only=differences`
    (only settings whose values differ between the runs).
    """
    experiment = view.store.experiment(view.run)
    settings = [flatten_settings(view.store.experiment(run).config) for run in view.runs]
    only = view.choice("only", ("everything", "differences"))
    search = view.text("search").casefold()
    names: dict[str, None] = {}  # a dictionary as an ordered set
    for settings_of_run in settings:
        names |= dict.fromkeys(settings_of_run)
    different, listed = set[str](), []
    for name in names:
        values = [settings_of_run.get(name) for settings_of_run in settings]  # None if a run doesn't set it
        if len(set(values)) > 1:
            different.add(name)
        elif only == "differences":
            continue
        searched = " ".join([name, *(value or "" for value in values)])
        if search in searched.casefold():
            listed.append((name, values))
    example_key = listed[0][0] if listed else "type"
    return view.render(
        "configuration.html",
        experiment=experiment,
        example_key=example_key,
        explain_command=explain_command(experiment, example_key),
        keys=listed,
        total=len(names),
        only=only,
        different=different,
    )


PAGES = (Page("/configuration", "Configuration", show, navigation="run", key="c"),)
