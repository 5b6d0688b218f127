"""The configurations that the repository ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config import lexer
from treetune.config.build import build
from treetune.config.errors import ConfigError, ConfigIssue
from treetune.config.explain import Explanation
from treetune.config.jsonnet import TABLE, Config, Layer, configurations, load, sum_of
from treetune.runtime.base import PolicyIteration, Runtime

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
def names_in(table: Path) -> dict[str, str]:
    """The experiments' names in a table, evaluated at once and nothing else of them; `_` for none."""
    names = "local all = import '%s'; { [one]: std.get(all[one], 'experiment_name', '_') for one in %s }"
    layer = Layer(str(table), names % (TABLE, "std.objectFieldsAll(all)"), table)
    return sum_of([layer], {})


@cache
def whole_configurations() -> list[str]:
    """Files that name an experiment or have a library name it, and tables; the others are fragments or bases,
    of which some (``experiment_name+:``) add to a name."""

    def whole(path: Path) -> bool:
        if not path.is_file():  # an entry of a table
            return not names_in(path.with_name(TABLE))[path.stem].startswith("_")
        called = any(file.endswith(NAMING) for file in lexer.imports(path.read_text()))
        return called or "experiment_name:" in path.read_text() or "tables" in path.parts

    return [str(path.relative_to(ROOT)) for path in configurations(CONFIGS) if whole(path)]


@cache  # each file that is imported costs Jsonnet some 20 ms
def experiment_of(configs: str, *overrides: str, **environ: str) -> PolicyIteration:
    """The experiment of these files (`a,b`, with or without `.jsonnet`), whatever the environment says."""
    config = loaded(configs, *overrides, **environ)
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def issues_of(configs: str, *overrides: str) -> tuple[ConfigIssue, ...]:
    """What is wrong with the experiment of these files, of which there is something."""
    config = loaded(configs, *overrides)
    with pytest.raises(ConfigError) as caught:
        build(Runtime, config.data, Explanation(config))
    return caught.value.issues


def loaded(configs: str, *overrides: str, **environ: str) -> Config:
    files = [f"{name.removesuffix('.jsonnet')}.jsonnet" for name in configs.split(",")]
    return load(files, overrides, environ)
