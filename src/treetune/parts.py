"""Makes all parts of this package known, and imports nothing heavy: ``import treetune.parts``.

Every module with a class below ``@….register("name")`` is imported. A new part is one file.
"""

import treetune
from treetune.config.imports import import_package

# In an installed wheel, the folder `treetune/examples` has files for users to copy, which are not imported.
import_package(treetune, left_out_folder="examples")
