"""Random numbers of a run: a function of the place they are drawn at, not of what was drawn before.

So no state of a generator is kept, and a micro-batch draws the same wherever it is computed.
"""

import hashlib


def place_seed(seed: int, kind: str, epoch: int, number: int) -> int:
    """Seed of a micro-batch: `number` packs of the epoch of a split (`kind`) come before it."""
    text = repr((seed, kind, epoch, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
