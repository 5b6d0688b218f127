"""Derives seeds from the run's seed and the place where randomness is used, such as iteration and problem.

So the same command gives the same run, however the work is split among ranks, servers or restarts.
"""

from __future__ import annotations

import hashlib
import random

SEED_BITS = 48
"""Wide enough that collisions don't happen in a run, narrow enough that the engine's `seed + i`
for the i-th sample of a request stays far below 2**63."""


def derive_seed(run_seed: int, *purpose: int | str) -> int:
    """Returns the seed for one use of randomness in a run, such as the sampling of one problem's answers:
    ``derive_seed(seed, iteration, problem.id, "rollout")``.

    The purposes ("a", "bc") and ("ab", "c") have different seeds, since each element is hashed with its
    length. So have (1,) and ("1",), since an element is hashed as Python writes it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for element in (run_seed, *purpose):
        text = repr(element).encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)


def derived_random(run_seed: int, *purpose: int | str) -> random.Random:
    """Returns a random number generator with the seed that `derive_seed` returns. The global generator is
    never used."""
    return random.Random(derive_seed(run_seed, *purpose))
