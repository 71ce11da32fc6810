"""The identity of a target and its prompts, as manifests and drafts record it; its comparison.

An identity is a flat table of named facts:

    weights_hash, config_hash, architectures, quantization, dtype
    code_hash             of the Python files that come with a target and are run
    config.NAME           a field of the decoder's config that changes its states
    rope.NAME             its rope settings, with the layer type before the name where they differ
    rope_factors          of a longrope target: those of every document, "short" or "long"
    streams               of a target with several residual streams: what makes one state of them
    tokenizer_hash        of the whole tokenizer.json; tokenizer.NAME: of its parts
    chat_template_hash, chat_template_kwargs
    template_kwargs_used, system_messages, ...
                          how prompts were rendered, and engine defaults: see `shards.serving`
    dataset_fingerprint, head, target_name, target_revision, contexts, own_head
                          only in drafts

A fact without an entry is unknown: a target on disk may lack its weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.shards.serving import (
    FACTS,
    OTHERS,
    TOKENS_OF,
    differing_prompts,
    joined_counts,
)

REFUSE, WARN = "refuse", "warn"

_STATES = (
    *("weights_hash", "config_hash", "code_hash", "architectures", "quantization"),
    *("config.", "rope.", "rope_factors", "streams"),
)
_COARSE = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # bits of a mantissa
_PROMPTS = ("chat_template_kwargs", *FACTS)
CONTEXTS = "contexts"
"""Of a draft alone: its training documents by ranges of contexts that their answers have."""
OWN_HEAD = "own_head"
"""Of a draft alone: its LM head is not made of rows of the target's."""
_OF_A_DRAFT = ("dataset_fingerprint", "head", "target_name", "target_revision", CONTEXTS, OWN_HEAD)
"""Only in origins; never compared."""
_SPECIAL = ("tokenizer.bos_token", "tokenizer.eos_token")  # not in tokenizer.json
_HASHED = {"config_hash": ("config.", "rope."), "tokenizer_hash": ("tokenizer.",)}
_MEANING = {
    "weights_hash": "other weights (fine-tuned, rounded, another version), or the same weights in "
    "other files",
    "config_hash": "config.json differs in a field that is not compared by name",
    "code_hash": "the Python files that come with the model differ; they compute the states",
    "quantization": "rounded weights choose other tokens, and their hash cannot be compared",
    "dtype": "it rounds more coarsely",
    "streams": "one state was made of a block's residual streams in another way",
    "tokenizer_hash": "text becomes other token ids",
    "tokenizer.pre_tokenizer": "text is split into other pieces before it becomes token ids",
    "tokenizer.normalizer": "text is changed in another way before it becomes token ids",
    "tokenizer.model": "another vocabulary, or other merges",
    "tokenizer.added_tokens": "other special tokens",
    "chat_template_hash": "the chat template renders other prompts",
}


@dataclass(frozen=True)
class FactDifference:
    """One fact in which two identities differ; `text` is a line for the user."""

    name: str
    severity: str
    text: str


@dataclass(frozen=True)
class IdentityComparison:
    """What differs, and the names of the facts that only one of the two identities has."""

    differences: tuple[FactDifference, ...]
    unknown: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        """A line for each difference."""
        return [d.text for d in self.differences]

    @property
    def refused(self) -> list[str]:
        """A line for each difference that forbids what was asked for."""
        return [d.text for d in self.differences if d.severity == REFUSE]

    @property
    def warned(self) -> list[str]:
        """A line for each difference that only needs attention."""
        return [d.text for d in self.differences if d.severity == WARN]

    @property
    def not_compared(self) -> str:
        """The facts that could not be compared, in words; empty if there are none."""
        # tokenizer_hash does not cover special tokens, but it may have been compared
        words = [name.partition(".")[2 if name in _SPECIAL else 0] for name in self.unknown]
        return ", ".join(dict.fromkeys(words))


def joined(identities: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the identity of several datasets as one: the first's, with the counts of all."""
    first = {k: v for k, v in identities[0].items() if k not in FACTS}
    return first | joined_counts(list(identities))


def of_some(identity: Mapping[str, Any], dropped: int) -> dict[str, Any]:
    """Return the identity of a dataset without `dropped` of its documents.

    How the prompts of these were rendered is not known. Where others may be the usual ones now, it
    tells none: `eval` then asks for the template kwargs.
    """
    unclear: set[str] = set()
    for name, tokens in TOKENS_OF.items():
        used = identity.get(name) or {}
        counts = sorted((n for value, n in used.items() if value != OTHERS), reverse=True)
        if len(counts) > 1 and counts[0] - dropped <= counts[1]:
            unclear |= {name, tokens}
    if "template_kwargs_used" in unclear:
        unclear.add("chat_template_kwargs")
    return {k: v for k, v in identity.items() if k not in unclear}


def compare(
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    of_recorded: str,
    of_current: str,
    states: bool = False,
) -> IdentityComparison:
    """Compare two identities fact by fact.

    Args:
        recorded: what a draft or a dataset was made with.
        current: what it is used with now.
        of_recorded: the subject and verb of the first, such as "the draft was fitted with".
        of_current: the same of the second, such as "this target has".
        states: the states of both are compared or mixed, so a fact that decides states refuses.
            Otherwise every difference is a warning: people serve fine-tuned targets on purpose.
    """
    differing, unknown = {}, []
    for name in sorted(recorded.keys() | current.keys()):
        before, now = recorded.get(name), current.get(name)
        if name in _PROMPTS or name in _OF_A_DRAFT or _same_file(name, recorded, current):
            continue
        if not (_tells(name, recorded) and _tells(name, current)):
            if name not in ("dtype", "rope_factors"):
                unknown.append(name)
        elif name == "dtype":
            if _COARSE.get(str(now), 0) < _COARSE.get(str(before), 0):
                differing[name] = before, now
        elif before != now:
            differing[name] = before, now
    lines = []
    for name, (before, now) in differing.items():
        if _explained(name, differing):
            continue
        shown = name.removeprefix("config.").removeprefix("rope.")
        text = f"{shown}: {of_recorded} {_shown(before)}, {of_current} {_shown(now)}"
        text += f": {_MEANING[name]}" if name in _MEANING else ""
        severity = REFUSE if states and name.startswith(_STATES) else WARN
        lines.append(FactDifference(name, severity, text))
    for name, text in differing_prompts(recorded, current, of_recorded, of_current):
        lines.append(FactDifference(name, WARN, text))
    return IdentityComparison(tuple(lines), tuple(unknown))


def _tells(name: str, identity: Mapping[str, Any]) -> bool:
    """Whether an identity tells a fact: rope settings and tokenizer parts may be absent."""
    group = name.partition(".")[0] + "."
    return name in identity or (
        group in ("rope.", "tokenizer.") and any(other.startswith(group) for other in identity)
    )


def _same_file(name: str, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a fact is of an equal file: its value may differ by defaults of transformers."""
    for file_hash, parts in _HASHED.items():
        if name.startswith(parts) and name not in _SPECIAL:
            return file_hash in recorded and bool(recorded[file_hash] == current.get(file_hash))
    return False


def _explained(name: str, differing: Mapping[str, Any]) -> bool:
    """Whether another difference that is listed says the same, and more clearly."""
    if name in ("weights_hash", "config_hash") and "quantization" in differing:
        return True
    parts = _HASHED.get(name)
    return parts is not None and any(
        other.startswith(parts) for other in differing if other not in _SPECIAL
    )


def _shown(value: Any) -> str:
    """Return a value for a message: text in quotes, hashes and lists shortened."""
    if value is None:
        return "none"
    if isinstance(value, str):
        kind, colon, digest = value.rpartition(":")
        return f"{kind}{colon}{digest[:12]}" if len(digest) == 64 else repr(value)  # a sha256
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
