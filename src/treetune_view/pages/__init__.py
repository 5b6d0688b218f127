"""All pages of the viewer, in the order of its navigation. A new page goes into the `PAGES` of a module
here."""

from treetune_view.page import Page
from treetune_view.pages import (
    agreement,
    answer,
    answers,
    compare,
    configuration,
    continuations,
    data,
    experiments,
    notes,
    timeline,
)

_HOME, _RUN = experiments.PAGES
_DATA, *_ROWS = data.PAGES
_ANSWERS, *_PROBLEMS = answers.PAGES

PAGES: tuple[Page, ...] = (
    _HOME,
    _DATA,
    _RUN,
    *timeline.PAGES,
    _ANSWERS,
    *_PROBLEMS,
    *answer.PAGES,
    *compare.PAGES,
    *continuations.PAGES,
    *configuration.PAGES,
    *notes.PAGES,
    *agreement.PAGES,
    *_ROWS,
)
