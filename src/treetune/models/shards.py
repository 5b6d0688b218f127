"""Weights that leave a model in chunks of bounded size, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.models.export import HEAD, embeddings_among, making_room_explained
from treetune.store.files import sync, write_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
"""What Hugging Face's format calls the list of all names and their files: with it, a folder is whole."""

Weight = tuple[str, "Tensor"]


def with_head(weights: Iterable[Weight], names: Iterable[str], tied: bool) -> Iterator[Weight]:
    """The weights, with an output head of its own where it is `tied` to the embeddings, or is not among the
    `names`: right behind them, since whoever hands the weights out may not keep them. See
    `write_for_engine`."""
    known = list(names)
    source = embeddings_among(known) if tied or HEAD not in known else None
    for name, weight in weights:
        if name == HEAD and source is not None:
            continue
        yield name, weight
        if name == source:
            yield HEAD, weight


def in_chunks(
    weights: Iterable[Weight], most_bytes: int, keep: Callable[[Tensor], Tensor]
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Weights in their order, as many as have no more than `most_bytes` together, or a single larger one; and
    whether these are the last. Each is taken by `keep` before the next is asked for: until then alone it is
    there."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        if chunk and size + weight.nbytes > most_bytes:
            yield chunk, False
            chunk, size = {}, 0
        chunk[name] = keep(weight)
        size += weight.nbytes
    yield chunk, True


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"model-{number + 1:05d}.safetensors"


def write_shard(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError that says what to do where there is no room."""
    from safetensors.torch import save_file

    with making_room_explained(path.parent):
        save_file(weights, path, metadata={"format": "pt"})
        sync(path)


def write_index(files: Mapping[str, str], directory: Path) -> None:
    """`files` are those of all names."""
    write_json(directory / INDEX, {"metadata": {}, "weight_map": dict(files)})


def shards_of(directory: Path) -> list[Path] | None:
    """The files of weights in a folder; None where it isn't whole."""
    try:
        named = json.loads((directory / INDEX).read_text())["weight_map"].values()
    except FileNotFoundError:
        return None
    return [directory / name for name in sorted(set(named))]
