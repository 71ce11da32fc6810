"""The page about runs and evaluations: curves, settings, acceptance, drafted tokens.

Curves are drawn over trained tokens, so that runs with other batch sizes can be compared.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from spec_data import __version__
from spec_data.pages.page import (
    Axis,
    Bars,
    Figures,
    Format,
    Lines,
    Note,
    Page,
    Part,
    Section,
    Table,
    Value,
    Viewer,
    WrittenPage,
    write_page,
)
from spec_data.pages.token_texts import Joiner
from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_data.shards.even_sample import even_sample
from spec_data.terminal.paths import check_file_to_write
from spec_train.options.draft_options import draft_options
from spec_train.options.training import DEFAULTS, Training
from spec_train.reports.results import (
    Bins,
    Context,
    Evaluation,
    First,
    Point,
    Range,
    Run,
    Sample,
    Simulated,
    VerificationStep,
    is_run,
    number,
    read_evaluation,
    read_run,
)
from spec_train.simulation.train_serve_gap import train_serve_gap
from spec_train.training import setup
from spec_train.training.result import FitResult

log = logging.getLogger(__name__)

PAGE = "report.html"
MOST_POINTS = 600
"""Points of a curve that a page holds at most; a longer curve is thinned evenly."""
FEWEST_ROUNDS = 10
"""A mean over fewer verifications is not drawn."""
_TOKENS = Axis(title="trained tokens", format="count", least=0)
_LENGTH = "tokens per verification"
_UNSAID = ("data", "out", "config", "track", "keep", "preset", "save_every")


def write_report(places: Sequence[str | Path], out: str | Path | None = None) -> WrittenPage:
    """Write the page about run directories and files of `eval --json`, and return it.

    Args:
        places: at least one; runs may still train. out: the HTML file; None: report.html in the
            run directory, or beside the file with its name, if there is one place.

    Raises:
        MissingError: a place does not exist. ConfigError: a place is neither a run nor such a file,
            or the page cannot be written there. RunError: a run's files are damaged.
    """
    paths = [Path(place) for place in places]
    if not paths or (out is None and len(paths) > 1):
        raise ConfigError(
            f"--out is needed for a page about {len(paths)} places: name an HTML file"
            if paths
            else "nothing to report: name run directories, or files of `eval --json`"
        )
    beside = paths[0] / PAGE if paths[0].is_dir() else paths[0].with_suffix(".html")
    file = beside if out is None else Path(out)
    check_file_to_write("--out", file)
    return write_page(file, page_of(paths))


def page_of(paths: Sequence[Path]) -> Page:
    """Read runs and files of `eval --json`, and return the page about them.

    Raises:
        As `write_report`.
    """
    runs: list[Run] = []
    evaluations: list[Evaluation] = []
    for path, name in zip(paths, short_names(paths), strict=True):
        if not path.exists():
            raise MissingError(f"{path}: no such file or run directory; check the path")
        if path.is_file():
            evaluations += read_evaluation(path, name)
        elif is_run(path):
            runs.append(read_run(path, name))
        else:
            raise ConfigError(
                f"{path}: not a run of `spec-train fit` (it has no fit.json and no metrics.jsonl); "
                "pass the directory of --out"
            )
    return report_page(runs, evaluations)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for every path: its last parts, as many as tell it apart from the others.

    A path that is there twice gets a number.
    """
    whole = [path.absolute().parts for path in paths]
    names = []
    for i, parts in enumerate(whole):
        others = [other for k, other in enumerate(whole) if k != i and other != parts]
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        name = "/".join(part.strip("/") for part in parts[-count:])
        earlier = sum(other == parts for other in whole[:i])
        names.append(f"{name} ({earlier + 1})" if earlier else name)
    return names


def report_page(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> Page:
    """Return the page about runs and evaluations, at least one of them, in the order given."""
    measured = [*(run.held_out for run in runs if run.held_out is not None), *evaluations]
    sections = []
    if runs:
        sections += [_overview(runs, evaluations), _learning(runs), _depths(runs)]
    if measured:
        sections += [_acceptance(measured, alone=not runs), _where(measured), _speed(measured)]
        sections.append(_drafted_tokens(measured))
    sections.append(_confidence(runs, measured))
    if runs:
        sections += [_optimisation(runs), _settings(runs)]
    names = list(dict.fromkeys([run.name for run in runs] or [one.name for one in evaluations]))
    kind = ("Run" if len(runs) == 1 else "Runs") if runs else "Evaluation"
    return Page(
        title=f"{names[0]} and {len(names) - 1} more" if len(names) > 3 else ", ".join(names),
        kind=kind,
        sections=[section for section in sections if section.parts],
        footer=f"spec-train {__version__}",
    )


def fit(draft_name: str, config: Training, options: Any) -> FitResult:
    """Fit a draft (see `training.setup.fit`), then write report.html into the run directory."""
    result = setup.fit(draft_name, config, options)
    if os.environ.get("RANK", "0") == "0":
        try:
            log.info("page       %s", write_report([result.directory]).path)
        except Exception as error:  # the run is saved, and worth more than its page
            warn_of_page(result.directory / PAGE, error)
    return result


def warn_of_page(file: Path, error: Exception) -> None:
    """Log that a page could not be written."""
    log.warning("warning: %s was not written: %s: %s", file, type(error).__name__, error)
    log.debug("the page failed", exc_info=error)


# -- charts ----------------------------------------------------------------------------------------


def _axis(title: str, format: Format = "number", least: float | None = None) -> Axis:
    return Axis(title=title, format=format, least=least)


def _lines(title: str, y: Axis, series: dict[str, list[Point]], note: str = "") -> list[Part]:
    """Return a chart over trained tokens of the curves that have a value, thinned."""
    curves = {
        name: points
        if len(points) <= MOST_POINTS
        else [*even_sample(points[:-1], MOST_POINTS - 1), points[-1]]
        for name, points in series.items()
        if any(value is not None for _, value in points)
    }
    if not curves:
        return []
    few = max(map(len, curves.values())) <= 40
    return [Lines(title=title, x=_TOKENS, y=y, series=curves, note=note, points=few)]


def _curves(
    runs: Sequence[Run], name: str, title: str, y: Axis, note: str = "", held_out: bool = False
) -> list[Part]:
    """Return a chart of one curve per run."""
    series = {run.name: run.curve(name, held_out) for run in runs}
    return _lines(f"{title}, held out" if held_out else title, y, series, note)


def _both(runs: Sequence[Run], name: str, title: str, y: Axis, note: str = "") -> list[Part]:
    """Return training and held-out curve of a metric: one chart for one run, else two."""
    if len(runs) == 1:
        (run,) = runs
        series = {"training": run.curve(name), "held out": run.curve(name, True)}
        return _lines(title, y, series, note)
    training = _curves(runs, name, f"{title}, training", y)
    return _curves(runs, name, title, y, note, held_out=True) + training


def _by_depth(title: str, rates: dict[str, list[float | None]], note: str) -> list[Part]:
    """Return the chart of acceptance by depth, in lists of any length."""
    rates = {name: own for name, own in rates.items() if any(rate is not None for rate in own)}
    depths = max(map(len, rates.values()), default=0)
    if not depths:
        return []
    return [
        Bars(
            title=title,
            x="depth of the drafted token",
            y=_axis("share accepted", "share", 0),
            labels=[str(d) for d in range(1, depths + 1)],
            series={name: [*own, *[None] * (depths - len(own))] for name, own in rates.items()},
            note=note,
        )
    ]


# -- runs ------------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> Section:
    decoded = [_decoded(run, evaluations) for run in runs]
    real = all(decoded)  # lengths of one column are measured in one way
    facts = [_facts(run, one if real else None) for run, one in zip(runs, decoded, strict=True)]
    parts: list[Part] = [Figures(items=facts[0])]
    if len(runs) > 1:
        table = Table(
            title="Runs",
            columns=[("run", "text"), *((name, form) for name, _, form in facts[0])],
            rows=[[r.name, *(v for _, v, _ in own)] for r, own in zip(runs, facts, strict=True)],
            note="The best draft is the one with the longest product-limit length on held-out "
            "documents. Tokens per second and waiting for data are medians.",
        )
        parts = [table]
    parts += _lengths(runs, decoded)
    parts += [Note(text=text, warning=True) for run in runs for text in _problems(run)]
    return Section(title="Overview", parts=parts)


def _decoded(run: Run, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation of a draft of the run by real decoding, if there is one."""
    folder = run.path.resolve()
    for one in evaluations:
        if one.decoded and Path(one.decoded.draft).resolve().is_relative_to(folder):
            return one
    return None


def _facts(run: Run, decoded: Evaluation | None) -> list[tuple[str, Value, Format]]:
    """Return the figures of a run: first the length by which it is told."""
    best = run.best
    if decoded is None:
        interval = best.get("serving_like_interval")
        length = _length_items(number(best, "serving_like_length"), interval, False)
    else:
        acceptance = decoded.result.acceptance
        length = _length_items(acceptance.acceptance_length, acceptance.interval, True)
    medians = {
        name: median(values) if values else None
        for name in ("tokens_per_second", "data_wait")
        for values in [[value for _, value in run.curve(name) if value is not None]]
    }
    return [
        *length,
        ("draft", run.draft, "text"),
        ("best at step", number(best, "step"), "count"),
        ("its held-out loss", number(best, "loss"), "number"),
        ("steps", f"{run.last('step'):,}" + (f" of {run.steps:,}" if run.steps else ""), "text"),
        ("trained tokens", run.last("tokens") or None, "count"),
        ("tokens per second", medians["tokens_per_second"], "count"),
        ("waiting for data", medians["data_wait"], "share"),
    ]


def _length_items(
    length: float | None, interval: Sequence[float] | None, real: bool
) -> list[tuple[str, Value, Format]]:
    between = "{:.2f} to {:.2f}".format(*interval) if interval else None
    name = "acceptance length, real decoding" if real else "acceptance length, serving-like"
    return [(name, length, "number"), ("its 95 % interval", between, "text")]


_LENGTHS = {
    "serving_like_length": (
        "serving-like",
        "The draft continues its own tokens and states, step by step, on held-out documents: "
        "predicts real greedy decoding.",
    ),
    "product_limit_length": (
        "product-limit",
        "Teacher-forced, also from answers shorter than a chain: chooses the best draft.",
    ),
    "acceptance_length": (
        "teacher-forced",
        "The draft reads the documents' own tokens at every depth, as in training; serving does "
        "not.",
    ),
}


def _lengths(runs: Sequence[Run], decoded: Sequence[Evaluation | None]) -> list[Part]:
    """Return the table of all lengths of the best drafts, with what each of them is."""
    real = [one.result.acceptance.acceptance_length if one else None for one in decoded]
    rows: list[list[Value]] = [
        ["real decoding", *real, "The target decodes prompts with the draft."],
        *([n, *(number(r.best, key) for r in runs), what] for key, (n, what) in _LENGTHS.items()),
    ]
    rows = [row for row in rows if any(value is not None for value in row[1:-1])]
    names: list[tuple[str, Format]] = [(run.name, "number") for run in runs]
    columns: list[tuple[str, Format]] = [(_LENGTH, "text"), *names, ("what it is", "text")]
    return [Table(title="Lengths of the best draft", columns=columns, rows=rows)] if rows else []


def _problems(run: Run) -> list[str]:
    """Return what a reader must know before the figures."""
    best, problems = run.best, []
    if run.damaged:
        problems.append(f"{run.damaged} lines of metrics.jsonl cannot be read.")
    if not run.validation:
        problems.append("nothing was held out or validated yet, so there is no held-out curve.")
    if best and number(best, "step") == 0 and run.last("step") > 0:
        problems.append("no validation was better than the draft at step 0; training did not help.")
    if best and number(best, "acceptance_length") is None:
        problems.append(
            "no held-out answer is long enough for a chain of every depth, so there is no "
            "acceptance length; see the product-limit length."
        )
    served, rounds = (number(best, f"serving_like_{name}") for name in ("uncut", "rounds"))
    if text := train_serve_gap(best, served, int(rounds or 0)):
        problems.append(f"{text}.")
    return [f"{run.name}: {problem}" for problem in problems]


def _learning(runs: Sequence[Run]) -> Section:
    length = _axis(_LENGTH, least=1)
    losses = {(run.draft, run.options.get("loss")) for run in runs}
    other = "The runs have different drafts or losses: their values cannot be compared."
    served = "The draft continues its own tokens, step by step; the ends of answers cut steps."
    limit = "It also counts answers that are shorter than a chain; it chooses the best draft."
    parts = [
        *_curves(
            runs, "serving_like_length", "Serving-like acceptance length", length, served, True
        ),
        *_both(runs, "loss", "Loss", _axis("loss"), other if len(losses) > 1 else ""),
        *_both(runs, "acceptance_length", "Teacher-forced acceptance length", length),
        *_curves(runs, "product_limit_length", "Product-limit length", length, limit, True),
    ]
    prefix = "product_limit_length/"
    for run in runs:  # the held-out lengths by dataset, if there are several
        names = dict.fromkeys(n for line in run.validation for n in line if n.startswith(prefix))
        series = {name.removeprefix(prefix): run.curve(name, True) for name in names}
        parts += _lines(f"Product-limit length by dataset: {run.name}", length, series)
    return Section(
        title="Learning",
        text="Teacher-forced, but where a chart says serving-like: the draft continues the "
        "documents' own tokens. Acceptance length is the number of tokens per verification of the "
        "target, its own token included.",
        parts=parts,
    )


def _depths(runs: Sequence[Run]) -> Section:
    rates = {
        run.name: [number(run.best, f"accept_rate/{d}") for d in range(1, run.depths + 1)]
        for run in runs
    }
    note = "Of the chains whose earlier tokens were all accepted. On held-out documents."
    parts = _by_depth("Acceptance by depth, best draft", rates, note)
    share = _axis("share of the chains", "share", 0)
    for run in runs:
        title = "Chains accepted up to a depth, over training"
        title = title if len(runs) == 1 else f"{title}: {run.name}"
        parts += _lines(title, share, _accepted_up_to(run))
    text = "Depth 1 is the first drafted token of a chain."
    return Section(title="Depth", text=text, parts=parts)


def _accepted_up_to(run: Run) -> dict[str, list[Point]]:
    """Return the held-out share of chains that are accepted up to each depth, over training.

    It is the product of the rates of the depths. A mean over the few chains that reach a large
    depth would jump.
    """
    curves: dict[str, list[Point]] = {f"depth {d}": [] for d in range(1, run.depths + 1)}
    for line in run.validation:
        tokens, share = number(line, "tokens"), 1.0
        for d in range(1, run.depths + 1):
            rate = number(line, f"accept_rate/{d}")
            if rate is None or tokens is None:
                break
            share *= rate
            curves[f"depth {d}"].append((tokens, share))
    return curves


def _optimisation(runs: Sequence[Run]) -> Section:
    clips = {run.options.get("clip") for run in runs}
    clip = clips.pop() if len(clips) == 1 else None
    scaled = f"Gradients with a larger norm than {clip:g} are scaled down to it." if clip else ""
    speed = _axis("tokens per second", "count", 0)
    return Section(
        title="Optimisation and loading",
        text="Every point is the value at a line of the log; shares and speeds are means since the "
        "line before.",
        parts=[
            *_curves(runs, "lr", "Learning rate", _axis("learning rate", least=0)),
            *_curves(
                runs, "grad_norm", "Gradient norm", _axis("norm before clipping", least=0), scaled
            ),
            *_curves(runs, "data_wait", "Waiting for data", _axis("share of the time", "share", 0)),
            *_curves(runs, "tokens_per_second", "Speed", speed),
        ],
    )


def _settings(runs: Sequence[Run]) -> Section:
    """Return the options: those of one run that are no default, those that differ of several."""
    tables = [run.options for run in runs]
    names = [n for n in dict.fromkeys(n for t in tables for n in t) if n not in _UNSAID]
    if len(runs) > 1:
        title = "Options in which the runs differ"
        names = [n for n in names if len({repr(table.get(n)) for table in tables}) > 1]
    else:
        title = "Options that are not the default"
        usual = _defaults(runs[0].draft)
        names = [n for n in names if n not in usual or tables[0][n] != usual[n]]
    rows = [[name, *(_option(table.get(name)) for table in tables)] for name in ("data", *names)]
    columns = [("option", "text"), *((run.name, "text") for run in runs)]
    table = Table(title=title, columns=columns, rows=rows)  # type: ignore[arg-type]
    text = "fit.json in the run has all of them."
    return Section(title="Settings", text=text, parts=[table] if any(tables) else [])


def _defaults(draft: str) -> dict[str, Any]:
    """Return the defaults of the options of `fit` for a kind of draft; none if it is unknown."""
    try:
        fields = (*dataclasses.fields(Training), *dataclasses.fields(draft_options(draft)))
    except DraftError:
        return {}
    return {field.name: field.default for field in fields} | DEFAULTS


def _option(value: Any) -> str:
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# -- evaluations -----------------------------------------------------------------------------------


def _acceptance(measured: Sequence[Evaluation], alone: bool) -> Section:
    """Return the section on lengths; `alone`: the page begins with it."""
    rows: list[list[Value]] = []
    for one in measured:
        real, acceptance = one.decoded, one.result.acceptance
        row: list[Value] = [one.name, "real decoding" if real else "simulated", one.where]
        row += [acceptance.acceptance_length, *(acceptance.interval or (None, None))]
        row += [acceptance.rounds]
        if isinstance(one.result, Simulated):
            rows.append([*row, one.result.on_policy, None, None])
        else:
            same = one.result.identical
            lossless = None if same is None else f"{same} of {one.result.responses}"
            rows.append([*row, None, lossless, one.result.speedup])
    columns: list[tuple[str, Format]] = [
        *(("evaluation", "text"), ("kind", "text"), ("on", "text"), ("length", "number")),
        *(("from", "number"), ("to", "number"), ("verifications", "count")),
        *(("on-policy", "share"), ("lossless", "text"), ("speed-up", "number")),
    ]
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    table = Table(
        title="Evaluations",
        columns=[columns[i] for i in used],
        rows=[[row[i] for i in used] for row in rows],
        note="Length: tokens per verification of the target, its own token included; from and to: "
        "its 95 % interval over prompts or documents. Real decoding: the target decodes prompts "
        "with the draft. Simulated: the draft continues its own tokens on stored documents, which "
        "predicts real greedy decoding.",
    )
    parts: list[Part] = [table]
    known = [one for one in measured if one.result.acceptance.acceptance_length is not None]
    if alone and known:  # the length to trust most: of real decoding, if there is one
        lead = min(known, key=lambda one: one.decoded is None)
        acceptance = lead.result.acceptance
        items = _length_items(
            acceptance.acceptance_length, acceptance.interval, lead.decoded is not None
        )
        parts.insert(0, Figures(items=items))
    for one in measured:
        parts += [Note(text=f"{one.name}: {text}.", warning=True) for text in one.warnings]
    rates = {one.name: one.result.acceptance.accept_rate for one in measured}
    note = "Of the verifications whose earlier drafted tokens were all accepted."
    return Section(
        title="Acceptance",
        text="As in serving: the draft continues with its own tokens, step after step.",
        parts=[*parts, *_by_depth("Acceptance by depth", rates, note)],
    )


def _where(measured: Sequence[Evaluation]) -> Section:
    positions = {one.name: one.result.by_position for one in measured}
    contexts = {one.name: one.decoded.by_context for one in measured if one.decoded}
    parts = [
        *_by_range(
            positions,
            "Acceptance length by position in the response",
            "tokens of the response before the verification",
        ),
        *_by_range(
            contexts,
            "Acceptance length by length of the context",
            "tokens of prompt and response before the verification",
        ),
    ]
    for one in measured:
        parts += _by_source(one) if isinstance(one.result, Simulated) else _by_set(one)
    return Section(title="Where drafts are accepted", parts=parts)


def _by_range(lines: dict[str, list[Range]], title: str, x: str) -> list[Part]:
    """Return the lengths by range of positions or of contexts, one series per evaluation."""
    ends = {one.start: one.end for own in lines.values() for one in own}
    labels = {
        start: f"{start:,}+" if end is None else f"{start:,}\u2013{end - 1:,}"
        for start, end in sorted(ends.items())
    }
    series = {}
    for name, own in lines.items():
        known = {one.start: one.acceptance_length for one in own if one.rounds >= FEWEST_ROUNDS}
        if any(length is not None for length in known.values()):
            series[name] = [known.get(start) for start in labels]
    if not series:
        return []
    return [
        Bars(
            title=title,
            x=x,
            y=_axis(_LENGTH, least=0),
            labels=list(labels.values()),
            series=series,
            note=f"Ranges with fewer than {FEWEST_ROUNDS} verifications are not drawn.",
        )
    ]


def _by_set(one: Evaluation) -> list[Part]:
    """Return the table of several sets of prompts; nothing for one set."""
    sets = one.decoded.by_set if one.decoded else []
    if len(sets) < 2:
        return []
    return [
        Table(
            title=f"By set of prompts: {one.name}",
            columns=[
                *(("set", "text"), ("prompts", "count"), ("verifications", "count")),
                *(("acceptance length", "number"), ("from", "number"), ("to", "number")),
            ],
            rows=[
                [s.set, s.prompts, s.rounds, s.acceptance_length, *(s.interval or (None, None))]
                for s in sets
            ],
            note="From and to: the 95 % interval over the prompts of the set.",
        )
    ]


def _by_source(one: Evaluation) -> list[Part]:
    sources = one.result.by_source if isinstance(one.result, Simulated) else []
    names = ("source", "documents", "supervised_tokens", "on_policy", "rounds", "acceptance_length")
    if not sources:
        return []
    table = Table(
        title=f"By source: {one.name}",
        columns=[
            *(("source", "text"), ("documents", "count"), ("supervised tokens", "count")),
            *(("on-policy", "share"), ("verifications", "count")),
            ("acceptance length", "number"),
        ],
        rows=[[getattr(source, name) for name in names] for source in sources],
        note="On-policy: supervised tokens that are the target's own greedy choice.",
    )
    if len(sources) == 1:
        return [table]
    bars = Bars(
        title=f"Acceptance length by source: {one.name}",
        x="source",
        y=_axis(_LENGTH, least=0),
        labels=[source.source for source in sources],
        series={"acceptance length": [source.acceptance_length for source in sources]},
    )
    return [bars, table]


def _speed(measured: Sequence[Evaluation]) -> Section:
    decoded = {one.name: one.decoded for one in measured if one.decoded}
    parts: list[Part] = []
    shares = {name: one.speed.shares for name, one in decoded.items() if any(one.speed.shares)}
    names = {"draft": "drafting", "verify": "verification", "prefill": "prefill", "other": "other"}
    if shares:
        bars = Bars(
            title="Time of decoding with the draft",
            x="part of the time",
            y=_axis("share of the time", "share", 0),
            labels=list(names.values()),
            series={name: [own.get(part) for part in names] for name, own in shares.items()},
        )
        parts.append(bars)
    lengths: dict[str, list[Point]] = {}
    speedups: dict[str, list[Point]] = {}
    for name, one in decoded.items():
        if len(one.sweep) > 1:
            lengths[name] = [(float(x.draft_tokens), x.acceptance_length) for x in one.sweep]
            speedups[f"{name}, measured"] = [(float(x.draft_tokens), x.speedup) for x in one.sweep]
            modelled = [(float(x.draft_tokens), x.modelled.speedup) for x in one.sweep]
            speedups[f"{name}, modelled"] = modelled
    x = _axis("drafted tokens per verification", "count")
    for title, y, series in (
        ("Acceptance length by drafted tokens", _axis(_LENGTH, least=1), lengths),
        ("Speed-up by drafted tokens", _axis("times the target alone", least=0), speedups),
    ):
        if series:
            parts.append(Lines(title=title, x=x, y=y, series=series, points=True))
    return Section(
        title="Speed",
        text="Of this implementation, one response at a time. Prefill is left out of the speed-up "
        "that is modelled.",
        parts=parts,
    )


def _confidence(runs: Sequence[Run], measured: Sequence[Evaluation]) -> Section:
    """Return the section about confidence heads; without parts if no draft has one."""
    bins: dict[str, Bins] = {run.name: run.best.get("confidence_bins") or [] for run in runs}
    for one in measured:
        if isinstance(one.result, Simulated) and one.result.teacher_forced:
            bins[one.name] = one.result.teacher_forced.confidence_bins
    bins = {name: own for name, own in bins.items() if any(row[0] for row in own)}
    parts: list[Part] = []
    if bins:
        series: dict[str, list[Point]] = {
            name: [(mean, share) for _, mean, share in own if mean is not None]
            for name, own in bins.items()
        }
        whole = Axis(title="mean forecast", format="share", least=0, most=1)
        chart = Lines(
            title="Forecast and acceptance",
            x=whole,
            y=dataclasses.replace(whole, title="share accepted"),
            series={**series, "calibrated": [(0.0, 0.0), (1.0, 1.0)]},
            points=True,
            note="Above the line of calibrated forecasts the draft is too careful, below it too "
            "sure.",
        )
        parts.append(chart)
    parts += _curves(
        runs,
        "confidence_calibration",
        "Calibration error over training",
        _axis("mean difference", "share", 0),
        "Mean absolute difference of forecast and acceptance over ten ranges of the forecast, on "
        "held-out documents.",
        held_out=True,
    )
    parts += [_reliability(name, own) for name, own in bins.items()]
    return Section(
        title="Confidence",
        text="The draft forecasts for every drafted token the probability that it is accepted. "
        "A forecast is calibrated if of the tokens with forecast p the share p is accepted.",
        parts=parts,
    )


def _reliability(name: str, bins: Bins) -> Table:
    total = sum(weight or 0.0 for weight, _, _ in bins)
    rows: list[list[Value]] = []
    for b, (weight, mean, share) in enumerate(bins):
        if weight:
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


# -- drafted tokens --------------------------------------------------------------------------------

_DOCUMENT_KEYS = [
    ["differs", "accepted, but the document differs"],
    ["document", "the document's token, not the target's"],
]
_KEYS = [
    ["accepted", "drafted and accepted"],
    ["rejected", "drafted and rejected"],
    ["target", "the target's own token"],
]

Word = tuple[int, str]
"""The id and the text of a token."""


def _drafted_tokens(measured: Sequence[Evaluation]) -> Section:
    """Return the section with the responses that evaluations have kept."""
    keys = _KEYS + (_DOCUMENT_KEYS if any(one.decoded is None for one in measured) else [])
    documents = [response(one, sample) for one in measured for sample in one.result.samples]
    data = {
        "note": "",
        "noun": "response",
        "item": "verification step",
        "modes": [
            ["steps", "drafted tokens", keys],
            ["steps all", "also those after a rejected one", [*keys, ["unused", "not used"]]],
        ],
        "documents": documents,
    }
    return Section(
        title="Drafted tokens",
        text="What the draft proposed in a few responses, and what the target made of it. The "
        "responses are evenly spread over those that were measured.",
        parts=[Viewer(data=data)] if documents else [],
    )


def response(one: Evaluation, sample: Sample) -> dict[str, Any]:
    """Return a sampled response as a document of the viewer (`pages.viewer`)."""
    texts, joiner = one.result.texts, Joiner()
    segments: list[dict[str, Any]] = []
    rounds = [part for part in sample.parts if isinstance(part, VerificationStep)]
    position, step = 0, 0
    for part in sample.parts:
        if isinstance(part, Context):
            joiner = Joiner() if part.left_out else joiner
            title = f"context, {part.left_out:,} tokens before are not shown" * bool(part.left_out)
            segments.append({"title": title or "context", "learned": False, "items": []})
            words = [[text, "context"] for _, text in _words(part.tokens, texts, joiner)]
            about = ["Tokens that are not drafted."]
            position = 0
        elif isinstance(part, First):
            segments.append({"title": "response", "learned": True, "items": []})
            words = [[text, "target"] for _, text in _words(part.tokens, texts, joiner)]
            about = ["Where the response begins."]
            position += len(part.tokens)
        else:
            step += 1
            where = f"Verification step {step} of {len(rounds)}, after {position:,} tokens"
            words, about = _step(part, texts, joiner, where)
            position += len(part.emitted)
        segments[-1]["items"].append({"words": words, "about": about})
    return {
        "head": _figures_of(one, sample, rounds),
        "id": " · ".join(filter(None, (one.name, sample.name, sample.source))),
        "segments": segments,
    }


def _figures_of(one: Evaluation, sample: Sample, rounds: Sequence[VerificationStep]) -> str:
    emitted = sum(len(step.emitted) for step in rounds)
    accepted, drafted = (sum(x.accepted for x in rounds), sum(len(x.drafted) for x in rounds))
    length = f"{emitted / len(rounds):.2f}" if rounds else "\u2013"
    tree = one.decoded is not None and one.decoded.tree_tokens
    return (
        f"{len(rounds):,} verification steps, {emitted:,} tokens: {length} per step. "
        f"{accepted:,} of {drafted:,} drafted tokens accepted."
        + " Decoded with trees: of the drafted tokens only the accepted path is kept."
        * bool(tree)
    )


def _words(ids: Sequence[int], texts: dict[str, str], joiner: Joiner) -> list[Word]:
    """Return the tokens with their texts after those that `joiner` has seen."""
    return [(token, joiner.add(texts.get(str(token), "")) or f"<token {token}>") for token in ids]


def _step(
    step: VerificationStep, texts: dict[str, str], response: Joiner, where: str
) -> tuple[list[list[str]], list[str]]:
    """Return the words of a verification step with their kinds, and what is said of it.

    Drafted tokens go on after the response before the step, the target's token after the drafts
    that were accepted; `response` goes on with the tokens that the step emits.
    """
    begun, count = response.begun, step.accepted
    drafted = _words(step.drafted, texts, Joiner(begun))
    accepted = Joiner(begun)
    _words(step.drafted[:count], texts, accepted)
    choice = None if step.choice is None else _words([step.choice], texts, accepted)[0]
    emitted = _words(step.emitted, texts, response)
    words = [
        [text, "accepted" if i >= len(emitted) or emitted[i][0] == token else "differs"]
        for i, (token, text) in enumerate(drafted[:count])
    ]
    rejected = ["rejected" if choice else "unused"] + ["unused"] * len(drafted)
    words += [[text, kind] for (_, text), kind in zip(drafted[count:], rejected, strict=False)]
    if len(emitted) > count:
        same = choice is None or emitted[count][0] == choice[0]
        words.append([emitted[count][1], "target" if same else "document"])
    elif count and len(emitted) == count and emitted[-1][0] != drafted[count - 1][0]:
        words.append([emitted[-1][1], "document"])
    about = [
        f"{where}: {count} of {len(drafted)} drafted tokens accepted.",
        "Drafted: " + (" ".join(map(_quoted, drafted)) or "nothing"),
    ]
    if choice:
        about.append(f"The target's token: {_quoted(choice)}.")
    if words and words[-1][1] == "document":
        about.append(f"The document goes on with {_quoted(emitted[-1])}.")
    return words, about


def _quoted(word: Word) -> str:
    return json.dumps(word[1], ensure_ascii=False)
