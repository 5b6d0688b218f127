"""The configurations that the repository ships."""

from __future__ import annotations

from pathlib import Path

from treetune.config import lexer

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
NAMING = (
    "lib/equal_cost.libsonnet",
    "lib/experiment.libsonnet",
    "lib/quickstart.libsonnet",
    "lib/signposts.libsonnet",
    "lib/turns.libsonnet",
    "correct_paths.libsonnet",
)


def whole_configurations() -> list[str]:
    """Files that name an experiment or have a library name it, and tables; the others are fragments or bases,
    of which some (``experiment_name+:``) add to a name."""

    def whole(path: Path) -> bool:
        called = any(file.endswith(NAMING) for file in lexer.imports(path.read_text()))
        return called or "experiment_name:" in path.read_text() or "tables" in path.parts

    return [str(path.relative_to(ROOT)) for path in sorted(CONFIGS.rglob("*.jsonnet")) if whole(path)]
