"""Which states are these? What a tool stored is found by comparison with the target itself.

Layer ids, their order, the final norm and the frame of the mask are not asked of anybody. Each
stored chunk (a layer, or the last state) of a few documents is compared with every state that the
target computes for them: the embedding, the output of each block, the final state, at the token
itself and at its neighbours. The nearest one is what the chunk is. A chunk that is near none, or
near a state of another token, is refused, and so is a layer id that the tool recorded otherwise.

Shapes: T tokens of a document, n stored layers, H hidden size.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_data.capture.hooks import States
from spec_data.capture.proofs import FLOOR, token_errors
from spec_data.capture.skeleton import embedded, load_skeleton, run_block, run_norm
from spec_data.conversion.samples import NEXT, TOKEN, Samples, SampleStates
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.template import EndTokens, Template
from spec_data.models.reading import end_token_ids
from spec_data.shards.errors import CorpusError, RunError
from spec_data.shards.layer_ids import EMBEDDING
from spec_data.shards.packing import even_sample, runs
from spec_data.shards.schema import Evidence
from spec_data.terminal.progress import progress
from spec_data.terminal.types import comma_list

logger = logging.getLogger(__name__)

_COMPARED, _COMPARED_TOKENS = 8, 128  # samples that the target runs, and tokens of each
_TRIED = 64  # samples that are tried for these, and whose masks are looked at

# Relative differences. A dataset stores states in bf16: two that differ by less are the same there.
_SAME = torch.finfo(torch.bfloat16).eps / 2
# Two forwards in bf16, and the rounding to 8-bit floats with 3 bits behind the point.
ROUNDING = FLOOR[torch.bfloat16] + torch.finfo(torch.float8_e4m3fn).eps / 2
_ALLOWED = 0.35  # an engine that runs quantised weights; a state of another target differs by 1
SHIFTS = (0, -1, 1)
"""Row t of a chunk may be the state of token t + shift."""


def target_states(
    path: Path, documents: Sequence[Tensor], blocks: int, *, dtype: str, trust: bool
) -> list[States]:
    """Compute the states [T, H] of documents, int64 [T] each, on the CPU, block after block.

    The output of each block is the input of the next one, so the weights of the target are read
    from disk once, and it need not fit in memory. `dtype` "auto" is that of the checkpoint; `trust`
    runs code that comes with the model.

    Raises:
        MissingError, TargetError: the target cannot be loaded, or its blocks cannot be left out.
    """
    skeleton = load_skeleton(path, (), dtype=dtype, trust=trust)
    computed = [States(layers={EMBEDDING: embedded(skeleton, ids)}) for ids in documents]
    for k in progress(range(blocks), desc="run the target", unit="blocks", leave=False):
        model = load_skeleton(path, (k,), dtype=dtype, trust=trust)
        for ids, states in zip(documents, computed, strict=True):
            states.layers[k] = run_block(model, ids, k, states.layers[k - 1])
    for ids, states in zip(documents, computed, strict=True):
        states.final = run_norm(skeleton, ids, states.layers[blocks - 1])
    return computed


# -- what the stored chunks are --------------------------------------------------------------------

AFTER, BEFORE = "after", "before"
"""Whether the last stored state is the one after or before the final norm."""
FINAL_STATE = "final"
"""Name of the state after the final norm, beside the layer ids."""


class Convention(NamedTuple):
    """What a chunk may be: a state (a layer id or `FINAL_STATE`), of the token `shift` further."""

    state: int | str
    shift: int = 0

    def text(self, blocks: int) -> str:
        """Return it in words; `blocks` is the number of the target's blocks."""
        text = {EMBEDDING: "the embedding output", FINAL_STATE: "the state after the final norm"}
        words = text.get(self.state, f"the output of block {self.state}")
        if self.state == blocks - 1:
            words += " (the last one, before the final norm)"
        return words + {0: "", 1: " of the next token", -1: " of the previous token"}[self.shift]


class Match(NamedTuple):
    """What a stored chunk is: the nearest convention, and the relative difference from it.

    `worst` is the difference of the document that differs most.
    """

    chunk: str
    convention: Convention
    difference: float
    worst: float


_Pair = tuple[list[Tensor], list[Tensor]]  # stored [T, H] of the documents, and computed ones


def matches(
    stored: Sequence[SampleStates],
    normed: Sequence[Tensor],
    computed: Sequence[States],
    blocks: int,
) -> list[Match]:
    """Compare every chunk of some documents with every state of the target.

    The output of the last block is recognised by what the final norm makes of it, because its
    length does not matter: `normed`, [T, H] each. Return a match for each layer, in the stored
    order, and one for the last state.
    """
    states: dict[int | str, list[Tensor]] = {
        k: [document.layers[k] for document in computed] for k in computed[0].layers
    }
    finals = states[FINAL_STATE] = [document.final for document in computed]
    layers = []
    for number in range(stored[0].aux.shape[1]):
        chunks = [document.aux[:, number] for document in stored]
        pairs = {state: (chunks, values) for state, values in states.items()}
        layers.append(_nearest(f"stored layer {number + 1}", pairs))
    last = [document.last for document in stored]
    pairs = {state: (last, values) for state, values in states.items()}
    pairs[blocks - 1] = (list(normed), finals)
    # A norm of ones changes nothing that it has normed before: such a state is one after it. What
    # is stored may change by more than rounding: the norm takes out the part of a codec's error, or
    # of a quantised target's, that lies along the state: 1/sqrt(H) of it, an eighth for H = 64.
    changed, error = (float(_differences(last, x, 0).mean()) for x in (list(normed), finals))
    if changed <= max(_SAME, error / 4):
        del pairs[blocks - 1]
    return [*layers, _nearest("the last state", pairs)]


def _nearest(chunk: str, pairs: dict[int | str, _Pair]) -> Match:
    """Return what a chunk is; `pairs` has what is compared for each state that it may be."""
    differences = {
        Convention(state, shift): _differences(*pair, shift)
        for state, pair in pairs.items()
        for shift in SHIFTS
    }
    best = min(differences, key=lambda convention: float(differences[convention].mean()))
    documents = differences[best]
    return Match(chunk, best, float(documents.mean()), float(documents.max()))


def _differences(chunks: list[Tensor], expected: list[Tensor], shift: int) -> Tensor:
    """Return the relative difference of row t from the state of token t + shift, by document."""
    means = []
    for chunk, state in zip(chunks, expected, strict=True):
        first, stop = max(0, -shift), len(chunk) - max(0, shift)
        means.append(token_errors(chunk[first:stop], state[first + shift : stop + shift]).mean())
    return torch.stack(means)


def check_matches(
    chunks: Sequence[Match], recorded: Sequence[int] | None, tool: str, blocks: int
) -> tuple[list[int], str]:
    """Return the layer ids in the stored order, and the side of the final norm.

    Raises:
        RunError: the chunks are no states from which a dataset can be made, or not the recorded
            ones.
    """
    *layers, last = [match.convention.state for match in chunks]
    norms = {FINAL_STATE: AFTER, blocks - 1: BEFORE}
    unusable = FINAL_STATE in layers or len(set(layers)) < len(layers) or last not in norms
    problem = None
    if any(match.worst > _ALLOWED for match in chunks):
        problem = (
            "At least one is no state of this target: give the --target that was captured, with "
            "the same weights, or another --from"
        )
    elif any(match.convention.shift for match in chunks):
        problem = (
            "The states are shifted against the token ids, so each token has those of a "
            "neighbour. Write them again with the ids that the target was given"
        )
    elif unusable:
        problem = (
            "A layer is stored twice, or after the final norm, or the last state is that of "
            "another block. Capture again"
        )
    elif recorded is not None and layers != list(recorded):
        problem = (
            f"{tool} recorded the layers {comma_list(recorded)}, and these are "
            f"{comma_list(layers)}. If the record is wrong, correct it in its manifest"
        )
    if problem is not None:
        lines = [
            f"{match.chunk}: nearest to {match.convention.text(blocks)} (relative difference "
            f"{match.difference:.2g}, at most {match.worst:.2g} of a sample)"
            for match in chunks
        ]
        raise RunError(
            "the stored states are not what a dataset needs. Compared with what the target "
            "computes:\n  " + "\n  ".join(lines) + f"\n{problem}. Nothing was written"
        )
    return [int(layer) for layer in layers], norms[last]


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
