"""Read what a run recorded about its data: the evaluation of its draft depends on it."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.json_texts import read_json_text
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import differing_settings
from spec_train.data.splits import HeldOut
from spec_train.options.data_option import parse_sources
from spec_train.options.loss_function import identity as loss_identity
from spec_train.training.run_directory import read_run_json, resolve_draft_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The facts of the run that made a draft."""

    seq_len: int
    datasets: list[str]
    """Fingerprints of its data."""
    split_rule: str
    split_border: int
    split_seed: int
    split_common: str | None = None
    """Of what it held out: see `held_out`."""
    sources: Sequence[Any] = ()
    """Paths of its data."""
    follow: bool = False
    mask: str | None = None
    """The mask policy; None: as stored."""
    identity: dict[str, Any] | None = None
    """Of its data; None: it is no longer readable."""
    made_of: frozenset[str] = frozenset()
    """Fingerprints of the datasets that the readable data was made of."""
    parts: Sequence[HiddenStatesDataset] = ()
    """Those of the data that are readable."""
    ids: Sequence[Any] = ()
    """Ids of the documents of each of these, an array each."""
    earlier: Sequence["RunRecord"] = ()
    """The runs of --init-from, the last one first."""
    unknown: str | None = None
    """The draft of unknown data that the first of them began as; None: of none."""

    @property
    def held_out(self) -> HeldOut:
        """The rule by which documents were held out."""
        return HeldOut.of(vars(self))


def read_run(given: Path, folder: Path, later: tuple[Path, ...] = ()) -> RunRecord | None:
    """Read the facts of the run that made the draft; None for a draft without a run.

    Args:
        given, folder: what the user named, and the draft's own directory.
        later: runs that went on from this draft.

    Raises:
        ConfigError: fit.json or run.json is damaged.
    """
    for run in (given, given.parent, folder.parent):
        if (run / "fit.json").is_file() and (run / "run.json").is_file():
            break
    else:
        return None
    if run.resolve() in later:  # written again since
        return None
    try:
        options = read_json_text(run / "fit.json")
        identity = read_run_json(run)["identity"]
        if (own_loss := options.get("loss_fn")) is not None:  # there with the place of its file
            options["loss_fn"] = loss_identity(own_loss)
        both = options.keys() & identity.keys()
        if differing := differing_settings(
            {name: identity[name] for name in both}, {name: options[name] for name in both}
        ):
            raise ValueError(f"they differ: {'; '.join(differing)}")
        datasets = identity["dataset"]
        record = RunRecord(
            seq_len=options["seq_len"],
            datasets=[datasets] if isinstance(datasets, str) else datasets,
            split_rule=identity["split_rule"],
            split_border=identity["split_border"],
            split_seed=identity["split_seed"],
            split_common=identity.get("split_common"),
            sources=[source.path for source in parse_sources(options["data"])],
            follow=identity.get("follow", False),
            mask=identity.get("mask"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RunError) as error:
        raise ConfigError(
            f"{run}: fit.json or run.json is damaged ({type(error).__name__}: {error}); restore "
            "it, or copy only the draft directory to evaluate it without its run"
        ) from None
    parts: list[HiddenStatesDataset] = []
    for source in record.sources:
        try:
            parts.append(HiddenStatesDataset(source, ()))
        except SpecDataError as error:
            log.info("training data not found: %s", error)
    earlier, unknown = None, None
    if (start := options.get("init_from")) is not None:
        with contextlib.suppress(SpecDataError):  # moved or damaged since
            earlier = read_run(Path(start), resolve_draft_dir(start), (*later, run.resolve()))
        unknown = start if earlier is None else earlier.unknown
    return replace(
        record,
        identity=next((part.manifest.identity for part in parts if part.manifest.identity), None),
        made_of=frozenset().union(*(part.manifest.ancestors() for part in parts)),
        parts=parts,
        ids=[part.id_array for part in parts],
        earlier=() if earlier is None else (earlier, *earlier.earlier),
        unknown=unknown,
    )
