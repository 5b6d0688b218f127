"""All pages of the viewer, in the order of its navigation. A new page is a module here and a line below."""

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
    problem,
    row,
    rows,
    run,
    timeline,
)

PAGES: tuple[Page, ...] = (
    experiments.PAGE,
    data.PAGE,
    run.PAGE,
    timeline.PAGE,
    timeline.TRACE,
    answers.PAGE,
    answer.PAGE,
    compare.PAGE,
    problem.PAGE,
    continuations.PAGE,
    configuration.PAGE,
    notes.PAGE,
    notes.DATA,
    agreement.PAGE,
    rows.PAGE,
    rows.HISTOGRAMS,
    row.PAGE,
)
