"""The sections of a report about one experiment: importing this defines them, in their order."""

# ruff: noqa: F401, I001  (the order of the imports is the order of the page)

import treetune_view.report.sections.training
import treetune_view.report.sections.domains
import treetune_view.report.sections.numbers
import treetune_view.report.sections.threads
import treetune_view.report.sections.diagnostics
import treetune_view.report.sections.times
import treetune_view.report.sections.microscope
import treetune_view.report.sections.tree
import treetune_view.report.sections.episodes
