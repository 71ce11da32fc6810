"""How the agreement with the target is shown: tables, and suspicions in words."""

import math
from collections.abc import Iterable, Mapping, Sequence

from spec_data.shards.likelihood import ALL_SOURCES, GREEDY_SHARE, Agreement, AgreementTable
from spec_data.shards.schema import Manifest

_LOW_SHARE = 0.7
_SOURCE_GAP = 0.2
_MOST_SOURCES = 20  # that are listed by name


def contradictions(manifest: Manifest) -> list[str]:
    """Return, in words, what contradicts --on-policy in a manifest; nothing without the flag."""
    measured, temperature = manifest.agreement, manifest.sampling_temperature
    if measured is None or not manifest.on_policy:
        return []
    return [
        contradiction_text(name, measured.judged()[name], temperature)
        for name in measured.contradicting(temperature)
    ]


def suspicions(manifest: Manifest) -> list[str]:
    """Return what is suspicious about a sealed dataset, in words."""
    if manifest.agreement is None:
        return []
    on_policy, temperature = manifest.policy == "on-policy", manifest.sampling_temperature
    found = warnings(manifest.agreement.judged(), manifest.vocab_size, temperature, on_policy)
    refused = [f"--on-policy was not accepted: {text}" for text in contradictions(manifest)]
    return _first(refused + found)


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, and how many more there are: a folder of files is many sources."""
    more = len(lines) - _MOST_SOURCES
    return [*lines[:_MOST_SOURCES], f"and {more:,} more such lines"] if more > 0 else lines


_CAUSES = (
    "likely causes: another chat template than the one that the answers were made with, a doubled "
    "BOS token, answers shuffled between prompts, or a target with missing or wrongly configured "
    "weights"
)


def warnings(
    sources: Mapping[str, Agreement], vocab_size: int, temperature: float | None, on_policy: bool
) -> list[str]:
    """Return what is suspicious about the sources of a dataset, in words."""
    found = [
        message
        for name, agreement in sources.items()
        if (message := _suspicion(agreement, vocab_size, temperature, on_policy, name))
    ]
    return found + _source_gaps(sources)


def _suspicion(
    found: Agreement, vocab_size: int, temperature: float | None, on_policy: bool, name: str
) -> str | None:
    """Return the strongest suspicion about one source, or None."""
    figures = f"{name}: {figures_text(found)}"
    if found.above_random(vocab_size):
        return f"{figures}. {above_random_text(vocab_size)}"
    if found.like_random(vocab_size):
        return (
            f"{figures}. The target behaves like a random model, which has an NLL of about ln V = "
            f"{math.log(vocab_size):.2f}: its weights are untrained, or these are not its token ids"
        )
    if found.nearly_own() and temperature is None:
        return (
            f"{figures}. Samples of this target at temperature 1 would have "
            f"{found.own_share:.1%}, its greedy answers {GREEDY_SHARE:.0%} or more. If these are "
            f"its greedy answers, the share is too low; {_CAUSES}"
        )
    if found.enough and not on_policy and found.share < _LOW_SHARE:
        return (
            f"{figures}, which is low. Answers of people or of other models often have no more; "
            f"drafts are accepted longer when the target writes its own. Otherwise, {_CAUSES}"
        )
    return None


def _source_gaps(sources: Mapping[str, Agreement]) -> list[str]:
    """Return one line per source with a far lower share than the best one."""
    single = {name: a for name, a in sources.items() if a.enough and name != ALL_SOURCES}
    if len(single) < 2:
        return []
    best = max(single, key=lambda name: single[name].share)
    return [
        f"{name}: {a.share:.1%} first choices, but {best} has {single[best].share:.1%}: compare "
        "how the two are rendered (template, BOS, order of answers) and who wrote the answers"
        for name, a in single.items()
        if a.share < single[best].share - _SOURCE_GAP
    ]


def above_random_text(vocab_size: int) -> str:
    """Say what an NLL above ln V means."""
    return (
        f"A random model has an NLL of about ln V = {math.log(vocab_size):.2f}. A higher one means "
        "that these token ids are not this tokenizer's, or that the target never learned such text "
        "(another language)"
    )


def contradiction_text(name: str, found: Agreement, temperature: float | None) -> str:
    """Say why a source is not on-policy."""
    at = "1" if temperature is None else f"{temperature:g}"
    return (
        f"{name}: {figures_text(found)}; samples of this target at temperature {at} would have "
        f"{found.own_share:.1%} and {found.own_nll:.2f} nats"
    )


def figures_text(found: Agreement) -> str:
    """Return share and NLL in words."""
    return (
        f"{found.share:.1%} of {found.tokens:,} supervised tokens are the target's first choice, "
        f"mean NLL {found.nll:.2f} nats"
    )


def agreement_rows(measured: AgreementTable) -> Iterable[Sequence[str]]:
    """Yield the cells of a table, header first. Of many sources, the largest are listed."""
    yield ("source", "supervised", "first choice", "NLL", "own first choice", "own NLL")
    every = measured.sources
    largest = set(sorted(every, key=lambda name: -every[name].tokens)[:_MOST_SOURCES])
    sources = {name: found for name, found in every.items() if name in largest}
    if len(every) != 1:
        more = len(every) - len(sources)
        sources[f"{ALL_SOURCES}, {more:,} more of them" if more else ALL_SOURCES] = measured.total
    for name, found in sources.items():
        yield (
            name,
            f"{found.tokens:,}",
            f"{found.share:.1%}",
            f"{found.nll:.3f}",
            f"{found.own_share:.1%}",
            f"{found.own_nll:.3f}",
        )
