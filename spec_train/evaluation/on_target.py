"""Acceptance and speed of a draft by decoding with its target; also checks that output is lossless.

The same model answers prompts without and with the draft; the speed-up is that of responses that
were decoded both ways in turn, prefill included. Later ones are decoded without the draft only if
that response is not known from an earlier evaluation. Greedy answers must be equal. If they differ,
the first differing position is examined, and a difference counts as a tie only if rounding in the
dtype explains it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_data.corpus.documents import RenderError
from spec_data.models.devices import compute_dtype
from spec_data.models.loading import fix_rope_factors, load_model, short_positions
from spec_data.shards.packing import even_sample
from spec_data.shards.thoughts import BLOCK, thinks
from spec_data.terminal.progress import progress
from spec_train.decoding.chains import (
    Generation,
    Request,
    check_target,
    decode_plain,
    decode_speculative,
    decoder_config,
    examine_difference,
    prove_stepwise,
    why_stepwise,
)
from spec_train.decoding.trees import TreeDrafter, TreeMasks, TreeShape, decode_tree
from spec_train.drafts import Draft
from spec_train.evaluation.decoding_metrics import Response, decoding_metrics
from spec_train.evaluation.on_dataset import SAMPLES, check_sizes
from spec_train.evaluation.plain_responses import PlainResponses
from spec_train.evaluation.prompts import Prompt, Prompts
from spec_train.formats.origin import embedding_warnings
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import shown
from spec_train.losses.sampling import make_sampler
from spec_train.simulation.modes import modes_of
from spec_train.simulation.samples import token_texts

log = logging.getLogger(__name__)

SEED = 0
"""Of the first sampled response; later ones count on."""
TIMED_PAIRS = 16
"""Responses that are decoded both ways at every number of drafted tokens."""
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How prompts are answered, as the options of `spec-train eval` say it."""

    target: str
    prompts: str
    columns: str | dict[str, str] = ""
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float = 0.0
    max_new_tokens: int = 256
    tree_tokens: int = 0
    cost_ratio: float = 0.0
    trust_remote_code: bool = False


def load_target(
    decoding: Decoding, directory: Path, device: torch.device, dtype: str, rope_factors: str | None
) -> Any:
    """Load the target in evaluation mode on `device`.

    `rope_factors` are those that the draft was fitted to, "short" or "long"; a target without
    longrope has none.

    Raises:
        TargetError: it cannot be loaded.
    """
    # on a GPU "auto" is the dtype of the weights; half precision is slow on CPUs
    on_gpu = dtype == "auto" and device.type == "cuda"
    model = load_model(
        str(directory),
        dtype="auto" if on_gpu else compute_dtype(dtype, device),
        device=str(device),
        trust=decoding.trust_remote_code,
    )
    if short_positions(model.config) is not None:
        fix_rope_factors(model, rope_factors)
    return model


@torch.no_grad()
def check_draft(draft: Draft, model: Any) -> list[str]:
    """Refuse a target that the draft cannot run with; return warnings if it was fitted to another.

    A draft of another target decodes without an error, and its tokens are never accepted.

    Raises:
        DraftError: vocabulary, hidden size or layers do not match.
    """
    config = draft.config
    embedding = model.get_input_embeddings().weight
    vocab = model.get_output_embeddings().weight.shape[0]
    check_sizes(draft, vocab, embedding.shape[1], "--target")
    check_target(model, config.layers)
    prove_stepwise(model)
    weight = draft.embed_tokens.weight
    return embedding_warnings(weight, embedding, trained=config.train_embeddings)


def stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end a response, from the generation config and the tokenizer.

    The model config is used only if those name none: the default of its class may be another token
    in this vocabulary.
    """
    for owners in ((model.generation_config, tokenizer), (decoder_config(model),)):
        values = [getattr(owner, "eos_token_id", None) for owner in owners]
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in values]
        if ids := {int(i) for ids in lists for i in ids if i is not None}:
            return ids
    return set()


def evaluate_target(
    draft: Draft,
    model: Any,
    tokenizer: Any,
    decoding: Decoding,
    prompts: Prompts,
    plain: PlainResponses,
    depth: int,
) -> dict[str, Any]:
    """Decode the prompts with up to `depth` drafted tokens per step; return the metrics.

    `plain` are greedy responses of the target that were decoded before; new ones are kept there.
    """
    bench = PairedDecoding(draft, model, tokenizer, decoding, depth, plain)
    steps = emitted = 0
    with progress(total=len(prompts), unit="prompts", desc="decode", leave=False) as bar:
        for prompt in prompts:
            for response in bench.converse(prompt, prompts):
                steps += len(response.generation.steps)
                emitted += sum(step.emitted for step in response.generation.steps)
            bar.set_postfix_str(f"acceptance {shown(emitted / steps if steps else None)}", False)
            bar.update(1)
    greedy = decoding.temperature == 0
    if greedy:
        plain.save()
    sampled = {prompt.where for prompt in even_sample(prompts.prompts, SAMPLES)}
    samples = [response.sample() for response in bench.responses if response.where in sampled]
    stepwise = why_stepwise(model)
    return decoding_metrics(bench.responses, depth, decoding.cost_ratio, timed=stepwise is None) | {
        "stepwise": stepwise,
        "temperature": decoding.temperature,
        "identical": bench.identical if greedy else None,
        "ties": bench.ties if greedy else None,
        "different": bench.different if greedy else None,
        "too_long": bench.too_long,
        "failed_turns": bench.failed_turns,
        "samples": samples,
        "texts": token_texts(samples, tokenizer),
        "plain_responses_kept": plain.used,
        "tree_tokens": decoding.tree_tokens,
    }


class PairedDecoding:
    """Answers prompts with and without the draft, and compares the responses."""

    def __init__(
        self,
        draft: Draft,
        model: Any,
        tokenizer: Any,
        decoding: Decoding,
        depth: int,
        plain: PlainResponses,
    ) -> None:
        """Decode both ways once, untimed: the first forwards of a process are slower."""
        self.draft, self.model, self.tokenizer = draft, model, tokenizer
        self.decoding, self.depth, self.plain = decoding, depth, plain
        self.head = TargetHead.from_model(model, draft.config.origin.get("head"))
        self.responses: list[Response] = []
        self.identical = self.ties = 0
        self.different: list[str] = []
        self.too_long: list[str] = []
        self.failed_turns: list[str] = []
        self._stop = stop_ids(model, tokenizer)
        self._context = getattr(decoder_config(model), "max_position_embeddings", None) or 1 << 62
        self._shape = TreeShape(nodes=decoding.tree_tokens)
        self._masks: TreeMasks | None = None
        if decoding.tree_tokens:
            TreeDrafter.of(draft, self.head, self._shape)  # raises if the draft has no trees
            self._masks = TreeMasks(model)
        for decode in (self._decode_plain, self._decode):
            decode(self._request([0], _WARM_UP_TOKENS, 0))

    def converse(self, prompt: Prompt, prompts: Prompts) -> list[Response]:
        """Answer a prompt of `prompts`: one response, or one for each of its turns."""
        before, group = len(self.responses), prompts.groups.get(prompt.where, "")
        ids, chat = prompt.ids, list(prompt.record.messages or ())
        for follow_up in (*prompt.record.follow_ups, None):
            limit = min(self.decoding.max_new_tokens, self._context - len(ids))
            if limit < 1:
                self.too_long.append(prompt.where)
                log.warning(
                    "warning[long-prompt]: %s: skipped; its %d tokens leave no room for an "
                    "answer in the target's context",
                    *(prompt.where, len(ids)),
                )
                break
            response = self._answer(ids, limit, prompt.where, group)
            response = replace(response, modes=self._modes(prompt, chat, response))
            self.responses.append(response)
            if follow_up is None:
                break
            text = self.tokenizer.decode(response.generation.tokens, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
            chat.append({"role": "user", "content": follow_up})
            try:
                ids = prompts.continued(prompt, chat)
            except RenderError as error:
                log.warning(
                    "warning[long-prompt]: the next turn of a prompt is left out: %s", error
                )
                self.failed_turns.append(str(error))
                break
        return self.responses[before:]

    def _modes(self, prompt: Prompt, chat: list[Any], response: Response) -> Sequence[str]:
        """Return the modes of the answer to the messages of `chat`; () where there are none."""
        if not chat:
            return ()
        before, answer = (
            self.tokenizer.decode(some)
            for some in (response.ids[-BLOCK:], response.generation.tokens[:BLOCK])
        )
        turn = 1 + sum(message.get("role") == "assistant" for message in chat)
        return modes_of(thinks(before, answer), bool(prompt.record.tools), turn)

    def _answer(self, ids: list[int], limit: int, where: str, group: str) -> Response:
        """Answer one prompt, and compare the ways; the response is not kept yet."""
        number, greedy = len(self.responses), self.decoding.temperature == 0
        timed = number < TIMED_PAIRS
        known = self.plain.find(ids, limit) if greedy and not timed else None
        ways = [self._decode]
        if timed or (greedy and known is None):
            ways.insert(number % 2, self._decode_plain)  # neither way always runs first
        made = {way: way(self._request(ids, limit, SEED + number)) for way in ways}
        alone, generation = made.get(self._decode_plain), made[self._decode]
        if greedy:
            if known is not None and known != generation.tokens and self.plain.is_kept(ids, limit):
                known = self._decode_plain(self._request(ids, limit, SEED + number)).tokens
                self.plain.keep(ids, limit, known)
            if alone is not None:
                known = alone.tokens
                self.plain.keep(ids, limit, known)
            self._compare(ids, known or [], generation.tokens, where)
        return Response(where=where, group=group, ids=ids, generation=generation, plain=alone)

    def _request(self, ids: Sequence[int], limit: int, seed: int) -> Request:
        return Request(ids, make_sampler(self.decoding.temperature, seed), limit, self._stop)

    def _decode_plain(self, request: Request) -> Generation:
        return decode_plain(self.model, request)

    def _decode(self, request: Request) -> Generation:
        columns = self.draft.state_columns
        if self._masks is None:
            drafter = self.draft.drafter(self.head)
            return decode_speculative(self.model, drafter, columns, request, self.depth)
        trees = TreeDrafter.of(self.draft, self.head, self._shape)
        return decode_tree(self.model, self._masks, trees, columns, request, self.depth)

    def _compare(
        self, ids: list[int], plain: list[int], speculative: list[int], where: str
    ) -> None:
        d = examine_difference(self.model, ids, plain, speculative)
        if d is None:
            self.identical += 1
        elif d.is_tie:
            self.ties += 1
        else:
            self.different.append(
                f"{where}: token {d.index} is {d.speculative} with the draft and {d.plain} without;"
                f" their logits differ by {d.gap:.3g}, rounding in this dtype allows "
                f"{d.tolerance:.3g}"
            )
