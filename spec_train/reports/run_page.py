"""The page about runs and evaluations. A run opens on its curves, several on the best of them, an
evaluation on answers decoded with and without the draft.

Curves are drawn over trained tokens, so that runs with other batch sizes can be compared.
"""

import json
import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any

from spec_data import __version__
from spec_data.pages.page import (
    Axis,
    Chart,
    Column,
    Figure,
    Format,
    Note,
    Page,
    Part,
    Point,
    Section,
    Table,
    Value,
    Viewer,
    WrittenPage,
    listed,
    shown,
    with_rows,
    write_page,
)
from spec_data.shards.draft_code import is_code
from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.file_system import followed
from spec_data.shards.packing import even_sample
from spec_data.shards.serving import GENERATION, prompt_lines, sampling_text
from spec_data.terminal.config import flag
from spec_data.terminal.paths import check_file_to_write
from spec_train.formats.draft_files import read_config
from spec_train.formats.draft_seal import SECTION
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.reports.results import (
    Context,
    DraftedStep,
    Evaluation,
    ModeFigures,
    RangeFigures,
    Run,
    SampleResponse,
    Simulated,
    evaluations,
    is_run,
    number,
    read_json,
)
from spec_train.simulation.ranges import range_text
from spec_train.simulation.simulated_decoding import train_serve_gap
from spec_train.training.result import no_gain
from spec_train.training.run_directory import link_of, resolve_draft_dir

log = logging.getLogger(__name__)

PAGE = "report.html"
MOST_POINTS = 600
"""Points of a curve that a page holds at most; a longer curve is thinned evenly."""
_UNSAID = (
    *("out", "config", "track", "keep", "preset", "save_every", "log_every", "eval_every"),
    *("device", "follow", "follow_timeout", "accept_edited", "sharding", "gradient_checkpointing"),
)
"""Options that change nothing of a draft."""
_PLACES = ("data", "out", "config")


def write_report(paths: Sequence[Path], out: Path | None = None) -> WrittenPage:
    """Write the page about run directories and files of `eval --json`, and return it.

    Args:
        paths: at least one; runs may still train. A directory of runs stands for them all, by name.
            out: the HTML file; None: report.html in the directory, or beside the file with its
            name, if there is one path.

    Raises:
        MissingError: a path does not exist. ConfigError: a path is neither a run nor such a file,
            or the page cannot be written there. RunError: a run's files are damaged.
    """
    if not paths:
        raise ConfigError("nothing to report: name run directories, or files of `eval --json`")
    if out is None and len(paths) > 1:
        raise ConfigError(
            f"--out is needed for a page about {len(paths)} places: name an HTML file"
        )
    file = out or (paths[0] / PAGE if paths[0].is_dir() else paths[0].with_suffix(".html"))
    check_file_to_write("--out", file)
    runs, measured = _read(paths)
    page = report_page(runs, measured, file.absolute().parent)
    return write_page(file, page, _export_of_best(runs, measured))


def _runs_in(path: Path) -> list[Path]:
    """Return the runs that lie in a directory, by name: [] of a run, a file or other contents."""
    if is_run(path) or not path.is_dir():
        return []
    return sorted(inner for inner in path.iterdir() if inner.is_dir() and is_run(inner))


def page_of(paths: Sequence[Path]) -> Page:
    """Read runs and files of `eval --json`, and return the page about them.

    Raises:
        As `write_report`.
    """
    return report_page(*_read(paths))


def _read(paths: Sequence[Path]) -> tuple[list[Run], list[Evaluation]]:
    runs: list[Run] = []
    measured: list[Evaluation] = []
    paths = list(dict.fromkeys(run for path in paths for run in _runs_in(path) or [path]))
    for path, name in zip(paths, short_names(paths), strict=True):
        if is_run(path):
            runs.append(Run(path, name))
        elif path.is_dir():
            raise ConfigError(
                f"{path}: not a run of `spec-train fit` (it has no fit.json and no metrics.jsonl), "
                "and no run lies in it; pass the directory of --out"
            )
        else:
            measured += evaluations(read_json(path), str(path), name)
    return runs, measured


def _export_of_best(runs: Sequence[Run], measured: Sequence[Evaluation]) -> tuple[str, ...]:
    """Return the command that exports the best draft of a page; (): none is the best."""
    decoded = [one for one in measured if one.decoded is not None]
    lengths = [number(run.best, "serving_like_length") for run in runs]
    best = _longest(lengths, [run.data for run in runs]) if runs else _best(decoded)
    if best is None and len(runs or decoded) != 1:
        return ()
    words: tuple[str, ...] = ("spec-train", "export", "--draft")
    if runs:
        draft = str(runs[best or 0].path)
        return (*words, draft, *_code_words(draft))
    one = decoded[best or 0].decoded
    assert one is not None  # see above
    return (*words, one.draft, "--target", one.target, *_code_words(one.draft))


def _code_words(draft: str) -> tuple[str, ...]:
    """Return the option without which no command reads a draft from outside; the page needs none.

    The draft of an evaluation may be elsewhere, and that of a run may be gone.
    """
    with suppress(SpecDataError):
        section = read_config(resolve_draft_dir(draft)).get(SECTION)
        code = section.get("code") if isinstance(section, dict) else None
        return ("--draft-code", code) if isinstance(code, str) and is_code(code) else ()
    return ()


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for every path: its last part if these differ, else the paths."""
    names = [path.absolute().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def report_page(
    runs: Sequence[Run], others: Sequence[Evaluation], beside: Path | None = None
) -> Page:
    """Return the page about runs and evaluations, at least one of them, in the order given.

    `beside` is the directory of its file, if it may have links to pages below that.
    """
    decoded = [_decoded(run, others) for run in runs]
    stored = [one for one in decoded if one is not None and one not in others]
    measured = [*(run.held_out for run in runs if run.held_out is not None), *stored, *others]
    kinds = {one and one.kind for one in decoded}  # a column has lengths of one kind
    pairs = list(zip(runs, decoded, strict=True))
    facts = [_facts(run, one if len(kinds) == 1 else None) for run, one in pairs]
    answers, acceptance = _answers(measured), _acceptance(measured)
    if not runs:
        sections = [answers, acceptance]
        kind, lead, figures = "Evaluation", _lead_of(others), _figures_of(others)
    elif len(runs) == 1:
        rows = [[name, shown(value, form)] for name, value, form in facts[0]]
        rows += [[name, text] for name, text in prompt_lines(runs[0].origin)]
        if sampling := runs[0].origin.get(GENERATION):
            rows.append(["sampling that engines apply", sampling_text(sampling)])
        about = Table(title="", columns=[("", "text"), ("", "text")], rows=rows)
        parts: list[Part] = [about, *_own_settings(runs[0])]
        sections = [_learning(runs), acceptance, answers, Section(title="The run", parts=parts)]
        named = {figure[0]: figure for figure in facts[0]}
        kind, lead = "Run", _lead_of_run(runs[0], facts[0], decoded[0])
        figures = [_with_interval(facts[0]), named["its held-out loss"], named["trained tokens"]]
    else:
        on = [one.data if one and len(kinds) == 1 else run.data for run, one in pairs]
        best = _longest([row[0][1] for row in facts], on)
        settings = Section(title="Settings", parts=_settings(runs))
        compared = _compared(runs, facts, best, beside)
        sections = [compared, _learning(runs), settings, acceptance, answers]
        kind, (lead, figures) = "Runs", _lead_of_runs(runs, facts, best)
    names = list(dict.fromkeys([run.name for run in runs] or [one.name for one in others]))
    return Page(
        title=listed(names),
        kind=kind,
        lead=lead,
        figures=figures,
        sections=[section for section in sections if section.parts],
        footer=f"spec-train {__version__}",
    )


def leave_page(file: Path, make: Callable[[], Page]) -> Path | None:
    """Write a page at the end of a command; a failure is a warning: the results are worth more."""
    try:
        log.info("page       %s", write_page(file, make()).path)
        return file
    except Exception as error:
        log.warning("warning[page]: %s was not written: %s: %s", file, type(error).__name__, error)
        log.debug("the page failed", exc_info=error)
        return None


# -- runs ------------------------------------------------------------------------------------------


def _longest(lengths: Sequence[Value], on: Sequence[Any]) -> int | None:
    """Return the number of the longest of several lengths; None: it is not one alone.

    `on` is what each was measured on: if they differ, no length is the longest.
    """
    known = sorted((x for x in lengths if isinstance(x, float)), reverse=True)
    if len(known) < 2 or known[0] == known[1] or any(data != on[0] for data in on):
        return None
    return lengths.index(known[0])


def _lead_of_run(run: Run, facts: Sequence[Figure], decoded: Evaluation | None) -> str:
    data = listed(_names_of(run.options.get("data"))) or "its data"
    steps = dict((name, value) for name, value, _ in facts)["steps"]
    lead = f"{run.draft}, trained for {steps} steps on {data}: "
    length = facts[0][1]
    if not isinstance(length, float):
        return f"{lead}nothing was validated yet."
    if decoded is not None:
        return f"{lead}each verification by the target yields {length:.2f} tokens ({decoded.kind})."
    step = shown(number(run.best, "step"), "count")
    best = f"its best draft, of step {step}, would yield {length:.2f} tokens"
    return f"{lead}{best} per verification; it was not yet decoded for real."


def _lead_of_runs(
    runs: Sequence[Run], facts: Sequence[Sequence[Figure]], best: int | None
) -> tuple[str, list[Figure]]:
    if best is None:
        return f"{len(runs)} runs, none of which is the best by its length.", []
    others = [i for i in range(len(runs)) if i != best and isinstance(facts[i][0][1], float)]
    second = max(others, key=lambda i: facts[i][0][1] or 0.0)
    (_, length, form), (_, other, _) = facts[best][0], facts[second][0]
    lead = (
        f"{runs[best].name} is the best of {len(runs)} runs: {length:.2f} tokens per verification. "
        f"{runs[second].name} follows with {other:.2f}."
    )
    tokens = next(figure for figure in facts[best] if figure[0] == "trained tokens")
    return lead, [
        _with_interval(facts[best]),
        (f"that of {runs[second].name}", other, form),
        tokens,
    ]


def _with_interval(facts: Sequence[Figure]) -> Figure:
    """Return a length and its interval, which follows it, as one figure."""
    (name, length, form), (about, between, _) = facts[:2]
    return (f"{name}; {about} {between}" if between else name, length, form)


def _problems(run: Run) -> list[Part]:
    names = "product_limit_length", "every_slot_length", "serving_like_rounds"
    forced, own, steps = (number(run.best, name) for name in names)
    problems = [train_serve_gap(forced, own, int(steps or 0))]
    if not run.validation:
        problems.append("nothing was held out or validated yet: there is no held-out curve")
    elif not run.best:
        problems.append("only the draft at step 0 was validated, before training")
    if no_gain(run.best, run.validation):
        problems.append("no validation was better than the draft at step 0, before training")
    return [Note(text=f"{run.name}: {text}.", warning=True) for text in problems if text]


def _compared(
    runs: Sequence[Run],
    facts: Sequence[Sequence[Figure]],
    best: int | None,
    beside: Path | None = None,
) -> Section:
    """Return the table of several runs, each with a link to its own page if that lies below."""
    pages = [run.path.absolute() / PAGE for run in runs]
    links = {
        row: PurePosixPath(page.relative_to(beside))
        for row, page in enumerate(pages)
        if beside is not None and page.is_relative_to(beside) and page.is_file()
    }
    table = Table(
        title="",
        columns=[("run", "text"), *((name, form) for name, _, form in facts[0])],
        rows=[[r.name, *(v for _, v, _ in row)] for r, row in zip(runs, facts, strict=True)],
        best=best,
        links=links,
        note="\u2605 The longest acceptance length; intervals that overlap tell no drafts apart. "
        "Tokens per second and waiting for data are medians.",
    )
    return Section(title="Runs", parts=[table])


def _decoded(run: Run, others: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation of the run's best draft by real decoding: one of these, or the last."""
    links = run.path, followed(run.path / "best"), link_of(run.path)
    best = {link.resolve() for link in links}
    for one in others:
        if one.decoded and Path(one.decoded.draft).resolve() in best:
            return one
    return run.decoded


def _facts(run: Run, decoded: Evaluation | None) -> list[Figure]:
    """Return the figures of a run: first the length by which it is told."""
    best = run.best
    if decoded is None:
        served = number(best, "serving_like_length")
        length = _length_items(served, best.get("serving_like_interval"), None)
    else:
        acceptance = decoded.acceptance
        length = _length_items(acceptance.acceptance_length, acceptance.interval, decoded)
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
    length: float | None, interval: Sequence[float] | None, one: Evaluation | None
) -> list[Figure]:
    between = "{:.2f} to {:.2f}".format(*interval) if interval else None
    kind = one.kind if one is not None and one.decoded else "serving-like"
    name = f"acceptance length, {kind}"
    return [(name, length, "number"), ("its 95 % interval", between, "text")]


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
        losses = {
            run.name + ", training" * (not run.validation): run.curve("loss", bool(run.validation))
            for run in runs
        }
    note = "The runs have different drafts or losses: their values cannot be compared."
    kinds = {(run.draft, run.options.get("loss")) for run in runs}
    most = max(run.last("tokens") for run in runs)  # both charts have one axis
    tokens = Axis(title="trained tokens", format="count", least=0, most=most)
    length, loss = Axis(title="tokens per verification", least=1), Axis(title="loss")
    text = (
        "On held-out documents; tokens per verification of the target, its own included. "
        "Serving-like: the draft continues its own tokens, which estimates real greedy decoding."
    )
    if len(runs) == 1:
        text += (
            " Product-limit: teacher-forced, also from answers shorter than a chain; chooses "
            "the best draft. Teacher-forced: the draft reads the documents' own tokens."
        )
    return Section(
        title="Learning",
        parts=[
            *_lines("Acceptance length", tokens, length, lengths, text),
            *_lines("Loss", tokens, loss, losses, note if len(kinds) > 1 else ""),
            *(problem for run in runs for problem in _problems(run)),
        ],
    )


def _lines(
    title: str, x: Axis, y: Axis, series: dict[str, list[Point]], note: str = ""
) -> list[Part]:
    """Return a chart of the curves that have a value, thinned; none: no chart."""
    curves = {
        name: points
        if len(points) <= MOST_POINTS
        else [*even_sample(points[:-1], MOST_POINTS - 1), points[-1]]
        for name, points in series.items()
        if any(value is not None for _, value in points)
    }
    return [Chart(title=title, x=x, y=y, series=curves, note=note)] if curves else []


def _own_settings(run: Run) -> list[Part]:
    """Return the tables of what a run was given, and of what else made it what it is."""
    known = fields(Training)
    if run.draft in DRAFT_OPTIONS:
        known += fields(DRAFT_OPTIONS[run.draft])
    defaults = {field.name: field.default for field in known}
    # JSON has lists where options have tuples
    rows: list[list[Value]] = [
        [flag(name), _option(value, name)]
        for name, value in run.options.items()
        if name not in _PLACES and json.dumps(value) != json.dumps(defaults.get(name))
    ]
    target = run.origin.get("target_name")
    about: list[list[Value]] = [
        ["datasets", ", ".join(run.data)],
        ["their fingerprints", ", ".join(map(str, run.fingerprints)) or None],
        ["target", None if target is None else str(target)],
        ["trained on", run.machine],
    ]
    if run.draft in DRAFT_OPTIONS:  # a kind of one's own is named by its place, which is not known
        again = ["spec-train", "fit", run.draft, "--config", str(run.path / "fit.json")]
        about.append(["the same run again", shlex.join([*again, "--out", "OTHER"])])
    text: list[Column] = [("", "text"), ("", "text")]
    note = "Options that are not the default of `fit`; fit.json in the run has all."
    settings = [Table(title="Settings", columns=text, rows=rows, note=note)] if rows else []
    about = [row for row in about if row[1] is not None]
    return [*settings, Table(title="Made from", columns=text, rows=about)]


def _settings(runs: Sequence[Run]) -> list[Part]:
    """Return the table of the options that matter in which several runs differ."""
    options = dict.fromkeys(name for run in runs for name in run.options if name not in _UNSAID)
    rows = [
        [name, *texts]
        for name in options
        for texts in [[_option(run.options.get(name), name) for run in runs]]
        # an option that one kind of draft alone has says no more than its kind
        if len({text for run, text in zip(runs, texts, strict=True) if name in run.options}) > 1
    ]
    table = Table(
        title="Options in which the runs differ",
        columns=[("option", "text"), *((run.name, "text") for run in runs)],
        rows=rows,
        note="Of those that change a draft; fit.json in each run has all options.",
    )
    return [table] if rows else []


def _names_of(data: Any) -> list[str]:
    """Return the last parts of the paths of datasets, and their weights."""
    paths = [data] if isinstance(data, str) else data or ()
    return [str(path).rstrip("/").rpartition("/")[2] for path in paths]


def _option(value: Any, name: str) -> str:
    value = _names_of(value) if name == "data" else value
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# -- evaluations -----------------------------------------------------------------------------------


def _lead_of(others: Sequence[Evaluation]) -> str:
    """Say what was evaluated: the best of several, or the one."""
    if (best := _best(others)) is not None:
        length = f"{others[best].acceptance.acceptance_length:.2f} tokens per verification"
        return f"{others[best].name} is the best of {len(others)}: {length}."
    result = _first(others).result
    if isinstance(result, Simulated):
        on = f"{result.documents:,} documents of {_names_of([result.path])[0]}"
        return f"On {on}, without the target: the draft continues its own tokens, as in serving."
    name = _names_of([result.target])[0]
    depth = f"{result.draft_tokens} tokens at a time"
    return f"{result.responses:,} answers of {name}; the draft proposes {depth}."


def _best(measured: Sequence[Evaluation]) -> int | None:
    """Return the number of the best of several evaluations of one kind on the same data."""
    lengths = [one.acceptance.acceptance_length for one in measured]
    return _longest(lengths, [(one.kind, one.data) for one in measured])


def _first(measured: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation to trust most: by real decoding, if there is one, and the longest."""

    def trust(one: Evaluation) -> tuple[bool, bool, float]:
        length = one.acceptance.acceptance_length
        return length is not None, one.decoded is not None, length or 0.0

    return max(measured, key=trust)


def _figures_of(others: Sequence[Evaluation]) -> list[Figure]:
    one = _first(others)
    length, interval = one.acceptance.acceptance_length, one.acceptance.interval
    figures = [_with_interval(_length_items(length, interval, one))]
    if (result := one.decoded) is None:
        share = getattr(one.result, "on_policy", None)
        figures.append(("of the tokens are the target's own choice", share, "share"))
        return [*figures, ("verifications", one.acceptance.rounds, "count")]
    same = None if result.identical is None else f"{result.identical:,} of {result.responses:,}"
    speed = None if result.speedup is None else f"{result.speedup:.2f} times"
    figures.append(("the speed of plain decoding, in this implementation", speed, "text"))
    return [*figures, ("answers equal to plain decoding", same, "text")]


def _acceptance(measured: Sequence[Evaluation]) -> Section:
    """Return lengths, and where drafts are accepted."""
    parts: list[Part] = [_evaluations(measured)] if measured else []
    for one in measured:
        parts += [Note(text=f"{one.name}: {text}.", warning=True) for text in one.warnings]
    parts += _lines(
        "Acceptance by depth",
        Axis(title="depth of the drafted token", format="count", least=1),
        Axis(title="share accepted", format="share", least=0),
        {one.name: list(enumerate(one.acceptance.accept_rate, 1)) for one in measured},
        "Of the verifications whose earlier drafted tokens were all accepted.",
    )
    for one in measured:
        result = one.result
        title, fields, lines = (
            ("By source", _SOURCE, result.by_source)
            if isinstance(result, Simulated)
            else ("By set of prompts", _SET, result.by_set if len(result.by_set) > 1 else [])
        )
        if lines:
            parts.append(
                Table(
                    title=f"{title}: {one.name}",
                    columns=[*((name, form) for _, name, form in fields), *_BETWEEN],
                    rows=[
                        [
                            *(line.get(key) for key, _, _ in fields),
                            *(line.get("interval") or (None, None)),
                        ]
                        for line in lines
                    ],
                    note=_FROM_TO,
                )
            )
        parts += _by_part(one)
    text = "As in serving: the draft continues with its own tokens, step after step."
    return Section(title="Acceptance", text=text, parts=parts)


def _by_part(one: Evaluation) -> list[Part]:
    """Return how acceptance changes with the length of answer and context, and with the mode."""
    behind, result = "Of the verifications behind so many tokens", one.result
    tables: list[tuple[str, str, Sequence[RangeFigures | ModeFigures], str]] = [
        ("By tokens of the answer", "tokens before", result.by_position, f"{behind}."),
        (
            *("By tokens of the context", "tokens before", result.by_context),
            f"{behind}, those of the prompt included.",
        ),
        ("By mode", "mode", result.by_mode, "Of the verifications in such answers."),
    ]
    return [
        Table(
            title=f"{title}: {one.name}",
            columns=[(first, "text"), *((name, form) for _, name, form in _LENGTH), *_BETWEEN],
            rows=[
                [
                    x.mode if isinstance(x, ModeFigures) else range_text(x.start, x.end),
                    *(x.rounds, x.acceptance_length, *(x.interval or (None, None))),
                ]
                for x in some
            ],
            note=f"{note} {_FROM_TO}",
        )
        for title, first, some, note in tables
        if len(some) > 1
    ]


_Fields = Sequence[tuple[str, str, Format]]
_LENGTH: _Fields = (
    ("rounds", "verifications", "count"),
    ("acceptance_length", "acceptance length", "number"),
)
_BETWEEN: Sequence[tuple[str, Format]] = (("from", "number"), ("to", "number"))
_FROM_TO = "From and to: the 95 % interval of the length, over prompts or documents."
_SOURCE: _Fields = (
    ("source", "source", "text"),
    ("documents", "documents", "count"),
    ("supervised_tokens", "supervised tokens", "count"),
    ("on_policy", "on-policy", "share"),
    *_LENGTH,
)
_SET: _Fields = (("set", "set", "text"), ("prompts", "prompts", "count"), *_LENGTH)


def _evaluations(measured: Sequence[Evaluation]) -> Table:
    rows: list[list[Value]] = []
    for one in measured:
        acceptance, result = one.acceptance, one.result
        lossless = None
        if isinstance(result, Simulated):
            on = f"{result.path}, {result.split}: {result.documents:,} documents"
        else:
            on = f"{result.target}: {result.responses:,} responses"
            if result.identical is not None:
                lossless = f"{result.identical} of {result.responses}"
        row: list[Value] = [one.name, one.kind, on]
        row += [acceptance.acceptance_length, *(acceptance.interval or (None, None))]
        row += [acceptance.rounds, getattr(result, "on_policy", None)]
        rows.append([*row, lossless, getattr(result, "speedup", None)])
    return Table(
        title="Evaluations",
        columns=[
            *(("evaluation", "text"), ("kind", "text"), ("on", "text"), ("length", "number")),
            *(("from", "number"), ("to", "number"), ("verifications", "count")),
            *(("on-policy", "share"), ("lossless", "text"), ("speed-up", "number")),
        ],
        rows=rows,
        best=_best(measured),
        note="Length: tokens per verification of the target, its own token included; from and to: "
        "its 95 % interval over prompts or documents. Simulated: on stored documents, which "
        "estimates real greedy decoding. Speed-up: of this implementation, one response at a time.",
    )


# -- answers ---------------------------------------------------------------------------------------

_KEYS = [
    ["accepted", "drafted and accepted"],
    ["target", "the target's own token"],
    ["document", "the document's token: the target would choose another"],
]


def _answers(measured: Sequence[Evaluation]) -> Section:
    """Return the section with the responses that evaluations have kept."""
    order = sorted(measured, key=lambda one: one.decoded is None)  # real decoding first
    samples = [(one, sample) for one in order for sample in one.result.samples]
    documents = [response(i, one, sample) for i, (one, sample) in enumerate(samples, 1)]
    keys = _KEYS if any(one.decoded is None for one in measured) else _KEYS[:2]
    columns: list[Column] = [("answer", "count"), ("tokens", "count")]
    columns += [("per step", "number"), ("of", "text")]
    sorts = [["in order", 0, 1], ["most accepted", 2, -1], ["least accepted", 2, 1]]
    note = "A few responses, evenly spread over those that were measured."
    data: dict[str, Any] = {"note": note, "noun": "answer", "item": "verification step"}
    data |= {"keys": keys, "columns": columns, "sorts": sorts}
    data["documents"] = with_rows(columns, documents)
    return Section(title="Answers", parts=[Viewer(data=data)] if documents else [])


def response(number: int, one: Evaluation, sample: SampleResponse) -> dict[str, Any]:
    """Return a sampled response as a document of the viewer (`pages/viewer.js`)."""
    texts, plain = one.result.texts, sample.plain
    segments: list[dict[str, Any]] = []
    steps = [part for part in sample.parts if isinstance(part, DraftedStep)]
    position, step = 0, 0
    for part in sample.parts:
        if isinstance(part, DraftedStep):
            step += 1
            words, about = _step(part, texts)
            where = f"Verification step {step} of {len(steps)}, after {position:,} tokens"
            about[0] = f"{where}: {about[0]}"
            position += len(part.emitted)
        else:
            title, kind, about = "response", "target", ["Where the response begins."]
            position += len(part.tokens)
            if isinstance(part, Context):
                title, kind, about = "context", "context", ["Tokens that are not drafted."]
                title += f", {part.left_out:,} tokens before are not shown" * bool(part.left_out)
                position = 0
            segments.append({"title": title, "learned": kind == "target", "items": []})
            words = [[_text(token, texts), kind] for token in part.tokens]
        segments[-1]["items"].append({"words": words, "about": about})
    emitted, accepted = (sum(len(x.emitted) for x in steps), sum(x.accepted for x in steps))
    per_step = emitted / len(steps) if steps else None
    head = (
        f"{len(steps):,} verification steps, {emitted:,} tokens: "
        f"{emitted / max(len(steps), 1):.2f} per step. {accepted:,} of "
        f"{sum(len(x.drafted) for x in steps):,} drafted tokens accepted."
    )
    if one.decoded is not None and one.decoded.tree_tokens:
        head += " Decoded with trees: of the drafted tokens only the accepted path is kept."
    if plain is not None:  # both side by side; the drafted one after the other
        segments[-1] |= {"title": _timed("with the draft", position, plain.draft_seconds)}
        segments[-1]["seconds"] = plain.draft_seconds
        about = ["One pass of the target for each token."]
        items = [{"words": [[_text(token, texts), ""]], "about": about} for token in plain.tokens]
        title = _timed("the target alone", len(items), plain.seconds)
        alone = {"title": title, "learned": False, "items": items, "seconds": plain.seconds}
        segments.insert(-1, alone)
    name = " \u00b7 ".join(filter(None, (one.name, sample.name, sample.source)))
    figures = {"number": number, "row": [number, position, per_step, name]}
    return figures | {"head": head, "id": name, "segments": segments}


def _timed(name: str, tokens: int, seconds: float) -> str:
    return f"{name}: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.1f} per second"


def _text(token: int, texts: dict[str, str]) -> str:
    return texts.get(str(token)) or f"<token {token}>"


def _step(step: DraftedStep, texts: dict[str, str]) -> tuple[list[list[str]], list[str]]:
    """Return the words that a verification step adds, with their kinds, and what is said of it."""
    drafted, emitted, count, choice = step.drafted, step.emitted, step.accepted, step.choice
    words = []
    for i, token in enumerate(emitted):
        kind = "document"
        if i < count and drafted[i] == token:
            kind = "accepted"
        elif i >= count and choice in (None, token):
            kind = "target"
        words.append([_text(token, texts), kind])

    def quoted(token: int) -> str:
        return json.dumps(_text(token, texts), ensure_ascii=False)

    about = [
        f"{count} of {len(drafted)} drafted tokens accepted.",
        "Drafted: " + (" ".join(map(quoted, drafted)) or "nothing"),
    ]
    if choice is not None:
        about.append(f"The target's token: {quoted(choice)}.")
    if words and words[-1][1] == "document":
        about.append(f"The document goes on with {quoted(emitted[-1])}.")
    return words, about
