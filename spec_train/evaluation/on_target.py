"""Acceptance and speed of a draft by decoding with its target, and proof that nothing is lost.

Every prompt is answered twice in the same process by the same model: without and with the draft.
Speed is the ratio of the two, prefill included. Greedy answers must be equal; where they are not,
the first differing position is examined, and only what the dtype's own noise explains passes as a
tie. The draft's embedding and the dataset's tokenizer are compared with the target's first: a draft
of another target decodes without an error and is never accepted.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_data.devices import compute_dtype
from spec_data.progress import progress
from spec_data.shards.errors import DraftError, MissingError, TargetError
from spec_data.shards.files import sha256_json
from spec_train.decoding.chains import (
    Difference,
    Generation,
    check_target,
    decode_plain,
    decode_speculative,
    examine_difference,
)
from spec_train.decoding.tree_growth import TreeDrafter, TreeShape
from spec_train.decoding.tree_masks import TreeMasks
from spec_train.decoding.trees import decode_tree
from spec_train.drafts import Draft
from spec_train.evaluation.prompts import Prompt, opening, render, render_text
from spec_train.head import TargetHead
from spec_train.metrics import shown
from spec_train.options import EvalConfig
from spec_train.sampling import make_sampler

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8


@dataclass(kw_only=True)
class Tally:
    """What all responses add up to. Lists over depths have K entries."""

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
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    too_long: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(self, plain: Generation, speculative: Generation) -> None:
        """Count one response."""
        self.responses += 1
        self.stopped += speculative.stopped
        self.tokens += len(speculative.tokens)
        self.seconds += speculative.seconds
        self.draft_passes += speculative.draft_passes
        self.plain_tokens += len(plain.tokens)
        self.plain_seconds += plain.seconds
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
        """Tokens per verification of the target; None before the first."""
        return self.emitted / self.rounds if self.rounds else None


def load_target(config: EvalConfig, device: torch.device) -> tuple[Any, Any]:
    """The target and its tokenizer, ready on `device`.

    Raises:
        MissingError: no such model. TargetError: it cannot be loaded.
    """
    name = str(config.target)
    remote = config.trust_remote_code
    # On a GPU "auto" is the dtype of the weights; CPUs are slow in half precision.
    on_gpu = config.dtype == "auto" and device.type == "cuda"
    dtype: Any = "auto" if on_gpu else compute_dtype(config.dtype, device)
    options: dict[str, Any] = {} if config.attn == "auto" else {"attn_implementation": config.attn}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=remote)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=remote, **options
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise MissingError(f"--target {name}: cannot be found or read: {reason}") from None
    except (ValueError, KeyError, ImportError) as error:
        raise TargetError(f"--target {name}: cannot be loaded: {error}") from error
    return model.to(device).eval(), tokenizer


@torch.no_grad()
def check_draft(draft: Draft, model: Any) -> list[str]:
    """Refuse a target the draft cannot run with; give warnings about one it was not made for.

    Raises:
        DraftError: vocabulary, hidden size or layers do not fit.
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
                f"the draft is for a target of {name} {own}, --target has {theirs}: it was fitted "
                "to another target"
            )
    check_target(model, config.layers)
    own_rows = draft.embed_tokens.weight.float()
    difference = (own_rows - embedding.to(own_rows.device).float()).norm() / own_rows.norm()
    if float(difference) > 0.02:  # bf16 rounding is 0.002; another model's rows differ by about 1
        return [
            f"the draft's embedding differs from the target's by {float(difference):.0%}: it was "
            "fitted to another target or another version of it; expect low acceptance"
        ]
    return []


def check_tokenizer(
    tokenizer: Any, template_kwargs: Mapping[str, Any], trained: Mapping[str, Any]
) -> list[str]:
    """Warnings where prompts are rendered otherwise than the data the draft was trained on.

    `trained` says how that was, as far as it is known (see `evaluate.trained_rendering`).
    """
    warnings = []
    template = tokenizer.chat_template
    same_template = None
    if "chat_template_hash" in trained:
        same_template = template and sha256_json(template) == trained["chat_template_hash"]
    folder = trained.get("folder")
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        stored = AutoTokenizer.from_pretrained(folder)
        if stored.get_vocab() != tokenizer.get_vocab():
            warnings.append("the tokenizer's vocabulary is not that of the training data")
        if same_template is None:
            same_template = stored.chat_template == template
    if same_template is not None and not same_template:
        warnings.append("the chat template is not that of the training data")
    recorded = trained.get("chat_template_kwargs")
    if recorded is not None and dict(template_kwargs) != recorded:
        warnings.append(
            f"--chat-template-kwargs {dict(template_kwargs)}; the training data has {recorded}"
        )
    return [w + ": expect lower acceptance" for w in warnings]


def stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Ids that end a response: the generation config's and the tokenizer's.

    The model config counts only where those name none: its class may carry a default that means
    another token in this vocabulary.
    """
    for owners in ((model.generation_config, tokenizer), (model.config.get_text_config(),)):
        values = [getattr(owner, "eos_token_id", None) for owner in owners]
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in values]
        found = {int(i) for ids in lists for i in ids if i is not None}
        if found:
            return found
    return set()


class Bench:
    """Answers prompts with and without the draft and keeps the tally."""

    def __init__(
        self, draft: Draft, model: Any, tokenizer: Any, config: EvalConfig, depth: int
    ) -> None:
        """Start with an empty tally; `depth` is K."""
        self.draft, self.model, self.tokenizer = draft, model, tokenizer
        self.head = TargetHead.from_model(model, draft.config.origin.get("head"))
        self.config, self.depth = config, depth
        self.stop = stop_ids(model, tokenizer)
        self.tally = Tally(tried=[0] * depth, accepted=[0] * depth)
        self.saved: list[dict[str, list[int]]] = []
        text = model.config.get_text_config()
        self._context = getattr(text, "max_position_embeddings", None) or 1 << 62
        self._shape = TreeShape(nodes=config.tree_tokens, topk=config.tree_topk)
        self._masks: TreeMasks | None = None
        if config.tree_tokens:
            TreeDrafter.of(draft, self.head, self._shape)  # refuses drafts that grow no trees
            self._masks = TreeMasks(model)

    def _plain(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        sampler = make_sampler(self.config.temperature, seed)
        return decode_plain(self.model, ids, sampler, limit, self.stop)

    def _speculative(self, ids: Sequence[int], limit: int, seed: int) -> Generation:
        sampler = make_sampler(self.config.temperature, seed)
        if self._masks is not None:
            return decode_tree(
                self.model,
                self._masks,
                TreeDrafter.of(self.draft, self.head, self._shape),
                self.draft.state_columns,
                ids,
                sampler,
                limit,
                self.depth,
                self.stop,
            )
        return decode_speculative(
            self.model,
            self.draft.drafter(self.head),
            self.draft.state_columns,
            ids,
            sampler,
            limit,
            self.depth,
            self.stop,
        )

    def warm_up(self, ids: Sequence[int]) -> None:
        """Run both ways once, untimed: the first forwards of a process are not its speed."""
        self._plain(ids, _WARM_UP_TOKENS, 0)
        self._speculative(ids, _WARM_UP_TOKENS, 0)

    def answer(self, ids: list[int], where: str) -> list[int]:
        """Answer one prompt both ways; gives the response that is to be fed back."""
        limit = min(self.config.max_new_tokens, self._context - len(ids))
        if limit < 1:
            self.tally.too_long.append(where)
            log.warning("%s: %d tokens leave no room to answer; left out", where, len(ids))
            return []
        number = self.tally.responses
        seed = self.config.seed + number
        first, second = (self._plain, self._speculative)
        if number % 2:  # alternate: neither way always runs on a warmer machine
            first, second = second, first
        results = first(ids, limit, seed), second(ids, limit, seed)
        plain, speculative = results[::-1] if number % 2 else results
        self.tally.add(plain, speculative)
        if self.config.temperature == 0:
            self._compare(ids, plain.tokens, speculative.tokens, where)
        if self.config.save_responses:
            response = speculative.tokens
            mask = [0] * len(ids) + [1] * len(response)
            self.saved.append({"input_ids": [*ids, *response], "loss_mask": mask})
        return speculative.tokens

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

    def converse(self, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> None:
        """Answer a row: one response, or one for each of its turns."""
        messages = opening(prompt, self.tokenizer)
        if messages is None:
            self.answer(render_text(prompt.text or "", self.tokenizer, prompt.where), prompt.where)
            return
        chat = list(messages)
        for follow_up in (*prompt.follow_ups, None):
            ids = render(chat, self.tokenizer, template_kwargs, prompt.tools, prompt.where)
            response = self.answer(ids, prompt.where)
            if not response:
                return
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
            chat.append({"role": "user", "content": follow_up})


def _describe(d: Difference) -> str:
    return (
        f"token {d.index} is {d.speculative} with the draft and {d.plain} without; their logits "
        f"differ by {d.gap:.3g}, the dtype's noise allows {d.tolerance:.3g}"
    )


def figures(tally: Tally, depth: int, temperature: float) -> dict[str, Any]:
    """The tally as the figures of --json."""
    speed = tally.tokens / tally.seconds if tally.seconds else 0.0
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
        "speedup": speed / plain if plain else None,
        "temperature": temperature,
        "identical": tally.identical if greedy else None,
        "ties": tally.ties if greedy else None,
        "different": tally.differences if greedy else None,
        "too_long": tally.too_long,
    }


def evaluate_target(
    draft: Draft,
    model: Any,
    tokenizer: Any,
    config: EvalConfig,
    prompts: Sequence[Prompt],
    *,
    depth: int,
    template_kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, list[int]]]]:
    """Decode the prompts; gives the figures and the saved responses (greedy, when asked)."""
    bench = Bench(draft, model, tokenizer, config, depth)
    bench.warm_up([0])
    with progress(prompts, unit="prompts", desc="decode", leave=False) as bar:
        for prompt in bar:
            bench.converse(prompt, template_kwargs)
            length = shown(bench.tally.acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
    result = {"prompts": len(prompts), **figures(bench.tally, depth, config.temperature)}
    result["tree_tokens"] = config.tree_tokens
    result["tree_topk"] = config.tree_topk if config.tree_tokens else None
    return result, bench.saved
