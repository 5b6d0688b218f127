"""Makes a folder with a model of random weights, without a download.

    python scripts/gpu/random_model.py FOLDER                                        # Qwen2.5-0.5B's sizes
    python scripts/gpu/random_model.py FOLDER --sizes microsoft/rho-math-1b-v0.1     # 1.1 billion weights
    python scripts/gpu/random_model.py FOLDER --small --chat                         # for a trial on a CPU

The folder is in Hugging Face format. The model is a Llama with the sizes of a published model, its vocabulary
included, but a head that is not tied. Its tokenizer knows the characters of the quickstart, or with `--chat`
those of English chats and a chat template. The model samples these characters, and sometimes ends an answer.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from treetune.models.shapes import PUBLISHED  # noqa: E402
from treetune.models.tokenizer import character_tokenizer  # noqa: E402

QUICKSTART_CHARACTERS = "0123456789+= \n#"
CHAT_CHARACTERS = string.ascii_letters + string.digits + " +-=#?!.,:'\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
POSITIONS = 1024
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 1000,
}


def write_model(folder: Path, sizes: dict[str, Any], dtype: torch.dtype, chat: bool) -> int:
    """Writes the model and its tokenizer, and returns the number of weights."""
    tokenizer = character_tokenizer(CHAT_CHARACTERS if chat else QUICKSTART_CHARACTERS, POSITIONS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    config = AutoConfig.for_model(
        # For other architectures, transformers may replace the saved tokenizer's parts by its own when it is
        # loaded, and then loses white space.
        **sizes | {"model_type": "llama", "tie_word_embeddings": False},
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    width = config.hidden_size**0.5
    with torch.no_grad():
        # From a direction that all tokens share, the head gives the characters 20 more than tokens without
        # text; among the characters, the standard deviation is about 2.
        head = model.get_output_embeddings().weight
        model.get_input_embeddings().weight.normal_()[:, 0] = width
        head.zero_()[1 : len(tokenizer)].normal_(std=3 / width)  # 0 is padding
        head[1 : len(tokenizer), 0] = 28 / width
        head[tokenizer.eos_token_id, 0] = 23 / width  # some answers end, and others are cut off
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", choices=sorted(PUBLISHED), default="Qwen/Qwen2.5-0.5B", metavar="MODEL")
    parser.add_argument("--small", action="store_true", help="100,000 weights in float32, for a CPU")
    parser.add_argument("--chat", action="store_true", help="a tokenizer with a chat template")
    options = parser.parse_args()
    sizes = PUBLISHED[options.sizes] | (SMALL if options.small else {})
    dtype = torch.float32 if options.small else torch.bfloat16
    count = write_model(options.folder, sizes, dtype, options.chat)
    sys.stdout.write(f"{count:,} weights\n")


if __name__ == "__main__":
    main()
