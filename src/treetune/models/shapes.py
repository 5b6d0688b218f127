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
    from treetune.models.shapes import PUBLISHED

    if (cached := _cached_config(name)) is not None:
        return shape_of(json.loads(cached.read_text()), f"config.json of {name} in the Hugging Face cache")
    described = PUBLISHED.get(name)
    return None if described is None else shape_of(described, f"published config.json of {name}")


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _sizes(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    tied: bool = False,
) -> dict[str, Any]:
    """As a config.json calls them."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


# hidden, layers, heads, heads of keys and values, MLP, vocabulary
RHO_1B = _sizes("llama", 2048, 22, 32, 4, 5632, 32_000)
DEEPSEEK_MATH_7B = _sizes("llama", 4096, 30, 32, 32, 11_008, 102_400)
LLAMA_3_2_1B = _sizes("llama", 2048, 16, 32, 8, 8192, 128_256, tied=True)
QWEN_2_5_0_5B = _sizes("qwen2", 896, 24, 14, 2, 4864, 151_936, tied=True)
QWEN_2_5_1_5B = _sizes("qwen2", 1536, 28, 12, 2, 8960, 151_936, tied=True)
QWEN_2_5_3B = _sizes("qwen2", 2048, 36, 16, 2, 11_008, 151_936, tied=True)
QWEN_2_5_7B = _sizes("qwen2", 3584, 28, 28, 4, 18_944, 152_064)
QWEN_2_5_32B = _sizes("qwen2", 5120, 64, 40, 8, 27_648, 152_064)
QWEN_3_0_6B = _sizes("qwen3", 1024, 28, 16, 8, 3072, 151_936, tied=True)
QWEN_3_1_7B = _sizes("qwen3", 2048, 28, 16, 8, 6144, 151_936, tied=True)
QWEN_3_4B = _sizes("qwen3", 2560, 36, 32, 8, 9728, 151_936, tied=True)
QWEN_3_8B = _sizes("qwen3", 4096, 36, 32, 8, 12_288, 151_936)

PUBLISHED: dict[str, dict[str, Any]] = {
    "microsoft/rho-math-1b-v0.1": RHO_1B,
    "realtreetune/rho-1b-sft-GSM8K": RHO_1B,
    "realtreetune/rho-1b-sft-MATH": RHO_1B,
    "deepseek-ai/deepseek-math-7b-base": DEEPSEEK_MATH_7B,
    "realtreetune/deepseekmath-7b-sft-GSM8K": DEEPSEEK_MATH_7B,
    "realtreetune/deepseekmath-7b-sft-MATH-v2": DEEPSEEK_MATH_7B,
    "meta-llama/Llama-3.2-1B": LLAMA_3_2_1B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_3_2_1B,
    "Qwen/Qwen2.5-0.5B": QWEN_2_5_0_5B,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_2_5_0_5B,
    "Qwen/Qwen2.5-1.5B": QWEN_2_5_1_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_2_5_1_5B,
    "Qwen/Qwen2.5-3B": QWEN_2_5_3B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN_2_5_3B,
    "Qwen/Qwen2.5-7B": QWEN_2_5_7B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN_2_5_7B,
    "Qwen/Qwen2.5-32B": QWEN_2_5_32B,
    "Qwen/Qwen3-0.6B": QWEN_3_0_6B,
    "Qwen/Qwen3-1.7B": QWEN_3_1_7B,
    "Qwen/Qwen3-1.7B-Base": QWEN_3_1_7B,
    "Qwen/Qwen3-4B": QWEN_3_4B,
    "Qwen/Qwen3-4B-Base": QWEN_3_4B,
    "Qwen/Qwen3-4B-Thinking-2507": QWEN_3_4B,
    "Qwen/Qwen3-8B": QWEN_3_8B,
}
