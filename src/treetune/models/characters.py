"""The tokenizer of the tiny models: one token per character of the task's alphabet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"

_BRACKETS = (("<", ">"), ("⟨", "⟩"))
"""Around the names of special tokens; the second pair for alphabets that can spell the first."""


def character_tokenizer(alphabet: str, context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer in Hugging Face format: ids 0 and 1 pad and end, then the alphabet in its order.

    It saves as ``tokenizer.json``, which AutoTokenizer and vLLM load without code of this project.
    Text over the alphabet is encoded without loss; any other character raises when encoded.

    The special tokens are `PAD` and `EOS`, in other brackets where the alphabet can spell them: they
    would be read as such within a text. Raises ValueError for an empty alphabet, and one with repeated
    characters or with both pairs of brackets.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ValueError("the alphabet is empty: the task has to name every character that it uses")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise ValueError(f"the alphabet {alphabet!r} has {', '.join(map(repr, repeated))} more than once")
    for opening, closing in _BRACKETS:
        pad, eos = (f"{opening}{name[1:-1]}{closing}" for name in (PAD, EOS))
        if not (set(pad) <= set(alphabet) or set(eos) <= set(alphabet)):
            break
    else:
        raise ValueError(f"the alphabet {alphabet!r} can spell {PAD!r} and {pad!r}, which must stay special")
    vocabulary = {token: index for index, token in enumerate([pad, eos, *alphabet])}
    # No unknown token: a character that is silently replaced would be trained on.
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
