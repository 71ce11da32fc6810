"""The findings of a preflight: whether an engine loads a draft and computes what was trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.target_facts import TargetFacts

REFUSE, WARN, NOTE, OK = "refuse", "warn", "note", "ok"
OF_TARGET = "target"
"""The rule whether an engine serves the target of a draft: a refusal, or a warning if unknown."""


@dataclass(frozen=True)
class Finding:
    """One sentence about one engine's release; REFUSE: the draft would fail or be read wrongly.

    `rule` names a rule that other code asks for; most have no name.
    """

    engine: str
    level: str
    text: str
    rule: str = ""


@dataclass(frozen=True)
class Subject:
    """A draft in our own form, its target, and the form of its output.

    `changed` are keys for engines that the files have, as they are, otherwise than an export;
    `unread` are keys of another trainer's files of which it is unknown what they change.
    """

    own: DraftFiles
    target: TargetFacts
    form: str
    changed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """config.json of our form."""
        return self.own.config

    @property
    def kind(self) -> str:
        """Name of the draft kind."""
        return str(self.config[SECTION]["draft"])

    @property
    def layers(self) -> list[int]:
        """Layer ids: outputs of decoder blocks, from 0; empty if it reads only the final hidden."""
        return list(self.config[SECTION].get("layers", ()))

    @property
    def num_layers(self) -> int | None:
        """Decoder blocks of the target; None if neither the target nor the config has them."""
        config = self.config.get("num_target_layers")
        return self.target.num_layers or config or self.origin.get("config.num_hidden_layers")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the target's class; empty if neither the target nor the draft says them."""
        return self.target.architectures or tuple(self.origin.get("architectures") or ())

    @property
    def origin(self) -> dict[str, Any]:
        """The identity of the target and prompts that it was fitted to; empty if not recorded."""
        return self.config[SECTION].get("origin") or {}

    @property
    def blocks(self) -> int:
        """Decoder layers of the draft."""
        return int(self.config.get("num_hidden_layers", 1))

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return bool(self.config["draft_vocab_size"] < self.config["vocab_size"])

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor with this name."""
        return name in self.own.tensors


class Notes:
    """Collects the findings for one engine."""

    def __init__(self, engine: str) -> None:
        """Start for an engine and its release, for example "vLLM 0.33.0"."""
        self._engine = engine
        self._found: list[Finding] = []

    def refuse(self, condition: bool, text: str, rule: str = "") -> None:
        """If `condition`, add a finding that the engine fails or reads the draft wrongly."""
        self._add(condition, REFUSE, text, rule)

    def warn(self, condition: bool, text: str, rule: str = "") -> None:
        """If `condition`, add a finding that needs the user's attention."""
        self._add(condition, WARN, text, rule)

    def note(self, condition: bool, text: str) -> None:
        """If `condition`, add a finding that says what was not checked."""
        self._add(condition, NOTE, text)

    def _add(self, condition: bool, level: str, text: str, rule: str = "") -> None:
        if condition:
            self._found.append(Finding(self._engine, level, text, rule))

    def __iter__(self) -> Iterator[Finding]:
        """Yield the findings; there may be none, and none is of level OK: see `preflight`."""
        yield from self._found
