"""Facts about a model that its configuration tells: the positions that it was made for, and which of its
tokens are ordinary ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
"""Names under which architectures keep the number of their positions, the usual one first."""

MOST_TOKENS = 4096
"""Tokens of a vocabulary from which rows are made."""

_EXTENDED_ALREADY = ("gemma3", "gemma3_text")
"""Values of `model_type` whose `max_position_embeddings` counts the linear scaling in."""


class LengthRule(NamedTuple):
    """Rotary embeddings that are others in a batch whose longest row has more than `limit` tokens."""

    kind: str
    limit: int


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Reads from a config.json for how many tokens the model was made; None where it doesn't say.

    YaRN stretches the original positions by its factor, and linear scaling those that the model has; the
    other kinds name the stretched number themselves.
    """
    text = _text_config(config)
    longest = next((text[name] for name in LONGEST if isinstance(text.get(name), int)), None)
    if longest is None or longest <= 0:
        return None
    for rope in rope_settings(text):
        factor = rope.get("factor")
        if not isinstance(factor, int | float) or factor < 1:
            continue
        if rope_kind(rope) == "yarn":
            original = rope.get("original_max_position_embeddings") or longest
            longest = max(longest, int(factor * original))
        elif rope_kind(rope) == "linear" and text.get("model_type") not in _EXTENDED_ALREADY:
            longest = int(factor * longest)
    return longest


def length_rule(config: Mapping[str, Any]) -> LengthRule | None:
    """Reads from a config.json whether the rows of a batch depend on how long its longest row is.

    LongRoPE (Phi-3 and Phi-4) and dynamic NTK choose frequencies by the longest row. An engine that samples
    chooses them otherwise (vLLM by the longest row that it would take), so that beyond the original length
    there is no one model that both could have.
    """
    text = _text_config(config)
    for rope in rope_settings(text):
        kind = rope_kind(rope)
        if kind not in ("longrope", "su", "dynamic"):
            continue
        limit = (
            rope.get("original_max_position_embeddings")
            or text.get("original_max_position_embeddings")
            or text.get("max_position_embeddings")
        )
        if isinstance(limit, int):
            return LengthRule("dynamic NTK" if kind == "dynamic" else "LongRoPE", limit)
    return None


def rope_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the settings of the rotary embeddings: one, or one for each kind of layer."""
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        return
    if rope_kind(settings) is not None:
        yield settings
        return
    yield from (of_layers for of_layers in settings.values() if isinstance(of_layers, Mapping))


def rope_kind(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("rope_type") or settings.get("type")
    return kind if isinstance(kind, str) else None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is about the language model, where the model also sees or hears."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def probe_rows(config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Makes rows of tokens for which a model is compared with itself, the same at every call. `config` is
    that of transformers. Tokens with a meaning of their own, such as padding and images, are left out."""
    text = config.get_text_config()
    special = {
        value
        for described in (config.to_dict(), text.to_dict())
        for key, value in described.items()
        if isinstance(value, int) and key.endswith(("token_id", "token_index"))
    }
    ordinary = [token for token in range(min(text.vocab_size, MOST_TOKENS)) if token not in special]
    rows = []
    for number, length in enumerate(lengths):
        # Steps of a prime number through the vocabulary: neighbours differ, and rows do.
        start = 1 + 11 * number
        rows.append([ordinary[(start + 37 * place) % len(ordinary)] for place in range(length)])
    return rows
