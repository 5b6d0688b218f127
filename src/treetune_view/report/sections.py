"""Sections of a report and drawings of answers: what each is, and the lists of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from treetune.vocabulary import Episode
from treetune_view.drawings import NOTE, ThreadedAnswer, threads_html
from treetune_view.experiment import Experiment


class ReportSection:
    """A part of the page about one experiment. Defining a sub-class adds it to the page, below those before.

    A section writes the HTML below its heading and escapes what it took from files. In its charts the colour
    class ``own`` is the experiment's. What it looked for and did not find it adds to `experiment.missing`.
    """

    title: ClassVar[str]
    """The heading."""

    def applies(self, experiment: Experiment) -> bool:
        """Returns whether the experiment may have anything to show here."""
        return True

    def html(self, experiment: Experiment) -> str:
        """Returns the content below the title; nothing, and no title, where it is empty."""
        raise NotImplementedError

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns further columns of the table of results, from an evaluation's summary: heading and text."""
        return {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _SECTIONS.append(cls())


class AnswerDrawing:
    """Draws answers that a list of steps doesn't do justice to. Defining a sub-class adds it.

    Answers that a drawing takes go first among those that are shown, over the width of the page.
    """

    note: ClassVar[str]
    """Explains the drawing, once above all answers, as HTML."""

    def applies(self, episode: Episode) -> bool:
        raise NotImplementedError

    def html(self, answer: ThreadedAnswer) -> str:
        """Returns the answer below its prompt; its trajectory is there where it is stored."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _DRAWINGS.append(cls())


_SECTIONS: list[ReportSection] = []
_DRAWINGS: list[AnswerDrawing] = []


def all_sections() -> tuple[ReportSection, ...]:
    """Returns all sections, in the order of the page."""
    from treetune_view.report import recorded, episodes  # noqa: F401, I001  (they define them, in this order)

    return tuple(_SECTIONS)


def drawing_of(episode: Episode) -> AnswerDrawing | None:
    """Returns the first drawing that takes the answer."""
    return next((drawing for drawing in _DRAWINGS if drawing.applies(episode)), None)


class ThreadsDrawing(AnswerDrawing):
    note = NOTE

    def applies(self, episode: Episode) -> bool:
        return any(stretch.branch for stretch in episode.stretches)

    def html(self, answer: ThreadedAnswer) -> str:
        return threads_html(answer)
