"""Sizes of the models that the shipped configurations name, from the config.json that each is published
with on the Hugging Face hub, under the name that is the key. A test holds the sums against the numbers of
parameters that the models' cards give."""

from __future__ import annotations

from typing import Any


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
