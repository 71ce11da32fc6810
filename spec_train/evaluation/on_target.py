"""Acceptance and speed of a draft by decoding with its target; also checks that output is lossless.

The same model answers prompts without and with the draft. Greedy responses without a draft are kept
between evaluations (see plain_responses.py). The speed-up is the ratio over the first responses,
which are always decoded both ways in this process, prefill included. Greedy answers must be equal.
If they differ, the first differing position is examined, and a difference counts as a tie only if
rounding in the dtype explains it. First the draft's embedding is compared with the target's: a
draft of another target decodes without an error, and its tokens are never accepted.
"""

from pathlib import Path
from typing import Any

import torch

from spec_data.models.devices import compute_dtype
from spec_data.models.loading import load_model
from spec_data.models.reading import load_tokenizer
from spec_data.models.resolve import resolve_model
from spec_data.models.rope_factors import fix_rope_factors, short_positions
from spec_data.shards.errors import DraftError
from spec_data.shards.even_sample import even_sample
from spec_data.terminal.progress import progress
from spec_train.decoding.chains import check_target
from spec_train.drafts import Draft
from spec_train.evaluation import paired_decoding
from spec_train.evaluation.on_dataset import SAMPLES
from spec_train.evaluation.paired_decoding import Bench, Decoding, PlainResponses
from spec_train.evaluation.prompt_batches import answer_in_batches
from spec_train.evaluation.prompts import Prompts
from spec_train.evaluation.speed_model import with_model
from spec_train.evaluation.tally import figures
from spec_train.formats.origin import embedding_warnings
from spec_train.losses.metrics import shown
from spec_train.simulation.sample_texts import token_texts


def find_target(decoding: Decoding) -> tuple[Path, Any]:
    """Return the directory and the tokenizer of the target.

    Raises:
        MissingError: the model does not exist. TargetError: its tokenizer cannot be loaded.
    """
    directory, _ = resolve_model(decoding.target)
    return directory, load_tokenizer(directory, decoding.trust_remote_code)


def load_target(
    decoding: Decoding,
    directory: Path,
    device: torch.device,
    dtype: str = "auto",
    rope_factors: str | None = None,
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


def evaluate_target(
    draft: Draft,
    model: Any,
    tokenizer: Any,
    decoding: Decoding,
    prompts: Prompts,
    known: PlainResponses,
    *,
    depth: int,
    width: int = 1,
) -> tuple[dict[str, Any], list[dict[str, list[int]]]]:
    """Decode the prompts; return the metrics, and the responses if they are to be saved.

    `known` are the responses of the target alone; new ones are added and saved. The prompts after
    the timed pairs are decoded `width` at a time.
    """
    sampled = [prompt.where for prompt in even_sample(prompts.found, SAMPLES)]
    bench = Bench(draft, model, tokenizer, decoding, depth, known, sampled, prompts.groups)
    bench.warm_up([0])
    with progress(total=len(prompts), unit="prompts", desc="decode", leave=False) as bar:
        for number, prompt in enumerate(prompts.found):
            if width > 1 and bench.tally.responses >= paired_decoding.TIMED_PAIRS:
                answer_in_batches(bench, prompts, prompts.found[number:], width, bar)
                break
            bench.converse(prompt, prompts)
            length = shown(bench.tally.acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
            bar.update(1)
    known.save()
    result = figures(bench.tally, depth, decoding.temperature)
    result["texts"] = token_texts(result["samples"], tokenizer)
    result["modelled"] = with_model(result, decoding.cost_ratio)
    result["batch_prompts"] = width
    result["plain_responses_kept"] = known.used
    result["tree_tokens"] = decoding.tree_tokens
    return result, bench.saved
