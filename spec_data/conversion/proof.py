"""Prove on samples what the stored states are, before anything is written.

Two things must hold: the masks are about the tokens that they should be, and each stored chunk is
the state of the target that its name says. On more samples, the head says how likely the next
supervised tokens are under the declared norm and under others, without a shift and with one.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spec_data.conversion.evidence import (
    SHIFTS,
    HeadFigures,
    check_fits,
    fits_of,
    head_figures,
    head_warning,
    rounding_warning,
    walk,
)
from spec_data.conversion.sample_plan import (
    TOKEN,
    check_frame,
    generation_prompt,
    runs_by_offset,
    tokens_of,
)
from spec_data.conversion.stored_backend import Head
from spec_data.conversion.stored_samples import AFTER, BEFORE, Layout, SampleStates
from spec_data.corpus.bad_rows import BadRow
from spec_data.generation.setup import Setup
from spec_data.models.devices import usable_device
from spec_data.options.conversion_options import ConvertConfig
from spec_data.shards.errors import CorpusError
from spec_data.shards.even_sample import even_sample

logger = logging.getLogger(__name__)

_WALKED, _WALKED_TOKENS = 4, 128  # samples that the target runs, and tokens of each
_HEADED, _HEADED_TOKENS = 16, 256  # samples whose final states the head reads, and tokens of each
_TRIED = 64  # samples that are tried for these, and whose masks are looked at

Sample = tuple[int, Tensor, Tensor]
"""Its number, ids int64 [T] and mask [T]."""


def prove_samples(
    config: ConvertConfig, layout: Layout, setup: Setup, blocks: int
) -> dict[str, Any]:
    """Prove the declared conventions on samples; return what was measured, as plain values.

    Args:
        config: the options of `convert`.
        layout: the source, under the declared conventions.
        setup: of the dataset.
        blocks: decoder blocks of the target.

    Raises:
        CorpusError: no sample can be read.
        ConfigError: the masks are shifted against their tokens.
        RunError: the states are not what the declared convention says.
    """
    samples = list(_readable(layout, config, setup.vocab_size))
    if config.mask == "all":
        mask_text = "every token is supervised"
    else:
        documents = [(ids, mask) for _, ids, mask in samples]
        counts = runs_by_offset(documents, generation_prompt(setup.tokenizer))
        mask_text = check_frame(counts, config.mask_frame)
    head = Head(
        setup.model_dir,
        setup.layers,
        dtype=config.dtype,
        device=usable_device(config.device),
        trust=config.trust_remote_code,
    )
    head_table = _head_evidence(layout, head, even_sample(samples, _HEADED))
    stored = layout.conventions
    few = [
        (ids[:_WALKED_TOKENS], _begin_of(layout, n)) for n, ids, _ in even_sample(samples, _WALKED)
    ]
    own = walk(
        setup.model_dir,
        [ids for ids, _ in few],
        blocks,
        dtype=config.dtype,
        trust=config.trust_remote_code,
    )
    normed = [head.final_states(ids, states.last, BEFORE).cpu() for ids, states in few]
    fits = fits_of(stored, [states for _, states in few], normed, own, blocks)
    check_fits(fits, stored, layout.tool, blocks)
    names = [*(f"layer {k}" for k in stored.layers), "final"]
    differences = {n: float(f"{f.error:.2g}") for n, f in zip(names, fits, strict=True)}
    worst = max(differences, key=lambda name: differences[name])
    tokens = sum(len(ids) for ids, _ in few)
    logger.info(
        "states: of %d samples (%d tokens) they are those of the target's own blocks; the largest "
        "difference is %.1e (%s)",
        *(len(few), tokens, differences[worst], worst),
    )
    _log_head(head_table, stored.final_norm)
    for warning in (rounding_warning(fits), head_warning(head_table, stored.final_norm)):
        if warning:
            logger.warning("warning: %s", warning)
    logger.info("masks: %s", mask_text)
    return {
        "tool": layout.tool,
        "counting": stored.counting,
        "stored_layers": list(stored.stored_layers),
        "final_norm": stored.final_norm,
        "mask_frame": config.mask_frame if config.mask == "stored" else TOKEN,
        "documents": len(few),
        "tokens": tokens,
        "differences": differences,
        "head": {f"{norm} norm, shift {shift}": vars(f) for (norm, shift), f in head_table.items()},
        "masks": mask_text,
    }


def _readable(layout: Layout, config: ConvertConfig, vocabulary: int) -> Iterator[Sample]:
    """Yield samples spread over the source that can be read and have something to predict.

    Raises:
        CorpusError: there is none.
    """
    problem, found = "nothing is supervised", 0
    numbers = even_sample(range(len(layout)), _TRIED)
    for number in numbers:
        try:
            ids, mask = tokens_of(layout, number, config.mask == "all", config.mask_frame)
            layout.states(number)
        except BadRow as error:
            problem = f"{layout.where(number)}: {error}"
            continue
        if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
            problem = (
                f"{layout.where(number)}: token ids from {int(ids.min())} to {int(ids.max())}, but "
                f"the target has {vocabulary}; is it the one that was captured?"
            )
            continue
        if mask[1:].any():
            found += 1
            yield number, ids, mask
    if not found:
        raise CorpusError(f"{config.data}: no usable sample of {len(numbers)} tried ({problem})")


def _begin_of(layout: Layout, number: int) -> SampleStates:
    states = layout.states(number)
    return SampleStates(aux=states.aux[:_WALKED_TOKENS], last=states.last[:_WALKED_TOKENS])


def _head_evidence(
    layout: Layout, head: Head, samples: list[Sample]
) -> dict[tuple[str, int], HeadFigures]:
    """Return what the head says of the next tokens, by norm and shift."""
    documents = [(ids[:_HEADED_TOKENS], mask[:_HEADED_TOKENS]) for _, ids, mask in samples]
    last = [layout.states(number).last[:_HEADED_TOKENS] for number, _, _ in samples]
    found = {}
    for norm in (AFTER, BEFORE):
        finals = [
            head.final_states(ids, states, norm)
            for (ids, _), states in zip(documents, last, strict=True)
        ]
        for shift in SHIFTS:
            found[norm, shift] = head_figures(documents, finals, head.backend.logits_of, shift)
    return found


def _log_head(figures: dict[tuple[str, int], HeadFigures], norm: str) -> None:
    own = figures[norm, 0]
    others = {key: f for key, f in figures.items() if key != (norm, 0)}
    best = min(others, key=lambda key: others[key].nll)
    logger.info(
        "head: %.0f %% of %d next supervised tokens are its first choice, NLL %.2f; under the best "
        "other convention (%s the norm, shift %d) %.0f %% and %.2f",
        *(100 * own.first_choice, own.tokens, own.nll, *best),
        *(100 * others[best].first_choice, others[best].nll),
    )
