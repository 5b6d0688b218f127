"""Files that change nothing because everything that they set is set again on their right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treetune.config.errors import ConfigError, KeyPath, dotted
from treetune.config.explain import Explanation, key_paths, value_at
from treetune.config.jsonnet import Config, Layer, sum_of

SHOWN_KEYS = 4


def overridden(config: Config) -> Iterator[str]:
    """A sentence for each file that could be left out, and that would say something elsewhere.

    A preset on the left of the experiment that it is for is the commonest of them. What a file on its left
    says already, a file may say again.
    """
    for place, layer in enumerate(config.layers):
        if layer.path is None or place + 1 == len(config.layers):
            continue
        without = [*config.layers[:place], *config.layers[place + 1 :]]
        if _sum(without, config) != config.data:
            continue
        before, after = _sum(config.layers[:place], config), _sum(config.layers[: place + 1], config)
        if after is None or before == after:
            continue
        lost = [path for path in key_paths(after) if _is_own(path, before, after)]
        winners = [right.name for right in config.layers[place + 1 :] if _sets_any(right, lost, config)]
        shown = ", ".join(dotted(path) for path in lost[:SHOWN_KEYS])
        more = ", …" if len(lost) > SHOWN_KEYS else ""
        yield (
            f"{layer.name} changes nothing: all that it sets ({shown}{more}) is set again on its right, by"
            f" {' and '.join(winners)}: put it further to the right, or leave it out"
        )


def _sets_any(layer: Layer, paths: Sequence[KeyPath], config: Config) -> bool:
    alone = Explanation(Config({}, (layer,), config.variables))
    return any(alone.settings(path[:depth]) for path in paths for depth in range(len(path), 0, -1))


def _is_own(path: KeyPath, before: Any, after: Any) -> bool:
    """Whether the value at a path is the file's, and no object with more specific ones in it."""
    value = value_at(after, path)
    return not isinstance(value, dict) and value_at(before, path) != value


def _sum(layers: Any, config: Config) -> Any:
    """What some of the layers make, or None where they make nothing without the others."""
    try:
        return sum_of(layers, config.variables) if layers else {}
    except ConfigError:
        return None
