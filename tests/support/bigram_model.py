"""A real model whose next token depends on the last one alone, by a table: what it says is known exactly.

One layer that adds nothing: attention and MLP write zeros, embeddings are one-hot, and the head holds the
table. Served by the real engine, it writes answers with threads of all kinds, the malformed ones too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.models.sources import TinyModel
from treetune.threads.format import TAGS
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALPHABET = "?0123456789:abx\n"
END = "<end>"
Table = Mapping[str, Mapping[str, float]]
"""From a token to the odds of those that may follow it."""

FLOOR = -30.0
"""The logit of what may not follow: it never does."""

THREADS: Table = {
    "?": {"x": 1, "<Parallel>": 9},
    "<Parallel>": {"<Outlines>": 15, "</Outlines>": 1},
    "<Outlines>": {"<Outline>": 19, "</Outlines>": 1},
    "<Outline>": {"1": 3, "2": 2, "3": 2},
    **{key: {":": 1} for key in "123"},
    ":": {"a": 5, "b": 5, "<Parallel>": 1},
    "a": {"</Outline>": 3, "a": 3, "b": 2, "\n": 2, END: 0.1},
    "b": {"</Outline>": 2, "a": 3, "b": 2, "\n": 3},
    "</Outline>": {"<Outline>": 2, "</Outlines>": 2},
    "</Outlines>": {"x": 1},
    "\n": {"</Thread>": 2, "</Parallel>": 2, "a": 0.5},
    "</Thread>": {"x": 1},
    "</Parallel>": {"x": 1, "<Parallel>": 1},
    "x": {"x": 1, END: 2},
}
MANY_THREADS: Table = {
    **THREADS,
    "?": {"<Parallel>": 1},
    "<Parallel>": {"<Outlines>": 1},
    "<Outlines>": {"<Outline>": 1},
    "<Outline>": dict.fromkeys("123456789", 1),
    **{digit: {**dict.fromkeys("0123456789", 0.2), ":": 1} for digit in "0123456789"},
    ":": {"</Outline>": 1},
    "</Outline>": {"<Outline>": 70, "</Outlines>": 1},
    "\n": {"</Parallel>": 1},
    "</Parallel>": {"x": 1},
}


@dataclass(frozen=True)
class BigramModel:
    """A table as a model in `folder`, with its codec."""

    table: Table
    folder: Path
    codec: TextCodec
    tokenizer: PreTrainedTokenizerBase

    def logprob(self, before: int, token: int) -> float:
        """ln P(token | before)."""
        names = self.tokenizer.convert_ids_to_tokens([before, token])
        odds = self.table[_name(names[0], self.tokenizer)]
        return math.log(odds.get(_name(names[1], self.tokenizer), 0.0) / sum(odds.values()))

    def logprobs(self, context_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Of what was sampled behind the context."""
        befores = [context_ids[-1], *response_ids[:-1]]
        return [self.logprob(*pair) for pair in zip(befores, response_ids, strict=True)]


def bigram_model(table: Table, folder: Path, context_length: int = 1024) -> BigramModel:
    import torch

    from treetune.models.policy_files import write_for_engine

    source = TinyModel(
        layers=1,
        hidden_size=64,
        heads=2,
        intermediate_size=64,
        context_length=context_length,
        added_tokens=TAGS,
    )
    model = source.load_model(0, lambda: ALPHABET)
    tokenizer = source.load_tokenizer(lambda: ALPHABET)
    ids = {_name(token, tokenizer): place for token, place in tokenizer.get_vocab().items()}
    width = model.config.hidden_size
    assert len(tokenizer) <= width, "embeddings are one-hot"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(width)[: len(tokenizer)])
        head = model.get_output_embeddings().weight
        head.zero_()
        for before, odds in table.items():
            # The last norm makes a one-hot vector sqrt(width) long.
            head[:, ids[before]] = FLOOR / width**0.5
            for token, of_token in odds.items():
                head[ids[token], ids[before]] = math.log(of_token) / width**0.5
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, folder)
    return BigramModel(table, folder, source.codec(tokenizer), tokenizer)


def _name(token: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return END if token == tokenizer.eos_token else token
