"""What documents hold beyond the files of their target: how their prompts were rendered.

Template kwargs, system messages and lists of tools are part of serving: a draft learns prompts
that have them, and an engine must render the same ones. They are counted over the documents of a
dataset, with their supervised tokens, as facts of its identity (`spec_data.shards.identity`):

    template_kwargs_used, template_kwargs_tokens   by the kwargs as JSON text, with those of rows
    system_messages, system_tokens                 by the system message; "": there is none
    tools_used, tools_tokens                       "tools" or "": whether a list of tools is given
    default_system       what the template writes as a system message where there is none
    generation_defaults  sampling of generation_config.json, which engines apply by default

Shares are compared, not presence: of prompts that 2 % of the documents have, a draft knows little.
Rare values are joined as OTHERS. Of system messages only frequent ones are kept, because a draft
that is published carries them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.shards.errors import TargetError
from spec_data.shards.files import read_object

OTHERS = "others"
"""Among the counts of a fact: documents whose value is not listed."""
TOKENS_OF = {
    "template_kwargs_used": "template_kwargs_tokens",
    "system_messages": "system_tokens",
    "tools_used": "tools_tokens",
}
"""The counted facts, by the name of their documents: that of their supervised tokens."""
TOOLS = "tools"
DEFAULT_SYSTEM, GENERATION = "default_system", "generation_defaults"
FACTS = (*TOKENS_OF, *TOKENS_OF.values(), DEFAULT_SYSTEM, GENERATION)
"""All facts of this module. Two identities differ in them by shares, not by values."""
NAMES = {
    "template_kwargs_used": "chat_template_kwargs",
    "system_messages": "system message",
    "tools_used": "tools",
}
"""The counted facts, as messages name them."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Keys of generation_config.json that engines take as defaults of a request."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_MOST = {"template_kwargs_used": 16, "system_messages": 4, "tools_used": 2}
_LEAST_SHARE = 0.05  # of the documents; a system message of fewer is one of OTHERS
_COUNTED = 4096  # different values that are counted one by one at a time
_LONGEST = 1000  # characters of a system message that are kept
_SHOWN = 80  # and shown
_CLEARLY = 0.1
"""Part of the documents that may be rendered otherwise without a warning."""


# -- counting --------------------------------------------------------------------------------------


def kwargs_text(kwargs: Mapping[str, Any]) -> str:
    """Return template kwargs as the JSON text under which documents are counted."""
    return json.dumps(kwargs, sort_keys=True, ensure_ascii=False, default=str)


def system_of(messages: list[dict[str, Any]]) -> str:
    """Return the system message of a conversation; "": it has none."""
    system = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        system.append(str(message.get("content") or ""))
    return "\n\n".join(system)


def prompt_facts(
    kwargs: Mapping[str, Any], messages: list[dict[str, Any]], tools: Any
) -> dict[str, str]:
    """Return what renders the prompts of one conversation, as it is counted."""
    return {
        "template_kwargs_used": kwargs_text(kwargs),
        "system_messages": _kept(system_of(messages)),
        "tools_used": TOOLS if tools else "",
    }


def _kept(system: str) -> str:
    if len(system) <= _LONGEST:
        return system
    digest = hashlib.sha256(system.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{system[:_LONGEST]}... ({len(system):,} characters, sha256 {digest})"


@dataclass
class PromptCounts:
    """Documents and their supervised tokens by what renders their prompts."""

    documents: dict[str, Counter[str]] = field(default_factory=dict)
    tokens: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, facts: Mapping[str, str], supervised: int) -> None:
        """Count one document; `facts` are those of `prompt_facts`."""
        for name, value in facts.items():
            documents = self.documents.setdefault(name, Counter())
            tokens = self.tokens.setdefault(name, Counter())
            documents[value] += 1
            tokens[value] += supervised
            if len(documents) > _COUNTED:  # every row may have a value of its own
                for rare in sorted(documents, key=documents.__getitem__)[: _COUNTED // 2]:
                    if rare != OTHERS:
                        documents[OTHERS] += documents.pop(rare)
                        tokens[OTHERS] += tokens.pop(rare)

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the facts of an identity."""
        found: dict[str, dict[str, int]] = {}
        for name, documents in self.documents.items():
            listed = frequent(name, documents)
            found[name] = listed
            found[TOKENS_OF[name]] = regrouped(self.tokens[name], listed)
        return found


def frequent(name: str, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of a fact, the most frequent first, with the rarest joined as OTHERS."""
    total = sum(counts.values())
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    least = _LEAST_SHARE * total if name == "system_messages" else 0
    listed = [value for value, n in ranked if value != OTHERS and (n >= least or value == "")][
        : _MOST[name]
    ]
    return regrouped(counts, listed)


def regrouped(counts: Mapping[str, int], listed: Any) -> dict[str, int]:
    """Return the counts of the listed values, in their order, and of all others as OTHERS."""
    rest = sum(n for value, n in counts.items() if value not in listed or value == OTHERS)
    return {value: counts.get(value, 0) for value in listed if value != OTHERS} | (
        {OTHERS: rest} if rest else {}
    )


def joined_counts(identities: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of several datasets as one; what one of them does not record is left out."""
    found: dict[str, Any] = {}
    for name, tokens in TOKENS_OF.items():
        if not all(name in identity for identity in identities):
            continue
        listed = frequent(name, _sum(identities, name))
        found[name] = listed
        if all(tokens in identity for identity in identities):
            found[tokens] = regrouped(_sum(identities, tokens), listed)
    for name in (DEFAULT_SYSTEM, GENERATION):
        if name in identities[0]:
            found[name] = identities[0][name]
    return found


def _sum(identities: list[Mapping[str, Any]], name: str) -> Counter[str]:
    return sum((Counter(identity[name]) for identity in identities), Counter[str]())


def read_sampling(directory: Path) -> dict[str, float]:
    """Return the sampling defaults of a model directory; {} if it has no generation_config.json.

    Raises:
        TargetError: it is damaged.
    """
    file = directory / "generation_config.json"
    return sampling_defaults(read_object(file, TargetError)) if file.is_file() else {}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling of a generation_config.json that an engine applies by default.

    Values that change nothing are left out.
    """
    found = {}
    for name in SAMPLING:
        value = generation_config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name == "top_k" and value <= 0:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            found[name] = value
    return found


# -- comparing -------------------------------------------------------------------------------------


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the part of the documents that each value has; {} of none."""
    total = sum(counts.values())
    return {value: n / total for value, n in counts.items()} if total else {}


def apart(recorded: Mapping[str, int], current: Mapping[str, int]) -> float:
    """Return the part of the documents of one set that are rendered unlike those of the other.

    It is the distance in total variation. What is counted as OTHERS may be any value that the other
    set does not list either.
    """
    one, other = shares(recorded), shares(current)
    same = sum(min(share, other.get(value, 0.0)) for value, share in one.items() if value != OTHERS)
    unlisted = sum(share for value, share in other.items() if value not in one or value == OTHERS)
    unlisted_here = sum(
        share for value, share in one.items() if value not in other or value == OTHERS
    )
    if OTHERS in one:
        same += min(one[OTHERS], unlisted)
    elif OTHERS in other:
        same += min(other[OTHERS], unlisted_here)
    return max(0.0, 1.0 - same)


def differing_prompts(
    recorded: Mapping[str, Any], current: Mapping[str, Any], of_recorded: str, of_current: str
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact in which clearly many prompts of two identities differ."""
    for name in TOKENS_OF:
        before, now = _counts(recorded, name), _counts(current, name)
        if not before or not now or (part := apart(before, now)) <= _CLEARLY:
            continue
        fact = NAMES[name]
        yield (
            name,
            f"{fact}: {of_recorded} {mixture(recorded, name)}, {of_current} "
            f"{mixture(current, name)}: {percent(part)} of the prompts are rendered in another "
            "way",
        )


def _counts(identity: Mapping[str, Any], name: str) -> Mapping[str, int]:
    counts: Mapping[str, int] | None = identity.get(name)
    if counts is None and name == "template_kwargs_used" and "chat_template_kwargs" in identity:
        return {kwargs_text(identity["chat_template_kwargs"] or {}): 1}
    return counts or {}


def usual_kwargs(identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the template kwargs of most documents, or None if they are not recorded."""
    used = {k: n for k, n in _counts(identity, "template_kwargs_used").items() if k != OTHERS}
    if not used:
        return identity.get("chat_template_kwargs")
    kwargs: dict[str, Any] = json.loads(max(used, key=used.__getitem__))
    return kwargs


def usual_system(identity: Mapping[str, Any]) -> tuple[str, float]:
    """Return the most frequent system message and the part of the documents that have it.

    The message is "" if none is recorded, or if no system message is the most frequent.
    """
    part = shares(_counts(identity, "system_messages"))
    message = max((m for m in part if m not in ("", OTHERS)), key=part.__getitem__, default="")
    return (message, part[message]) if message else ("", 0.0)


# -- words -----------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Return a share in words; one that is neither none nor all is not written as 0 or 100 %."""
    for least, text in ((0.0, "under 1 %"), (0.99, "over 99 %")):
        if least < share < least + 0.01 and round(share, 2) in (0.0, 1.0):
            return text
    return f"{share:.0%}".replace("%", " %")


def shown(value: str, name: str = "") -> str:
    """Return a value of a counted fact for a message."""
    if value == OTHERS:
        return "others"
    if name == "tools_used":
        return "a list of tools" if value else "no tools"
    if name != "system_messages":
        return value
    if not value:
        return "none"
    text = " ".join(value.split())
    return f"'{text}'" if len(text) <= _SHOWN else f"'{text[: _SHOWN - 20]}...'"


def mixture(identity: Mapping[str, Any], name: str) -> str:
    """Return the values of a counted fact with their shares of documents and supervised tokens."""
    documents, tokens = shares(_counts(identity, name)), shares(identity.get(TOKENS_OF[name]) or {})
    if len(documents) == 1:
        return shown(next(iter(documents)), name)
    parts = []
    for value, share in sorted(documents.items(), key=lambda item: -item[1]):
        of_tokens = f" ({percent(tokens[value])} of supervised tokens)" if value in tokens else ""
        parts.append(f"{shown(value, name)} in {percent(share)}{of_tokens}")
    return ", ".join(parts)


def prompt_lines(identity: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of what the prompts hold beyond the files of the target.

    Nothing is said of what all documents lack.
    """
    lines = []
    kwargs = _counts(identity, "template_kwargs_used")
    if kwargs.keys() - {"{}"}:
        lines.append(("chat template kwargs", mixture(identity, "template_kwargs_used")))
    systems, default = _counts(identity, "system_messages"), identity.get(DEFAULT_SYSTEM)
    if systems.keys() - {""}:
        lines.append(("system message", mixture(identity, "system_messages")))
    if default and (not systems or systems.get("")):
        text = f"{shown(default, 'system_messages')} where a chat has none"
        lines.append(("system message of the template", text))
    if _counts(identity, "tools_used").keys() - {""}:
        lines.append(("tools", mixture(identity, "tools_used")))
    return lines


def sampling_text(defaults: Mapping[str, float]) -> str:
    """Return sampling defaults in words."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
