"""Acceptance and speed of a draft by decoding with its target; also checks that output is lossless.

The same model answers prompts without and with the draft. Greedy responses without a draft are kept
between evaluations (see plain_responses.py). The speed-up is the ratio over the first responses,
which are always decoded both ways in this process, prefill included. Greedy answers must be equal.
If they differ, the first differing position is examined, and a difference counts as a tie only if
rounding in the dtype explains it. First the draft's embedding is compared with the target's: a
draft of another target decodes without an error, and its tokens are never accepted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spec_data.corpus.documents import RenderError
from spec_data.devices import compute_dtype
from spec_data.models.loading import load_model
from spec_data.models.reading import load_tokenizer
from spec_data.models.resolve import resolve_model
from spec_data.models.rope_factors import fix_rope_factors, short_positions
from spec_data.progress import progress
from spec_data.shards.errors import DraftError
from spec_train.decoding.chains import (
    Difference,
    Generation,
    Request,
    check_target,
    decode_plain,
    decode_speculative,
    decoder_config,
    examine_difference,
)
from spec_train.decoding.tree_growth import TreeDrafter, TreeShape
from spec_train.decoding.tree_masks import TreeMasks
from spec_train.decoding.trees import decode_tree
from spec_train.drafts import Draft
from spec_train.evaluation.plain_responses import PlainResponses
from spec_train.evaluation.prompts import Prompt, Prompts
from spec_train.head import TargetHead
from spec_train.metrics import shown
from spec_train.options import EvalConfig
from spec_train.origin import embedding_warnings
from spec_train.sampling import make_sampler

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8
TIMED_PAIRS = 16
"""Responses that are decoded both ways, even if the one without a draft is known."""


@dataclass(kw_only=True)
class Tally:
    """Counts over all responses. Lists over depths have K entries."""

    tried: list[int]
    accepted: list[int]
    responses: int = 0
    identical: int = 0
    ties: int = 0
    stopped: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    draft_passes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    timed_pairs: int = 0
    timed_tokens: int = 0  # with the draft, of the pairs; `seconds` are those of all responses
    timed_seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    too_long: list[str] = field(default_factory=list)
    failed_turns: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add_pair(self, plain: Generation, speculative: Generation) -> None:
        """Count the times of a response that was decoded both ways."""
        self.timed_pairs += 1
        self.timed_tokens += len(speculative.tokens)
        self.timed_seconds += speculative.seconds
        self.plain_tokens += len(plain.tokens)
        self.plain_seconds += plain.seconds

    def add(self, speculative: Generation) -> None:
        """Count one response with the draft."""
        self.responses += 1
        self.stopped += speculative.stopped
        self.tokens += len(speculative.tokens)
        self.seconds += speculative.seconds
        self.draft_passes += speculative.draft_passes
        for r in speculative.rounds:
            self.rounds += 1
            self.emitted += r.emitted
            self.drafted += r.drafted
            for depth in range(r.tried):
                self.tried[depth] += 1
            for depth in range(r.accepted):
                self.accepted[depth] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification of the target; None before the first verification."""
        return self.emitted / self.rounds if self.rounds else None


def find_target(config: EvalConfig) -> tuple[Path, Any]:
    """Return the directory and the tokenizer of the target.

    Raises:
        MissingError: the model does not exist. TargetError: its tokenizer cannot be loaded.
    """
    directory, _ = resolve_model(str(config.target))
    return directory, load_tokenizer(directory, config.trust_remote_code)


def load_target(
    config: EvalConfig, directory: Path, device: torch.device, rope_factors: str | None = None
) -> Any:
    """Load the target in evaluation mode on `device`.

    `rope_factors` are those that the draft was fitted to, "short" or "long"; a target without
    longrope has none.

    Raises:
        TargetError: it cannot be loaded.
    """
    # on a GPU "auto" is the dtype of the weights; half precision is slow on CPUs
    on_gpu = config.dtype == "auto" and device.type == "cuda"
    model = load_model(
        str(directory),
        dtype="auto" if on_gpu else compute_dtype(config.dtype, device),
        device=str(device),
        attn=config.attn,
        trust=config.trust_remote_code,
    )
    if short_positions(model.config) is not None:
        fix_rope_factors(model, rope_factors)
    return model


@torch.no_grad()
def check_draft(draft: Draft, model: Any) -> list[str]:
    """Refuse a target that the draft cannot run with; return warnings if it was fitted to another.

    Raises:
        DraftError: vocabulary, hidden size or layers do not match.
    """
    config = draft.config
    embedding = model.get_input_embeddings().weight
    vocab = model.get_output_embeddings().weight.shape[0]
    for name, own, theirs in (
        ("vocabulary", config.vocab_size, vocab),
        ("hidden size", config.target_hidden_size, embedding.shape[1]),
    ):
        if own != theirs:
            raise DraftError(
                f"the draft is for a target of {name} {own}, --target has {theirs}: the draft was "
                "fitted to another target"
            )
    check_target(model, config.layers)
    own = draft.embed_tokens.weight
    return embedding_warnings(own, embedding, trained=config.train_embeddings)


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
        config: EvalConfig,
        depth: int,
        known: PlainResponses,
    ) -> None:
        """Start with an empty tally; `depth` is K, `known` the responses without a draft."""
        self.draft, self.model, self.tokenizer = draft, model, tokenizer
        self.head = TargetHead.from_model(model, draft.config.origin.get("head"))
        self.config, self.depth = config, depth
        self.stop = stop_ids(model, tokenizer)
        self.known = known
        self.tally = Tally(tried=[0] * depth, accepted=[0] * depth)
        self.saved: list[dict[str, list[int]]] = []
        self._context = getattr(decoder_config(model), "max_position_embeddings", None) or 1 << 62
        self._shape = TreeShape(nodes=config.tree_tokens, topk=config.tree_topk)
        self._masks: TreeMasks | None = None
        if config.tree_tokens:
            TreeDrafter.of(draft, self.head, self._shape)  # raises if the draft has no trees
            self._masks = TreeMasks(model)

    def _request(self, ids: Sequence[int], limit: int, seed: int) -> Request:
        return Request(ids, make_sampler(self.config.temperature, seed), limit, self.stop)

    def _plain(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        return decode_plain(self.model, self._request(ids, limit, seed))

    def _speculative(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        request, columns = self._request(ids, limit, seed), self.draft.state_columns
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
        limit = min(self.config.max_new_tokens, self._context - len(ids))
        if limit < 1:
            self.tally.too_long.append(where)
            log.warning(
                "%s: skipped; its %d tokens leave no room for an answer in the target's context",
                *(where, len(ids)),
            )
            return []
        greedy = self.config.temperature == 0
        timed = self.tally.responses < TIMED_PAIRS
        plain = self.known.find(ids, limit) if greedy and not timed else None
        if timed or (greedy and plain is None):
            plain, speculative = self._both_ways(ids, limit)
            if greedy:
                self.known.keep(ids, limit, plain)
        else:
            seed = self.config.seed + self.tally.responses
            speculative = self._speculative(ids, limit, seed)
        self.tally.add(speculative)
        if greedy and plain is not None:
            self._compare(ids, plain, speculative.tokens, where)
        if self.config.save_responses:
            response = speculative.tokens
            mask = [0] * len(ids) + [1] * len(response)
            self.saved.append({"input_ids": [*ids, *response], "loss_mask": mask})
        return speculative.tokens

    def _both_ways(self, ids: list[int], limit: int) -> tuple[list[int], Generation]:
        """Decode without and with the draft, and count the times; return both responses."""
        number = self.tally.responses
        seed = self.config.seed + number
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
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
            chat.append({"role": "user", "content": follow_up})
            try:
                ids = prompts.continued(prompt, chat)
            except RenderError as error:
                log.warning("warning: the next turn of a prompt is left out: %s", error)
                self.tally.failed_turns.append(str(error))
                return


def _describe(d: Difference) -> str:
    return (
        f"token {d.index} is {d.speculative} with the draft and {d.plain} without; their logits "
        f"differ by {d.gap:.3g}, rounding in this dtype allows {d.tolerance:.3g}"
    )


def figures(tally: Tally, depth: int, temperature: float) -> dict[str, Any]:
    """Return the metrics of --json."""
    speed = tally.tokens / tally.seconds if tally.seconds else 0.0
    paired = tally.timed_tokens / tally.timed_seconds if tally.timed_seconds else 0.0
    plain = tally.plain_tokens / tally.plain_seconds if tally.plain_seconds else 0.0
    pairs = zip(tally.accepted, tally.tried, strict=True)
    greedy = temperature == 0
    return {
        "acceptance_length": tally.acceptance_length,
        "accept_rate": [a / t if t else None for a, t in pairs],
        "accepted_per_depth": tally.accepted,
        "tried_per_depth": tally.tried,
        "draft_tokens": depth,
        "drafted": tally.drafted,
        "draft_passes": tally.draft_passes,
        "accepted": sum(tally.accepted),
        "rounds": tally.rounds,
        "emitted": tally.emitted,
        "responses": tally.responses,
        "tokens": tally.tokens,
        "stopped": tally.stopped,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": paired / plain if plain else None,
        "timed_pairs": tally.timed_pairs,
        "temperature": temperature,
        "identical": tally.identical if greedy else None,
        "ties": tally.ties if greedy else None,
        "different": tally.differences if greedy else None,
        "too_long": tally.too_long,
        "failed_turns": tally.failed_turns,
    }


def evaluate_target(
    draft: Draft,
    model: Any,
    tokenizer: Any,
    config: EvalConfig,
    prompts: Prompts,
    known: PlainResponses,
    *,
    depth: int,
) -> tuple[dict[str, Any], list[dict[str, list[int]]]]:
    """Decode the prompts; return the metrics, and the responses if --save-responses is set.

    `known` are the responses of the target alone; new ones are added and saved.
    """
    bench = Bench(draft, model, tokenizer, config, depth, known)
    bench.warm_up([0])
    with progress(prompts.found, unit="prompts", desc="decode", leave=False) as bar:
        for prompt in bar:
            bench.converse(prompt, prompts)
            length = shown(bench.tally.acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
    known.save()
    result = figures(bench.tally, depth, config.temperature)
    result["plain_responses_kept"] = known.used
    result["tree_tokens"] = config.tree_tokens
    result["tree_topk"] = config.tree_topk if config.tree_tokens else None
    return result, bench.saved
