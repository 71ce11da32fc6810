"""Random seeds of a run. A seed depends on the micro-batch's place, not on earlier draws.

So no generator state is saved, and a micro-batch draws the same numbers on any rank.
"""

import hashlib

import torch


def place_seed(seed: int, kind: str, epoch: int, number: int) -> int:
    """Return the seed of a micro-batch of the split `kind` with `number` packs before it in the
    epoch."""
    text = repr((seed, kind, epoch, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_place(seed: int, kind: str, epoch: int, number: int) -> None:
    """Seed torch for a micro-batch; arguments as for `place_seed`."""
    torch.manual_seed(place_seed(seed, kind, epoch, number))
