"""The section of a page about the speed of real decoding: where the time goes, how many drafts."""

from collections.abc import Sequence

from spec_data.pages.page_parts import Axis, Bars, Lines, Part, Section
from spec_train.reports.stored_figures import Measured, number

_PARTS = ("draft", "verify", "prefill", "other")


def speed_section(found: Sequence[Measured]) -> Section:
    """Return the section; it has no part if nothing was decoded for real.

    Args:
        found: evaluations, simulated ones too.
    """
    return Section(
        title="Speed",
        text="Of this implementation, one response at a time. Prefill is left out of the speed-up "
        "that is modelled.",
        parts=[*_shares(found), *_sweeps(found)],
    )


def _shares(found: Sequence[Measured]) -> list[Part]:
    series = {}
    for one in found:
        shares = (one.figures.get("speed") or {}).get("shares") if one.real else None
        values = [number(shares or {}, name) for name in _PARTS]
        if any(value is not None for value in values):
            series[one.name] = values
    if not series:
        return []
    return [
        Bars(
            title="Time of decoding with the draft",
            x=Axis(title="part of the time", format="text"),
            y=Axis(title="share of the time", format="share", least=0),
            labels=["drafting", "verification", "prefill", "other"],
            series=series,
        )
    ]


def _sweeps(found: Sequence[Measured]) -> list[Part]:
    """Return lengths and speed-ups by drafted tokens, of evaluations with several numbers."""
    lengths: dict[str, list[tuple[float, float | None]]] = {}
    speedups: dict[str, list[tuple[float, float | None]]] = {}
    for one in found:
        lines = list(one.figures.get("sweep") or ()) if one.real else []
        if len(lines) < 2:
            continue
        drafted = [float(line["draft_tokens"]) for line in lines]
        kinds = {
            "measured": [number(line, "speedup") for line in lines],
            "modelled": [number(line["modelled"], "speedup") for line in lines],
        }
        lengths[one.name] = [
            (n, number(line, "acceptance_length")) for n, line in zip(drafted, lines, strict=True)
        ]
        for kind, values in kinds.items():
            if any(value is not None for value in values):
                speedups[f"{one.name}, {kind}"] = list(zip(drafted, values, strict=True))
    if not lengths:
        return []
    x = Axis(title="drafted tokens per round", format="count")
    y = Axis(title="tokens per verification", least=1)
    times = Axis(title="times the speed of the target alone", least=0)
    parts: list[Part] = [
        Lines(title="Acceptance length by drafted tokens", x=x, y=y, series=lengths, points=True)
    ]
    if speedups:
        parts.append(
            Lines(title="Speed-up by drafted tokens", x=x, y=times, series=speedups, points=True)
        )
    return parts
