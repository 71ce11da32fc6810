"""Our checkpoints in the forms of engines and trainers, which each kind of draft writes itself.

What a form cannot hold is in the table of engines (`spec_data/models/engines.toml`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import Writer, files_of, unchanged
from spec_train.formats.names import FORM
from spec_train.formats.preflight import REFUSE, Subject, of_engine
from spec_train.formats.target_facts import TargetFacts

TARGET = "target"
"""A copy of the target with the trained block in it; `evaluation.exporting` writes it."""
_OWN_CLASS = ("deepspec", "transformers")
"""Forms of one program each; what its class does not have, such files cannot hold."""


def writers_of(section: Mapping[str, Any]) -> Mapping[str, Writer]:
    """Return the writers of a draft by form; one with code from outside has our own form alone.

    `section` is that of this project in its config.json.
    """
    return {"hf": unchanged} if section.get("code") else files_of(section["draft"]).forms


def write_form(ours: DraftFiles, form: str, target: TargetFacts) -> DraftFiles:
    """Convert our checkpoint to the form `form`.

    Raises:
        DraftError: this kind of draft has no such form, or the class of the form cannot hold it.
    """
    writers = writers_of(ours.config[SECTION])
    if form not in writers:
        raise DraftError(
            f"{ours.where}: there is no {form} form of {ours.config[SECTION]['draft']} drafts; use "
            f"one of {', '.join(writers)}"
        )
    if form in _OWN_CLASS:
        findings = of_engine(Subject(ours, target, form), form)
        if faults := [finding.text for finding in findings if finding.level == REFUSE]:
            raise DraftError(f"{ours.where}: the {form} form cannot hold it: {'; '.join(faults)}")
    files = writers[form](ours, target)
    if files is ours:
        return ours
    marked = {**files.config[SECTION], FORM: form}
    return DraftFiles({**files.config, SECTION: marked}, files.tensors, files.where)


def with_facts_in(files: DraftFiles, target: TargetFacts) -> TargetFacts:
    """Return a target's facts; its class and number of blocks, if unknown, as the files say."""
    raw = files.config
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    blocks = raw.get("target_num_hidden_layers") or raw.get("num_target_layers")
    return replace(
        target,
        architectures=target.architectures or tuple(verifier.get("architectures") or ()),
        num_layers=target.num_layers or blocks,
    )
