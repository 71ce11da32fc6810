"""`spec-train export`: check a draft, write it in another form, read it back and compare.

The draft is first loaded into its class, so only a complete and consistent draft is exported. The
files are made from what the class saves, never copied from the input directory.
"""

import dataclasses
import json
import logging
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch

from spec_data.models.identify import identify_files
from spec_data.models.resolve import cached_model, local_directory
from spec_data.shards.errors import ConfigError, DraftError, RunError
from spec_data.shards.files import remove_left_of, temporary_name, write_atomically
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_train.drafts import Draft, load_draft, own_files, read_draft
from spec_train.evaluation.pruning import PruningCost, pruned
from spec_train.formats.draft_card import CARD, Serving, draft_card, servings
from spec_train.formats.draft_files import DraftFiles, write_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.forms import changed_keys, with_facts_in, write_form
from spec_train.formats.names import unread_keys
from spec_train.formats.preflight import (
    NOTE,
    SPEC_TRAIN,
    Finding,
    Subject,
    preflight,
    readers,
    refusals,
)
from spec_train.formats.target_facts import TargetFacts, read_target
from spec_train.options.command_options import ExportConfig
from spec_train.options.vocabulary_options import CHOICES
from spec_train.training.stored import resolve_draft_dir

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedDraft:
    """A draft that was read for export, and what every engine would make of it."""

    draft: Draft
    own: DraftFiles
    folder: Path
    target: TargetFacts
    findings: dict[str, list[Finding]]
    servings: list[Serving]
    """How the engines that read the form serve it."""
    card: str
    """README.md of an export."""
    cost: PruningCost | None = None
    """What its smaller vocabulary costs, if it was pruned."""


def run_export(config: ExportConfig) -> CheckedDraft:
    """Export or check a draft with `config`, print the report if asked; return what was checked.

    Raises:
        As `check_draft` and `export_draft`.
    """
    checked = check_draft(config)
    if checked.cost is not None:
        print(checked.cost.text())
    if config.check:
        print(report(checked.findings, checked.own))
    export_draft(config, checked)
    return checked


def check_draft(config: ExportConfig) -> CheckedDraft:
    """Read the draft of `config` and check it for every engine.

    Raises:
        SpecDataError: the draft or the target cannot be read.
    """
    if config.out is not None:
        check_directory_to_write("--out", config.out)
    target = find_target(config.target)
    folder = resolve_draft_dir(config.draft)
    draft, files = read_draft(folder, target, config.accept_edited)
    cost = None
    if config.prunes:
        draft, cost = pruned(draft, config, folder, target)
    own = own_files(draft, str(folder))
    name = Path(config.out).name if config.out else folder.resolve().name
    if target.name is None:
        origin = own.config[SECTION].get("origin") or {}
        target = dataclasses.replace(target, name=origin.get("target_name"))
        if config.format == "speculators" and target.name:
            log.warning(
                "the target is named %s, as its dataset names it; --target names another one "
                "(a directory or a Hub id from which it can be served)",
                target.name,
            )
    changed = () if cost else keys_changed(files, own)
    unread = tuple(unread_keys(files))
    subject = Subject(own, with_facts_in(files, target), config.format or "vllm", changed, unread)
    found = preflight(subject, formed=config.format is not None)
    serve = servings(subject, found, config.out or name, draft.depth)
    return CheckedDraft(
        draft=draft,
        own=own,
        folder=folder,
        target=target,
        findings=found,
        servings=serve,
        card=draft_card(subject, serve, draft.depth, {} if cost else _validation(folder)),
        cost=cost,
    )


def _validation(folder: Path) -> dict[str, Any]:
    """Return the figures of the last validation of a draft; empty if none can be read."""
    path = folder / "validation.json"
    if not path.is_file():
        return {}
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("warning: %s: cannot be read (%s); the card has no acceptance", path, error)
        return {}
    return figures if isinstance(figures, dict) else {}


def find_target(name: str | None) -> TargetFacts:
    """Read the facts and the identity of a target; None: nothing is known of it.

    A Hub id is looked up in the local cache only, without a download.

    Raises:
        MissingError: `name` is a path without a model. TargetError: a file of it is damaged.
    """
    if name is None:
        return TargetFacts()
    folder = local_directory(name) or cached_model(name)
    if folder is None:
        problem = f"{name} is no directory here and not in the local Hub cache"
        return TargetFacts(name=name, problems=(problem,))
    facts, problems = identify_files(folder)
    found = read_target(folder, name)
    if found.dtype:  # in which an engine serves it, if it is not told otherwise
        facts["dtype"] = found.dtype
    return dataclasses.replace(found, identity=facts, problems=tuple(problems))


def export_draft(config: ExportConfig, checked: CheckedDraft) -> DraftFiles | None:
    """Write a checked draft with `config`; return the written files, None without a format.

    Raises:
        DraftError: the format cannot hold it, or an engine that reads the format would not load it
            or would compute something else than what was trained.
        ConfigError: --out exists.
        RunError: the written files read back as another draft.
    """
    if config.format is None:
        return None
    if refused := refusals(checked.findings, config.format):
        lines = "\n  ".join(f"{finding.engine}: {finding.text}" for finding in refused)
        raise DraftError(f"{checked.folder} cannot be exported as {config.format}:\n  {lines}")
    written = write_form(checked.own, config.format, checked.target)
    if config.out is not None:
        _write_once(written, checked, Path(config.out))
        _log_export(checked, config, written)
    return written


def command_after(config: ExportConfig, checked: CheckedDraft) -> list[str]:
    """The command that an export or a check leads to: one that serves, writes or checks."""
    if config.out is None:
        forms = ("vllm", "sglang", "speculators")
        fitting = [form for form in forms if not refusals(checked.findings, form)]
        form = config.format or (fitting[0] if fitting else "hf")
        out = f"{config.draft.rstrip('/')}-{form}"
        target = ["--target", config.target] if config.target else []
        words = ["--draft", config.draft, "--format", form, "--out", out, *target]
        names = (*CHOICES, "draft_vocab_from", "data")
        given = {name: getattr(config, name) for name in names}
        for name, value in given.items():
            words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return ["spec-train", "export", *words]
    commands = [serving for serving in checked.servings if serving.language == "sh"]
    if not commands:
        return ["spec-train", "export", "--draft", config.out, "--check"]
    return shlex.split(commands[0].lines[-1])


def keys_changed(files: DraftFiles, own: DraftFiles) -> tuple[str, ...]:
    """Return the keys of the files, as they are, that an export would write differently."""
    if SECTION not in files.config:
        return ()
    changed, odd = changed_keys(files, own)
    return (*changed, *odd)


def _write_once(written: DraftFiles, checked: CheckedDraft, out: Path) -> None:
    """Write next to `out`, verify, then rename, so that `out` is never incomplete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists already; pass a new directory")
    make_directory("--out", out.parent)
    remove_left_of(out)
    temporary = temporary_name(out)
    try:
        write_files(written, temporary)
        _verify(temporary, checked.own, checked.target)
        write_atomically(temporary / CARD, checked.card)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _verify(folder: Path, own: DraftFiles, target: TargetFacts) -> None:
    """Check that the written files read back as the exported draft, bit for bit."""
    embedding = own.tensors.get("embed_tokens.weight")
    if target.embedding is None:  # a form without an embedding uses the target's, equal to this
        target = dataclasses.replace(target, embedding=embedding)
    back = own_files(load_draft(folder, target), str(folder))
    wrong = [name for name in own.tensors if not _same(own.tensors[name], back.tensors.get(name))]
    wrong += [name for name in back.tensors if name not in own.tensors]
    if wrong or back.config != own.config:
        raise RunError(
            f"{folder}: the export reads back as another draft ("
            f"{', '.join(wrong) or 'its config differs'}); this is a bug in spec-train, please "
            "report it"
        )


def _same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and torch.equal(a, b)


def report(found: dict[str, list[Finding]], own: DraftFiles) -> str:
    """Return lines with the kind of the draft, its layers and the findings of every engine."""
    section = own.config["spec_train"]
    layers = section.get("layers")
    reads = f"layers {layers} (outputs of decoder blocks)" if layers else "final hidden states"
    lines = [f"{own.where}: {section['draft']}, reads {reads}"]
    for findings in found.values():
        lines += [f"  {f.level:<7}{f.engine}: {f.text}" for f in findings]
    return "\n".join(lines)


def _log_export(checked: CheckedDraft, config: ExportConfig, written: DraftFiles) -> None:
    """Log what was written, the warnings of the engines that read the format, and how to serve."""
    found = checked.findings
    engines = () if config.check else (SPEC_TRAIN, *readers(config.format or "hf"))
    for finding in (f for engine in engines for f in found[engine] if f.level == "warn"):
        log.warning("warning: %s: %s", finding.engine, finding.text)
    for finding in (f for engine in engines for f in found[engine] if f.level == NOTE):
        log.info("%s: %s", finding.engine, finding.text)
    size = sum(value.nbytes for value in written.tensors.values())
    log.info(
        "%s: %s draft in %s format, %d tensors, %.1f MB; verified by reading it back",
        *(config.out, checked.draft.name, config.format, len(written.tensors), size / 1e6),
    )
    for serving in checked.servings:
        note = [f"({serving.note})"] if serving.note else []
        log.info("\nserve with %s:\n  %s", serving.engine, "\n  ".join([*serving.lines, *note]))
