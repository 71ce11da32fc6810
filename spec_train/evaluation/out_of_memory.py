"""What helps where `eval` is out of memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from spec_data.models.devices import (
    SMALLER_PIECES,
    compute_dtype,
    is_memory_error,
    memory_error_text,
)
from spec_data.shards.errors import RunError


@contextmanager
def explained_memory(
    doing: str, lower: Mapping[str, int], dtype: str, device: torch.device
) -> Iterator[None]:
    """Turn full memory into a RunError that names what was `doing`, and what helps.

    `lower` has the options that take less when they are lowered, with their values; 0: not used.
    `dtype` is that of --dtype.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        helps = [f"{name} below {value}" for name, value in lower.items() if value]
        helps += ["--dtype bfloat16"] if compute_dtype(dtype, device).itemsize > 2 else []
        helps += ["--device cpu, where there is more memory"] if device.type != "cpu" else []
        advice = ", or ".join(helps) or "shorter documents"
        raise RunError(
            f"{memory_error_text(error, doing)}. Run the same command again with {advice}. "
            f"{SMALLER_PIECES} in the environment helps where free memory lies in pieces"
        ) from None
