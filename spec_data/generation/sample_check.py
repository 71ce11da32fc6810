"""Check on a sample, before the first shard, that the target could have written the corpus.

Hours of capture must not pass before token ids of another tokenizer are noticed, or answers that
`--on-policy` calls the target's own and that it would never write.
"""

import logging
from collections.abc import Iterable, Sequence

from spec_data.capture.backend import TargetBackend
from spec_data.generation.capture import (
    add_figures,
    forward_batches,
    forward_columns,
    supervised_next,
)
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.even_sample import even_sample
from spec_data.shards.likelihood import (
    Agreement,
    DocumentFigures,
    places_by_name,
    summarise,
)
from spec_data.shards.likelihood_text import (
    above_random_text,
    contradiction_text,
    figures_text,
    warnings,
)
from spec_data.shards.schema import predicts_supervised

logger = logging.getLogger(__name__)

_FEWEST, _PER_SOURCE, _OF_ALL_SOURCES = 2, 16, 256  # documents
LONGEST = 2048  # tokens of a document that are looked at


def check_agreement(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    form: str,
    batch_tokens: int,
    proven: Iterable[int],
) -> None:
    """Measure a sample of every source and refuse what cannot be right; log what is suspicious.

    Args:
        setup, plan, target: what is captured.
        form: the proven mask form.
        batch_tokens: tokens per forward.
        proven: indices of the documents of the proofs, which join the sample.

    Raises:
        CorpusError: the NLL of a source is clearly above ln V, and --allow-high-nll is not set.
        ConfigError: --on-policy, and a source that the target did not write.
    """
    options = setup.options
    temperature = options.sampling_temperature
    chosen = sample_of_sources(plan.documents.sources, proven)
    figures = measure_documents(plan, target, form, chosen, batch_tokens, options.own_temperature)
    sources = [plan.documents.sources[d] for d in chosen]
    found = summarise(figures, sources).judged()
    _refuse_other_ids(found, setup)
    if options.on_policy:
        _refuse_label(found, temperature)
    for message in warnings(found, setup.vocab_size, temperature, options.on_policy):
        logger.warning("on a sample of %d documents, %s", len(chosen), message)


def sample_of_sources(sources: Sequence[str], proven: Iterable[int]) -> list[int]:
    """Return indices of documents, ascending: `proven`, and some spread evenly over each source.

    Of more sources than the sample may have pairs of documents, some are chosen, evenly as well.
    """
    places = list(places_by_name(sources).values())
    most = max(_FEWEST, min(_PER_SOURCE, _OF_ALL_SOURCES // len(places)))
    chosen = set(proven)
    for documents in even_sample(places, _OF_ALL_SOURCES // _FEWEST):
        chosen |= set(even_sample(documents.tolist(), most))
    return sorted(chosen)


def measure_documents(
    plan: Plan,
    target: TargetBackend,
    form: str,
    chosen: list[int],
    batch_tokens: int,
    temperature: float,
) -> DocumentFigures:
    """Measure the first tokens of the documents `chosen`, indices into the plan."""
    offsets, tokens = plan.documents.beginnings(chosen, LONGEST)
    following = supervised_next(
        tokens["input_ids"], predicts_supervised(tokens["loss_mask"], offsets)
    )
    figures = DocumentFigures.zeros(len(chosen))
    for batch in forward_batches(
        offsets, tokens["input_ids"], form, plan.pack_length, batch_tokens
    ):
        asked = following[batch.token_index(offsets)]
        _, found = forward_columns(target, batch, form, (), asked, temperature)
        add_figures(found.cpu().numpy(), asked, batch, figures)
    return figures


def _refuse_other_ids(sources: dict[str, Agreement], setup: Setup) -> None:
    for name, found in sources.items():
        if not found.above_random(setup.vocab_size) or setup.options.allow_high_nll:
            continue
        raise CorpusError(
            f"{name}: on a sample, {figures_text(found)}. {above_random_text(setup.vocab_size)}. "
            "Give the target that these ids or this text were made for; pass --allow-high-nll to "
            "capture them all the same"
        )


def _refuse_label(sources: dict[str, Agreement], temperature: float | None) -> None:
    wrong = [
        contradiction_text(name, found, temperature)
        for name, found in sources.items()
        if found.contradicts_on_policy(temperature)
    ]
    if wrong:
        advice = (
            "; for samples at a known temperature, pass --sampling-temperature T"
            if temperature is None
            else ""
        )
        raise ConfigError(
            "--on-policy: this target did not write these answers. On a sample:\n  "
            + "\n  ".join(wrong)
            + "\nCheck the template, BOS and order of the answers, and that this is the target "
            f"that wrote them. Otherwise leave --on-policy out{advice}"
        )
