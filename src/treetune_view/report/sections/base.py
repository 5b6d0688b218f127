"""What a section of a report is, how an episode may be drawn, and the lists of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from treetune.vocabulary import Segment
from treetune_view.report.experiment import Experiment


class ReportSection:
    """A part of the page about one experiment. Defining a sub-class adds it to the page, below those before.

    `title` is its heading. A section writes the HTML below the heading and escapes what it took from files.
    In its charts the colour class ``own`` is the experiment's. What it looked for and did not find it adds to
    `experiment.missing`, in words.
    """

    title: ClassVar[str]

    def applies(self, experiment: Experiment) -> bool:
        """Whether the experiment has anything to show here."""
        raise NotImplementedError

    def html(self, experiment: Experiment) -> str:
        """What stands below the title; nothing, and no title, where it is empty."""
        raise NotImplementedError

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        """Further columns of the table of results, from an evaluation's summary: heading and text."""
        return {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _SECTIONS.append(cls())


_SECTIONS: list[ReportSection] = []


def sections() -> tuple[ReportSection, ...]:
    """All of them, in the order of the page."""
    import treetune_view.report.sections  # noqa: F401  (defines them)

    return tuple(_SECTIONS)


@dataclass(frozen=True)
class Sampled:
    """What a trajectory knows of its sampling, and an episode doesn't."""

    segments: tuple[Segment, ...]
    numbers: Mapping[str, float]


class AnswerDrawing:
    """Draws episodes that a list of steps doesn't do justice to. Defining a sub-class adds it.

    `row` is a row of ``episodes.arrow``. `note` explains the drawing, once above all episodes, as HTML.
    Episodes that a drawing takes go first among those that are shown, over the width of the page.
    """

    note: ClassVar[str]

    def applies(self, row: Mapping[str, Any]) -> bool:
        raise NotImplementedError

    def html(self, row: Mapping[str, Any], sampled: Sampled | None, scale: float) -> str:
        """The answer below its prompt. Advantages have their full colour from `scale` on; `sampled` is there
        where the trajectory is stored."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _DRAWINGS.append(cls())


_DRAWINGS: list[AnswerDrawing] = []


def drawing_of(row: Mapping[str, Any]) -> AnswerDrawing | None:
    """The first that takes the row."""
    return next((drawing for drawing in _DRAWINGS if drawing.applies(row)), None)
