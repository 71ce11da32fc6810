"""Read what a run recorded about its data: the evaluation of its draft depends on it."""

import json
import logging
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.files import MANIFEST
from spec_data.shards.remote import open_mirror
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import Manifest
from spec_data.shards.urls import normal_url, scheme_of
from spec_train.options.data_option import parse_sources
from spec_train.training.stored import read_run_json

log = logging.getLogger(__name__)

_RUN_FIELDS = ("seed", "validation", "seq_len")


def read_run(given: Path, folder: Path) -> dict[str, Any] | None:
    """Read the facts of the run that made the draft; None for a draft without a run.

    Keys: the run's `seed`, `validation` and `seq_len`; the path of its `data` (the first of
    several), and of all its `sources`; the fingerprints of its `datasets`; whether it used
    `follow`; its `mask` policy (None: as stored); the `split_rule`,
    `split_seed` and `split_border` of its held-out documents; and the `identity` of its data (None
    if the data is no longer readable).

    Raises:
        ConfigError: fit.json or run.json is damaged.
    """
    for place in (given, given.parent, folder.parent):
        if (place / "fit.json").is_file() and (place / "run.json").is_file():
            break
    else:
        return None
    try:
        options = json.loads((place / "fit.json").read_text(encoding="utf-8"))
        run = read_run_json(place)
        identity, notes = run["identity"], run["notes"]
        both = options.keys() & identity.keys()
        if differing := differing_settings(
            {name: identity[name] for name in both}, {name: options[name] for name in both}
        ):
            raise ValueError(f"they differ: {'; '.join(differing)}")
        found = {name: options[name] for name in _RUN_FIELDS}
        found["sources"] = [source.path for source in parse_sources(options["data"])]
        found["data"] = found["sources"][0]
        fingerprints = identity["dataset"]
        found["datasets"] = [fingerprints] if isinstance(fingerprints, str) else fingerprints
        found["follow"] = identity.get("follow", False)
        found["mask"] = identity.get("mask")
        found["split_rule"] = identity["split_rule"]
        found["split_seed"] = identity["split_seed"]
        found["split_border"] = notes["split_border"]
    except (ValueError, KeyError, TypeError, AttributeError, RunError) as error:
        raise ConfigError(
            f"{place}: fit.json or run.json is damaged ({type(error).__name__}: {error}); restore "
            "it, or copy only the draft directory to evaluate it without its run"
        ) from None
    found["identity"] = None
    try:
        found["identity"] = _manifest(found["data"]).identity
    except (MissingError, DatasetError, ConfigError, RunError) as error:
        log.info("training data not found: %s", error)
    return found


def _manifest(data: Path) -> Manifest:
    """Read the manifest of a dataset: a directory, or the path of a URL as a run records it.

    Raises:
        MissingError, DatasetError: there is none. ConfigError, RunError: the storage refuses.
    """
    mirror = open_mirror(normal_url(data)) if scheme_of(data) else None
    return Manifest.read((mirror.directory if mirror else data) / MANIFEST)
