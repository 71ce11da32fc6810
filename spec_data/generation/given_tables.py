"""`generate --tables-of`: the codec tables of another dataset, instead of tables of one's own.

A dataset has one decoding table per lossy column, so two captures can be merged only if they share
their tables. The other dataset must have the states of the same target; this is compared before the
corpus is read, with the rules of `verify --target`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.identity import compare, identity_of
from spec_data.shards.lossy import Tables
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Column, Manifest
from spec_data.terminal.config import differing_fields

logger = logging.getLogger(__name__)

_CLEARLY = 1.5  # times the error that the other dataset declares: this data is of another kind
_FIGURES = {"mse_median": "median channel", "mse_max": "worst channel", "kl": "teacher KL"}
_NOT_DATA = "chat_template_kwargs"  # counted per document, so `merge` accepts others
_OF_STATES = ("dtype", "quantised_as")  # of the manifest's `target`: known when it is loaded


@dataclass(frozen=True, kw_only=True)
class GivenTables:
    """The tables of another dataset, and what it declares about them.

    Attributes:
        where: the dataset, as the user wrote it.
        fingerprint: of the dataset; sha256: of its codec.safetensors.
        target: the manifest's `target`.
        tables: of the columns that are captured, by name.
        errors: the declared `error` of each of them.
    """

    where: str
    fingerprint: str
    sha256: str
    target: Mapping[str, Any] = field(repr=False)
    tables: Mapping[str, Tables] = field(repr=False)
    errors: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @property
    def about(self) -> dict[str, str]:
        """What the manifest's `codec` records."""
        return {"fingerprint": self.fingerprint, "sha256": self.sha256}

    def check_loaded(self, described: Mapping[str, Any]) -> None:
        """Compare how the target was loaded with how the other dataset's was.

        `described` is the manifest's `target` of this run.

        Raises:
            ConfigError: another dtype, or weights that were quantised in another way.
        """
        ours, theirs = ({k: table.get(k) for k in _OF_STATES} for table in (described, self.target))
        changed = differing_fields(theirs, ours)
        if changed:
            raise ConfigError(
                f"--tables-of {self.where}: its target was loaded in another way:\n  "
                + "\n  ".join(changed)
                + "\nPass the same --dtype, or leave --tables-of out"
            )

    def warn_of_errors(self, errors: Mapping[str, Mapping[str, Any]]) -> None:
        """Log a warning for each column whose error on this data is clearly above the declared one.

        `errors` has the `error` of each column as it was measured on this data.
        """
        for name, error in errors.items():
            declared = self.errors.get(name, {})
            worse = [
                f"{words} {error[figure]:.1e} (there {declared[figure]:.1e})"
                for figure, words in _FIGURES.items()
                if 0 < _CLEARLY * declared.get(figure, 0) < error.get(figure, 0)
            ]
            if worse:
                logger.warning(
                    "warning: --tables-of %s: column %s loses clearly more on this data: %s. Its "
                    "states are of another kind than those that the tables were made from. If the "
                    "two need not be merged, leave --tables-of out",
                    *(self.where, name, ", ".join(worse)),
                )


def read_given_tables(
    path: str, columns: Sequence[Column], identity: Mapping[str, Any]
) -> GivenTables:
    """Read the tables of the lossy ones of `columns` from the dataset `path`.

    Args:
        path: a directory or a URL.
        columns: what is captured.
        identity: of the target and its prompts, as it is found now; of an `estimate`, without the
            hash of its weights.

    Raises:
        ConfigError: no column is lossy.
        MissingError, DatasetError: the dataset cannot be read, is of another target, or lacks a
            table.
    """
    lossy = [column for column in columns if column.lossy]
    if not lossy:
        raise ConfigError(
            f"--tables-of {path}: --codec bf16 has no tables; leave the option out, or pass the "
            "--codec of that dataset"
        )
    other = HiddenStatesDataset(path)
    _check_target(path, other.manifest, identity)
    _check_columns(path, other.manifest, lossy)
    entries = {entry["name"]: entry for entry in other.manifest.raw["columns"]}
    names = [column.name for column in lossy]
    return GivenTables(
        where=path,
        fingerprint=other.manifest.fingerprint,
        sha256=other.manifest.codec.get("sha256", ""),
        target=other.manifest.target,
        tables={name: other.tables[name] for name in names},
        errors={name: entries[name].get("error", {}) for name in names},
    )


def _check_target(path: str, manifest: Manifest, identity: Mapping[str, Any]) -> None:
    """Check that a dataset has the states of the target with this identity.

    Raises:
        DatasetError: it has not; the message lists how they differ.
    """
    found = compare(
        identity_of(manifest),
        {
            name: fact
            for name, fact in identity.items()
            if fact is not None or name != "weights_hash"
        },
        of_recorded=f"{path} was captured with",
        of_found="this target has",
        states=True,
    )
    if found.refused:
        raise DatasetError(
            f"--tables-of {path}: it is of another target:\n  "
            + "\n  ".join(found.refused)
            + "\nTables fit the states that they were made from; leave the option out"
        )
    for difference in found.differences:
        if difference.name != _NOT_DATA:
            logger.warning(
                "warning: --tables-of %s: %s. `merge` refuses to join the two",
                *(path, difference.text),
            )
    if found.not_compared:
        logger.warning(
            "warning: --tables-of %s: not compared, because only one side tells it: %s",
            *(path, found.not_compared),
        )


def _check_columns(path: str, manifest: Manifest, lossy: Sequence[Column]) -> None:
    """Check that a dataset stores these columns with these codecs.

    Raises:
        DatasetError: it does not.
    """
    own = {column.name: column.codec for column in manifest.columns}
    for column in lossy:
        if column.name not in own:
            raise DatasetError(
                f"--tables-of {path}: it has no column {column.name}, only layers "
                f"{', '.join(map(str, manifest.layers))}; capture some of these, with --layers"
            )
        if own[column.name] != column.codec:
            raise DatasetError(
                f"--tables-of {path}: its column {column.name} has the codec {own[column.name]}, "
                f"not {column.codec}; pass that with --codec"
            )
