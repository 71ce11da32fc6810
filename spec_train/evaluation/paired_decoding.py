"""Paired decoding: answer prompts one by one, with and without the draft, and count the results.

The first responses are always decoded both ways in turn, so that their times can be compared.
Later ones are decoded without the draft only if that response is not known.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_data.corpus.documents import RenderError
from spec_data.shards.files import cache_directory, sha256_json, write_atomically
from spec_train.decoding.chains import (
    Difference,
    Generation,
    Request,
    decode_plain,
    decode_speculative,
    decoder_config,
    examine_difference,
)
from spec_train.decoding.trees import TreeDrafter, TreeMasks, TreeShape, decode_tree
from spec_train.drafts import Draft
from spec_train.evaluation.prompts import Message, Prompt, Prompts
from spec_train.evaluation.tally import Tally
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import make_sampler

# -- plain responses -------------------------------------------------------------------------------
# Greedy responses of a target without a draft, kept between evaluations.
#
# They are the same for every draft, so they are decoded once and kept in a file per target and
# settings, in the cache directory (see `shards.cache_directory`). Everything that can change a
# token is part of the file's name: the target's weights, config, dtype, attention and device, the
# longest response, and the versions of the libraries. A file that is damaged in any way is ignored.


log = logging.getLogger(__name__)

_MOST_FILES = 64


class PlainResponses:
    """Responses by prompt; read from a file when made, written back by `save`."""

    def __init__(self, file: Path | None) -> None:
        """Read what is kept in `file`; None keeps nothing between evaluations."""
        self._file = file
        self._kept: dict[str, list[int]] = _read(file) if file else {}
        self._new = False
        self.used = 0
        """Responses that did not have to be decoded."""

    @classmethod
    def of(
        cls,
        model: Any,
        identity: Mapping[str, Any],
        limit: int,
        stop: Collection[int],
        batch: int = 1,
    ) -> "PlainResponses":
        """Find the responses of a target.

        Args:
            model: the loaded target.
            identity: the facts of its files (see `models.identify`).
            limit: the longest response, in tokens.
            stop: the token ids that end a response.
            batch: prompts per forward. In half precision, where near-ties are common, another
                batch has other responses.
        """
        settings = {
            "identity": dict(identity),
            "limit": limit,
            "stop": sorted(stop),
            "dtype": str(model.dtype),
            "device": model.device.type,
            "attention": getattr(model.config, "_attn_implementation", None),
            "rope": getattr(model.config.get_text_config(), "rope_parameters", None),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        if batch > 1 and model.dtype not in (torch.float32, torch.float64):
            settings["batch"] = batch
        name = sha256_json(settings).removeprefix("sha256:")[:32]
        return cls(cache_directory("plain-responses") / f"{name}.json")

    def find(self, prompt: Sequence[int], limit: int) -> list[int] | None:
        """Return the kept response to a prompt of token ids with this limit, or None."""
        found = self._kept.get(_key(prompt, limit))
        self.used += found is not None
        return found

    def keep(self, prompt: Sequence[int], limit: int, response: Sequence[int]) -> None:
        """Keep a response, token ids, until `save`.

        If another one is kept for this prompt, the device does not repeat its results, and all
        kept responses are dropped.
        """
        key, tokens = _key(prompt, limit), list(response)
        if self._kept.get(key, tokens) != tokens:
            log.info("this device does not repeat its responses: kept ones are not used")
            self._kept.clear()
        self._new |= key not in self._kept
        self._kept[key] = tokens

    def save(self) -> None:
        """Write the file if there is something new. A failure is logged: only time is lost."""
        if self._file is None or not self._new:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            others = sorted(self._file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime)
            for old in others[: max(0, len(others) - _MOST_FILES + 1)]:
                old.unlink(missing_ok=True)
            body = {"sha256": sha256_json(self._kept), "responses": self._kept}
            write_atomically(self._file, json.dumps(body))
        except OSError as error:
            log.info("the responses of the target alone were not kept: %s", error)


def _key(prompt: Sequence[int], limit: int) -> str:
    return hashlib.sha256(json.dumps([limit, *map(int, prompt)]).encode()).hexdigest()[:32]


def _read(file: Path) -> dict[str, list[int]]:
    """Return the responses of a file; none if it does not exist or is damaged."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        responses = body["responses"]
        if body["sha256"] != sha256_json(responses):
            raise ValueError("wrong checksum")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("%s is not used: %s", file, error)
        return {}
    return responses


# -- paired decoding -------------------------------------------------------------------------------


_WARM_UP_TOKENS = 8
SEED = 0
"""Of the first sampled response; later ones count on."""
TIMED_PAIRS = 16
"""Responses that are decoded both ways, even if the one without a draft is known."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How prompts are answered, as the options of `spec-train eval` say it."""

    target: str
    prompts: str
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float = 0.0
    max_new_tokens: int = 256
    tree_tokens: int = 0
    batch_prompts: int = 0
    cost_ratio: float = 0.0
    save_responses: str | None = None
    trust_remote_code: bool = False


def stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end a response, from the generation config and the tokenizer.

    The model config is used only if those name none: the default of its class may be another token
    in this vocabulary.
    """
    for owners in ((model.generation_config, tokenizer), (decoder_config(model),)):
        values = [getattr(owner, "eos_token_id", None) for owner in owners]
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in values]
        found = {int(i) for ids in lists for i in ids if i is not None}
        if found:
            return found
    return set()


class Bench:
    """Answers prompts with and without the draft and counts the results."""

    def __init__(
        self,
        draft: Draft,
        model: Any,
        tokenizer: Any,
        decoding: Decoding,
        depth: int,
        known: PlainResponses,
        sampled: Collection[str] = (),
        groups: Mapping[str, str] | None = None,
    ) -> None:
        """Start with an empty tally; `depth` is K, `known` the responses without a draft.

        `sampled` are the places of the prompts whose drafted tokens are kept; `groups` has the set
        of each place.
        """
        self.draft, self.model, self.tokenizer = draft, model, tokenizer
        self.head = TargetHead.from_model(model, draft.config.origin.get("head"))
        self.decoding, self.depth = decoding, depth
        self.stop = stop_ids(model, tokenizer)
        self.known = known
        self.tally = Tally(
            tried=[0] * depth,
            accepted=[0] * depth,
            sampled=frozenset(sampled),
            groups=groups or {},
        )
        self.saved: list[dict[str, list[int]]] = []
        self._context = getattr(decoder_config(model), "max_position_embeddings", None) or 1 << 62
        self._shape = TreeShape(nodes=decoding.tree_tokens)
        self._masks: TreeMasks | None = None
        if decoding.tree_tokens:
            TreeDrafter.of(draft, self.head, self._shape)  # raises if the draft has no trees
            self._masks = TreeMasks(model)

    def request(self, ids: Sequence[int], limit: int, seed: int) -> Request:
        """Return what is decoded: a prompt, its limit and a sampler of this seed."""
        return Request(ids, make_sampler(self.decoding.temperature, seed), limit, self.stop)

    def _plain(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        return decode_plain(self.model, self.request(ids, limit, seed))

    def _speculative(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        request, columns = self.request(ids, limit, seed), self.draft.state_columns
        if self._masks is None:
            drafter = self.draft.drafter(self.head)
            return decode_speculative(self.model, drafter, columns, request, self.depth)
        trees = TreeDrafter.of(self.draft, self.head, self._shape)
        return decode_tree(self.model, self._masks, trees, columns, request, self.depth)

    def warm_up(self, ids: Sequence[int]) -> None:
        """Decode both ways once, untimed: the first forwards of a process are slower."""
        self._plain(ids, _WARM_UP_TOKENS, 0)
        self._speculative(ids, _WARM_UP_TOKENS, 0)

    def answer(self, ids: list[int], where: str) -> list[int]:
        """Answer one prompt both ways; return the response for the next turn of the chat."""
        limit = self.room(ids)
        if limit < 1:
            self.skip(ids, where)
            return []
        timed = self.tally.responses < TIMED_PAIRS
        plain = self.known.find(ids, limit) if self.greedy and not timed else None
        if timed or (self.greedy and plain is None):
            plain, speculative = self._paired(ids, limit)
            if self.greedy:
                self.known.keep(ids, limit, plain)
        else:
            seed = SEED + self.tally.responses
            speculative = self._speculative(ids, limit, seed)
        self.record(ids, where, plain, speculative)
        return speculative.tokens

    @property
    def greedy(self) -> bool:
        """Whether nothing is sampled."""
        return self.decoding.temperature == 0

    def room(self, ids: Sequence[int]) -> int:
        """Return the longest response to a prompt, in tokens; below 1: there is no room for one."""
        return min(self.decoding.max_new_tokens, self._context - len(ids))

    def skip(self, ids: Sequence[int], where: str) -> None:
        """Count a prompt that fills the context."""
        self.tally.too_long.append(where)
        log.warning(
            "%s: skipped; its %d tokens leave no room for an answer in the target's context",
            *(where, len(ids)),
        )

    def record(
        self,
        ids: list[int],
        where: str,
        plain: list[int] | None,
        speculative: Generation,
        *,
        alone: bool = True,
    ) -> None:
        """Count a response, and compare it with that of the target alone if decoding is greedy."""
        self.tally.add(speculative, where, ids, alone=alone)
        if self.greedy and plain is not None:
            self._compare(ids, plain, speculative.tokens, where)
        if self.decoding.save_responses:
            response = speculative.tokens
            mask = [0] * len(ids) + [1] * len(response)
            self.saved.append({"input_ids": [*ids, *response], "loss_mask": mask})

    def _paired(self, ids: list[int], limit: int) -> tuple[list[int], Generation]:
        """Decode without and with the draft, and count the times; return both responses."""
        number = self.tally.responses
        seed = SEED + number
        first, second = (self._plain, self._speculative)
        if number % 2:  # alternate, so that neither way always runs first
            first, second = second, first
        results = first(ids, limit, seed), second(ids, limit, seed)
        plain, speculative = results[::-1] if number % 2 else results
        self.tally.add_pair(plain, speculative)
        return plain.tokens, speculative

    def _compare(
        self, ids: list[int], plain: list[int], speculative: list[int], where: str
    ) -> None:
        difference = examine_difference(self.model, ids, plain, speculative)
        if difference is None:
            self.tally.identical += 1
        elif difference.is_tie:
            self.tally.ties += 1
        else:
            self.tally.differences.append(f"{where}: {_describe(difference)}")

    def converse(self, prompt: Prompt, prompts: Prompts) -> None:
        """Answer a prompt of `prompts`: one response, or one for each of its turns."""
        ids, chat = prompt.ids, list(prompt.record.messages or ())
        for follow_up in (*prompt.record.follow_ups, None):
            response = self.answer(ids, prompt.where)
            if not response or follow_up is None:
                return
            try:
                ids = self.next_turn(prompt, prompts, chat, response, follow_up)
            except RenderError as error:
                self.fail(error)
                return

    def next_turn(
        self,
        prompt: Prompt,
        prompts: Prompts,
        chat: list[Message],
        response: list[int],
        follow_up: str,
    ) -> list[int]:
        """Append a response and the user's next message to `chat`; return the next prompt.

        Raises:
            RenderError: the template rejects the chat.
        """
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        chat.append({"role": "assistant", "content": text})
        chat.append({"role": "user", "content": follow_up})
        return prompts.continued(prompt, chat)

    def fail(self, error: RenderError) -> None:
        """Count a turn that could not be rendered."""
        log.warning("warning: the next turn of a prompt is left out: %s", error)
        self.tally.failed_turns.append(str(error))


def _describe(d: Difference) -> str:
    return (
        f"token {d.index} is {d.speculative} with the draft and {d.plain} without; their logits "
        f"differ by {d.gap:.3g}, rounding in this dtype allows {d.tolerance:.3g}"
    )
