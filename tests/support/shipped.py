"""The configurations that the repository ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.catalogue import find_configurations
from treetune.config.errors import ConfigIssue
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.config.layers import Config
from treetune.exceptions import ConfigError
from treetune.runtime.base import PolicyIteration, Runtime

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def whole_configurations() -> list[str]:
    """Returns the experiments and tables; the others are fragments, data sets and pipelines."""
    return [
        f"configs/{entry.name}" for entry in find_configurations() if entry.kind in ("experiments", "tables")
    ]


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
