"""The random numbers of a micro-batch: those of its place in the run."""

import hashlib


def batch_seed(seed: int, split: str, epoch: int, number: int) -> int:
    """Return the seed for the micro-batch with `number` packs before it in the epoch.

    The numbers depend on nothing else than the run's `seed` and the split: no generator state is
    saved, and a micro-batch draws the same ones on any rank.
    """
    text = repr((seed, split, epoch, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
