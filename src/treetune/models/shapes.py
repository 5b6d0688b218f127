"""Computes the sizes of a decoder-only transformer from its config.json, without loading it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""The values of `model_type` that are supported: models with RMS norms, attention with rotary embeddings, and
a gated MLP."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model, in elements.

    Example: Qwen2.5-0.5B has ``hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate=4864,
    vocabulary=151_936, tied=True, biases=True``.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the head is the embeddings' transpose."""
    source: str
    """The origin of the sizes, for messages."""
    biases: bool = False
    """Whether queries, keys and values have biases, as in Qwen2."""
    head_norms: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""

    @property
    def query(self) -> int:
        """The width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """The width of all keys of a token, and of all its values."""
        return self.kv_heads * self.head_dim

    @property
    def weights_per_block(self) -> int:
        """The number of weights of a block."""
        # `query` and `key` are the widths of all heads of queries and of keys. The projection of outputs is
        # as large as that of queries, and that of values as large as that of keys.
        attention = 2 * self.hidden * self.query + 2 * self.hidden * self.key
        biases = self.query + 2 * self.key if self.biases else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        # A gated MLP has three matrices.
        return attention + biases + norms + 3 * self.hidden * self.intermediate

    @property
    def backbone(self) -> int:
        """The number of weights without the language-model head: the embeddings, the blocks and the last
        norm."""
        return self.vocabulary * self.hidden + self.layers * self.weights_per_block + self.hidden

    @property
    def parameters(self) -> int:
        """The number of weights of the model."""
        return self.backbone + (0 if self.tied else self.head)

    @property
    def head(self) -> int:
        """The number of weights of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def served(self) -> int:
        """The number of weights in the engine, whose head is never tied to the embeddings."""
        return self.backbone + self.head


def shape_of(config: Mapping[str, Any], source: str) -> Shape | None:
    """Returns the shape of the model that a config.json describes; None for an architecture that is not in
    `ARCHITECTURES`.

    Args:
        source: The origin of the configuration, for messages.
    """
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    default_head_dim = 128 if model_type == "qwen3" else hidden // heads  # as in transformers' configurations
    return Shape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or default_head_dim,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        # Attention always has biases in qwen2, whose config.json has no key for them.
        biases=model_type == "qwen2" or bool(config.get("attention_bias")),
        head_norms=model_type == "qwen3",
        source=source,
    )


def published_shape(name: str) -> Shape | None:
    """Returns the shape of a model on the hub, from the Hugging Face cache or else from `PUBLISHED`; None if
    it is in neither."""
    from huggingface_hub import try_to_load_from_cache

    # `cached` is the file's path; None if the file isn't in the cache; or huggingface_hub's mark of a file
    # that the hub doesn't have.
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        described = json.loads(Path(cached).read_text())
        return shape_of(described, f"config.json of {name} in the Hugging Face cache")
    published = PUBLISHED.get(name)
    return None if published is None else shape_of(published, f"published config.json of {name}")


def number_of_weights(name: str) -> float | None:
    """Returns the number of weights of a model on the hub: from its published shape, or else from its name.

    Example: 7e9 for ``someone/model-7b``; None for ``gpt2``.
    """
    shape = published_shape(name)
    if shape is not None:
        return shape.parameters
    model_name = name.rpartition("/")[2].lower()
    billions = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)b(?![a-z])", model_name)
    return float(billions[1]) * 1e9 if billions else None


_KEYS_OF_SIZES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
# The names of models, separated by spaces, by the values of `_KEYS_OF_SIZES` that they have in common.
_MODELS_BY_SIZES: dict[tuple[str | int | bool, ...], str] = {
    ("llama", 2048, 22, 32, 4, 5632, 32_000, False): (
        "microsoft/rho-math-1b-v0.1 realtreetune/rho-1b-sft-GSM8K realtreetune/rho-1b-sft-MATH"
    ),
    ("llama", 4096, 30, 32, 32, 11_008, 102_400, False): (
        "deepseek-ai/deepseek-math-7b-base realtreetune/deepseekmath-7b-sft-GSM8K"
        " realtreetune/deepseekmath-7b-sft-MATH-v2"
    ),
    ("llama", 2048, 16, 32, 8, 8192, 128_256, True): (
        "meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct"
    ),
    ("llama", 576, 30, 9, 3, 1536, 49_152, True): (
        "HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
    ("qwen2", 896, 24, 14, 2, 4864, 151_936, True): "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct",
    ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True): "Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-1.5B-Instruct",
    ("qwen2", 2048, 36, 16, 2, 11_008, 151_936, True): "Qwen/Qwen2.5-3B Qwen/Qwen2.5-3B-Instruct",
    ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False): "Qwen/Qwen2.5-7B Qwen/Qwen2.5-7B-Instruct",
    ("qwen2", 5120, 64, 40, 8, 27_648, 152_064, False): "Qwen/Qwen2.5-32B",
    ("qwen3", 1024, 28, 16, 8, 3072, 151_936, True): "Qwen/Qwen3-0.6B",
    ("qwen3", 2048, 28, 16, 8, 6144, 151_936, True): "Qwen/Qwen3-1.7B Qwen/Qwen3-1.7B-Base",
    ("qwen3", 2560, 36, 32, 8, 9728, 151_936, True): (
        "Qwen/Qwen3-4B Qwen/Qwen3-4B-Base Qwen/Qwen3-4B-Thinking-2507"
    ),
    ("qwen3", 4096, 36, 32, 8, 12_288, 151_936, False): "Qwen/Qwen3-8B",
}

PUBLISHED: dict[str, dict[str, Any]] = {}
"""For each model that the shipped configurations name, the sizes in its config.json on the Hugging Face hub.
A test compares the numbers of weights that follow from these sizes with those in the models' cards."""
for _sizes, _names in _MODELS_BY_SIZES.items():
    for _name in _names.split():
        PUBLISHED[_name] = dict(zip(_KEYS_OF_SIZES, _sizes, strict=True))
