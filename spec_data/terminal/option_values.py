"""What the values of options are read with: sizes, codecs, names of drafts."""

import re

from spec_data.shards.errors import ConfigError
from spec_data.shards.layer_ids import RECIPES
from spec_data.terminal.console import did_you_mean

HIDDEN_CODECS = ("bf16", "int8c", "lm6c", "lm4c", "fp8")
DEFAULT_CODEC = "lm4c"

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB, 2GB or 1000000.

    Raises:
        ConfigError: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError(f"size {text!r}: expected something like 500MB or 2GB")
    return int(float(found[1]) * _SIZES[found[2].upper()])


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


def parse_codecs(text: str, supervision: str) -> dict[str, str]:
    """Return the codecs of the aux states and of hidden.final: one name, or aux=NAME,final=NAME.

    What is not named keeps the default; hidden.final is bf16 where `supervision` stores none.

    Raises:
        ConfigError: an unknown codec or kind, or a codec of hidden.final where there is none.
    """
    named = dict(part.partition("=")[::2] for part in text.split(","))
    if len(named) == 1 and list(named.values()) == [""]:
        named = dict.fromkeys(("aux", "final"), text)
        if supervision != "final-hidden":
            named["final"] = "bf16"
    elif "final" in named and supervision != "final-hidden":
        raise ConfigError(f"--codec {text}: --supervision {supervision} stores no hidden.final")
    unknown = set(named) - {"aux", "final"} or set(named.values()) - set(HIDDEN_CODECS)
    if unknown:
        raise ConfigError(
            f"--codec {text!r}: expected one of {', '.join(HIDDEN_CODECS)}, or aux=NAME,final=NAME"
        )
    final = DEFAULT_CODEC if supervision == "final-hidden" else "bf16"
    return {"aux": DEFAULT_CODEC, "final": final} | named


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
            known = ", ".join(RECIPES) + did_you_mean(name, list(RECIPES))
            raise ConfigError(f"--for {text}: there is no draft {name!r}; known: {known}")
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
    kept = f"--final {final}" if supervision == "final-hidden" else f"--supervision {supervision}"
    raise ConfigError(
        f"--for eagle with {kept}: this draft reads hidden.final at every token; use --supervision "
        "final-hidden and --final all, or leave eagle out"
    )
