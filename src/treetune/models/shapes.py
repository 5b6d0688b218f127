"""The sizes of a decoder-only transformer, from its config.json: how many weights it has, before it is
loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers are RMS norms, attention with rotary embeddings and a gated MLP."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes in elements. `tied`: the head is the embeddings' transpose. `source` says who told them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    source: str
    biases: bool = False
    """Of queries, keys and values, as Qwen2's."""
    head_norms: bool = False
    """Of queries and keys, as Qwen3's."""

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Weights of one block."""
        attention = 2 * self.hidden * self.query + 2 * self.hidden * self.key
        biases = self.query + 2 * self.key if self.biases else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return attention + biases + norms + 3 * self.hidden * self.intermediate

    @property
    def backbone(self) -> int:
        """Weights without a language-model head of their own."""
        return self.vocabulary * self.hidden + self.layers * self.layer + self.hidden

    @property
    def parameters(self) -> int:
        return self.backbone + (0 if self.tied else self.head)

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def served(self) -> int:
        """Weights as an engine holds them, whose head is a matrix of its own."""
        return self.backbone + self.head


def shape_of(described: Mapping[str, Any], source: str) -> Shape | None:
    """From what a config.json says; None for an architecture that is built otherwise."""
    kind = described.get("model_type")
    if kind not in ARCHITECTURES:
        return None
    heads, hidden = described["num_attention_heads"], described["hidden_size"]
    own_dim = 128 if kind == "qwen3" else hidden // heads
    return Shape(
        hidden=hidden,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or own_dim,
        intermediate=described["intermediate_size"],
        vocabulary=described["vocab_size"],
        tied=bool(described.get("tie_word_embeddings", False)),
        biases=kind == "qwen2" or bool(described.get("attention_bias")),
        head_norms=kind == "qwen3",
        source=source,
    )


def published_shape(name: str) -> Shape | None:
    """Of a model on the hub: from the Hugging Face cache, or else from `published_shapes`."""
    from treetune.models.published_shapes import PUBLISHED

    if (cached := _cached_config(name)) is not None:
        return shape_of(json.loads(cached.read_text()), f"config.json of {name} in the Hugging Face cache")
    described = PUBLISHED.get(name)
    return None if described is None else shape_of(described, f"published config.json of {name}")


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None
