"""Is it the same target, served in the same way? Facts of the draft, the dataset and the target.

The comparison is that of `spec_data.shards.identity`; here each difference gets the name of the
failure that it is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from spec_data.shards.identity import compare, identity_of
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.diagnosis.outcome import Check, finding, ok, undecided
from spec_train.formats.target_facts import TargetFacts

_FIX = {
    "quantised": "serve the target as it was captured, or capture with the quantised target and "
    "train again",
    "chat-template": "serve with the template and kwargs of the training data, or generate the "
    "dataset with those that are served",
    "tokenizer": "serve with the tokenizer of the training data, or generate again",
    "target": "use the target that the draft was fitted to, or capture this one and train again",
}
_WHAT = {
    "quantised": "the target runs in the precision of the capture",
    "chat-template": "prompts are rendered as in the training data",
    "tokenizer": "the tokenizer is that of the training data",
    "target": "weights, config and rope are those of the training",
}

_ROUNDED = "no other quantisation; states are rounded when served, as those of every target are"
"""Said of a capture in float32 of a target that is served in bf16: no failure by itself."""


def _named(fact: str) -> str:
    """Return the check that a fact belongs to."""
    if fact.startswith("chat_template"):
        return "chat-template"
    if fact.startswith("tokenizer"):
        return "tokenizer"
    return "quantised" if fact in ("quantization", "dtype") else "target"


def target_checks(
    origin: Mapping[str, Any], dataset: HiddenStatesDataset | None, target: TargetFacts | None
) -> Iterator[Check]:
    """Compare the target and the prompts of the draft, of the dataset and of serving.

    Args:
        origin: what the draft records of its training; empty for drafts of other trainers.
        dataset: the dataset, if there is one.
        target: the target that serves, with its identity; None: not given.
    """
    stored = identity_of(dataset.manifest) if dataset is not None else {}
    served = target.identity if target is not None else {}
    pairs = [
        (origin, stored, "the draft was fitted with", "the dataset has"),
        (origin, served, "the draft was fitted with", "the target has"),
        (stored, served, "the dataset was captured with", "the target has"),
    ]
    possible = [pair for pair in pairs if pair[0] and pair[1]]
    lines: dict[str, list[str]] = {name: [] for name in _WHAT}
    notes: dict[str, list[str]] = {name: [] for name in _WHAT}
    unknown: list[str] = []
    for recorded, found, ours, theirs in possible:
        compared = compare(recorded, found, of_recorded=ours, of_found=theirs)
        for difference in compared.differences:
            into = notes if difference.name == "dtype" else lines
            into[_named(difference.name)].append(difference.text)
        if compared.not_compared:
            unknown.append(f"not compared, because only one side tells it: {compared.not_compared}")
    if target is not None:
        unknown += [f"not compared: {problem}" for problem in target.problems]
    for name, texts in lines.items():
        if texts:
            yield finding(name, *dict.fromkeys(texts), fix=_FIX[name])
        elif not possible:
            yield undecided(name, _needed(origin, dataset, target))
        else:
            text = _ROUNDED if notes[name] else _WHAT[name]
            more = unknown if name == "target" else notes[name]
            yield ok(name, text, *dict.fromkeys(more))


def _needed(
    origin: Mapping[str, Any], dataset: HiddenStatesDataset | None, target: TargetFacts | None
) -> str:
    if target is None:
        text = "give --target" if origin or dataset is not None else "give --target and --data"
        return f"{text}: the draft does not record its target" if not origin else text
    return "give --data: the draft does not record its target"
