"""A configuration as it was evaluated, and where two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from treetune.config.explain import key_paths, value_at
from treetune.view.page import Page, PageRequest


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns each key that holds no further keys, with its value as JSON."""
    values = {".".join(path): value_at(config, path) for path in key_paths(config)}
    leaves = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in leaves.items()}


def show(view: PageRequest) -> Response:
    """`?run=` (also several), `?search=` in names and values, `?only=differences`."""
    experiment = view.store.experiment(view.run)
    settings = [flat(view.store.experiment(run).config) for run in view.runs]
    only = view.choice("only", ("everything", "differences"))
    search = view.text("search").casefold()
    names = dict.fromkeys(name for own in settings for name in own)
    keys = [(name, [own.get(name) for own in settings]) for name in names]  # None: it has none
    different = {name for name, values in keys if len(set(values)) > 1}
    listed = [
        (name, values)
        for name, values in keys
        if (only == "everything" or name in different)
        and search in f"{name} {' '.join(v or '' for v in values)}".casefold()
    ]
    return view.render(
        "configuration.html",
        command=experiment.command if len(view.runs) == 1 else None,
        keys=listed,
        total=len(keys),
        only=only,
        different=different,
    )


PAGES = (Page("/configuration", "Configuration", show, place="run", key="c"),)
