"""What a preflight says: whether a draft will load there, and be read as it was trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.flat import SECTION
from spec_train.formats.target_facts import TargetFacts

REFUSE, WARN, OK = "refuse", "warn", "ok"


@dataclass(frozen=True)
class Finding:
    """One sentence about one engine's release; `refuse` means that it would fail or be wrong."""

    engine: str
    level: str
    text: str


@dataclass(frozen=True)
class Subject:
    """A draft in our own form, its target, and the name and form of its directory to be."""

    own: DraftFiles
    target: TargetFacts
    name: str
    form: str

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
        """Layer ids: outputs of blocks, from 0; none if it reads only the final hidden."""
        return list(self.config[SECTION].get("layers", ()))

    @property
    def num_layers(self) -> int | None:
        """Blocks of the target, if the target or the config says so."""
        return self.target.num_layers or self.config.get("num_target_layers")

    @property
    def blocks(self) -> int:
        """Decoder layers of the draft."""
        return int(self.config.get("num_hidden_layers", 1))

    @property
    def reduced(self) -> bool:
        """Whether it proposes from a part of the vocabulary."""
        return bool(self.config["draft_vocab_size"] < self.config["vocab_size"])

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return name in self.own.tensors


class Notes:
    """Collects findings of one engine, saying each in one line."""

    def __init__(self, engine: str) -> None:
        """Start for an engine with its release, as "vLLM 0.33.0"."""
        self._engine = engine
        self._found: list[Finding] = []

    def refuse(self, condition: bool, text: str) -> None:
        """It will fail there, or be read wrongly, if `condition`."""
        self._add(condition, REFUSE, text)

    def warn(self, condition: bool, text: str) -> None:
        """It needs care there if `condition`."""
        self._add(condition, WARN, text)

    def _add(self, condition: bool, level: str, text: str) -> None:
        if condition:
            self._found.append(Finding(self._engine, level, text))

    def __iter__(self) -> Iterator[Finding]:
        """The findings, or one that says that there are none."""
        if not self._found:
            yield Finding(self._engine, OK, "loads, and is read as it was trained")
        yield from self._found
