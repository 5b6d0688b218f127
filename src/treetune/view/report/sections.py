"""Sections of a report: what one is, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from treetune.view.experiment import StoredExperiment


class ReportSection:
    """A part of the page about one experiment. Defining a sub-class adds it to the page, below those before.

    A section writes the HTML below its heading and escapes what it took from files. In its charts the colour
    class ``own`` is the experiment's. What it looked for and did not find it adds to `experiment.missing`.
    """

    title: ClassVar[str]
    """The heading."""

    def applies(self, experiment: StoredExperiment) -> bool:
        """Returns whether the experiment may have anything to show here."""
        return True

    def html(self, experiment: StoredExperiment) -> str:
        """Returns the content below the title; nothing, and no title, where it is empty."""
        raise NotImplementedError

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns further columns of the table of results, from an evaluation's summary: heading and text."""
        return {}

    @override
    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _SECTIONS.append(cls())


_SECTIONS: list[ReportSection] = []


def all_sections() -> tuple[ReportSection, ...]:
    """Returns all sections, in the order of the page."""
    from treetune.view.report import recorded, episodes  # noqa: F401, I001  (they define them, in this order)

    return tuple(_SECTIONS)
