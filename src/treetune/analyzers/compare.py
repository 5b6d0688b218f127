"""The command `compare_analyses`: one figure of what several experiments gave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.analyzers.figures import save
from treetune.runtime.analysis import Analyzer
from treetune.runtime.directory import write_json


def compare_analyses(name: str, experiments: Sequence[str], output: Path) -> Path:
    """Draws the analysis `name` of several experiments (``DIRECTORY`` or ``NAME=DIRECTORY``) in one
    figure, and keeps their numbers beside it; the path of the figure without its ending.

    Raises ValueError for an experiment without this analysis, for two of one name, and for analyses
    by different analyzers.
    """
    results: dict[str, Mapping[str, Any]] = {}
    for text in experiments:
        label, _, given = text.rpartition("=")
        path = Path(given) / "analyses" / name / "result.json"
        if not path.is_file():
            found = sorted(other.parent.name for other in Path(given).glob("analyses/*/result.json"))
            raise ValueError(
                f"{given} has no analysis {name!r} ({path} is missing; there: {', '.join(found) or 'none'}):"
                " run_analyzers makes it"
            )
        result = json.loads(path.read_text())
        label = label or result["experiment"]
        if label in results:
            raise ValueError(f"two experiments are called {label!r}: give them names, as in mine={given}")
        results[label] = result
    kinds = sorted({result["analyzer"] for result in results.values()})
    if len(kinds) != 1:
        raise ValueError(f"analyses {name!r} of different kinds don't go into one figure: {', '.join(kinds)}")
    analyzers = Analyzer.registered()
    if kinds[0] not in analyzers:
        raise ValueError(f"there is no analyzer {kinds[0]!r} here to draw it: {', '.join(sorted(analyzers))}")
    output.parent.mkdir(parents=True, exist_ok=True)
    save(analyzers[kinds[0]].draw(results), output.parent, output.name)  # type: ignore[attr-defined]
    write_json(output.with_name(f"{output.name}.json"), results)
    return output
