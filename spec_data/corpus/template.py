"""Render the beginnings of one conversation with one chat template, each at most once.

Every token comes from the tokenizer's own `apply_chat_template`. A template is a program that
strangers wrote: any exception it raises becomes a `RenderError` of the record.
"""

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import Record

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
RESERVED = {  # arguments of apply_chat_template that this module sets; users cannot set them
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}


@dataclass(frozen=True)
class Rendered:
    """The token ids of one render, and its generation tags."""

    ids: list[int]
    tags: list[int] | None  # 1 at tokens inside generation tags; None: the template has no tags


class Chat:
    """The renders of the beginnings of one conversation.

    `tagged` is True if the template marks what the target generates with `{% generation %}`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        record: Record,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
    ) -> None:
        self.record = record
        self._tokenizer = tokenizer
        self._messages = messages
        self._kwargs = {**kwargs, **record.template_kwargs}
        self._prompts: dict[int, list[int]] = {}
        self._throughs: dict[int, Rendered] = {}
        if reserved := RESERVED & set(record.template_kwargs):
            names = ", ".join(sorted(reserved))
            raise render_error(record, "bad-template-kwargs", f"{names} cannot be set per row")
        if not self._tokenizer.chat_template:
            raise render_error(
                record,
                "no-chat-template",
                "the target's tokenizer has no chat template; add one (chat_template.jinja in its "
                "directory), or use a corpus of text or input_ids",
            )
        try:
            template = self._tokenizer.get_chat_template(None, record.tools)
        except ValueError as error:
            raise render_error(record, "no-chat-template", str(error)) from error
        self.tagged = bool(_GENERATION_TAG.search(template)) and self._tokenizer.is_fast

    def _apply(self, end: int, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                self._messages[:end], tools=self.record.tools, **self._kwargs, **options
            )
        except Exception as error:  # templates are programs: they can raise anything
            message = f"the chat template fails: {type(error).__name__}: {error}"
            raise render_error(self.record, "template-error", message) from error

    def prompt(self, k: int) -> list[int]:
        """Return the token ids that serving sends to get message k."""
        if k not in self._prompts:
            rendered = self._apply(k, add_generation_prompt=True, return_dict=True)
            self._prompts[k] = list(rendered["input_ids"])
        return self._prompts[k]

    def through(self, k: int) -> Rendered:
        """Return the render of the conversation up to and including message k."""
        if k not in self._throughs:
            rendered = self._apply(
                k + 1, return_dict=True, return_assistant_tokens_mask=self.tagged
            )
            tags = list(rendered["assistant_masks"]) if self.tagged else None
            self._throughs[k] = Rendered(list(rendered["input_ids"]), tags)
        return self._throughs[k]

    def spliced(self, k: int) -> list[int]:
        """Return prompt_k, then the tokens of the rest of the text of through_k, tokenised alone.

        Return [] if the text of through_k does not begin with that of prompt_k, or if the joined
        tokens decode to another text.
        """
        prompt = self._apply(k, add_generation_prompt=True, tokenize=False)
        through = self._apply(k + 1, tokenize=False)
        if not through.startswith(prompt) or through == prompt:
            return []
        rest = self._tokenizer(through[len(prompt) :], add_special_tokens=False)["input_ids"]
        ids = self.prompt(k) + list(rest)
        same = self._tokenizer.decode(ids) == self._tokenizer.decode(self.through(k).ids)
        return ids if same else []


def render_error(record: Record, reason: str, message: str) -> RenderError:
    """Return a RenderError whose message names the record."""
    return RenderError(reason, f"{record.where}: {message}")
