"""The sections of a page about evaluations: lengths, depths, sources, positions, forecasts."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spec_data.pages.page_parts import (
    Axis,
    Bars,
    Figures,
    Format,
    Lines,
    Note,
    Part,
    Section,
    Table,
    Value,
    Viewer,
)
from spec_train.reports.stored_figures import Measured, Run, number
from spec_train.simulation.sample_texts import with_characters

# -- acceptance viewer -----------------------------------------------------------------------------
# The viewer of drafted tokens: which were accepted, which the target rejected or corrected.


_HERE = Path(__file__).parent


def acceptance_viewer(found: Sequence[Measured]) -> Viewer | None:
    """Return the viewer of the responses that evaluations have kept; None if they kept none.

    Args:
        found: evaluations, in the order in which they are shown.

    Returns:
        Its data are `texts` (of token ids, by group) and `samples`, each with its `group` (an
        index), the `evaluation`, whether it is `real` decoding, and name, source and parts as in
        `simulation.samples`. A part may have `whole`: texts that differ from those of the tokens
        alone, by list ("tokens", "drafted", "emitted", "choice") and position.
    """
    texts: list[dict[str, str]] = []
    samples: list[dict[str, Any]] = []
    for one in found:
        kept = one.figures.get("samples") or ()
        if not kept:
            continue
        for sample in kept:
            samples.append(
                {
                    "group": len(texts),
                    "evaluation": one.name,
                    "real": one.real,
                    "tree": bool(one.figures.get("tree_tokens")),
                    "name": str(sample["name"]),
                    "source": str(sample.get("source") or ""),
                    "parts": with_characters(sample["parts"], one.texts),
                }
            )
        texts.append(one.texts)
    if not samples:
        return None
    data = {"texts": texts, "samples": samples}
    script, style = _asset("acceptance_viewer.js"), _asset("acceptance_viewer.css")
    return Viewer(name="acceptance", data=data, script=script, style=style)


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


# -- speed parts -----------------------------------------------------------------------------------
# The section of a page about the speed of real decoding: where the time goes, how many drafts.


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


# -- acceptance sections ---------------------------------------------------------------------------


FEWEST_ROUNDS = 10
"""A mean over fewer rounds is not drawn."""
_LENGTH = Axis(title="tokens per verification", least=0)


def headline(found: Sequence[Measured]) -> Figures | None:
    """Return the length to trust most: by real decoding if there is one, else as in serving."""
    known = sorted((one for one in found if one.length is not None), key=lambda one: not one.real)
    if not known:
        return None
    return Figures(items=length_items(known[0].length, known[0].interval, known[0].real))


def length_items(
    length: float | None, interval: Sequence[float] | None, real: bool
) -> list[tuple[str, Value, Format]]:
    """Return the tiles of an acceptance length and its interval."""
    name = "acceptance length, real decoding" if real else "acceptance length, serving-like"
    low, high = interval or (None, None)
    between = None if low is None else f"{low:.2f} to {high:.2f}"
    return [(name, length, "number"), ("its 95 % interval", between, "text")]


def acceptance_sections(found: Sequence[Measured], alone: bool = True) -> list[Section]:
    """Return the sections about evaluations, without the empty ones.

    Args:
        found: evaluations; none: no sections. alone: the page begins with them.
    """
    if not found:
        return []
    lead = headline(found) if alone else None
    sections = [_overview(found, lead), _where(found), speed_section(found), _viewer(found)]
    return [section for section in sections if section.parts]


def _overview(found: Sequence[Measured], lead: Figures | None) -> Section:
    rows: list[list[Value]] = []
    for one in found:
        low, high = one.interval or (None, None)
        figures = one.figures
        same = figures.get("identical") if one.real else None
        lossless = None if same is None else f"{same} of {figures['responses']}"
        on_policy = None if one.real else number(figures, "on_policy")
        row: list[Value] = [one.name, "real decoding" if one.real else "simulated", one.where]
        row += [one.length, low, high, one.rounds, on_policy, lossless]
        rows.append([*row, number(figures, "speedup") if one.real else None])
    columns = [
        *(("evaluation", "text"), ("kind", "text"), ("on", "text"), ("length", "number")),
        *(("from", "number"), ("to", "number"), ("rounds", "count"), ("on-policy", "share")),
        *(("lossless", "text"), ("speed-up", "number")),
    ]
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    table = Table(
        title="Evaluations",
        columns=[columns[i] for i in used],  # type: ignore[misc]
        rows=[[row[i] for i in used] for row in rows],
        note="Length: tokens per verification of the target, its own token included"
        + ("; from and to: its 95 % interval over prompts or documents." if 4 in used else ".")
        + " Real decoding: the target decodes prompts with the draft. Simulated: the draft "
        "continues its own tokens on stored documents, which predicts real greedy decoding.",
    )
    parts: list[Part] = [table] if lead is None else [lead, table]
    parts += [
        Note(text=f"{one.name}: {text}.", warning=True) for one in found for text in one.warnings
    ]
    rates = {one.name: one.rates for one in found if any(r is not None for r in one.rates)}
    if rates:
        depths = max(map(len, rates.values()))
        parts.append(
            Bars(
                title="Acceptance by depth",
                x=Axis(title="depth of the drafted token", format="text"),
                y=Axis(title="share accepted", format="share", least=0),
                labels=[str(d) for d in range(1, depths + 1)],
                series={n: [*own, *[None] * (depths - len(own))] for n, own in rates.items()},
                note="Of the rounds whose earlier drafted tokens were all accepted.",
            )
        )
    return Section(
        title="Acceptance",
        text="As in serving: the draft continues with its own tokens, round after round.",
        parts=parts,
    )


def _where(found: Sequence[Measured]) -> Section:
    parts = [*_by_range(found, "by_position"), *_by_range(found, "by_context")]
    for one in found:
        parts += [*_by_set(one), *_by_source(one)]
    return Section(
        title="Where drafts are accepted",
        parts=parts,
    )


def _label(start: int, end: int | None) -> str:
    return f"{start:,}+" if end is None else f"{start:,}\u2013{end - 1:,}"


_RANGES = {
    "by_position": ("position in the response", "tokens of the response before the round"),
    "by_context": ("length of the context", "tokens of prompt and response before the round"),
}


def _by_range(found: Sequence[Measured], kind: str) -> list[Part]:
    """Return the lengths by range of positions or of contexts, one series per evaluation."""
    lines = {one.name: {x["start"]: x for x in one.figures.get(kind) or ()} for one in found}
    ends = {x["start"]: x.get("end") for own in lines.values() for x in own.values()}
    series: dict[str, list[float | None]] = {}
    for name, own in lines.items():
        enough = [s in own and own[s]["rounds"] >= FEWEST_ROUNDS for s in sorted(ends)]
        values = [
            number(own[s], "acceptance_length") if some else None
            for s, some in zip(sorted(ends), enough, strict=True)
        ]
        if any(value is not None for value in values):
            series[name] = values
    if not series:
        return []
    name, title = _RANGES[kind]
    return [
        Bars(
            title=f"Acceptance length by {name}",
            x=Axis(title=title, format="text"),
            y=_LENGTH,
            labels=[_label(start, ends[start]) for start in sorted(ends)],
            series=series,
            note=f"Ranges with fewer than {FEWEST_ROUNDS} rounds are not drawn.",
        )
    ]


def _by_set(one: Measured) -> list[Part]:
    """Return the table of several sets of prompts; nothing for one set."""
    lines = list(one.figures.get("by_set") or ())
    if len(lines) < 2:
        return []
    rows: list[list[Value]] = []
    for line in lines:
        low, high = line.get("interval") or (None, None)
        values = [number(line, name) for name in ("prompts", "rounds", "acceptance_length")]
        rows.append([str(line["set"]), *values, low, high])
    return [
        Table(
            title=f"By set of prompts: {one.name}",
            columns=[
                *(("set", "text"), ("prompts", "count"), ("rounds", "count")),
                *(("acceptance length", "number"), ("from", "number"), ("to", "number")),
            ],
            rows=rows,
            note="From and to: the 95 % interval over the prompts of the set.",
        )
    ]


def _by_source(one: Measured) -> list[Part]:
    lines = list(one.figures.get("by_source") or ())
    rows: list[list[Value]] = [
        [
            str(line["source"]),
            *(number(line, name) for name in ("documents", "supervised_tokens", "on_policy")),
            *(number(line, name) for name in ("rounds", "acceptance_length")),
        ]
        for line in lines
    ]
    if not rows:
        return []
    table = Table(
        title=f"By source: {one.name}",
        columns=[
            *(("source", "text"), ("documents", "count"), ("supervised tokens", "count")),
            *(("on-policy", "share"), ("rounds", "count"), ("acceptance length", "number")),
        ],
        rows=rows,
        note="On-policy: supervised tokens that are the target's own greedy choice.",
    )
    if len(rows) == 1:
        return [table]
    bars = Bars(
        title=f"Acceptance length by source: {one.name}",
        x=Axis(title="source", format="text"),
        y=_LENGTH,
        labels=[str(row[0]) for row in rows],
        series={"acceptance length": [number(line, "acceptance_length") for line in lines]},
    )
    return [bars, table]


def _viewer(found: Sequence[Measured]) -> Section:
    viewer = acceptance_viewer(found)
    return Section(
        title="Drafted tokens",
        text="What the draft proposed in a few responses, and what the target made of it. The "
        "responses are evenly spread over those that were measured.",
        parts=[] if viewer is None else [viewer],
    )


def forecast_section(runs: Sequence[Run], found: Sequence[Measured]) -> list[Section]:
    """Return the section about confidence heads; nothing if no draft has one.

    Args:
        runs, found: what the page is about.
    """
    tables = {run.name: list((run.best or {}).get("confidence_bins") or ()) for run in runs}
    tables |= {one.name: one.bins for one in found}
    tables = {name: bins for name, bins in tables.items() if any(row[0] for row in bins)}
    curves = {run.name: run.curve("confidence_calibration", True) for run in runs}
    curves = {name: own for name, own in curves.items() if any(y is not None for _, y in own)}
    if not tables and not curves:
        return []
    parts: list[Part] = []
    if tables:
        parts.append(_reliability(tables))
    if curves:
        parts.append(
            Lines(
                title="Calibration error over training",
                x=Axis(title="trained tokens", format="count", least=0),
                y=Axis(title="mean difference", format="share", least=0),
                series=curves,
                points=True,
                note="Mean absolute difference of forecast and acceptance over ten ranges of the "
                "forecast, on held-out documents.",
            )
        )
    parts += [_reliability_table(name, bins) for name, bins in tables.items()]
    return [
        Section(
            title="Confidence",
            text="The draft forecasts for every drafted token the probability that it is accepted. "
            "A forecast is calibrated if of the tokens with forecast p the share p is accepted.",
            parts=parts,
        )
    ]


def _reliability(tables: dict[str, list[list[float | None]]]) -> Lines:
    series: dict[str, list[tuple[float, float | None]]] = {
        name: [(mean, share) for _, mean, share in bins if mean is not None]
        for name, bins in tables.items()
    }
    return Lines(
        title="Forecast and acceptance",
        x=Axis(title="mean forecast", format="share", least=0, most=1),
        y=Axis(title="share accepted", format="share", least=0, most=1),
        series={**series, "calibrated": [(0.0, 0.0), (1.0, 1.0)]},
        points=True,
        note="Above the line of calibrated forecasts the draft is too careful, below it too sure.",
    )


def _reliability_table(name: str, bins: list[list[float | None]]) -> Table:
    total = sum(weight or 0.0 for weight, _, _ in bins)
    rows: list[list[Value]] = []
    for b, (weight, mean, share) in enumerate(bins):
        if not weight:
            continue
        gap = None if mean is None or share is None else mean - share
        label = f"{b / len(bins):.1f}\u2013{(b + 1) / len(bins):.1f}"
        rows.append([label, weight / total, mean, share, gap])
    return Table(
        title=f"Reliability: {name}",
        columns=[
            *(("forecast", "text"), ("share of tokens", "share"), ("mean forecast", "share")),
            *(("accepted", "share"), ("difference", "share")),
        ],
        rows=rows,
        note="Accepted: probability that a token drawn from the draft is kept. Tokens are weighted "
        "as in the loss.",
    )
