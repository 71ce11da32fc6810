"""Is a dataset that a command finds finished still whole?

A command that writes a dataset returns at once if the dataset is sealed already. The seal says that
the files were whole once. Since then a shard may have been deleted, or a copy may have stopped half
way, and "complete already" would be wrong.
"""

from pathlib import Path

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.reader import HiddenStatesDataset


def check_whole(place: str | Path) -> None:
    """Compare the shards of a sealed dataset (a directory or a URL) with its manifest, by size.

    The index of a local dataset is compared by its checksum, too. `verify` reads every byte.

    Raises:
        MissingError, DatasetError: a file is missing, truncated or changed.
    """
    try:
        dataset = HiddenStatesDataset(place, columns=())
        if dataset.mirror is None:
            _ = dataset.lengths  # the first use of the index checks it
    except (DatasetError, MissingError) as error:
        raise type(error)(
            f"{error}\n{place} was finished before, and is damaged now. Restore these files from "
            "a copy; or delete it, or choose another --out, and run the same command again"
        ) from None
