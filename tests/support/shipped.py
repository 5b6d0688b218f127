"""The configurations that the repository ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from treetune.config import lexer
from treetune.config.errors import ConfigError
from treetune.config.jsonnet import configurations, load

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
NAMING = (
    "lib/equal_cost.libsonnet",
    "lib/experiment.libsonnet",
    "lib/quickstart.libsonnet",
    "lib/signposts.libsonnet",
    "lib/turns.libsonnet",
)


@cache
def whole_configurations() -> list[str]:
    """Files that name an experiment or have a library name it, and tables; the others are fragments or bases,
    of which some (``experiment_name+:``) add to a name."""

    def whole(path: Path) -> bool:
        if not path.is_file():  # an entry of a table
            try:
                name = load([str(path)], environ={}).data.get("experiment_name", "_")
            except ConfigError:
                return False
            return not name.startswith("_")
        called = any(file.endswith(NAMING) for file in lexer.imports(path.read_text()))
        return called or "experiment_name:" in path.read_text() or "tables" in path.parts

    return [str(path.relative_to(ROOT)) for path in configurations(CONFIGS) if whole(path)]
