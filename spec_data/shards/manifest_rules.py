"""What a manifest may contain: one table of keys and types, and the checks that need several keys.

A manifest is a file that anyone can edit, and its fingerprint can be computed again. So nothing
reads a value that was not checked here, and a wrong one is named by its key. Keys that this release
does not know are accepted, except in records that become the arguments of a class.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spec_data.shards.errors import DatasetError

_LARGEST_SIZE, _LARGEST_COUNT = 2**31 - 1, 2**63 - 1
_LONGEST_NAME = 255  # bytes of a file's name on usual file systems
_LETTERS, _NAMED = 60, 3  # letters of a wrong value, and problems, that a message shows


@dataclass(frozen=True)
class Kind:
    """The type of one value, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Listed:
    """A list whose values all follow one rule."""

    rule: Any


@dataclass(frozen=True)
class Named:
    """An object with any names, whose values all follow one rule; `name` is a rule of the names."""

    rule: Any
    name: Kind | None = None


@dataclass(frozen=True)
class Table:
    """An object with these keys; one that ends in "?" may be missing. `closed`: no other keys."""

    keys: dict[str, Any]
    closed: bool = False


def safe_path(name: Any) -> bool:
    """Return whether `name` is a path that stays inside its directory, as manifests write it."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name or ":" in name:
        return False
    return name.isprintable() and not any(
        part in ("", ".", "..") or len(part.encode()) > _LONGEST_NAME for part in name.split("/")
    )


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST_COUNT and math.isfinite(value)


def _is_hex(value: Any, digits: int) -> bool:
    return (
        isinstance(value, str) and len(value) == digits and not set(value) - set("0123456789abcdef")
    )


def _supervision(value: Any) -> bool:
    if value in ("final-hidden", "logits"):
        return True
    return isinstance(value, str) and re.fullmatch(r"topk:[1-9][0-9]{0,8}", value) is not None


def or_null(kind: Kind) -> Kind:
    """Return a kind that also accepts null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.accepts(value))


ANY = Kind("a value", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
SIZE = Kind("a whole number of at least 1", lambda value: _is_int(value, 1, _LARGEST_SIZE))
COUNT = Kind("a whole number of at least 0", lambda value: _is_int(value, 0, _LARGEST_COUNT))
LAYER = Kind("a layer id of at least -1", lambda value: _is_int(value, -1, _LARGEST_SIZE))
NUMBER = Kind("a finite number", _is_number)
SHARE = Kind("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
FOUND = Kind(
    "a number or a text", lambda value: isinstance(value, (str, float)) or _is_number(value)
)
SHA256 = Kind("64 hex digits", lambda value: _is_hex(value, 64))
XXH3 = Kind("16 hex digits", lambda value: _is_hex(value, 16))
PATH = Kind("a path inside the dataset, without `..`, its names up to 255 bytes", safe_path)
TOKENS = Kind('"all" or "supervised"', lambda value: value in ("all", "supervised"))
SUPERVISION = Kind('"final-hidden", "logits" or "topk:K"', _supervision)

SHARD = Table(
    {
        "file": PATH,
        **dict.fromkeys(("rows", "tokens", "supervised", "bytes"), COUNT),
        **{"sha256": SHA256, "outline": XXH3},
    },
    closed=True,
)
_ERROR = Table(
    {
        **dict.fromkeys(("mse_median", "mse_max", "escaped"), SHARE),
        **dict.fromkeys(("kl?", "logit_median?", "logit_q99?", "logit_max?"), SHARE),
    }
)
_COLUMN = {
    **{"name": TEXT, "codec": TEXT, "width": or_null(SIZE), "tokens?": TOKENS},
    **{"bytes_per_token?": COUNT, "exact?": FLAG},
    **{"error?": _ERROR, "instead_of?": Named(_ERROR)},
}
_HEAD = {
    **{"vocab_size": SIZE, "hidden_size": SIZE, "tied": FLAG, "has_bias?": FLAG},
    **{"scale?": NUMBER, "softcap?": or_null(NUMBER)},
}
_DOCUMENTS = {
    **dict.fromkeys(("read?", "rendered?", "stored?", "bad_rows?", "cut?"), COUNT),
    **dict.fromkeys(("tokens_cut?", "tail_tokens_trimmed?"), COUNT),
    **dict.fromkeys(("dropped?", "unrendered?", "rendering?"), Named(COUNT)),
    "unrendered_examples?": Named(Listed(ANY)),
}
_POSITIONS = Table(
    {
        **{"kind": TEXT, "proven": FLAG, "reason": TEXT, "proven_to": COUNT, "difference": SHARE},
        **{"rotation": or_null(TEXT), "norm": OBJECT},
        "tables": Named(
            Table(
                {"dimensions": SIZE, "factor": NUMBER}
                | {"limit": or_null(SIZE), "factors": or_null(TEXT)},
                closed=True,
            )
        ),
    },
    closed=True,
)
_RENDERED = ("bad_rows", "unrendered", "rendering", "dropped", "cut", "tokens_cut")
_AGREEMENT = Table(
    {
        **dict.fromkeys(("documents", "tokens", "first_choice"), COUNT),
        **dict.fromkeys(("nll", "nll_error", "own_nll", "excess_error", "own_share"), NUMBER),
    },
    closed=True,
)
MANIFEST = Table(
    {
        "settings": Table({"on_policy?": FLAG, "sampling_temperature?": or_null(SHARE)}),
        **{"layers": Listed(LAYER), "supervision": SUPERVISION},
        "draft_layers?": Named(Listed(LAYER)),
        **dict.fromkeys(("layer_convention?", "policy?"), TEXT),
        **{"final?": TOKENS, "teacher?": TOKENS},
        "mask?": ANY,
        "target": Table(
            {
                **{"name": TEXT, "dtype": TEXT, "attn?": TEXT, "architectures?": Listed(TEXT)},
                **dict.fromkeys(("revision?", "model_type?"), or_null(TEXT)),
                **dict.fromkeys(("config_hash?", "weights_hash?"), or_null(TEXT)),
                **dict.fromkeys(("num_layers?", "hidden_size?"), SIZE),
                **dict.fromkeys(("parameters?", "active_parameters?"), SIZE),
            }
        ),
        "tokenizer": Table(
            {
                **dict.fromkeys(("hash?", "chat_template_hash?"), or_null(TEXT)),
                **{"chat_template_kwargs?": OBJECT, "size?": COUNT},
            }
        ),
        "corpus": Listed(Table({"source": TEXT, "licence?": or_null(TEXT)})),
        "codec?": Table({"file?": PATH, "sha256?": SHA256}),
        "columns": Listed(Table(_COLUMN)),
        "head": Table(_HEAD, closed=True),
        "positions?": _POSITIONS,
        "packing": Table(
            {
                **{"form?": TEXT, "utilisation?": SHARE, "tolerance?": SHARE, "noise?": ANY},
                **{"differences?": Named(FOUND), "pack_length?": COUNT},
            }
        ),
        "documents": Table(_DOCUMENTS),
        "agreement?": Table({"total": _AGREEMENT, "sources": Named(_AGREEMENT)}, closed=True),
        "left_out?": Table({"places": Listed(COUNT), "units": Listed(COUNT)}),
        "shards": Listed(SHARD),
        "totals": Table(
            {"documents": COUNT, "tokens": COUNT, "supervised?": COUNT, "bytes?": COUNT}
        ),
        "files": Named(Table({"bytes": COUNT, "sha256": SHA256, "xxh3": XXH3}), PATH),
        "card?": Table({"sha256": SHA256}),
        "ancestors?": Listed(Table({"fingerprint": SHA256, "documents": COUNT})),
        "view?": Table(
            {
                **{"command": TEXT, "options": OBJECT},
                "of": Listed(Table({"fingerprint": SHA256, "documents": COUNT})),
            }
        ),
        "identity?": Table(
            {
                **{"dtype?": TEXT, "architectures?": Listed(TEXT)},
                **dict.fromkeys(
                    ("weights_hash?", "config_hash?", "tokenizer_hash?"), or_null(TEXT)
                ),
                **{"chat_template_hash?": or_null(TEXT), "chat_template_kwargs?": OBJECT},
                **dict.fromkeys(("template_kwargs_used?", "system_messages?"), Named(COUNT)),
            }
        ),
    }
)


def problems(value: Any, rule: Any, where: str = "") -> Iterator[str]:
    """Yield what in `value` does not follow `rule`: the key, the value, and what is expected."""
    if isinstance(rule, Kind):
        if not rule.accepts(value):
            yield f"{where or 'it'} is {_shown(value)}, expected {rule.words}"
    elif isinstance(rule, Listed):
        if not isinstance(value, list):
            yield f"{where} is {_shown(value)}, expected a list"
            return
        for number, item in enumerate(value):
            yield from problems(item, rule.rule, f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where or 'it'} is {_shown(value)}, expected an object"
    elif isinstance(rule, Named):
        for name, item in value.items():
            if rule.name is not None and not rule.name.accepts(name):
                yield f"{where} has the name {_shown(name)}, expected {rule.name.words}"
            yield from problems(item, rule.rule, f"{where}[{_shown(name)}]")
    else:
        yield from _table_problems(value, rule, where)


def _table_problems(value: dict[str, Any], rule: Table, where: str) -> Iterator[str]:
    before = f"{where}." if where else ""
    known = {key.removesuffix("?"): key for key in rule.keys}
    for name, key in known.items():
        if name in value:
            yield from problems(value[name], rule.keys[key], before + name)
        elif not key.endswith("?"):
            yield f"{before}{name} is missing"
    if rule.closed:
        for name in value.keys() - known:
            yield f"{where} has the unknown key {_shown(name)}"


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, (list, dict)) else f"a {type(value).__name__}"
    text = {"None": "null", "True": "true", "False": "false", "a dict": "an object"}.get(text, text)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _LETTERS else text[:_LETTERS] + "..."


def contradictions(raw: dict[str, Any]) -> Iterator[str]:
    """Yield what keys of a sealed manifest, each of the right type, say against each other."""
    shards, totals = raw["shards"], raw["totals"]
    for total, part in (
        ("documents", "rows"),
        *((n, n) for n in ("tokens", "supervised", "bytes")),
    ):
        found = sum(shard[part] for shard in shards)
        if totals.get(total) != found:
            yield f"totals.{total} is {totals.get(total)}, but the shards have {found}"
    for number, shard in enumerate(shards):
        if (
            not 0 <= shard["supervised"] <= shard["tokens"]
            or not 0 < shard["rows"] <= shard["tokens"]
        ):
            yield f"shards[{number}] has impossible counts of rows and tokens"
    if len({shard["file"] for shard in shards}) < len(shards):
        yield "shards has a file twice"
    if raw["layers"] != sorted(set(raw["layers"])):
        yield f"layers is {raw['layers']}, expected ascending layer ids"
    for draft, own in raw.get("draft_layers", {}).items():
        if own != sorted(set(own)) or not set(own) <= set(raw["layers"]):
            yield f"draft_layers[{draft!r}] is {own}, expected ascending ids among layers"
    left = raw.get("left_out", {"places": [], "units": []})
    places, units = left["places"], left["units"]
    if len(places) != len(units) or places != sorted(set(places)) or units != sorted(units):
        yield "left_out has places and units that do not belong together"
    tables = raw.get("positions", {}).get("tables")
    if ("target/positions.safetensors" in raw["files"]) != bool(tables):
        yield "positions and the list of files disagree on target/positions.safetensors"
    begun = [ancestor["documents"] for ancestor in raw.get("ancestors", [])]
    if begun != sorted(begun) or max(begun, default=0) > totals["documents"]:
        yield "ancestors does not list ever more documents, up to those of this dataset"
    packing = raw["packing"]
    if "utilisation" in packing:
        if not {"form", "tolerance", "differences"} <= packing.keys():
            yield "packing has a utilisation, but no form, tolerance or differences"
        elif packing["form"] not in ("rows", "single"):
            found = packing["differences"].get(packing["form"])
            if not _is_number(found):
                yield f"packing.differences[{packing['form']!r}] is {_shown(found)}, not a number"
    for name in _RENDERED if "rendered" in raw["documents"] else ("dropped",):
        if name not in raw["documents"]:
            yield f"documents.{name} is missing"


def refuse(where: str, wrong: Iterable[str]) -> None:
    """Do nothing if there are no problems.

    Raises:
        DatasetError: there are some; the message names the manifest `where` and the first ones.
    """
    found = list(itertools.islice(wrong, _NAMED + 1))
    if found:
        more = "; and more" if len(found) > _NAMED else ""
        raise DatasetError(
            f"{where}: {'; '.join(found[:_NAMED])}{more}. The manifest was edited or damaged: "
            "restore it, or generate the dataset again"
        )
