"""`spec-train export`: check a draft, write it in another form, read it back and compare.

The draft is first loaded into its class, so only a complete and consistent draft is exported. The
files are made from what the class saves, never copied from the input directory.
"""

import dataclasses
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_data.models.identify import identify_files
from spec_data.models.resolve import cached_model, local_directory
from spec_data.pages.page import Column, Page, Section, Table, notebook_html
from spec_data.shards.errors import (
    ConfigError,
    DatasetError,
    DraftError,
    MissingError,
    RunError,
)
from spec_data.shards.files import (
    atomic_write,
    read_object,
    remove_dead_of,
    write_atomically,
)
from spec_data.terminal import NOTICE
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_data.terminal.paths import check_directory_to_write, make_parent_of_new
from spec_train.drafts import load_draft, own_files, read_draft
from spec_train.evaluation.pruning import PruningCost, SmallerVocabulary, pruned
from spec_train.formats.draft_card import CARD, Serving, draft_card, servings
from spec_train.formats.draft_files import DraftFiles, read_config, write_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import files_of
from spec_train.formats.names import unread_keys
from spec_train.formats.preflight import (
    NOTE,
    SPEC_TRAIN,
    WARN,
    Finding,
    Subject,
    preflight,
    readers,
    refusals,
)
from spec_train.formats.read import is_own_form
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.formats.write import TARGET, with_facts_in, write_form, writers_of
from spec_train.reports.results import is_run
from spec_train.training.run_directory import (
    VALIDATION,
    chosen_draft_dir,
    newer_than_best,
    resolve_draft_dir,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """An exported draft, or one that was only checked, and what every engine would make of it."""

    title: str
    """What the draft is and reads, in one line."""
    path: Path | None
    """The written directory; None: only checked."""
    format: str | None
    findings: dict[str, list[Finding]]
    """By engine; "spec-train" has those that hold for every engine."""
    servings: list[Serving]
    """How the engines that read the form serve it."""
    card: str
    """README.md of an export."""
    tensors: int
    bytes: int
    """Bytes of the tensors."""
    pruning: PruningCost | None = None
    """What its smaller vocabulary costs, if it was pruned."""
    next_command: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the report on all engines, or what was written; `next:` serves it."""
        cost = self.pruning.text().splitlines() if self.pruning else []
        if self.path is None:
            report = (f"  {f.level:<7}{f.engine}: {f.text}" for f in self.of())
            return "\n".join(map(wrapped, [*cost, self.title, *report]))
        size = f"{self.tensors} tensors, {self.bytes / 1e6:.1f} MB"
        lines = [f"{self.path}: {self.format} format, {size}; verified by reading it back"]
        lines = [*cost, *lines]
        if self.servings:
            engines = ", ".join(serving.engine for serving in self.servings)
            lines.append(f"read by {engines}; commands: {self.path / CARD}")
        return "\n".join(map(wrapped, lines))

    def _repr_html_(self) -> str:
        """Return what every engine makes of the draft as a table, as a part of a notebook."""
        return notebook_html(self._page, str(self))

    def _page(self) -> Page:
        rows = [[f.level, f.engine, f.text] for f in self.of()]
        columns: list[Column] = [("", "text"), ("engine", "text"), ("what it does", "text")]
        engines = Table(title="", columns=columns, rows=rows)
        serve = [[one.engine, line] for one in self.servings if self.path for line in one.lines]
        start = Table(title="", columns=[("engine", "text"), ("command", "text")], rows=serve)
        sections = [Section(title="Engines", parts=[engines])]
        return Page(
            title=str(self.path or self.format or "draft"),
            kind="Export" if self.path else "Report",
            lead=f"{self.title}.",
            figures=[("tensors", self.tensors, "count"), ("size", self.bytes, "bytes")],
            sections=[*sections, *([Section(title="Serve", parts=[start])] if serve else [])],
        )

    def details(self) -> str:
        """Return how every engine serves what was written."""
        lines: list[str] = []
        for serving in self.servings if self.path else ():
            note = [wrapped(f"({serving.note})")] if serving.note else []
            lines += [f"serve with {serving.engine}:", *serving.lines, *note]
        return "\n".join(lines)

    def of(self, engine: str = "") -> list[Finding]:
        """Return the findings about one engine in all its releases, such as "vllm"; "": all."""
        every = (finding for findings in self.findings.values() for finding in findings)
        return [f for f in every if f.engine.lower().startswith(engine.lower())]


def export_draft(
    draft: str,
    out: Path | None = None,
    form: str | None = None,
    target: str | None = None,
    *,
    vocabulary: SmallerVocabulary | None = None,
    accept_edited: bool = False,
) -> ExportResult:
    """Check a draft for every engine, and write it in a form; arguments as for `export`.

    Raises:
        DraftError: the format cannot hold it, or an engine that reads the format would not load it
            or would compute something else than what was trained.
        ConfigError: --out exists.
        RunError: the written files read back as another draft.
        SpecDataError: the draft or the target cannot be read.
    """
    if out is not None:
        check_directory_to_write("--out", str(out))
    if form == TARGET and target is None:
        raise ConfigError("--format target writes a copy of the target: pass --target")
    folder = chosen_draft_dir(draft)
    facts = find_target(target, _captured_revision(read_config(folder), target))
    if (steps := newer_than_best(folder)) is not None:
        said = "%s is of step %d, and `last` of step %d: no later validation was better, or there "
        said += "was none since. To export that one: --draft %s"
        log.log(NOTICE, said, folder, *steps, folder.parent / "last")
    loaded, files = read_draft(folder, facts, accept_edited)
    cost = None
    if vocabulary is not None:
        loaded, cost = pruned(loaded, Path(draft), folder, vocabulary)
    trained = own_files(loaded, str(folder))
    section = trained.config[SECTION]
    if facts.name is None and (name := (section.get("origin") or {}).get("target_name")):
        if form == "speculators":
            log.warning(
                "warning[target-name]: the target is named %s, as its dataset names it; --target "
                "names another one (a directory or a Hub id from which it can be served)",
                name,
            )
        facts = dataclasses.replace(facts, name=name)
    subject_facts = with_facts_in(files, facts)
    measured = {} if cost else _validation(folder)
    best = folder.name == "best" and is_run(folder.parent)  # its weights are calibrated
    beside = {} if form is None else loaded.files_beside(form, measured, calibrated=best)
    unread = tuple(unread_keys(files))
    subject = Subject(trained, subject_facts, form or "vllm", unread, tuple(beside))
    findings = preflight(subject, formed=form is not None)
    served_from = str(out) if out is not None else folder.resolve().name
    serve = servings(subject, findings, served_from, loaded.depth)
    card = draft_card(subject, serve, loaded.depth, measured)
    written = trained
    if form is not None:
        if refused := refusals(findings, form):
            lines = "\n  ".join(f"{finding.engine}: {finding.text}" for finding in refused)
            raise DraftError(f"{folder} cannot be exported as {form}:\n  {lines}")
        written = write_form(trained, form, facts)
    if form is None or out is None:
        known = writers_of(section)
        forms = (name for name in ("vllm", "sglang", TARGET, "hf") if name in known)
        form = form or next((name for name in forms if not refusals(findings, name)), None)
        place = Path(os.path.normpath(Path.cwd() / draft))
        place = place.parent if is_run(place.parent) else place  # nothing of others goes into a run
        to = f"{place}-{form}" if Path(draft).is_absolute() else os.path.relpath(f"{place}-{form}")
        command = ["spec-train", "export", "--draft", draft, "--format", str(form), "--out", to]
        command += ["--target", target or "MODEL"] if target or form == TARGET else []
        command += vocabulary.words() if vocabulary else []
        command = command + ["--accept-edited"] * accept_edited if form else []  # refused by all
    else:
        _write_once(written, trained, facts, {CARD: card, **beside}, out, form)
        for finding in (f for engine in (SPEC_TRAIN, *readers(form)) for f in findings[engine]):
            if finding.level == WARN:
                log.warning("warning[engines]: %s: %s", finding.engine, finding.text)
            elif finding.level == NOTE:
                log.info("%s: %s", finding.engine, finding.text)
        shell = [serving.lines[-1] for serving in serve if serving.language == "sh"]
        report = [] if form == TARGET else export_command(str(out), target)
        command = shlex.split(shell[0]) if shell else report
    layers = section.get("layers")
    reads = f"layers {layers} (outputs of decoder blocks)" if layers else "final hidden states"
    return ExportResult(
        title=f"{trained.where}: {section['draft']}, reads {reads}",
        path=out,
        format=None if out is None else form,
        findings=findings,
        servings=serve,
        card=card,
        tensors=len(written.tensors),
        bytes=sum(value.nbytes for value in written.tensors.values()),
        pruning=cost,
        next_command=command,
    )


def export_command(draft: str, target: str | None) -> list[str]:
    """Return the command that reports on a draft; forms of others may need their target."""
    words = ["spec-train", "export", "--draft", draft]
    own = is_own_form(read_config(resolve_draft_dir(draft)))
    return words + (["--target", target or "MODEL"] if target or not own else [])


def _validation(folder: Path) -> dict[str, Any]:
    """Return the figures of the last validation of a draft; empty if there are none."""
    path = folder / VALIDATION
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, DatasetError) as error:
        log.warning("warning[card]: %s; the card has no acceptance", error)
        return {}


def _captured_revision(config: Mapping[str, Any], target: str | None) -> str | None:
    """Return the commit of a target on the Hub that a draft in our own form was captured with."""
    section = config.get(SECTION)
    origin = section.get("origin") if isinstance(section, dict) else None
    if not isinstance(origin, dict) or origin.get("target_name") != target:
        return None
    return origin.get("target_revision")


def find_target(name: str | None, revision: str | None = None) -> TargetFacts:
    """Read the facts and the identity of a target; None: nothing is known of it.

    A Hub id is looked up in the local cache only, without a download; `revision` is a commit.

    Raises:
        MissingError: `name` is a path without a model, or no name of the Hub. TargetError: a file
            of it is damaged.
    """
    if name is None:
        return TargetFacts()
    folder = _folder_of(name, revision)
    if folder is None and "/" not in name:
        raise MissingError(f"--target {name}: no such directory, and not in the local Hub cache")
    if folder is None:
        commit = f" as of commit {revision}, which the draft was fitted to" if revision else ""
        problem = (
            f"{name} is no directory here and not in the local Hub cache{commit}; download it "
        )
        problem += "first"
        return TargetFacts(name=name, problems=(problem,))
    identity, problems = identify_files(folder)
    facts = read_target(folder, name)
    if facts.dtype:  # in which an engine serves it, if it is not told otherwise
        identity["dtype"] = facts.dtype
    return dataclasses.replace(facts, identity=identity, problems=tuple(problems))


def _folder_of(name: str, revision: str | None) -> Path | None:
    return local_directory(name) or cached_model(name, revision)


def _write_once(
    written: DraftFiles,
    trained: DraftFiles,
    target: TargetFacts,
    others: Mapping[str, str],
    out: Path,
    form: str,
) -> None:
    """Write next to `out`, check that it reads back bit for bit, then rename.

    `others` are the files beside config and weights: the card, and those of `files_beside`.
    """
    make_parent_of_new("--out", out)
    remove_dead_of(out)
    # a form without an embedding, or the number of blocks, has the target's, equal to this
    if target.embedding is None:
        target = dataclasses.replace(target, embedding=trained.tensors.get("embed_tokens.weight"))
    blocks = target.num_layers or trained.config.get("num_target_layers")
    target = dataclasses.replace(target, num_layers=blocks)
    with atomic_write(out) as temporary:
        if form == TARGET:
            folder = _folder_of(str(target.name), _captured_revision(trained.config, target.name))
            if folder is None:
                raise ConfigError(f"--target {target.name}: no directory, and not in the Hub cache")
            into_target = files_of(trained.config[SECTION]["draft"]).into_target
            if into_target is None or not into_target(trained, folder, temporary):
                raise RunError(f"{temporary}: the export reads back as another block; report this")
            _write_others(temporary, others)
            return
        write_files(written, temporary)
        back = own_files(load_draft(temporary, target), str(temporary))
        names = sorted(trained.tensors.keys() | back.tensors.keys())
        wrong = [n for n in names if not _same(trained.tensors.get(n), back.tensors.get(n))]
        if wrong or back.config != trained.config:
            raise RunError(
                f"{temporary}: the export reads back as another draft ("
                f"{', '.join(wrong) or 'its config differs'}); this is a bug in spec-train, please "
                "report it"
            )
        _write_others(temporary, others)


def _write_others(folder: Path, others: Mapping[str, str]) -> None:
    for name, content in others.items():
        write_atomically(folder / name, content)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
