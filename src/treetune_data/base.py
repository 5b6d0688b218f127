"""What a data pipeline is: a file of rows goes in, a folder with other rows comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment
from treetune.findings import UNKNOWN


class DataPipeline(Registrable, root="a data pipeline"):
    """The root of a pipeline's configuration."""

    def __getattr__(self, name: str) -> Any:
        """Parts that experiments have as well (models, graders, engines) look at the rest of an experiment
        when they check themselves. What a pipeline doesn't have of it is unknown to them."""
        if name in Experiment.__annotations__:
            return UNKNOWN
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def run(self, source: Path | None, output: Path, config: dict[str, Any]) -> int:
        """Turns the rows of `source` (None: those that its configuration names) into what enters `output`,
        and goes on with what is there already.

        `config` is the evaluated configuration, for the record. Returns the command's exit code. Raises
        ValueError for a wrong input and RuntimeError where the work can't be done, after keeping what was.
        """
        raise NotImplementedError
