"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No test is about time: on a busy machine hypothesis' own 200 ms fail examples that are right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
