"""Seeds are derived, not drawn: from the run's seed and the place where randomness is used.

The same command gives the same run, however the work was cut over ranks, servers or restarts.
"""

from __future__ import annotations

import hashlib
import random

SEED_BITS = 48
"""Wide enough that collisions don't happen in a run, narrow enough that the engine's `seed + i`
for the i-th sample of a request stays far below 2**63."""


def derive_seed(run_seed: int, *place: int | str) -> int:
    """A seed for one place, e.g. ``derive_seed(seed, iteration, problem.id, "rollout")``.

    Parts are length-delimited before hashing, so that ("a", "bc") and ("ab", "c") differ, and
    typed, so that 1 and "1" differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *place):
        text = repr(part).encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)


def derived_random(run_seed: int, *place: int | str) -> random.Random:
    """A private generator for one place; the global one is never touched."""
    return random.Random(derive_seed(run_seed, *place))
