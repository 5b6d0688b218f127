"""Make small models like those of the hub: a byte-level BPE tokenizer with a chat template, and random
weights in one of the common architectures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END, TURN, TURN_END, BEGIN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"


def template(name: str) -> str:
    """Read a chat template from the folder beside this file."""
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text().removesuffix("\n")


CHATML = template("chatml")
BEGINS_ITSELF = "{{ bos_token }}" + CHATML
"""A template that writes the token for the beginning of text itself, as Llama's does."""

CORPUS = [
    "Problem: what is 12 plus 34?\n\nSolution: 12 plus 34 is 46.\n# 46\n",
    "user assistant system You answer with a number.\n<think>\n\n</think>\n\n",
]


def bpe_tokenizer(
    *,
    template: str | None = CHATML,
    end: str | None = END,
    begin: str | None = None,
    begins_by_itself: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a small tokenizer.

    Args:
        begins_by_itself: Whether it puts `begin` before a text by default, as Llama's does.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = [END, TURN, TURN_END, BEGIN]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=specials,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if begins_by_itself:
        assert begin is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token=begin, extra_special_tokens=[TURN, TURN_END]
    )
    tokenizer.chat_template = template
    return tokenizer


def random_model(architecture: str, vocabulary: int, **changes: Any) -> PreTrainedModel:
    """Make a model with random weights, whose embeddings are tied as in small models of these families.

    Args:
        architecture: qwen2, qwen3 or llama.
    """
    import torch
    import transformers

    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[architecture]
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).float()


def save_as_on_the_hub(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    end_ids: list[int] | None = None,
    shard_size: str = "5GB",
) -> Path:
    """Save a model with a generation_config.json that names `end_ids` and has sampling settings."""
    model.save_pretrained(directory, max_shard_size=shard_size)
    tokenizer.save_pretrained(directory)
    generation = {"temperature": 0.7, "top_k": 20, "do_sample": True}
    if end_ids is not None:
        generation["eos_token_id"] = end_ids  # type: ignore[assignment]
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
