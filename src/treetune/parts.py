"""Makes all parts of this distribution known, and imports nothing heavy: ``import treetune.parts``.

Every module with a class below ``@….register("name")`` is imported: those of the core, then those of the
packages that stand on it, which the entry points of the group ``treetune.parts`` name as a user's package
names its own. A new part is one file.
"""

import importlib

import treetune
from treetune.config.imports import import_package
from treetune.config.schema import GROUP, own_entry_points

import_package(treetune, without="examples")  # in a wheel they lie there, for users to copy
for entry in own_entry_points(GROUP):
    import_package(importlib.import_module(entry.value))
