"""Reads facts about a model from its configuration: its number of positions, its ordinary tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
"""Keys of config.json for the number of positions, the most common one first."""

PROBE_TOKENS = 4096
"""`probe_rows` makes rows of tokens below this id: the start of the vocabulary."""

_EXTENDED_ALREADY = ("gemma3", "gemma3_text")
"""Values of `model_type` whose `max_position_embeddings` already includes the linear scaling."""


class LengthRule(NamedTuple):
    """Rotary embeddings of a kind that changes for all rows of a batch if one has more than `limit` tokens.

    Example: ``LengthRule("LongRoPE", 4096)``.
    """

    kind: str
    limit: int


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Returns the longest context of a model from its config.json. Returns None if the file doesn't say it.

    With YaRN, the longest context is the original number of positions times the factor. With linear scaling,
    it is the file's number of positions times the factor. With other kinds of rotary embeddings, the file has
    the scaled number already. If kinds of layers differ, the longest of their contexts is returned, since
    layers with a sliding window need no long one.
    """
    text = _text_config(config)
    positions = next((text[name] for name in CONTEXT_KEYS if isinstance(text.get(name), int)), None)
    if positions is None or positions <= 0:
        return None
    longest = positions
    for rope in rope_settings(text):
        factor = rope.get("factor")
        if not isinstance(factor, int | float) or factor < 1:
            continue  # these embeddings aren't scaled
        if rope_kind(rope) == "yarn":
            original = rope.get("original_max_position_embeddings") or positions
            # Some configurations give the scaled number already, so the larger one holds.
            longest = max(longest, int(factor * original))
        elif rope_kind(rope) == "linear" and text.get("model_type") not in _EXTENDED_ALREADY:
            # Not for the models in `_EXTENDED_ALREADY`, whose number includes the factor already.
            longest = max(longest, int(factor * positions))
    return longest


def length_rule(config: Mapping[str, Any]) -> LengthRule | None:
    """Returns the rule by which a batch's longest row changes the other rows; None if there is no such rule.

    LongRoPE (Phi-3 and Phi-4) and dynamic NTK choose their frequencies by the longest row. vLLM chooses them
    by the longest row that it would accept. So beyond the original length, trainer and engine would compute
    different models.
    """
    text = _text_config(config)
    for rope in rope_settings(text):
        kind = rope_kind(rope)
        if kind not in ("longrope", "su", "dynamic"):  # "su" is an earlier name of LongRoPE
            continue
        # The number of positions before scaling: configurations have it in one of the first two places, and
        # those of dynamic NTK often only as `max_position_embeddings`.
        limit = (
            rope.get("original_max_position_embeddings")
            or text.get("original_max_position_embeddings")
            or text.get("max_position_embeddings")
        )
        if isinstance(limit, int):
            return LengthRule("dynamic NTK" if kind == "dynamic" else "LongRoPE", limit)
    return None


def rope_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the settings of the rotary embeddings: one mapping for all layers, or one for each kind of layer
    (such as sliding and full attention)."""
    # `rope_parameters` is the key since transformers 5, `rope_scaling` the one before.
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        return
    if rope_kind(settings) is not None:  # the settings are those of all layers
        yield settings
        return
    for settings_of_layers in settings.values():
        if isinstance(settings_of_layers, Mapping):
            yield settings_of_layers


def rope_kind(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("rope_type") or settings.get("type")  # the key of older configurations
    return kind if isinstance(kind, str) else None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the language model. Multimodal models have them in a section of their own."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def probe_rows(config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Makes rows of ordinary tokens, the same at every call.

    The log-probs of these rows are computed in two ways, such as alone and packed, and then compared.

    Args:
        config: The model's configuration in transformers.
        lengths: The number of tokens of each row.

    Returns:
        The token ids of each row, without special tokens such as padding and images.
    """
    text = config.get_text_config()
    # The keys have names such as `eos_token_id`. Multimodal models have those of images outside of the
    # section `text_config`.
    special_ids: set[int] = set()
    for settings in (config.to_dict(), text.to_dict()):
        for key, value in settings.items():
            if not key.endswith(("token_id", "token_index")):
                continue
            ids = value if isinstance(value, list | tuple) else [value]  # `eos_token_id` may be a list
            special_ids.update(token for token in ids if isinstance(token, int))
    ordinary_ids = [token for token in range(min(text.vocab_size, PROBE_TOKENS)) if token not in special_ids]
    rows = []
    for number, length in enumerate(lengths):
        # Neighbouring tokens are 37 places apart in the vocabulary, and rows begin at different tokens, so
        # that neighbouring tokens and rows differ.
        start = 1 + 11 * number
        rows.append([ordinary_ids[(start + 37 * position) % len(ordinary_ids)] for position in range(length)])
    return rows
