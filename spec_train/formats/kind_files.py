"""What a kind of draft says of its files: its keys, classes, forms, and how it is read and written.

Every kind says it in `files.py` of its folder, as tables and functions. The general code of this
room asks for it by the name of the kind, and names none itself.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.shards.errors import an
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.target_facts import TargetFacts
from spec_train.options.kinds import DRAFT_OPTIONS, folder_of


@dataclass(frozen=True)
class Source:
    """What is known of another program's files before their kind reads them."""

    depth: int | None = None
    """Tokens per verification step, as a file of the speculators library says."""
    collected: bool = False
    """The states were collected in ascending order of their layers, whatever that of the ids."""


Reader = Callable[[DraftFiles, TargetFacts, Source], DraftFiles]
"""(files of another form, their target, what is known) -> our checkpoint."""
Writer = Callable[[DraftFiles, TargetFacts], DraftFiles]
"""(our checkpoint, its target) -> files of another form."""
Flatten = Callable[[DraftFiles, int | None], tuple[str, DraftFiles]]
"""(keys of a speculators file in one table, tokens per step) -> its kind, a flat file."""


def unchanged(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write our checkpoint as it is."""
    return ours


@dataclass(frozen=True, kw_only=True)
class KindFiles:
    """The files of a kind of draft. A draft from outside has our checkpoint alone."""

    title: str
    """As people write the kind."""
    what: str
    """The kind with its article, in messages about what such a draft has not."""
    classes: tuple[str, ...] = ()
    """Names in `architectures` that programs give it, the one that is written first."""
    claims: Callable[[DraftFiles], bool] = lambda files: False
    """Whether files are of this kind whatever class they name: their tensors say so."""
    claims_config: Callable[[Mapping[str, Any]], bool] = lambda raw: False
    """The same by config.json alone."""
    refined: Callable[[Mapping[str, Any]], str | None] = lambda raw: None
    """The kind that a config without tensors, of a class of this kind, is in truth."""
    shared_class: bool = False
    """Drafts of it have the class of a plain language model too."""
    own_keys: Callable[[DraftFiles], DraftFiles] = lambda files: files
    """Returns files with our keys, of a config without tensors."""
    stated: Callable[[DraftFiles, set[str], bool], dict[str, Any]] = lambda files, own, library: {}
    """The options, of those named, that a flat config states; `library`: it was of speculators."""
    read: Reader | None = None
    speculators: Flatten | None = None
    """Of the kinds that the speculators library has."""
    served_absent: Mapping[str, Any] = field(default_factory=dict)
    """Values that vLLM serves a speculators file with which lacks these keys."""
    forms: Mapping[str, Writer] = field(default_factory=lambda: {"hf": unchanged})
    """The forms that are written, by name."""
    into_target: Callable[[DraftFiles, Path, Path], bool] | None = None
    """(our checkpoint, the target's directory, a new one): writes a copy of the target that has the
    draft inside; returns whether it reads back the same. Of the kinds with the form `target`."""

    keys: tuple[str, ...] = ()
    """Keys of config.json that this kind alone has, and fields of its configuration."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that programs give to keys: ours by theirs."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the arithmetic, and the values, besides null, that change no other draft."""
    harmless: str = ""
    """Keys that no forward pass reads."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Classes of trainers that copy the target's config, and the keys that they write themselves
    (besides those of `names.toml`)."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Classes of such drafts with arithmetic that this project does not have, and what it is."""
    foreign: Callable[[DraftFiles], Iterator[tuple[str, str]]] = lambda files: iter(())
    """Yields what another draft has of this kind, which cannot be read: where, and what it is."""
    token_rows: tuple[str, ...] = ()
    """Tensors with a row per draft token, in an order that no trainer says."""

    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """What conditions and texts of the table of engines may name, beside keys of config.json."""
    served_as: Callable[[Mapping[str, Any]], str | None] = lambda config: None
    """The kind as which engines serve a draft of this config; None: this one."""


@functools.cache
def every_kind() -> dict[str, KindFiles]:
    """Return what the kinds of this project say of their files, by name."""
    modules = {kind: f"{folder_of(kind)}.files" for kind in DRAFT_OPTIONS}
    return {kind: importlib.import_module(name).FILES for kind, name in modules.items()}


def files_of(kind: str) -> KindFiles:
    """Return what a kind says of its files; of one from outside, that it has our checkpoint."""
    return every_kind().get(kind) or KindFiles(title=kind, what=f"{an(kind)} draft")
