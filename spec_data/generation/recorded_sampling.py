"""What the sampling record of a corpus means for `generate --on-policy`.

A corpus that `regenerate` wrote says which model sampled its answers, and how
(`corpus/sampling_record.py`). `--on-policy` is checked against it before the corpus is read, and
takes its temperature from it. The measurement of every token follows all the same.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_data.corpus.sampling_record import read_record
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import sha256_file

logger = logging.getLogger(__name__)

_FACTS = {  # of the identity of a target, by where a record has them
    "weights": (("target", "weights_hash"), "weights_hash"),
    "tokenizer": (("tokenizer", "hash"), "tokenizer_hash"),
    "chat template": (("tokenizer", "chat_template_hash"), "chat_template_hash"),
    "chat template kwargs": (("tokenizer", "chat_template_kwargs"), "chat_template_kwargs"),
}


def with_recorded_sampling(config: GenerateConfig, identity: Mapping[str, Any]) -> GenerateConfig:
    """Return the config with the --sampling-temperature that the records of its corpora have.

    Without --on-policy nothing is changed; a corpus that could have it is named.

    Args:
        config: the options of `generate`.
        identity: the target's, as `identify` makes it; facts that are None are not compared.

    Raises:
        ConfigError: --on-policy, and a record has another target, template or temperature.
        CorpusError: a record is damaged.
    """
    records = _records(config.corpus)
    if not records:
        return config
    if not config.on_policy:
        _name_the_flag(records, identity)
        return config
    for corpus, record in records.items():
        _check(corpus, record, identity, config)
    if config.sampling_temperature is None and len(records) == len(config.corpus):
        found = {float(r["settings"]["temperature"]) for r in records.values()}
        if len(found) == 1:
            logger.info("--sampling-temperature %g, from the records of the corpus", min(found))
            return replace(config, sampling_temperature=min(found))
    return config


def _records(corpora: Iterable[str]) -> dict[Path, dict[str, Any]]:
    """Return the sampling records of the corpora that are files and have one."""
    found = {}
    for name in corpora:
        path = Path(name)
        record = read_record(path) if path.is_file() else None
        if record is not None:
            found[path] = record
    return found


def _name_the_flag(records: Mapping[Path, Mapping[str, Any]], identity: Mapping[str, Any]) -> None:
    for corpus, record in records.items():
        if not _differing(record, identity):
            logger.info(
                "%s: this target wrote its answers (%s.sampling); --on-policy states and measures "
                "it",
                *(corpus, corpus.name),
            )


def _differing(record: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return, in words, the facts of the target that differ from a record, where both have them."""
    lines = []
    for words, ((table, name), fact) in _FACTS.items():
        recorded = (record["settings"].get(table) or {}).get(name)
        found = identity.get(fact)
        if recorded is not None and found is not None and recorded != found:
            lines.append(f"{words}: {recorded} there, {found} here")
    return lines


def _check(
    corpus: Path, record: Mapping[str, Any], identity: Mapping[str, Any], config: GenerateConfig
) -> None:
    """Refuse --on-policy where a record contradicts it; warn if the corpus was changed since."""
    lines = _differing(record, identity)
    if lines:
        raise ConfigError(
            f"--on-policy: {corpus} was not written by this target with this template "
            f"({corpus.name}.sampling):\n  " + "\n  ".join(lines) + "\nPass the target, and the "
            "--chat-template-kwargs, that `spec-data regenerate` had, or leave --on-policy out"
        )
    temperature, stated = record["settings"]["temperature"], config.sampling_temperature
    if stated is not None and stated != temperature:
        raise ConfigError(
            f"--sampling-temperature {stated:g}: the answers of {corpus} were sampled at "
            f"{temperature:g} ({corpus.name}.sampling); leave the option out"
        )
    if sha256_file(corpus) != record["sha256"]:
        logger.warning(
            "warning: %s was changed after `regenerate` wrote it; its sampling record may not hold "
            "for every answer",
            corpus,
        )
