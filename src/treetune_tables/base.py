"""What a table is: the root of a configuration that shows what experiments reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treetune.config.registrable import Registrable


class Table(Registrable, root="a table"):
    """The root of a table's configuration."""

    def examine(self, plain: Mapping[str, Any]) -> Iterable[str]:
        self.check_experiments()
        return ()

    def check_experiments(self) -> None:
        """What can't be seen in the table alone. Raises ValueError that names all that is wrong."""
