"""The sections of a report about one experiment: importing this defines them, in their order."""

# ruff: noqa: F401, I001  (the order of the imports is the order of the page)

import treetune.reports.sections.training
import treetune.reports.sections.domains
import treetune.reports.sections.numbers
import treetune.reports.sections.threads
import treetune.reports.sections.diagnostics
import treetune.reports.sections.times
import treetune.reports.sections.microscope
import treetune.reports.sections.tree
import treetune.reports.sections.episodes
