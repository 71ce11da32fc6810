"""The two programs meet: a batch straight from the target and the stored dataset give one loss."""

from typing import Any

import pytest
import torch

from spec_data.capture.model import Target
from spec_data.capture.target_batch import TargetBatch
from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.packing import pack_documents
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.block.blocks import sample_blocks
from spec_train.drafts.block.draft import dspark_loss
from spec_train.drafts.eagle import eagle_loss
from spec_train.drafts.eagle3 import eagle3_loss
from spec_train.drafts.peagle import peagle_loss
from spec_train.formats.names import BLOCK_KINDS
from spec_train.losses.head import TargetHead
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.drafts.any_draft import batch_of, build_draft
from tests.tolerance import close

LAYERS, WIDTH, DOCUMENTS = (0, 1, 2), 64, 12
LOSSES = {
    "eagle": eagle_loss,
    "eagle3": eagle3_loss,
    "peagle": peagle_loss,
    "dspark": dspark_loss,
    "dflash": dspark_loss,
    "dflash2": dspark_loss,
    "domino": dspark_loss,
    "xpress": dspark_loss,
    "lilicorr": dspark_loss,
}
FRAMES = {"eagle": "token", "eagle3": "shifted", "peagle": "shifted"} | dict.fromkeys(
    BLOCK_KINDS, "token"
)
BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 63}
CHANGED = {"eagle": {"noise": 0.0}, **dict.fromkeys(BLOCK_KINDS, BLOCK)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def dataset(model, tmp_path_factory) -> HiddenStatesDataset:
    path = tmp_path_factory.mktemp("meet") / "data"
    return HiddenStatesDataset(tiny_dataset(path, n_docs=DOCUMENTS, model=model))


@pytest.fixture(scope="module")
def head(dataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path, torch.float32, "cpu")


def online_batch(model: Any, rows: list[list[int]], **options: Any) -> TargetBatch:
    """One forward of the target over the documents that the dataset was made from."""
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    documents = random_documents(DOCUMENTS, 64, 0)
    for b, row in enumerate(rows):
        start = 0
        for d in row:
            tokens, supervised, _ = documents[d]
            span = slice(start, start + len(tokens))
            ids[b, span], attention[b, span] = torch.tensor(tokens), 1
            mask[b, span] = torch.tensor(supervised)
            start += len(tokens)
    lengths = [[len(documents[d][0]) for d in row] for row in rows]
    return Target(model, LAYERS, **options).generate_batch(ids, attention, mask, seq_lens=lengths)


def rest_of(kind: str, draft: Any, offline: Any, counts: torch.Tensor) -> tuple[dict, dict]:
    """What both losses are given beside the batch: the offline one's, the online one's."""
    options = draft.options
    if kind == "eagle":
        return {}, {"counts": counts}
    if kind == "eagle3":
        return {}, {"steps": options.ttt_steps, "counts": counts}
    if kind == "peagle":
        return {}, {"sample": draft.draw(offline), "count": counts}
    blocks = sample_blocks(offline.loss_mask, offline.document_ids, options.num_anchors)
    return {"blocks": blocks}, {"anchors": blocks.anchors, "real": blocks.real, "counts": counts}


@pytest.mark.parametrize(
    "kind, supervision",
    [
        *((kind, "final-hidden") for kind in LOSSES),
        *((kind, "logits") for kind in LOSSES if kind != "eagle"),  # it learns the final states
        *((kind, "target-probs") for kind in ("eagle3", "peagle")),
    ],
)
def test_a_batch_of_the_target_has_the_loss_of_the_dataset(kind, supervision, model, dataset, head):
    draft = build_draft(kind, dataset, head, **CHANGED.get(kind, {}))
    draft.train(kind not in ("peagle", "eagle3"))  # in evaluation: the same elements; every slot
    rows = pack_documents(dataset.lengths.tolist(), WIDTH)
    offline = batch_of(dataset, rows, WIDTH)
    counts = draft.slot_counts(offline)
    own, other = rest_of(kind, draft, offline, counts)
    expected = draft.batch_loss(offline, head, counts, **own)

    vocabulary = draft.draft_ids if supervision == "target-probs" else None
    batch = online_batch(model, rows, supervision=supervision, draft_vocabulary=vocabulary)
    if supervision == "final-hidden" or kind in BLOCK_KINDS:
        other |= {"head": head}
    frame, aux = FRAMES[kind], kind != "eagle"
    online = LOSSES[kind](draft, **batch.to_trainer_inputs(frame, aux=aux), **other)

    # Stored states are rounded to bf16 once; everything else is the same. A mean over all slots.
    terms = 1 / max(1, int(counts.sum()))
    close(online.loss, expected.loss, terms=terms, dtype=torch.bfloat16)
    for name in ("supervised", "drafted", "chains"):
        assert torch.equal(online.sums[name], expected.sums[name]), name
    # Both take the target's full distribution: EAGLE-3 and P-EAGLE have a reduced vocabulary here.
    acceptance = "acceptance"
    close(online.sums[acceptance], expected.sums[acceptance], terms=4, dtype=torch.bfloat16)

    if supervision == "target-probs":  # no loss of the token frame reads them
        with pytest.raises(TargetError, match="target_probs exist in the shifted frame alone"):
            batch.to_trainer_inputs("token")
        return
    wrong = batch.to_trainer_inputs("token" if frame == "shifted" else "shifted", aux=aux)
    with pytest.raises(DraftError, match=f"reads the {frame} frame"):
        LOSSES[kind](draft, **wrong, **other)
    # That is no formality: with the right name on the wrong tensors the loss is another one.
    mistaken = LOSSES[kind](draft, **wrong | {"frame": frame}, **other)
    assert abs(float((mistaken.loss / expected.loss).detach()) - 1) > 0.005


def test_the_token_frame_is_what_the_dataset_holds(model, dataset):
    rows = pack_documents(dataset.lengths.tolist(), WIDTH)
    offline = batch_of(dataset, rows, WIDTH)
    inputs = online_batch(model, rows).to_trainer_inputs("token")
    for name in ("input_ids", "loss_mask", "document_ids", "position_ids", "target_argmax"):
        assert torch.equal(inputs[name], getattr(offline, name).to(inputs[name].dtype)), name
    states = {"aux_hidden_states": offline.aux(LAYERS)}
    states["final_hidden"] = offline.hidden["hidden.final"]
    real = offline.document_ids >= 0  # padding runs through the target too, and means nothing
    for name, stored in states.items():
        close(inputs[name][real], stored[real], terms=1, dtype=torch.bfloat16, name=name)


def test_an_unknown_frame_is_refused(model):
    with pytest.raises(TargetError, match="shifted or token"):
        online_batch(model, [[0, 1]]).to_trainer_inputs("unshifted")
