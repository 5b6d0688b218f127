"""Rows of the schema, fewer of them: by difficulty, length, duplicates, quotas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from treetune_data.base import DataPipeline
from treetune_data.rules.base import Rule


@DataPipeline.register("filter_data")
@dataclass(frozen=True, kw_only=True)
class FilterData(DataPipeline):
    """Lets the `rules` go over rows of the schema, one after the other, and says how many rows each took.

    `seed` is for what is drawn, such as which rows a quota leaves.
    """

    rules: Annotated[tuple[Rule, ...], MinLen(1)]
    seed: int = 42

    def run(self, source: Path | None, output: Path, config: dict[str, Any]) -> int:
        from treetune_data.preparing import filtered

        assert source is not None, "the command line asks for it"
        return filtered(self, source, output, config)
