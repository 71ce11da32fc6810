"""Is a dataset that a command finds finished still whole?

A command that writes a dataset returns at once if the dataset is sealed already. The seal says that
the files were whole once. Since then a shard may have been deleted, or a copy may have stopped half
way, and "complete already" would be wrong.
"""

import logging
from pathlib import Path

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.reader import HiddenStatesDataset

logger = logging.getLogger(__name__)

VIEW_WORK, NEXT = ".view", "next"
"""Where a command works on a dataset of datasets, and what an `append` moves into place last."""


def check_whole(place: str | Path) -> None:
    """Compare the shards of a sealed dataset (a directory or a URL) with its manifest, by size.

    The index of a local dataset is compared by its checksum, too. `verify` reads every byte. A
    dataset to which an `append` was interrupted is left to that command, with a warning.

    Raises:
        MissingError, DatasetError: a file is missing, truncated or changed.
    """
    if (Path(place) / VIEW_WORK / NEXT).is_dir():
        logger.warning("warning: %s: `append` was interrupted; run it again to finish it", place)
        return
    try:
        dataset = HiddenStatesDataset(place, columns=())
        if dataset.mirror is None:
            _ = dataset.lengths  # the first use of the index checks it
    except (DatasetError, MissingError) as error:
        raise type(error)(
            f"{error}\n{place} was finished before, and is damaged now. Restore these files from "
            "a copy; or delete it, or choose another --out, and run the same command again"
        ) from None
