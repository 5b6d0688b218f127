"""How far training has come where it pauses."""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """How far an iteration's training has come: whole epochs, steps, and whether that is all."""

    epochs: int
    steps: int
    is_last: bool
