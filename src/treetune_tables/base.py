"""What a table is: the root of a configuration that shows what experiments reached."""

from __future__ import annotations

from treetune.config.registrable import Registrable


class Table(Registrable, root="a table"):
    """The root of a table's configuration."""

    def check_experiments(self) -> None:
        """What can't be seen in the table alone. Raises ValueError that names all that is wrong."""
