"""A rendered document: token ids, loss mask, and the turns that may be supervised.

The turns are stored beside the mask, so that a trainer can apply another mask policy later without
the target: `loss_mask == loss_mask_from_turns(len(input_ids), turns, policy)` holds for every
document that was not cut. A document that was rendered turn by turn has one turn.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec_data.shards.errors import CorpusError
from spec_data.shards.pictures import Placed
from spec_data.shards.turn_masks import supervised_spans

_NOTHING_TO_LEARN = frozenset({"no-assistant-turn", "nothing-supervised", "empty"})


UNPROVABLE = "unprovable-boundaries"
"""The reason of a turn that does not continue the prompt that serving sends."""


UNSUPERVISED = "nothing-supervised-within-max-length"
"""Why a document is left out whose answers begin after the tokens that are kept."""


class RenderError(CorpusError):
    """A record has no document; `reason` is a short slug under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)  # as it is pickled
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message

    @property
    def broken(self) -> bool:
        """Whether the record is wrong; False when it only has nothing to learn from."""
        return self.reason not in _NOTHING_TO_LEARN


class Turn(NamedTuple):
    """The supervisable tokens [start, end) of a turn, including its end-of-turn token.

    `role` is "assistant" in conversations, "text" for plain text, and "given" for a run of ones in
    the loss mask of a corpus row.
    """

    role: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """One rendered document in the token frame: `loss_mask[t]` belongs to `input_ids[t]`.

    `source` is the name of its file or dataset as the dataset stores it; `where` names its corpus
    row in messages; `prompt` is the number of its prompt (see `shards.prompt_keys`). `images` are
    in the order of their tokens, and `files` has the bytes of each by its SHA-256.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[Turn, ...]
    source: str
    where: str
    prompt: int = 0
    images: tuple[Placed, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def loss_mask_from_turns(length: int, turns: Sequence[Turn], policy: str) -> list[int]:
    """Return the loss mask (0 or 1 per token) of `length` tokens under a mask policy.

    Raises:
        ConfigError: the policy is unknown, or a turn lies outside the document.
    """
    mask = [0] * length
    for start, end in supervised_spans(length, turns, policy):
        mask[start:end] = [1] * (end - start)
    return mask


# -- counts ----------------------------------------------------------------------------------------

UNLEARNED = "answers of weight 0, not supervised"
CUT_ANSWERS = "answers cut at a limit of tokens, their end not supervised"
UNENDED = "turns without an end-of-turn token"
EMPTY_THOUGHTS = "empty think blocks, not supervised"
EDITED = "rows whose answers were edited after `regenerate` wrote them"
LEFT_OUT = "left out by the template: "
CONTROL = "messages that hold the control token "
CONTROL_TEXT = "texts that hold the control token "
OUTSIDE = "supervised tokens outside answers"
"""Names of counts that are read again."""
_SHOWN = 4  # control tokens that are named
_LITTLE = 0.01  # of the tokens: fewer that are cut off need no warning


@dataclass
class Rendering:
    """The documents of one record, and what is to be counted for it.

    Attributes:
        method: how the record was rendered.
        documents: one, or one per assistant turn.
        counts: messages and turns that were left out, cut or completed, by what happened to them.
        dropped: turns without a document, by reason; a record without any document is an error.
        causes: why, for each of these, naming the row and the message.
        edited: the row, if its answers were edited after `regenerate` wrote them.
        unmasked: whether the row is one of token ids without a mask.
        prompt: what renders the prompts of a conversation, as `shards.serving` counts it.
    """

    method: str
    documents: list[Document] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    causes: list[str] = field(default_factory=list)
    prompt: dict[str, str] = field(default_factory=dict)
    edited: str = ""
    unmasked: bool = False


@dataclass
class RenderCounts:
    """Sums of the fields of `Rendering` over records, in the order of their first occurrence.

    `edited` is the first row that was edited; `unmasked` the rows of token ids without a mask.
    """

    methods: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    edited: str = ""
    unmasked: int = 0

    def count(self, result: Rendering) -> None:
        """Add a record."""
        self.methods[result.method] += 1
        self.counts.update(result.counts)
        self.dropped.update(result.dropped)
        self.edited = self.edited or result.edited
        self.unmasked += result.unmasked

    def of_masks(self) -> list[str]:
        """Return which answers flags leave out, and which rows have no mask, in words."""
        flagged, said = self.counts[UNLEARNED], list[str]()
        if flagged:
            said.append(f"{flagged:,} answers are not learned, as flags of their messages say")
        if self.unmasked:
            said.append(
                f"{self.unmasked:,} rows of input_ids have no mask, so every token of them is "
                "learned, prompts too"
            )
        return said

    def ignored_masks(self) -> str | None:
        """Return what `--mask all` learns although rows say otherwise, in words; None: nothing."""
        flagged, rows = self.counts[UNLEARNED], self.methods["input_ids"] - self.unmasked
        said = [f"{flagged:,} answers whose flags"] if flagged else []
        said += [f"the tokens of {rows:,} rows of input_ids whose masks"] if rows else []
        if not said:
            return None
        return (
            f"--mask all learns {' and '.join(said)} say that they are not learned: leave it out "
            "to keep what the rows say"
        )


def count_warnings(counts: Mapping[str, Any], tokens: int | None) -> list[str]:
    """Return what misleads a draft, in words, of the fields of a `CountsRecord`.

    `tokens` are those that are kept; None: of some of them, the counts being those of all.
    """
    warnings = []
    cut, rendering = counts.get("tokens_cut", 0), counts.get("rendering", {})
    if tokens is not None and cut > _LITTLE * (cut + tokens):
        warnings.append(
            f"{cut / (cut + tokens):.0%} of all tokens ({cut:,}) were cut off at the maximal "
            f"length, of {counts['cut']:,} documents: raise --max-length (up to the context of the "
            "target), or split long documents"
        )
    if unended := rendering.get(UNENDED, 0) - rendering.get(CUT_ANSWERS, 0):
        warnings.append(
            f"{unended:,} turns have no end-of-turn token: the chat template writes none after "
            "them, and the target's generation_config.json names none that can be appended "
            "(eos_token_id). A draft never learns to stop there"
        )
    if edited := rendering.get(EDITED, 0):
        warnings.append(f"{edited:,} {EDITED}: they are not the target's own, so not on-policy")
    if outside := rendering.get(OUTSIDE, 0):
        share = f" ({outside / tokens:.0%} of all)" if tokens else ""
        warnings.append(
            f"--mask all supervises {outside:,} tokens outside answers{share}: questions and what "
            "the template writes, which the target never generates"
        )
    if held := _most(rendering, CONTROL):
        warnings.append(
            f"messages hold control tokens of the chat template ({held}): the text of a "
            "message becomes the token that begins or ends turns, here as in serving. Remove it "
            "where your users cannot send it"
        )
    if held := _most(rendering, CONTROL_TEXT):
        warnings.append(
            f"rows of text hold control tokens of the chat template ({held}), as chats that are "
            "rendered already: all of a text is learned, questions too. Give the messages, or "
            "input_ids with a loss_mask"
        )
    for name, count in rendering.items():
        if name.startswith(LEFT_OUT):
            kind = name.removeprefix(LEFT_OUT)
            warnings.append(f"the chat template leaves out {count:,} {kind}: no draft sees them")
    return warnings


def _most(rendering: Mapping[str, int], kind: str) -> str:
    """Return the control tokens of a kind of counts that are the most frequent, with their counts;
    "" if there are none."""
    held = {n.removeprefix(kind): c for n, c in rendering.items() if n.startswith(kind)}
    names = sorted(held, key=lambda name: -held[name])
    most = ", ".join(f"{name} in {held[name]:,}" for name in names[:_SHOWN])
    return most + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
