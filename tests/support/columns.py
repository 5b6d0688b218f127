"""Turn columns of tokens into tuples, which tests can compare."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(column: Any) -> tuple[Any, ...]:
    """Return the numbers of a column as a tuple, which can be compared and be a key."""
    return tuple(np.asarray(column).tolist())
