"""Is the dataset sound, and are its answers the target's own? The rules of verify and generate."""

from collections.abc import Iterator

from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards.errors import SpecDataError
from spec_data.shards.likelihood import total_agreement
from spec_data.shards.likelihood_text import figures_text, suspicions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from spec_train.diagnosis.outcome import Check, finding, ok, undecided

_WHOLE = 4 * 10**9
"""Bytes of a dataset up to which it is checked whole without being asked."""


def data_checks(
    dataset: HiddenStatesDataset, place: str, *, whole: bool, device: str
) -> Iterator[Check]:
    """Verify the dataset at `place`, and judge how its answers agree with the target."""
    yield _verified(dataset, place, whole, device)
    yield _agreement(dataset)


def _verified(dataset: HiddenStatesDataset, place: str, whole: bool, device: str) -> Check:
    size = dataset.manifest.raw["totals"]["bytes"]
    if size > _WHOLE and not whole:
        return undecided(
            "data", f"give --whole-data, or run `spec-data verify {place}`: {size / 1e9:.0f} GB"
        )
    try:
        found = examine(VerifyConfig(data=place, device=device))
    except SpecDataError as error:
        return finding("data", str(error), fix="copy or generate the dataset again")
    if found.failures:
        return finding(
            "data",
            found.failures[0],
            *found.failures[1:20],
            fix=f"copy or generate it again; `spec-data verify {place}` lists every failure",
        )
    return ok("data", f"{len(dataset):,} documents verified", *_only_files(found.warnings))


def _only_files(warnings: list[str]) -> Iterator[str]:
    """Yield the warnings about files; those about answers have a check of their own."""
    yield from (line for line in warnings if "first choice" not in line)


def _agreement(dataset: HiddenStatesDataset) -> Check:
    raw = dataset.manifest.raw
    total = total_agreement(raw)
    if total is None:
        return undecided(
            "on-policy", "give a dataset that `spec-data generate` of this release has written: "
            "this one records no agreement with its target",
        )  # fmt: skip
    if not total.enough:
        return undecided("on-policy", f"give more documents: {total.tokens} supervised tokens")
    if lines := suspicions(raw):
        return finding(
            "on-policy",
            *lines,
            fix="let the target answer the prompts itself (`spec-data regenerate`), and generate "
            "and train from that",
        )
    return ok("on-policy", figures_text(total))


def open_dataset(place: str) -> HiddenStatesDataset | Check:
    """Open a dataset; a finding if it cannot be opened.

    Raises:
        MissingError: there is none.
    """
    from spec_data.shards.errors import DatasetError

    try:
        return HiddenStatesDataset(place)
    except DatasetError as error:
        return finding("data", str(error), fix="copy or generate the dataset again")
