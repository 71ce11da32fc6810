"""Read what a run recorded about its data: the evaluation of its draft depends on it."""

import contextlib
import logging
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.json_texts import read_json_text
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import differing_settings
from spec_train.options.data_option import parse_sources
from spec_train.options.loss_function import identity as loss_identity
from spec_train.training.run_directory import read_run_json, resolve_draft_dir

log = logging.getLogger(__name__)


def read_run(given: Path, folder: Path, later: tuple[Path, ...] = ()) -> dict[str, Any] | None:
    """Read the facts of the run that made the draft; None for a draft without a run.

    Keys: the run's `seq_len`; the paths of its `sources`; the fingerprints of its `datasets`, and
    of those that they were `made_of`, and the `ids` of their documents, an array for each of them
    that is still readable, and these as `parts`; whether it used `follow`; its `mask` policy (None:
    as stored); `split_rule`, `split_seed`, `split_border` and `split_common` of what it held out
    (see `data.splits.HeldOut`); the `identity` of its data (None if it is no longer readable); and
    of --init-from the facts of the `earlier` runs, the last one first, and the draft of `unknown`
    data that the first of them began as (None: of none).

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
        facts = {name: identity[name] for name in ("split_rule", "split_seed", "split_border")}
        facts["split_common"] = identity.get("split_common")
        facts["seq_len"] = options["seq_len"]
        facts["sources"] = [source.path for source in parse_sources(options["data"])]
        datasets = identity["dataset"]
        facts["datasets"] = [datasets] if isinstance(datasets, str) else datasets
        facts["follow"], facts["mask"] = identity.get("follow", False), identity.get("mask")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RunError) as error:
        raise ConfigError(
            f"{run}: fit.json or run.json is damaged ({type(error).__name__}: {error}); restore "
            "it, or copy only the draft directory to evaluate it without its run"
        ) from None
    facts["identity"], facts["made_of"], facts["ids"], facts["parts"] = None, set(), [], []
    for source in facts["sources"]:
        try:
            dataset = HiddenStatesDataset(source, ())
        except SpecDataError as error:
            log.info("training data not found: %s", error)
            continue
        facts["identity"] = facts["identity"] or dataset.manifest.identity
        facts["made_of"] |= dataset.manifest.ancestors()
        facts["ids"].append(dataset.id_array)
        facts["parts"].append(dataset)
    facts["earlier"], facts["unknown"] = [], None
    if (start := options.get("init_from")) is not None:
        earlier = None
        with contextlib.suppress(SpecDataError):  # moved or damaged since
            earlier = read_run(Path(start), resolve_draft_dir(start), (*later, run.resolve()))
        facts["unknown"] = start if earlier is None else earlier["unknown"]
        facts["earlier"] = [] if earlier is None else [earlier, *earlier["earlier"]]
    return facts
