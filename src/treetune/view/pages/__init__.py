"""All pages of the viewer, in the order of its navigation. A new page goes into the `PAGES` of a module
here."""

from treetune.view.page import Page
from treetune.view.pages import (
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

_PAGES = (
    *experiments.PAGES,
    *timeline.PAGES,
    *answers.PAGES,
    *answer.PAGES,
    *compare.PAGES,
    *continuations.PAGES,
    *configuration.PAGES,
    *notes.PAGES,
    *data.PAGES,
)
# Pages at the top of the navigation come first. Sorting keeps the order above otherwise.
PAGES: tuple[Page, ...] = tuple(sorted(_PAGES, key=lambda page: page.place != "top"))
