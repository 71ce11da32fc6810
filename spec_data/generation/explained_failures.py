"""Full disks and full devices as errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from spec_data.shards.errors import RunError
from spec_data.shards.files import writing


@contextmanager
def explained_failures(out: Path) -> Iterator[None]:
    """Turn a full disk or full device memory into a RunError with advice."""
    try:
        with writing(out):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of device memory ({str(error).splitlines()[0]}). Run the same command again with "
            "fewer --batch-tokens, a smaller --dtype, or the target on several GPUs (--device-map "
            "auto); finished shards are kept"
        ) from None
