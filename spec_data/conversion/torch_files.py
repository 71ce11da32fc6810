"""Read what `torch.save` wrote, without running any code of it.

Only `torch.load(weights_only=True)` is used, which builds tensors and plain values and refuses
everything else. A file that it refuses is a bad row.
"""

import gzip
import io
from pathlib import Path
from typing import Any

import torch

from spec_data.corpus.bad_rows import BadRow


def load_table(file: Path) -> dict[str, Any]:
    """Return the table of tensors that a .pt, .ckpt or .ckpt.gz file holds, memory-mapped.

    A compressed file is decompressed in memory.

    Raises:
        BadRow: the file is missing, damaged, holds code, or holds no table.
    """
    try:
        if file.suffix == ".gz":
            with gzip.open(file, "rb") as packed:
                data = io.BytesIO(packed.read())
            found = torch.load(data, map_location="cpu", weights_only=True)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # of many types: the one for refused contents is no torch class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadRow(
            "the file is damaged, or it holds more than tensors and plain values, which could run "
            f"code when it is loaded ({reason})"
        ) from None
    if not isinstance(found, dict):
        raise BadRow(f"the file holds a {type(found).__name__}, not a table of tensors")
    return found
