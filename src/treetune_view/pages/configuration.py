"""A configuration as it was evaluated, where each value comes from, and where two of them differ."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from treetune_view.page import Page, View, digest
from treetune_view.report.experiment import Experiment
from treetune_view.store.origins import Origins, origins
from treetune_view.store.side_by_side import flat


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
    settings = [flat(view.store.experiment(run).config) for run in view.runs]
    only = view.choice("only", ("everything", "differences"))
    wanted = view.text("search").casefold()
    names = list(dict.fromkeys(name for own in settings for name in own))
    keys = [Key(name, tuple(own.get(name) for own in settings)) for name in names]
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


def mark(view: View) -> str:
    return digest(view.store.mark(view.runs), view.store.made)


PAGE = Page("/configuration", "Configuration", show, place="run", key="c", mark=mark)
