"""What `spec-train search` varies: axes of options, and the drafts that they make. No torch here.

An *arm* is one of these: a draft with its options, and what its run shares with all others.
"""

import dataclasses
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.layer_ids import candidate_layers, recipe_count
from spec_data.terminal.command import words_of
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.types import JOINED, Names
from spec_train.drafts.kinds import kind_named
from spec_train.options.draft_options import AUTO, DraftOptions
from spec_train.options.kinds import DEFAULT
from spec_train.options.presets import with_preset
from spec_train.options.training import RUNNING, RunOptions, Training

OF_TRAINING = ("lr", "optimizer", "warmup_ratio", "weight_decay", "clip")
"""Options of every draft that can be an axis: arms take equal steps of equal size and order."""
LISTS = ("layers", "position_weights", "layer_types")
"""Options whose value is a list: in an axis, + stands for its commas."""
DEFAULT_BUDGET = "30m"

Space = Annotated[str, JOINED, Parameter(metavar="AXIS=A,B,...")]
Axes = Mapping[str, Sequence[str]]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchTraining(RunOptions):
    """How every arm is trained: the options of `fit` that all drafts share."""

    out: Annotated[str, Parameter(metavar="DIR")] = "search"
    """Directory of the search: a run of `fit` for each arm; the same command resumes the search."""
    devices: Annotated[Names, RUNNING] = ""
    """Devices that train one arm each at a time, such as cuda:0,cuda:1; not given: --device."""

    def validate(self) -> None:
        """Refuse what arms cannot share."""
        super().validate()
        if self.validation == 0:
            raise ConfigError("--validation 0: arms are compared on held-out documents")

    def of_arm(self, **changes: Any) -> Training:
        """Return the options of one run of `fit`: those that were given, and `changes`."""
        names = {field.name for field in dataclasses.fields(Training)}
        given = {name: v for name, v in self.given_values().items() if name in names}
        return Training(**{"out": self.out} | given | changes)


@dataclass(frozen=True)
class Arm:
    """One draft of a search: `changes` are what it varies of the options of every draft."""

    name: str
    draft: str
    options: DraftOptions
    changes: Mapping[str, Any]

    def fit_words(self, training: Training) -> list[str]:
        """Return the words of its `fit` with these options of every draft."""
        own = words_of(type(self.options), self.options.given_values())
        words = words_of(Training, {**training.given_values(), **self.changes})
        return ["spec-train", "fit", self.draft, *words, *own]


def read_space(text: str) -> dict[str, list[str]]:
    """Return the axes of --space: a value without `=` belongs to the axis before it.

    Raises:
        ConfigError: no axes, or one that no draft among them has.
        DraftError: an unknown draft.
    """
    axes: dict[str, list[str]] = {}
    for part in filter(None, re.split(r"[,\s]+", text)):
        name, equals, value = part.rpartition("=")
        name = name.replace("-", "_") or next(reversed(axes), "")
        if not name or not value or (equals and name in axes):
            raise ConfigError(
                f"--space {text!r}: expected axes such as layers=auto,draft={DEFAULT},loss=ce"
            )
        axes.setdefault(name, []).append(value)
    drafts = axes.pop("draft", [DEFAULT])
    kinds = [kind_named(draft).options for draft in drafts]
    known = {f.name for kind in kinds for f in dataclasses.fields(kind)} | set(OF_TRAINING)
    for name in axes:
        if name not in known:
            raise ConfigError(
                f"--space: no {name!r} of {', '.join(drafts)}; an axis is draft, an option of a "
                f"draft, or one of {', '.join(OF_TRAINING)}{did_you_mean(name, sorted(known))}"
            )
    return {"draft": drafts, **axes}


def make_arms(
    axes: Axes,
    captured: Sequence[int],
    recorded: Mapping[str, tuple[int, ...]],
    preset: str | None = None,
) -> list[Arm]:
    """Return every arm of some axes, each once, on a dataset with the layers `captured`.

    `recorded` are the layers of recipes by draft. An axis that a draft does not have is left out
    for it, and one that does nothing beside the others of an arm for that arm. A preset sets
    options of drafts as in `fit`.

    Raises:
        ConfigError: a bad value of an axis, or fewer than two arms. DraftError: contradicting ones.
    """
    arms: list[Arm] = []
    for draft in axes["draft"]:
        kind, recorded_as = kind_named(draft).options, kind_named(draft).name
        own = {field.name for field in dataclasses.fields(kind)}
        of_draft = {n: list(v) for n, v in axes.items() if n in own or n in OF_TRAINING}
        if AUTO in of_draft.get("layers", ()):
            sets = candidate_layers(captured, recorded.get(recorded_as), recipe_count(draft) or 0)
            rest = [value for value in of_draft["layers"] if value != AUTO]
            of_draft["layers"] = [*("+".join(map(str, ids)) for ids in sets), *rest]
        for values in itertools.product(*of_draft.values()):
            texts = dict(zip(of_draft, values, strict=True))
            given = {axis: _value(kind, axis, text) for axis, text in texts.items()}
            name = _named(recorded_as, texts, of_draft)
            try:
                options = with_preset(kind(**{n: v for n, v in given.items() if n in own}), preset)
                if idle := options.idle:  # such as the form of a head that this arm has not
                    texts = {axis: text for axis, text in texts.items() if axis not in idle}
                    given = {axis: v for axis, v in given.items() if axis not in idle}
                    options = kind(**{n: v for n, v in given.items() if n in own})
                    options, name = (
                        with_preset(options, preset),
                        _named(recorded_as, texts, of_draft),
                    )
                if "layers" in given:
                    options.layer_ids(tuple(captured))
            except DraftError as error:
                raise DraftError(f"--space, {name}: {error}") from None
            changes = {axis: v for axis, v in given.items() if axis not in own}
            made = draft, options, changes
            if made not in [(arm.draft, arm.options, arm.changes) for arm in arms]:
                arms.append(Arm(name, *made))
    if len(arms) < 2:
        raise ConfigError(
            f"--space makes one draft of this dataset, {arms[0].name}: nothing to search; name "
            "more values (more layers: `spec-data generate --layers search` captures some)"
        )
    return arms


def _named(draft: str, texts: Mapping[str, str], axes: Axes) -> str:
    """Return the name of an arm: the axes in which arms of its draft differ."""
    return " ".join([draft, *(f"{n}={text}" for n, text in texts.items() if len(axes[n]) > 1)])


def _value(kind: type, axis: str, text: str) -> Any:
    """Return a value of an axis as the type of its option."""
    hint = typing.get_type_hints(Training if axis in OF_TRAINING else kind, include_extras=True)[
        axis
    ]
    if axis in LISTS:
        return text.replace("+", ",")
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").partition(" - at ")[0]
        raise ConfigError(f"--space {axis}={text}: {reason[0].lower()}{reason[1:]}") from None


def read_budget(text: str) -> float:
    """Return the seconds of a time such as 30m, 2h, 90s or 600; ConfigError: it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not match or not float(match[1]):
        raise ConfigError(f"--budget {text!r}: expected a time such as 30m, 2h or 90s")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
