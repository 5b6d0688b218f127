"""The command `compare_analyses`: one figure of what several experiments gave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.config.build import build
from treetune.runtime.analysis import RESULT, STATES, Analyzer, read_result
from treetune.store.files import write_json
from treetune_lab.analyzers.figures import save


def compare_analyses(name: str, experiments: Sequence[str], output: Path) -> Path:
    """Draws the analysis `name` of several experiments (``DIRECTORY`` or ``NAME=DIRECTORY``) in one
    figure, and keeps their numbers beside it; the path of the figure without its ending.

    Experiments of one NAME, such as a method's seeds, are taken together: their states are one
    sample, in which a problem stays one problem.

    Raises ValueError for an experiment without this analysis, and for analyses by different
    analyzers, or of one name with different settings.
    """
    folders: dict[str, list[Path]] = {}
    for text in experiments:
        label, _, given = text.rpartition("=")
        folder = Path(given) / "analyses" / name
        if not (folder / RESULT).is_file():
            found = sorted(other.parent.name for other in Path(given).glob(f"analyses/*/{RESULT}"))
            raise ValueError(
                f"{given} has no analysis {name!r} ({folder / RESULT} is missing; there:"
                f" {', '.join(found) or 'none'}): run_analyzers makes it"
            )
        folders.setdefault(label or _read(folder)["experiment"], []).append(folder)
    results = {label: _together(label, of_label) for label, of_label in folders.items()}
    kinds = sorted({result["analyzer"] for result in results.values()})
    if len(kinds) != 1:
        raise ValueError(f"analyses {name!r} of different kinds don't go into one figure: {', '.join(kinds)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    save(Analyzer.registered()[kinds[0]].draw(results), output.parent, output.name)  # type: ignore[attr-defined]
    write_json(output.with_name(f"{output.name}.json"), results)
    return output


def _read(folder: Path) -> dict[str, Any]:
    result = read_result(folder)
    if result["analyzer"] not in Analyzer.registered():
        known = ", ".join(sorted(Analyzer.registered()))
        raise ValueError(f"{folder} is by the analyzer {result['analyzer']!r}, which isn't here: {known}")
    return result


def _together(label: str, folders: Sequence[Path]) -> Mapping[str, Any]:
    """One result of several analyses by one analyzer with the same settings."""
    results = [_read(folder) for folder in folders]
    if len(results) == 1:
        return results[0]
    if any(result["settings"] != results[0]["settings"] for result in results):
        raise ValueError(
            f"the analyses that are to be taken together as {label!r} have different settings"
            f" ({', '.join(map(str, folders))}): give them different names, or analyse them alike"
        )
    rows = [json.loads(line) for folder in folders for line in (folder / STATES).read_text().splitlines()]
    settings = results[0]["settings"]
    return {
        "analyzer": results[0]["analyzer"],
        "experiment": [result["experiment"] for result in results],
        "settings": settings,
        "points": sorted({point for result in results for point in result["points"]}),
        "numbers": build(Analyzer, settings).summarise(rows),
    }
