"""What the values of options are read with: sizes, codecs, names of drafts."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from spec_data.shards.errors import ConfigError
from spec_data.shards.layer_ids import RECIPES
from spec_data.terminal.console import did_you_mean

QUALITIES = {"bf16": 0.0, "fine": 0.01, "default": 0.02, "small": 0.05}
"""Values of --codec by name: the error that a column may have, see `generation.calibrate`."""

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB, 2GB or 1000000.

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"size {text!r}: expected something like 500MB or 2GB")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_batch_tokens(text: str | int) -> int | None:
    """Return the tokens per forward of --batch-tokens; None for auto.

    Raises:
        ConfigError: no number above zero.
    """
    if text == "auto":
        return None
    if not re.fullmatch(r"0*[1-9]\d*", str(text)):
        raise ConfigError(f"--batch-tokens {text}: expected a number of tokens, or auto")
    return int(text)


def parse_codecs(text: str, supervision: str) -> dict[str, float]:
    """Return the qualities (0: bf16) of "aux" and "final", and of layers named like "L3".

    `text` is one value for all, NAME=VALUE, or both, separated by commas: fine,final=bf16. What is
    not named keeps the default; hidden.final is bf16 where `supervision` stores none.

    Raises:
        ConfigError: an unknown value or column, or one of hidden.final where there is none.
    """
    parts = [part.strip().rpartition("=")[::2] for part in text.split(",")]
    named = {name.strip().removeprefix("hidden."): _quality(value, text) for name, value in parts}
    if len(named) < len(parts) or not all(re.fullmatch(r"|aux|final|L-?\d+", n) for n in named):
        raise ConfigError(
            f"--codec {text!r}: expected one of {', '.join(QUALITIES)}, a number, or such values "
            "per column, as in fine,final=bf16,L3=0.03"
        )
    base = named.pop("", QUALITIES["default"])
    if supervision != "final-hidden":
        if "final" in named:
            raise ConfigError(f"--codec {text}: --supervision {supervision} stores no hidden.final")
        named["final"] = 0.0
    return {"aux": base, "final": base} | named


def _quality(value: str, text: str) -> float:
    number = QUALITIES.get(value)
    if number is None:
        with suppress(ValueError):
            number = float(value)
        if number is None or not 1e-5 <= number <= 0.5:
            raise ConfigError(
                f"--codec {text!r}: {value!r} is none of {', '.join(QUALITIES)}, and no error "
                "between 0.00001 and 0.5"
            )
    return number


def column_qualities(codecs: Mapping[str, float], layers: Sequence[int]) -> dict[str, float]:
    """Return the quality of each column of hidden states by its name, of `parse_codecs`.

    Raises:
        ConfigError: a layer is named that is not captured.
    """
    names = sorted(f"L{layer}" for layer in layers)
    if unknown := sorted(codecs.keys() - {*names, "aux", "final"}):
        raise ConfigError(
            f"--codec: {', '.join(unknown)} is not captured; the layers are "
            f"{', '.join(map(str, layers))}"
        )
    aux = {f"hidden.{name}": codecs.get(name, codecs["aux"]) for name in names}
    return aux | {"hidden.final": codecs["final"]}


def parse_drafts(text: str) -> tuple[str, ...]:
    """Return the names of drafts in `text`, separated by commas, each once; "all" is every draft.

    Raises:
        ConfigError: a name that is no draft.
    """
    if not text:
        return ()
    if text.strip() == "all":
        return tuple(RECIPES)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in RECIPES:
            drafts = ", ".join(RECIPES) + did_you_mean(name, list(RECIPES))
            raise ConfigError(f"--for {text}: there is no draft {name!r}; drafts are {drafts}")
    return names


def check_drafts(drafts: tuple[str, ...], layers: str, supervision: str, final: str) -> None:
    """Refuse --for beside --layers, or beside options without what one of its drafts reads.

    Raises:
        ConfigError: see above.
    """
    if drafts and layers != "auto":
        raise ConfigError(
            f"--layers {layers} and --for {','.join(drafts)}: --for chooses the layers; give one "
            "or the other"
        )
    if "eagle" not in drafts or (supervision, final) == ("final-hidden", "all"):
        return
    kind = f"--final {final}" if supervision == "final-hidden" else f"--supervision {supervision}"
    raise ConfigError(
        f"--for eagle with {kind}: this draft reads hidden.final at every token; use --supervision "
        "final-hidden and --final all, or leave eagle out"
    )
