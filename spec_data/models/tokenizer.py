"""Load the tokenizer of a model directory, by one rule for both programs.

Its class is that of `shards.saved_tokenizer`; a directory with a tekken.json alone is refused.

The chat template is the tokenizer's. Processors have had it in a file of their own
(chat_template.json), which transformers reads for processors only.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from spec_data.models.trial import check_in_child
from spec_data.shards.errors import TargetError
from spec_data.shards.file_heads import instead
from spec_data.shards.files import read_object
from spec_data.shards.saved_tokenizer import usual_tokenizer

logger = logging.getLogger(__name__)

_TEKKEN, _TOKENIZER, _CONFIG = "tekken.json", "tokenizer.json", "tokenizer_config.json"
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Where a processor has its template, in the order in which it is read."""


class Tokenizer(Protocol):
    """What a tokenizer must give, with the names and meanings that transformers has.

    Texts of chats are tokenised by `tokenizer(text, add_special_tokens=False)["input_ids"]`, and
    must have the tokens of `apply_chat_template(..., tokenize=True)` (`corpus.template` tries it).
    """

    chat_template: str | dict[str, str] | None
    bos_token_id: int | None
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, Any]
    is_fast: bool

    __call__: Callable[..., Any]
    __len__: Callable[[], int]
    apply_chat_template: Callable[..., Any]
    get_chat_template: Callable[..., str]
    decode: Callable[..., Any]
    save_pretrained: Callable[..., Any]


def load_tokenizer(directory: Path, trust: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model directory, with the chat template of its processor if it has
    none itself.

    Raises:
        TargetError: transformers cannot load one from there, what it loads does not end or takes
            all memory (`trial`), or it makes an empty one, as it does of a
            directory without the files of a tokenizer; or a template file is damaged.
    """
    _check_template_list(directory)
    others = _TOKENIZER, "tokenizer.model"
    if (directory / _TEKKEN).is_file() and not any((directory / n).is_file() for n in others):
        raise TargetError(
            f"{directory}: its only tokenizer is {_TEKKEN}, of which transformers makes one whose "
            f"texts do not have its tokens; copy the model's {_TOKENIZER}, {_CONFIG} and "
            "chat_template.jinja there. Or make them, with mistral-common installed: "
            'python -c "from transformers.integrations.mistral import convert_tekken_tokenizer as '
            f"c; c('{directory / _TEKKEN}').save_pretrained('{directory}')\""
        )
    try:
        tokenizer = usual_tokenizer(directory, trust)
        check_in_child(lambda: _try(tokenizer), str(directory))
        ids = tokenizer("some text", add_special_tokens=False)["input_ids"]
    except TargetError:
        raise
    except Exception as error:  # tokenizers raises a plain Exception for a file that it cannot read
        for file in sorted(p for p in directory.iterdir() if p.suffix in (".json", ".model")):
            if why := instead(file, ""):
                raise TargetError(f"{file}: {why}") from None
        reason = " ".join(str(error).split())
        raise TargetError(f"{directory}: no usable tokenizer ({reason})") from None
    if not ids:
        raise TargetError(
            f"{directory}: no usable tokenizer: it makes no tokens of a text. Copy the model's "
            f"{_TOKENIZER} (or tokenizer.model) and {_CONFIG} there"
        )
    if lacking := [n for n in Tokenizer.__annotations__ if not hasattr(tokenizer, n)]:
        raise TargetError(
            f"{directory}: no usable tokenizer: its {type(tokenizer).__name__} has no "
            f"{', '.join(lacking)}; copy the model's {_TOKENIZER} and {_CONFIG} there"
        )
    before = tokenizer.chat_template
    _add_processor_template(tokenizer, directory)
    if tokenizer.chat_template != before:
        check_in_child(lambda: _try(tokenizer), str(directory))
    return tokenizer


_SHORT = (
    [{"role": "user", "content": "Hello?"}],
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello, you."}],
)
"""Chats on which a template and a tokenizer are tried."""


def _try(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer("some text", add_special_tokens=False)
    for chat in _SHORT:
        asked = len(chat) == 1
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asked)
        tokenizer(text, add_special_tokens=False)


def _check_template_list(directory: Path) -> None:
    """Refuse a list of named templates that has no names; transformers says "'name'" of it."""
    file = directory / _CONFIG
    given = read_object(file, TargetError).get("chat_template") if file.is_file() else None
    if isinstance(given, Sequence) and not isinstance(given, str):
        for entry in given:
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise TargetError(
                    f"{file}: chat_template is a list, and an entry of it has no name or template; "
                    'write {"name": "default", "template": "..."}, or a single text'
                )


def _add_processor_template(tokenizer: Any, directory: Path) -> None:
    """Give a tokenizer without a chat template that of its processor; name one that differs."""
    for name in _PROCESSOR_FILES:
        file = directory / name
        table = read_object(file, TargetError) if file.is_file() else {}
        template = table.get("chat_template")
        if name == _PROCESSOR_FILES[0] and table and not isinstance(template, str):
            raise TargetError(f"{file}: it has no text under chat_template; copy the file again")
        if not isinstance(template, str):
            continue
        if not tokenizer.chat_template:
            tokenizer.chat_template = template
        elif tokenizer.chat_template != template:
            logger.warning(
                "warning[processor-template]: %s: the processor has another chat template (%s) "
                "than the tokenizer, which is used here; serving engines may prefer the "
                "processor's: keep one of them",
                *(directory, name),
            )
        return
