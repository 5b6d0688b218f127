"""One number of each token: ids, log-probs, advantages, masks, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

TokenIds: TypeAlias = "np.ndarray"
"""Token ids: int32 of shape [T]."""
Column: TypeAlias = "np.ndarray"
"""Another number of each token, of shape [T]: log-probs (float32 where the engine's are, else float64),
advantages (float64), masks (bool)."""


def token_array(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """As int32 of shape [T]; what is that already is not copied."""
    import numpy as np

    return np.asarray(token_ids, np.int32)


def joined(parts: Sequence[TokenIds]) -> TokenIds:
    """One after the other; a view where it is one alone."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def logprob_array(values: Sequence[float] | Column) -> Column:
    """As an array of shape [T]: float32 where that loses nothing, as with what vLLM sends."""
    import numpy as np

    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        return values
    wide = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    return narrow if np.array_equal(narrow, wide, equal_nan=True) else wide


class Columnar:
    """Dataclasses with columns: equal where all that is compared is, columns by their numbers."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _alike(getattr(self, one.name), getattr(other, one.name))
            for one in fields(self)  # type: ignore[arg-type]
            if one.compare
        )

    __hash__ = None  # type: ignore[assignment]

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _alike(one: Any, other: Any) -> bool:
    if hasattr(one, "dtype") or hasattr(other, "dtype"):
        import numpy as np

        # Not a number is alike only where it stands at the same places.
        both = one is not None and other is not None
        return both and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)
