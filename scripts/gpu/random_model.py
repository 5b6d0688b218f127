"""A model with random weights, made without a download: python scripts/gpu/random_model.py FOLDER [--small]

In Hugging Face format, of the shape of Qwen2.5-0.5B (its whole vocabulary, grouped queries, but a head of its
own) or smaller, with a tokenizer of the quickstart's characters. It says them by chance, and so ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from treetune.models.shapes import PUBLISHED  # noqa: E402
from treetune.models.tokenizer import character_tokenizer  # noqa: E402

CHARACTERS = "0123456789+= \n#"
POSITIONS = 1024
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 1000,
}


def write(folder: Path, small: bool) -> None:
    tokenizer = character_tokenizer(CHARACTERS, POSITIONS)
    config = Qwen2Config(
        **PUBLISHED["Qwen/Qwen2.5-0.5B"] | {"tie_word_embeddings": False} | (SMALL if small else {}),
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    width = config.hidden_size**0.5
    with torch.no_grad():
        # From a direction that all tokens share, the head gives the characters 20 more than what has no text;
        # among them the standard deviation is about 2.
        head = model.get_output_embeddings().weight
        model.get_input_embeddings().weight.normal_()[:, 0] = width
        head.zero_()[1 : len(tokenizer)].normal_(std=3 / width)  # 0 is padding
        head[1 : len(tokenizer), 0] = 28 / width
        head[tokenizer.eos_token_id, 0] = 23 / width  # some answers end, and some are cut off
    model.to(torch.float32 if small else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sys.stdout.write(f"{sum(weight.numel() for weight in model.parameters()):,} weights\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), "--small" in sys.argv[2:])
