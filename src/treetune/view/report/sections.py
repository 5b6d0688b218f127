"""The base class of a report's sections, and the list of all sections that were defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from treetune.view.experiment import StoredExperiment


class ReportSection:
    """A section of an experiment's part of the report.

    Defining a sub-class adds a section to the report, after the sections that were defined earlier. A section
    returns HTML, and must escape text from files. In its charts, the colour ``own`` is the experiment's
    colour. It adds messages about missing files to `experiment.missing`.

    Example::

        class Turns(ReportSection):
            title = "Turns"

            def html(self, experiment):
                return f"<p>{len(experiment.metrics)} iterations</p>"
    """

    title: ClassVar[str]
    """The heading of the section."""

    def applies(self, experiment: StoredExperiment) -> bool:
        """Returns whether to call `html` for this experiment."""
        return True

    def html(self, experiment: StoredExperiment) -> str:
        """Returns the content below the heading. An empty text leaves the section out, heading included."""
        raise NotImplementedError

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the cells of further columns in an evaluation's row of the table of results.

        They are {heading: text}, from the evaluation's summary: {"tokens per thread": "120.5"}.
        """
        return {}

    @override
    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _SECTIONS.append(cls())


_SECTIONS: list[ReportSection] = []


def registered_sections() -> list[ReportSection]:
    """Returns an instance of each sub-class that was defined so far, in the order of their definitions."""
    return list(_SECTIONS)
