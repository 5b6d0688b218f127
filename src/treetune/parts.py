"""Makes all parts of the package known, and imports nothing heavy: ``import treetune.parts``.

Every module with a class below ``@….register("name")`` is imported. A new part is one file in its room.
"""

import treetune
from treetune.config.imports import import_package

import_package(treetune)
