"""The tests' plain-loop references of the losses, on the problem of `fit.py`: one row, float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import FINAL
from spec_train.data.batch import DraftBatch
from spec_train.drafts.dspark.blocks import sample_blocks
from spec_train.drafts.eagle.loss import input_noise
from spec_train.head import TargetHead
from tests.spec_train.drafts.dspark import reference as reference_dspark
from tests.spec_train.drafts.eagle import reference as reference_eagle
from tests.spec_train.drafts.eagle3 import reference as reference_eagle3
from tests.spec_train.drafts.peagle import reference as reference_peagle


def reference_loss(name: str, draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """Return the loss of draft `name` with a graph to copies of its weights; same draws."""
    state = {
        key: value.clone().requires_grad_(value.is_floating_point())
        for key, value in draft.checkpoint_tensors(torch.float64).items()
    }
    return REFERENCES[name](draft, state, batch, head)


def tokens_of(batch: DraftBatch) -> dict[str, Any]:
    """Return the row's ids and loss mask."""
    return {"x": batch.input_ids[0].tolist(), "m": batch.loss_mask[0].int().tolist()}


def aux_document(kind: Any, draft: Any, batch: DraftBatch, head: TargetHead) -> Any:
    """Return the row as a document with aux states and the target's logits."""
    states = batch.aux(draft.config.layers)[0].double()
    logits = head.logits(batch.hidden[FINAL][0]).double()
    return kind(**tokens_of(batch), aux=states, z=logits)


def shape_of(draft: Any) -> dict[str, Any]:
    """Return the fields that every reference's configuration needs."""
    config = draft.config
    return {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_inv_freq": draft.rotary.inv_freq.double(),
    }


def eagle(draft: Any, state: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """EAGLE-1 by `reference_eagle`."""
    options, final = draft.options, batch.hidden[FINAL]
    noise = input_noise(final, batch.document_ids, options.noise, options.noise_scale)
    document = reference_eagle.Document(
        **tokens_of(batch), f=final[0].double(), noise=noise[0].double()
    )
    config = reference_eagle.ReferenceConfig(
        **shape_of(draft),
        head_weight=head.head_weight.double(),
        slots=options.slots,
        regression_weight=options.regression_weight,
        ce_weight=options.ce_weight,
    )
    return reference_eagle.reference_loss(state, config, [document]).loss


def eagle3(draft: Any, state: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """EAGLE-3 by `reference_eagle3`."""
    options = draft.options
    config = reference_eagle3.ReferenceConfig(
        **shape_of(draft), steps=options.ttt_steps, decay=options.step_decay, slots=options.slots
    )
    document = aux_document(reference_eagle3.Document, draft, batch, head)
    return reference_eagle3.reference_loss(state, config, [document]).loss


def peagle(draft: Any, state: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """P-EAGLE by `reference_peagle`."""
    config = reference_peagle.ReferenceConfig(
        **shape_of(draft),
        layers=draft.config.num_hidden_layers,
        mask_token_id=draft.config.mask_token_id,
        depths=draft.options.depths,
        slots=draft.options.slots,
    )
    document = aux_document(reference_peagle.Document, draft, batch, head)
    sample = [(t, d) for d, t in draft.draw(batch)[0].nonzero().tolist()]
    return reference_peagle.reference_loss(state, config, [document], [sample]).loss


def blocks(draft: Any, state: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """DSpark and DFlash by `reference_dspark`."""
    config, options = draft.config, draft.options
    settings = reference_dspark.ReferenceConfig(
        **shape_of(draft),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        kind=config.markov_head_type if config.markov_rank else "none",
        confidence=config.enable_confidence_head,
        gamma=options.loss_decay_gamma,
        ce_weight=options.ce_weight,
        l1_weight=options.l1_weight,
        confidence_weight=options.confidence_weight,
        ce_target=options.ce_target,
    )
    document = aux_document(reference_dspark.Document, draft, batch, head)
    anchors = sample_blocks(batch.loss_mask, batch.document_ids, options.num_anchors).anchors
    return reference_dspark.reference_loss(
        state, head.head_weight.double(), settings, [(document, anchors[0].tolist())]
    ).loss


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "peagle": peagle,
    "dspark": blocks,
    "dflash": blocks,
}
