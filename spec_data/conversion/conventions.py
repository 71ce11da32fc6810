"""What did a tool store? Its conventions are found by comparison with the target itself.

Layer ids, their order, the final norm and the frame of the mask are not asked of anybody: the
states of a few samples are compared with what the target computes (`capture.evidence`), and their
masks with the chat template.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_data.capture.evidence import ROUNDING, SampleStates, check_matches, matches, target_states
from spec_data.conversion.samples import NEXT, TOKEN, Samples
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.template import EndTokens, Template
from spec_data.models.reading import end_token_ids
from spec_data.shards.errors import CorpusError, RunError
from spec_data.shards.packing import even_sample, runs
from spec_data.shards.schema import Evidence
from spec_data.terminal.types import comma_list

logger = logging.getLogger(__name__)

_COMPARED, _COMPARED_TOKENS = 8, 128  # samples that the target runs, and tokens of each
_TRIED = 64  # samples that are tried for these, and whose masks are looked at

# -- the mask --------------------------------------------------------------------------------------
# A trainer may store the mask of labels: entry t then stands for token t + 1. The chat template of
# the target shows it: an answer begins right after the generation prompt, so the last token of the
# prompt comes just before a run of ones. Where the prompt ends *inside* the run, the mask is one
# too early, unless the run ends with the end of the turn: then it has a token of the prompt too
# (<think>). Where the prompt ends one token before the run, the mask is one too late.

_PROMPT_TOKENS = 3  # of the end of the generation prompt that must be found
_RUNS = 4  # fewest runs that say something


def generation_prompt(tokenizer: Any) -> list[int]:
    """Return the last token ids before an answer, by the chat template; [] if unknown."""
    message = [{"role": "user", "content": "a"}]
    try:
        given = {"tokenize": True, "return_dict": False}
        without = tokenizer.apply_chat_template(message, add_generation_prompt=False, **given)
        with_prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, **given)
    except Exception:  # there is no template, or it fails: a program, it can raise anything
        return []
    prompt = list(with_prompt)[len(without) :]
    begins = list(with_prompt)[: len(without)] == list(without)
    return prompt[-_PROMPT_TOKENS:] if begins else []


def mask_frame(
    documents: Sequence[tuple[Tensor, Tensor]], prompt: Sequence[int], ends: Collection[int]
) -> tuple[str, str]:
    """Return the frame of stored masks, and in words how it was found.

    `documents` are token ids int64 [T] and the stored mask [T], `prompt` is `generation_prompt`,
    and `ends` are the tokens that end a turn.

    Raises:
        RunError: most runs of ones begin one token too late.
    """
    counts = {0: 0, 1: 0, -1: 0}  # runs, by where the prompt ends relative to the token before
    width, whole = len(prompt), 0
    for ids, mask in documents:
        for start, stop in runs(mask.numpy()).tolist():
            for offset in counts:
                end = start + offset
                if width <= end <= len(ids) and ids[end - width : end].tolist() == list(prompt):
                    counts[offset] += 1
                    whole += offset == 1 and int(ids[stop - 1]) in ends
    total, best = sum(counts.values()), max(counts, key=lambda offset: counts[offset])
    if not width or total < _RUNS:
        return TOKEN, (
            "not checked: the generation prompt of the chat template was not found before answers"
        )
    if best == 1 and 2 * whole > counts[1]:
        return TOKEN, (
            f"{whole} of {total} supervised runs begin with the last token of the generation "
            "prompt, and end with the end of the turn"
        )
    if best == 1:
        return NEXT, (
            f"entry t is about token t + 1: {counts[1]} of {total} supervised runs begin with the "
            "last token of the generation prompt"
        )
    if best == -1:
        raise RunError(
            f"the loss masks are shifted: {counts[-1]} of {total} supervised runs begin one token "
            "too late. Nothing was written"
        )
    return TOKEN, f"{counts[0]} of {total} supervised runs begin right after the generation prompt"


def find_conventions(
    samples: Samples,
    path: Path,
    tokenizer: Any,
    normed: Callable[[Tensor, Tensor], Tensor],
    *,
    blocks: int,
    vocabulary: int,
    dtype: str,
    trust: bool,
) -> Evidence:
    """Find what the states of samples are; `normed` applies the final norm to states [T, H].

    Raises:
        CorpusError: no sample can be read.
        RunError: the states are not those of the target, or not at their tokens; or the masks are
            shifted.
    """
    tried = _readable(samples, vocabulary)
    frame, masks = TOKEN, "every token is supervised"
    if not samples.every_token:
        masked = [(ids, mask) for _, ids, mask in tried]
        ends = EndTokens(Template(tokenizer), end_token_ids(path)).all
        frame, masks = mask_frame(masked, generation_prompt(tokenizer), ends)
    few = even_sample(tried, _COMPARED)
    documents = [ids[:_COMPARED_TOKENS] for _, ids, _ in few]
    stored = [SampleStates(*(x[:_COMPARED_TOKENS] for x in samples.states(n))) for n, _, _ in few]
    computed = target_states(path, documents, blocks, dtype=dtype, trust=trust)
    pairs = zip(documents, stored, strict=True)
    after_norm = [normed(ids, states.last).cpu() for ids, states in pairs]
    opened = samples.opened
    chunks = matches(stored, after_norm, computed, blocks)
    layers, norm = check_matches(chunks, opened.layers, opened.tool, blocks)
    names = [*(f"layer {layer}" for layer in layers), "final"]
    evidence = Evidence(
        tool=opened.tool,
        stored_layers=layers,
        final_norm=norm,
        mask_frame=frame,
        documents=len(few),
        tokens=sum(map(len, documents)),
        differences={
            name: float(f"{match.difference:.2g}")
            for name, match in zip(names, chunks, strict=True)
        },
        masks=masks,
    )
    logger.info(
        "states: layers %s, and the last state %s the final norm; on %d samples (%d tokens) they "
        "differ from the target's own by %.1e at most",
        *(comma_list(layers), norm, evidence.documents, evidence.tokens),
        max(evidence.differences.values()),
    )
    logger.info("masks: %s", masks)
    worst = max(chunks, key=lambda match: match.difference)
    if worst.difference > ROUNDING:
        logger.warning(
            "warning[converted-states]: %s differs from what the target computes by %.2g, and "
            "rounding to bf16 or 8-bit floats by less than %.2g. Either the states are of a "
            "quantised target, or were rounded by a lossy codec (--codec of the dataset that was "
            "exported), or are of a target with slightly different weights, such as another "
            "fine-tune: check --target and --revision",
            *(worst.chunk, worst.difference, ROUNDING),
        )
    return evidence


_Sample = tuple[int, Tensor, Tensor]  # its number, ids int64 [T] and mask [T]


def _readable(samples: Samples, vocabulary: int) -> list[_Sample]:
    """Return samples spread over the source that can be read and have something to predict."""
    problem, usable = "nothing is supervised", []
    numbers = even_sample(samples.candidates(), _TRIED)
    for number in numbers:
        try:
            ids, mask = samples.tokens(number)
            states = samples.states(number)
            if not all(x[:_COMPARED_TOKENS].isfinite().all() for x in states):
                raise BadRow("states that are not finite: the capture leaves them out")
            if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
                raise BadRow(
                    f"token ids {int(ids.min())} to {int(ids.max())}, but the target has "
                    f"{vocabulary}; is it the one that was captured?"
                )
        except BadRow as error:
            problem = f"{samples.where(number)}: {error}"
            continue
        if mask[1:].any():
            usable.append((number, ids, mask))
    if not usable:
        raise CorpusError(f"{samples.root}: no usable sample of {len(numbers)} tried ({problem})")
    return usable
