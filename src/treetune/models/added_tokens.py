"""Tokens that a model is given beyond its own, such as the tags around threads.

A tag that a tokenizer cuts into pieces can't end a sample, be counted or be told from the word in it, so
each becomes a token of its own. None of them is special: text shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MULTIPLE = 64
"""A table of embeddings that has to grow, grows to a multiple of this: matrix products like it."""


def check_tokens(tokens: Sequence[str]) -> None:
    """Raises ValueError for tokens that can't be added: empty, with white space, or named twice."""
    for token in tokens:
        if not token or any(character.isspace() for character in token):
            raise ValueError(f"added_tokens has {token!r}: a token needs characters, and no white space")
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        raise ValueError(f"added_tokens has {', '.join(map(repr, twice))} more than once")


def missing_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> tuple[str, ...]:
    """Those of `tokens` that the tokenizer doesn't have yet, in their order."""
    known = tokenizer.get_vocab()
    return tuple(token for token in tokens if token not in known)


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """From here on `tokenizer` makes one token of each, wherever it stands in a text, and decodes it to
    its text. Those that it doesn't have yet get the next ids; the others keep theirs.

    Raises ValueError where one is a special token already: text wouldn't show it.
    """
    from tokenizers import AddedToken

    special = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and str(token) in tokens
    ]
    if special:
        raise ValueError(
            f"model.added_tokens has {', '.join(map(repr, special))}, which the tokenizer has as a special"
            " token, and text doesn't show those: leave it out, or take another name"
        )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])


def word_ids(tokenizer: PreTrainedTokenizerBase, token: str) -> tuple[int, ...]:
    """The tokens of the word in a tag: of ``Parallel`` for ``<Parallel>``, ``/Parallel`` for
    ``</Parallel>``. `tokenizer` doesn't have the tag yet. Raises ValueError where it can't write it."""
    word = token.removeprefix("<").removesuffix(">")
    try:
        ids = tuple(tokenizer.encode(word, add_special_tokens=False))
    except Exception as error:  # the tokenizers library raises no narrower one
        raise ValueError(_without_word(token, word, str(error))) from error
    if not ids or tokenizer.unk_token_id in ids:
        raise ValueError(_without_word(token, word, "it has no tokens for it"))
    return ids


def embed_tokens(model: PreTrainedModel, words: Mapping[int, tuple[int, ...]]) -> None:
    """Gives the tokens that `words` is keyed by their embeddings and rows of the output head, in place:
    each the mean over the tokens of its word. All other tokens keep theirs.

    Where the table has no room for them, it grows to a multiple of 64 rows. Those beyond the tokens are
    the mean of all old rows: by Jensen's inequality none of them is likelier than the average token.
    Tied weights stay tied. Raises ValueError where the model has no rows for tokens before the first.
    """
    import torch

    if not words:
        return
    rows = model.get_input_embeddings().num_embeddings
    if min(words) > rows:
        raise ValueError(
            f"the model embeds {rows} tokens, and its tokenizer has {min(words)} without those of"
            " model.added_tokens: they do not belong together"
        )
    grows = max(words) >= rows
    if grows:
        with torch.random.fork_rng(devices=[]):  # what is drawn for the new rows is replaced below
            model.resize_token_embeddings(max(words) + 1, pad_to_multiple_of=MULTIPLE, mean_resizing=False)
    with torch.no_grad():
        for table in _tables(model):
            if grows:
                table[rows:] = table[:rows].mean(0, dtype=torch.float32).to(table.dtype)
            for token, word in words.items():
                table[token] = table[list(word)].mean(0, dtype=torch.float32).to(table.dtype)


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """What has a row per token, each once: embeddings and, unless tied to them, the head with its bias."""
    tables = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None:
        tables += [
            table
            for table in (head.weight, getattr(head, "bias", None))
            if table is not None and table is not tables[0]
        ]
    return tables


def _without_word(token: str, word: str, why: str) -> str:
    return (
        f"model.added_tokens has {token!r}, which would begin as the mean of the tokens of {word!r}, and the"
        f" tokenizer cannot encode that: {why}"
    )
