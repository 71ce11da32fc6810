"""The sections of a page about one or several runs: figures, curves, settings.

Curves are drawn over trained tokens, so that runs with other batch sizes can be compared.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
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
)
from spec_data.shards.errors import DraftError
from spec_train.options.command_options import fit_config
from spec_train.reports.acceptance_sections import length_items
from spec_train.reports.stored_figures import Measured, Point, Run, number
from spec_train.simulation.parting import parted

MOST_POINTS = 600
"""Points of a curve that a page holds at most; a longer curve is thinned evenly."""
_TOKENS = Axis(title="trained tokens", format="count", least=0)
_LENGTH = "tokens per verification"
_UNSAID = ("data", "out", "config", "track", "keep", "preset", "draft_config", "save_every")


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS of the points, evenly spread, always with first and last."""
    count = len(points)
    if count <= MOST_POINTS:
        return list(points)
    return [points[i * (count - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def run_sections(runs: Sequence[Run], found: Sequence[Measured] = ()) -> list[Section]:
    """Return the sections about runs: overview, learning, depths, optimisation, settings.

    Args:
        runs: at least one. found: evaluations, also of other drafts.
    """
    sections = [
        _overview(runs, found),
        _learning(runs),
        _depths(runs),
        _loading(runs),
        _settings(runs),
    ]
    return [section for section in sections if section.parts]


def _overview(runs: Sequence[Run], found: Sequence[Measured]) -> Section:
    parts: list[Part] = []
    real = {run.name: _decoded(run, found) for run in runs}
    if len(runs) == 1:
        parts.append(Figures(items=_facts(runs[0], real[runs[0].name])))
    else:
        parts.append(_run_table(runs, real))
    parts += _lengths(runs, real)
    for run in runs:
        parts += [Note(text=text, warning=True) for text in _problems(run)]
    return Section(title="Overview", parts=parts)


def _last(run: Run, figure: str) -> float | None:
    points = [value for _, value in run.curve(figure) if value is not None]
    return points[-1] if points else None


def _tokens(run: Run) -> int | None:
    found = [number(line, "tokens") for line in (*run.training, *run.validation)]
    return int(max((n for n in found if n is not None), default=0)) or None


def _step(run: Run) -> int:
    return max((int(number(x, "step") or 0) for x in (*run.training, *run.validation)), default=0)


def _middle(run: Run, figure: str) -> float | None:
    values = [value for _, value in run.curve(figure) if value is not None]
    return median(values) if values else None


def _decoded(run: Run, found: Sequence[Measured]) -> Measured | None:
    """Return the evaluation of a draft of the run by real decoding, if there is one."""
    for one in found:
        draft = Path(str(one.figures.get("draft"))).resolve() if one.real else None
        if draft is not None and draft.is_relative_to(run.path.resolve()):
            return one
    return None


def _facts(run: Run, real: Measured | None) -> list[tuple[str, Value, Format]]:
    """Return the figures of a run with their formats, in the order in which they are shown.

    The length by which a run is told comes first: by real decoding, else as in serving.
    """
    best = run.best or {}
    steps = f"{_step(run):,}" + (f" of {run.steps:,}" if run.steps else "")
    if real is not None:
        length = length_items(real.length, real.interval, True)
    else:
        served = number(best, "serving_like_length")
        length = length_items(served, best.get("serving_like_interval"), False)
    return [
        *length,
        ("draft", run.draft, "text"),
        ("best at step", number(best, "step"), "count"),
        ("its held-out loss", number(best, "loss"), "number"),
        ("steps", steps, "text"),
        ("trained tokens", _tokens(run), "count"),
        ("tokens per second", _middle(run, "tokens_per_second"), "count"),
        ("waiting for data", _middle(run, "data_wait"), "share"),
    ]


def _run_table(runs: Sequence[Run], real: Mapping[str, Measured | None]) -> Table:
    decoded = all(real.values())  # lengths of one column are measured in one way
    facts = [_facts(run, real[run.name] if decoded else None) for run in runs]
    return Table(
        title="Runs",
        columns=[("run", "text"), *((name, kind) for name, _, kind in facts[0])],
        rows=[
            [run.name, *(value for _, value, _ in own)]
            for run, own in zip(runs, facts, strict=True)
        ],
        note="The best draft is the one with the longest product-limit length on held-out "
        "documents. Tokens per second and waiting for data are medians.",
    )


_LENGTHS = (
    ("serving_like_length", "serving-like", "The draft continues its own tokens and states, round "
     "by round, on held-out documents: predicts real greedy decoding."),
    ("product_limit_length", "product-limit", "Teacher-forced, also from answers shorter than a "
     "chain: chooses the best draft."),
    ("acceptance_length", "teacher-forced", "The draft reads the documents' own tokens at every "
     "depth, as in training; serving does not."),
)  # fmt: skip


def _lengths(runs: Sequence[Run], real: Mapping[str, Measured | None]) -> list[Part]:
    """Return the table of all lengths of the best drafts, with what each of them is."""
    best = [run.best or {} for run in runs]
    rows: list[list[Value]] = [
        [name, *(number(one, key) for one in best), what] for key, name, what in _LENGTHS
    ]
    decoded = [None if one is None else one.length for one in real.values()]
    rows.insert(0, ["real decoding", *decoded, "The target decodes prompts with the draft."])
    rows = [row for row in rows if any(value is not None for value in row[1:-1])]
    if not rows:
        return []
    columns: list[tuple[str, Format]] = [(run.name, "number") for run in runs]
    return [
        Table(
            title="Lengths of the best draft",
            columns=[("tokens per verification", "text"), *columns, ("what it is", "text")],
            rows=rows,
        )
    ]


def _problems(run: Run) -> list[str]:
    """Return what a reader must know before the figures."""
    found = []
    if run.damaged:
        lines = "line" if run.damaged == 1 else "lines"
        found.append(f"{run.name}: {run.damaged} {lines} of metrics.jsonl cannot be read.")
    if not run.validation:
        found.append(
            f"{run.name}: nothing was held out or validated yet, so there is no held-out curve."
        )
    best = run.best
    if best is not None and number(best, "step") == 0 and _step(run) > 0:
        found.append(
            f"{run.name}: no validation was better than the draft at step 0; training did not help."
        )
    if best is not None and number(best, "acceptance_length") is None:
        found.append(
            f"{run.name}: no held-out answer is long enough for a chain of every depth, so there "
            "is no acceptance length; see the product-limit length."
        )
    served, rounds = (number(best or {}, f"serving_like_{name}") for name in ("uncut", "rounds"))
    if text := parted(best or {}, served, int(rounds or 0)):
        found.append(f"{run.name}: {text}.")
    return found


def _chart(
    runs: Sequence[Run],
    title: str,
    axis: Axis,
    curve: Callable[[Run], Sequence[Point]],
    note: str = "",
    points: bool = False,
) -> list[Part]:
    """Return a chart of one curve per run; nothing if no run has it."""
    series = {run.name: thinned(curve(run)) for run in runs}
    return _lines(title, axis, series, note, points)


def _lines(
    title: str, axis: Axis, series: dict[str, list[Point]], note: str = "", points: bool = False
) -> list[Part]:
    kept = {
        name: found
        for name, found in series.items()
        if any(value is not None for _, value in found)
    }
    if not kept:
        return []
    points = points or max(map(len, kept.values())) <= 40
    return [Lines(title=title, x=_TOKENS, y=axis, series=kept, note=note, points=points)]


def _both(runs: Sequence[Run], figure: str, title: str, axis: Axis, note: str = "") -> list[Part]:
    """Return training and held-out curve of a figure: one chart for one run, else two."""
    if len(runs) == 1:
        series = {
            "training": thinned(runs[0].curve(figure)),
            "held out": thinned(runs[0].curve(figure, True)),
        }
        return _lines(title, axis, series, note)
    held = _chart(runs, f"{title}, held out", axis, lambda run: run.curve(figure, True), note)
    return held + _chart(runs, f"{title}, training", axis, lambda run: run.curve(figure))


def _learning(runs: Sequence[Run]) -> Section:
    length = Axis(title=_LENGTH, least=1)
    parts = [
        *_chart(
            runs,
            "Serving-like acceptance length, held out",
            length,
            lambda run: run.curve("serving_like_length", True),
            "The draft continues its own tokens, round by round; the ends of answers cut rounds.",
        ),
        *_both(runs, "loss", "Loss", Axis(title="loss"), _loss_note(runs)),
        *_both(runs, "acceptance_length", "Teacher-forced acceptance length", length),
        *_chart(
            runs,
            "Product-limit length, held out",
            length,
            lambda run: run.curve("product_limit_length", True),
            "It also counts answers that are shorter than a chain; it chooses the best draft.",
        ),
    ]
    for run in runs:
        parts += _by_dataset(run, length)
    return Section(
        title="Learning",
        text="Teacher-forced, but where a chart says serving-like: the draft continues the "
        "documents' own tokens. Acceptance length is the number of tokens per verification of the "
        "target, its own token included.",
        parts=parts,
    )


def _loss_note(runs: Sequence[Run]) -> str:
    kinds = {(run.draft, run.options.get("loss")) for run in runs}
    if len(kinds) < 2:
        return ""
    return "The runs have different drafts or losses: their values cannot be compared."


def _by_dataset(run: Run, axis: Axis) -> list[Part]:
    """Return the held-out lengths of a run by dataset, if it has several."""
    prefix = "product_limit_length/"
    names = dict.fromkeys(n for line in run.validation for n in line if n.startswith(prefix))
    series = {name[len(prefix) :]: thinned(run.curve(name, True)) for name in names}
    return _lines(f"Product-limit length by dataset: {run.name}", axis, series)


def _depths(runs: Sequence[Run]) -> Section:
    parts: list[Part] = []
    depths = max(run.depths for run in runs)
    best = {run.name: run.best for run in runs}
    series = {
        name: [number(line, f"accept_rate/{d}") for d in range(1, depths + 1)]
        for name, line in best.items()
        if line is not None
    }
    share = Axis(title="share accepted", format="share", least=0)
    if depths and series:
        parts.append(
            Bars(
                title="Acceptance by depth, best draft",
                x=Axis(title="depth of the drafted token", format="text"),
                y=share,
                labels=[str(d) for d in range(1, depths + 1)],
                series=series,
                note="Of the chains whose earlier tokens were all accepted. On held-out documents.",
            )
        )
    for run in runs:
        title = "Chains accepted up to a depth, over training"
        whole = Axis(title="share of the chains", format="share", least=0)
        curves = {name: thinned(points) for name, points in _accepted_up_to(run).items()}
        parts += _lines(title if len(runs) == 1 else f"{title}: {run.name}", whole, curves)
    return Section(
        title="Depth",
        text="Depth 1 is the first drafted token of a chain.",
        parts=parts,
    )


def _accepted_up_to(run: Run) -> dict[str, list[Point]]:
    """Return the held-out share of chains that are accepted up to each depth, over training.

    It is the product of the rates of the depths. A mean over the few chains that reach a large
    depth would jump.
    """
    curves: dict[str, list[Point]] = {f"depth {d}": [] for d in range(1, run.depths + 1)}
    for line in run.validation:
        tokens, share = number(line, "tokens"), 1.0
        if tokens is None:
            continue
        for d in range(1, run.depths + 1):
            rate = number(line, f"accept_rate/{d}")
            if rate is None:
                break
            share *= rate
            curves[f"depth {d}"].append((tokens, share))
    return curves


def _loading(runs: Sequence[Run]) -> Section:
    def of(figure: str) -> Callable[[Run], Sequence[Point]]:
        return lambda run: run.curve(figure)

    share = Axis(title="share of the time", format="share", least=0)
    return Section(
        title="Optimisation and loading",
        text="Every point is the value at a line of the log; shares and speeds are means since the "
        "line before.",
        parts=[
            *_chart(runs, "Learning rate", Axis(title="learning rate", least=0), of("lr")),
            *_chart(
                runs,
                "Gradient norm",
                Axis(title="norm before clipping", least=0),
                of("grad_norm"),
                _clip_note(runs),
            ),
            *_chart(runs, "Waiting for data", share, of("data_wait")),
            *_chart(
                runs,
                "Speed",
                Axis(title="tokens per second", format="count", least=0),
                of("tokens_per_second"),
            ),
        ],
    )


def _clip_note(runs: Sequence[Run]) -> str:
    clips = {run.options.get("clip") for run in runs}
    if len(clips) == 1 and isinstance(clip := clips.pop(), (int, float)) and clip > 0:
        return f"Gradients with a larger norm than {clip:g} are scaled down to it."
    return ""


def _settings(runs: Sequence[Run]) -> Section:
    """Return the options: all of one run, those that differ of several."""
    names = [n for n in dict.fromkeys(n for run in runs for n in run.options) if n not in _UNSAID]
    tables = [run.options for run in runs]
    if not any(tables):
        return Section(title="Settings")
    if len(runs) > 1:
        title = "Options in which the runs differ"
        names = [n for n in names if len({repr(table.get(n)) for table in tables}) > 1]
    else:
        title = "Options that are not the default"
        usual = _defaults(runs[0].draft)
        names = [n for n in names if n not in usual or tables[0][n] != usual[n]]
    rows = [[name, *(_shown(table.get(name)) for table in tables)] for name in ("data", *names)]
    columns = [("option", "text"), *((run.name, "text") for run in runs)]
    table = Table(title=title, columns=columns, rows=rows)  # type: ignore[arg-type]
    return Section(title="Settings", text="fit.json in the run has all of them.", parts=[table])


def _defaults(draft: str) -> dict[str, Any]:
    """Return the defaults of the options of `fit` for a kind of draft; none if it is unknown."""
    try:
        fields = dataclasses.fields(fit_config(draft))
    except DraftError:
        return {}
    return {field.name: field.default for field in fields}


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
