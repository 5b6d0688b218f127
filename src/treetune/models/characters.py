"""The tokenizer of the tiny models: one token per character of the task's alphabet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"


def character_tokenizer(alphabet: str, context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer in Hugging Face format: ids 0 and 1 pad and end, then the alphabet in its order.

    It saves as ``tokenizer.json``, which AutoTokenizer and vLLM load without code of this project.
    Text over the alphabet is encoded without loss; any other character raises when encoded.

    Raises ValueError for an empty alphabet, one with repeated characters, or one that can spell
    the special tokens (they would be read as such within a text).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ValueError("the alphabet is empty: the task has to name every character that it uses")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise ValueError(f"the alphabet {alphabet!r} has {', '.join(map(repr, repeated))} more than once")
    for special in (PAD, EOS):
        if set(special) <= set(alphabet):
            raise ValueError(f"the alphabet {alphabet!r} can spell {special!r}, which must stay special")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    # No unknown token: a character that is silently replaced would be trained on.
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
