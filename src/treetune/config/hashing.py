"""The content of a configuration as a short name."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def config_hash(data: Any) -> str:
    """32 hexadecimal digits, equal for equal JSON content whatever its key order.

    Whole floats count as the integers that they equal, as Jsonnet has one kind of number. Raises
    ValueError for what JSON can't hold (nan, infinity).
    """
    text = json.dumps(_canonical(data), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
