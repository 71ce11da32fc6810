"""The page about runs and evaluations: lengths first, then curves, drafted tokens and settings.

Curves are drawn over trained tokens, so that runs with other batch sizes can be compared.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from spec_data import __version__
from spec_data.pages.page import (
    Axis,
    Chart,
    Column,
    Figures,
    Format,
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
    Context,
    Evaluation,
    First,
    Point,
    Range,
    Run,
    Sample,
    Simulated,
    VerificationStep,
    evaluations,
    is_run,
    number,
    read_json,
    read_run,
)
from spec_train.simulation.train_serve_gap import train_serve_gap

log = logging.getLogger(__name__)

PAGE = "report.html"
MOST_POINTS = 600
"""Points of a curve that a page holds at most; a longer curve is thinned evenly."""
FEWEST_ROUNDS = 10
"""A mean over fewer verifications is not drawn."""
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
    measured: list[Evaluation] = []
    paths = list(dict.fromkeys(paths))
    for path, name in zip(paths, short_names(paths), strict=True):
        if not path.exists():
            raise MissingError(f"{path}: no such file or run directory; check the path")
        if path.is_file():
            measured += evaluations(read_json(path), str(path), name)
        elif is_run(path):
            runs.append(read_run(path, name))
        else:
            raise ConfigError(
                f"{path}: not a run of `spec-train fit` (it has no fit.json and no metrics.jsonl); "
                "pass the directory of --out"
            )
    return report_page(runs, measured)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for every path: its last part if these differ, else the paths."""
    names = [path.absolute().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def report_page(runs: Sequence[Run], others: Sequence[Evaluation]) -> Page:
    """Return the page about runs and evaluations, at least one of them, in the order given."""
    measured = [*(run.held_out for run in runs if run.held_out is not None), *others]
    sections = [_overview(runs, others), _learning(runs)] if runs else []
    sections += [_acceptance(runs, measured), _drafted_tokens(measured), _training(runs)]
    names = list(dict.fromkeys([run.name for run in runs] or [one.name for one in others]))
    return Page(
        title=f"{names[0]} and {len(names) - 1} more" if len(names) > 3 else ", ".join(names),
        kind=("Run" if len(runs) == 1 else "Runs") if runs else "Evaluation",
        sections=[section for section in sections if section.parts],
        footer=f"spec-train {__version__}",
    )


def warn_of_page(file: Path, error: Exception) -> None:
    """Log that a page could not be written."""
    log.warning("warning: %s was not written: %s: %s", file, type(error).__name__, error)
    log.debug("the page failed", exc_info=error)


# -- runs ------------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run], others: Sequence[Evaluation]) -> Section:
    decoded = [_decoded(run, others) for run in runs]
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
    parts += [Note(text=text, warning=True) for run in runs for text in _problems(run)]
    return Section(title="Overview", parts=parts)


def _decoded(run: Run, others: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation of a draft of the run by real decoding, if there is one."""
    folder = run.path.resolve()
    for one in others:
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
        length = _length_items(
            decoded.acceptance.acceptance_length, decoded.acceptance.interval, True
        )
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
    """Return lengths and losses: of several runs those on held-out documents, where there are."""
    if len(runs) == 1:
        (run,) = runs
        lengths = {
            "serving-like": run.curve("serving_like_length", True),
            "product-limit": run.curve("product_limit_length", True),
            "teacher-forced": run.curve("acceptance_length", True),
            "teacher-forced, training": run.curve("acceptance_length"),
        }
        losses = {"held out": run.curve("loss", True), "training": run.curve("loss")}
    else:
        lengths = {run.name: run.curve("serving_like_length", True) for run in runs}
        losses = {run.name: run.curve("loss", bool(run.validation)) for run in runs}
    note = "The runs have different drafts or losses: their values cannot be compared."
    kinds = {(run.draft, run.options.get("loss")) for run in runs}
    length = Axis(title=_LENGTH, least=1)
    parts = [
        *_curves("Acceptance length", length, lengths, "On held-out documents."),
        *_curves("Loss", Axis(title="loss"), losses, note if len(kinds) > 1 else ""),
    ]
    return Section(
        title="Learning",
        text="Acceptance length: tokens per verification of the target, its own included. "
        "Serving-like: the draft continues its own tokens, which predicts real greedy decoding. "
        "Product-limit: teacher-forced, also from answers shorter than a chain; chooses "
        "the best draft. Teacher-forced: the draft reads the documents' own tokens.",
        parts=parts,
    )


def _curves(title: str, y: Axis, series: dict[str, list[Point]], note: str = "") -> list[Part]:
    """Return a chart over trained tokens of the curves that have a value, thinned."""
    curves = {
        name: points
        if len(points) <= MOST_POINTS
        else [*even_sample(points[:-1], MOST_POINTS - 1), points[-1]]
        for name, points in series.items()
        if any(value is not None for _, value in points)
    }
    x = Axis(title="trained tokens", format="count", least=0)
    return [Chart(title=title, x=x, y=y, series=curves, note=note)] if curves else []


def _training(runs: Sequence[Run]) -> Section:
    """Return the optimisation and the options: not the default, or those that differ."""
    tables = [run.options for run in runs]
    if not any(tables):
        return Section(title="Training")
    names = [n for n in dict.fromkeys(n for t in tables for n in t) if n not in _UNSAID]
    if len(runs) > 1:
        title = "Options in which the runs differ"
        names = [n for n in names if len({repr(table.get(n)) for table in tables}) > 1]
    else:
        title = "Options that are not the default"
        usual = _defaults(runs[0].draft)
        names = [n for n in names if n not in usual or tables[0][n] != usual[n]]
    columns: list[Column] = [("option", "text"), *((run.name, "text") for run in runs)]
    rows = [[name, *(_option(table.get(name)) for table in tables)] for name in ("data", *names)]
    note = "fit.json in the run has all of them."
    parts: list[Part] = [Table(title=title, columns=columns, rows=rows, note=note)]
    for metric, name in (("lr", "learning rate"), ("grad_norm", "gradient norm before clipping")):
        axis = Axis(title=name, least=0)
        parts += _curves(name.capitalize(), axis, {run.name: run.curve(metric) for run in runs})
    return Section(title="Training", parts=parts)


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


def _acceptance(runs: Sequence[Run], measured: Sequence[Evaluation]) -> Section:
    """Return lengths, and where drafts are accepted; a page without runs begins with it."""
    parts: list[Part] = _evaluations(measured) if measured else []
    known = [one for one in measured if one.acceptance.acceptance_length is not None]
    if not runs and known:  # the length to trust most: of real decoding, if there is one
        lead = min(known, key=lambda one: one.decoded is None).acceptance
        real = any(one.decoded for one in known)
        items = _length_items(lead.acceptance_length, lead.interval, real)
        parts.insert(0, Figures(items=items))
    for one in measured:
        parts += [Note(text=f"{one.name}: {text}.", warning=True) for text in one.warnings]
    parts += _by_depth({one.name: one.acceptance.accept_rate for one in measured})
    parts += _by_position({one.name: one.result.by_position for one in measured})
    forecasts: dict[str, Any] = {run.name: run.best.get("confidence_bins") for run in runs}
    for one in measured:
        if isinstance(one.result, Simulated):
            parts += _plain_table("By source", one, _SOURCE, one.result.by_source, 1)
            if one.result.teacher_forced:
                forecasts[one.name] = one.result.teacher_forced.confidence_bins
        else:
            parts += _plain_table("By set of prompts", one, _SET, one.result.by_set, 2)
            parts += _plain_table("By drafted tokens", one, _SWEEP, one.result.sweep, 2)
    return Section(
        title="Acceptance",
        text="As in serving: the draft continues with its own tokens, step after step.",
        parts=[*parts, *_forecasts(forecasts)],
    )


def _evaluations(measured: Sequence[Evaluation]) -> list[Part]:
    rows: list[list[Value]] = []
    for one in measured:
        own = one.acceptance
        row: list[Value] = [one.name, "real decoding" if one.decoded else "simulated", one.where]
        row += [own.acceptance_length, *(own.interval or (None, None)), own.rounds]
        if isinstance(one.result, Simulated):
            rows.append([*row, one.result.on_policy, None, None])
        else:
            same = one.result.identical
            lossless = None if same is None else f"{same} of {one.result.responses}"
            rows.append([*row, None, lossless, one.result.speedup])
    columns: list[Column] = [
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
        "its 95 % interval over prompts or documents. Simulated: on stored documents, which "
        "predicts real greedy decoding. Speed-up: of this implementation, one response at a time.",
    )
    return [table]


def _by_depth(rates: dict[str, list[float | None]]) -> list[Part]:
    """Return the chart of acceptance by depth, of lists of any length."""
    rates = {name: own for name, own in rates.items() if any(rate is not None for rate in own)}
    depths = max(map(len, rates.values()), default=0)
    chart = Chart(
        title="Acceptance by depth",
        x=Axis(title="depth of the drafted token"),
        y=Axis(title="share accepted", format="share", least=0),
        labels=[str(depth) for depth in range(1, depths + 1)],
        series={name: [*own, *[None] * (depths - len(own))] for name, own in rates.items()},
        note="Of the verifications whose earlier drafted tokens were all accepted.",
    )
    return [chart] if depths else []


def _by_position(lines: dict[str, list[Range]]) -> list[Part]:
    """Return the lengths by range of positions, one series per evaluation."""
    ends = {one.start: one.end for own in lines.values() for one in own}
    labels = {
        start: f"{start:,}+" if end is None else f"{start:,}\u2013{end - 1:,}"
        for start, end in sorted(ends.items())
    }
    series = {}
    for name, own in lines.items():
        lengths = {one.start: one.acceptance_length for one in own if one.rounds >= FEWEST_ROUNDS}
        if any(length is not None for length in lengths.values()):
            series[name] = [lengths.get(start) for start in labels]
    chart = Chart(
        title="Acceptance length by position in the response",
        x=Axis(title="tokens of the response before the verification"),
        y=Axis(title=_LENGTH, least=0),
        labels=list(labels.values()),
        series=series,
        note=f"Ranges with fewer than {FEWEST_ROUNDS} verifications are not drawn.",
    )
    return [chart] if series else []


_LENGTH_COLUMN = ("acceptance_length", "number")
_ROUNDS = ("rounds", "count")
_SOURCE = (
    *(("source", "text"), ("documents", "count"), ("supervised_tokens", "count")),
    *(("on_policy", "share"), _ROUNDS, _LENGTH_COLUMN),
)
_SET = (("set", "text"), ("prompts", "count"), _ROUNDS, _LENGTH_COLUMN)
_SWEEP = (("draft_tokens", "count"), _LENGTH_COLUMN, ("speedup", "number"))


def _plain_table(
    title: str, one: Evaluation, fields: Sequence[Any], lines: Sequence[dict[str, Any]], fewest: int
) -> list[Part]:
    """Return the table of some fields of lines of JSON, if there are enough lines."""
    words = {"rounds": "verifications", "speedup": "speed-up"}
    columns = [(words.get(name, name.replace("_", " ")), form) for name, form in fields]
    rows = [[line.get(name) for name, _ in fields] for line in lines]
    table = Table(title=f"{title}: {one.name}", columns=columns, rows=rows)
    return [table] if len(rows) >= fewest else []


def _forecasts(bins: dict[str, Any]) -> list[Part]:
    """Return the chart of confidence heads; nothing if no draft has one."""
    series: dict[str, list[Point]] = {
        name: [(mean, share) for weight, mean, share in own if weight and mean is not None]
        for name, own in bins.items()
        if own
    }
    whole = Axis(title="mean forecast", format="share", least=0, most=1)
    chart = Chart(
        title="Forecast and acceptance",
        x=whole,
        y=dataclasses.replace(whole, title="share accepted"),
        series={**series, "calibrated": [(0.0, 0.0), (1.0, 1.0)]},
        note="The draft forecasts for every drafted token the probability that it is accepted. "
        "Above the line of calibrated forecasts it is too careful, below it too sure.",
    )
    return [chart] if any(series.values()) else []


# -- drafted tokens --------------------------------------------------------------------------------

_KEYS = [
    ["accepted", "drafted and accepted"],
    ["rejected", "drafted and rejected"],
    ["target", "the target's own token"],
    ["differs", "accepted, but the document differs"],
    ["document", "the document's token, not the target's"],
]

Word = tuple[int, str]
"""The id and the text of a token."""


def _drafted_tokens(measured: Sequence[Evaluation]) -> Section:
    """Return the section with the responses that evaluations have kept."""
    keys = _KEYS if any(one.decoded is None for one in measured) else _KEYS[:3]
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
    emitted, accepted = (sum(len(x.emitted) for x in rounds), sum(x.accepted for x in rounds))
    head = (
        f"{len(rounds):,} verification steps, {emitted:,} tokens: "
        f"{emitted / max(len(rounds), 1):.2f} per step. {accepted:,} of "
        f"{sum(len(x.drafted) for x in rounds):,} drafted tokens accepted."
    )
    if one.decoded is not None and one.decoded.tree_tokens:
        head += " Decoded with trees: of the drafted tokens only the accepted path is kept."
    return {
        "head": head,
        "id": " · ".join(filter(None, (one.name, sample.name, sample.source))),
        "segments": segments,
    }


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
