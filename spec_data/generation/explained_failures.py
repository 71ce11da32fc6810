"""Full disks and full devices as errors that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from spec_data.shards.errors import RunError


@contextmanager
def explained_failures(out: Path) -> Iterator[None]:
    """Turn a full disk or full device memory into a RunError with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of device memory ({str(error).splitlines()[0]}). Run the same command again with "
            "fewer --batch-tokens, a smaller --dtype, or the target on several GPUs (--device-map "
            "auto); finished shards are kept"
        ) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(
            f"{out}: the disk is full; finished files are safe. Free some space and run the same "
            "command again to resume"
        ) from None
