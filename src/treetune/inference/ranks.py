"""How the engines of several ranks agree: files in a folder that all see, and a barrier."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.store.files import write_json


@dataclass
class RankFiles:
    """This rank among the run's. Every method is a collective: all ranks call it, in one order."""

    rank: int
    world_size: int
    folder: Path | None
    barrier: Callable[[str], None]
    _meetings: int = field(default=0, init=False)

    def gather(self, own: Any) -> list[Any]:
        """Everyone's JSON value, in rank order."""
        if self.world_size == 1:
            return [own]
        assert self.folder is not None
        self._meetings += 1
        write_json(self._place(self._meetings, self.rank), own, durable=False)
        self.barrier("engines agree")
        # Everybody is here, so nobody reads any more what was left at the last meeting. No name comes again:
        # a file system that machines share may show an old file under it.
        self._place(self._meetings - 1, self.rank).unlink(missing_ok=True)
        return [json.loads(self._place(self._meetings, rank).read_text()) for rank in range(self.world_size)]

    def _place(self, meeting: int, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"engine-meeting-{meeting}-{rank}.json"
