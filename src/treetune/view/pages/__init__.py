"""All pages of the viewer, in the order of its navigation.

To add a page, put it into the `PAGES` of a module in this package.
"""

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
# Pages that the navigation always has come first. Otherwise the order is as above, because sorting is stable.
PAGES: tuple[Page, ...] = tuple(sorted(_PAGES, key=lambda page: page.navigation != "top"))
