"""The page of an experiment's evaluated configuration, or of several configurations side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from treetune.config.explain import key_paths, value_at
from treetune.view.page import Page, PageRequest


def flatten_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the value of each key as JSON: {"trainer.lora": "null", …}.

    Keys that have further keys below them are left out.
    """
    values = {".".join(path): value_at(config, path) for path in key_paths(config)}
    leaves = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in leaves.items()}


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
    return view.render(
        "configuration.html",
        command=experiment.command if len(view.runs) == 1 else None,
        keys=listed,
        total=len(names),
        only=only,
        different=different,
    )


PAGES = (Page("/configuration", "Configuration", show, navigation="run", key="c"),)
