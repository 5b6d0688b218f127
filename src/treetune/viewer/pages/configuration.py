"""A configuration as it was evaluated, where each value comes from, and where two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune.config.explain import key_paths, value_at
from treetune.reports.experiment import Experiment
from treetune.viewer.page import Page, View, digest
from treetune.viewer.store.origins import Origins, origins


@dataclass(frozen=True)
class Key:
    """One key with its value in each experiment, as JSON; None where it has none."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def show(view: View) -> Response:
    """`?run=` (also several), `?search=` in names and values, `?only=differences`."""
    view.run  # noqa: B018  (raises where none is named)
    flat = [_flat(view.store.experiment(run).config) for run in view.runs]
    only = view.choice("only", ("everything", "differences"))
    wanted = view.text("search").casefold()
    names = list(dict.fromkeys(name for own in flat for name in own))
    keys = [Key(name, tuple(own.get(name) for own in flat)) for name in names]
    kept = [
        key
        for key in keys
        if (only == "everything" or key.differs)
        and wanted in f"{key.name} {' '.join(v or '' for v in key.values)}".casefold()
    ]
    one = view.store.experiment(view.run)
    alone = len(view.runs) == 1
    return view.render(
        "configuration.html",
        origins=_origins(view, one) if alone else None,
        keys=kept,
        total=len(keys),
        only=only,
        different=sum(key.differs for key in keys),
    )


def _origins(view: View, one: Experiment) -> Origins | None:
    return view.store.later(
        "origins",
        view.run,
        lambda: origins(one),
        lambda error: Origins(problem=f"{type(error).__name__}: {error}"),
    )


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Each key that holds no further keys, with its value as JSON."""
    values = {".".join(path): value_at(config, path) for path in key_paths(config)}
    leaves = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in leaves.items()}


def mark(view: View) -> str:
    return digest(view.store.mark(view.runs), view.store.made)


PAGE = Page("/configuration", "Configuration", show, place="run", key="c", mark=mark)
