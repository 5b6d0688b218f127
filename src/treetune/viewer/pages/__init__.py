"""All pages of the viewer, in the order of its navigation. A new page is a module here and a line below."""

from treetune.viewer.page import Page
from treetune.viewer.pages import (
    answer,
    answers,
    compare,
    configuration,
    continuations,
    experiments,
    notes,
    problem,
    run,
)

PAGES: tuple[Page, ...] = (
    experiments.PAGE,
    run.PAGE,
    answers.PAGE,
    answer.PAGE,
    compare.PAGE,
    problem.PAGE,
    continuations.PAGE,
    configuration.PAGE,
    notes.PAGE,
    notes.DATA,
)
