"""How the agreement with the target is shown: tables, and suspicions in words."""

import math
from collections.abc import Iterator, Mapping, Sequence

from spec_data.shards.likelihood import ALL_SOURCES, GREEDY_SHARE, Agreement, AgreementTable
from spec_data.shards.schema import Manifest

_LOW_SHARE = 0.7
_MOST_SOURCES = 20  # that are listed by name
_CAUSES = (
    "likely causes: another chat template than the one that the answers were made with, a doubled "
    "BOS token, answers shuffled between prompts, or a target with missing or wrongly configured "
    "weights"
)


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
    texts = [f"--on-policy was not accepted: {text}" for text in contradictions(manifest)]
    texts += warnings(
        manifest.agreement.judged(),
        manifest.vocab_size,
        manifest.sampling_temperature,
        manifest.policy == "on-policy",
    )
    more = len(texts) - _MOST_SOURCES  # a folder of files is many sources
    return [*texts[:_MOST_SOURCES], *([f"and {more:,} more such lines"] if more > 0 else [])]


def warnings(
    sources: Mapping[str, Agreement], vocab_size: int, temperature: float | None, on_policy: bool
) -> list[str]:
    """Return the strongest suspicion about each source of a dataset, in words."""
    lines = []
    for name, found in sources.items():
        if found.above_random(vocab_size):
            why = f". {above_random_text(vocab_size)}"
        elif found.enough and found.nll > 0.9 * math.log(vocab_size):
            why = (
                ". The target behaves like a random model, which has an NLL of about ln V = "
                f"{math.log(vocab_size):.2f}: its weights are untrained, or these are not its "
                "token ids"
            )
        elif temperature is None and found.nearly_own():
            why = (
                f". Samples of this target at temperature 1 would have {found.own_share:.1%}, its "
                f"greedy answers {GREEDY_SHARE:.0%} or more. If these are its greedy answers, the "
                f"share is too low; {_CAUSES}"
            )
        elif found.enough and not on_policy and found.share < _LOW_SHARE:
            why = (
                ", which is low. Answers of people or of other models often have no more; drafts "
                f"are accepted longer when the target writes its own. Otherwise, {_CAUSES}"
            )
        else:
            continue
        lines.append(f"{name}: {figures_text(found)}{why}")
    return lines


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


def agreement_rows(measured: AgreementTable) -> Iterator[Sequence[str]]:
    """Yield the cells of a table, header first. Of many sources, the largest are listed."""
    yield ("source", "supervised", "first choice", "NLL", "own first choice", "own NLL")
    every = measured.sources
    largest = set(sorted(every, key=lambda name: -every[name].tokens)[:_MOST_SOURCES])
    rows = {name: found for name, found in every.items() if name in largest}
    if len(every) != 1:
        more = len(every) - len(rows)
        rows[f"{ALL_SOURCES}, {more:,} more of them" if more else ALL_SOURCES] = measured.total
    for name, found in rows.items():
        own = (f"{found.own_share:.1%}", f"{found.own_nll:.3f}")
        yield (name, f"{found.tokens:,}", f"{found.share:.1%}", f"{found.nll:.3f}", *own)
