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

_MODULES = (experiments, timeline, answers, answer, compare, continuations, configuration, notes, data)
PAGES: tuple[Page, ...] = tuple(
    sorted((page for module in _MODULES for page in module.PAGES), key=lambda page: page.place != "top")
)
