"""Columns of tokens as tests compare them."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(column: Any) -> tuple[Any, ...]:
    """Its numbers, which can be compared and looked up."""
    return tuple(np.asarray(column).tolist())
