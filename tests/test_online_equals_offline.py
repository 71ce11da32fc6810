"""The two programs meet: a batch straight from the target and the stored dataset give one loss."""

from typing import Any

import pytest
import torch

from spec_data.capture.model import Target
from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import pack_documents
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column
from spec_train.losses.head import TargetHead
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.drafts.any_draft import BLOCK_KINDS, batch_of, build_draft
from tests.tolerance import close

LAYERS, WIDTH, DOCUMENTS = (0, 1, 2), 64, 12
KINDS = ("eagle", "eagle3", "peagle", *BLOCK_KINDS)
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


def online_batch(model: Any, rows: list[list[int]], **options: Any) -> DraftBatch:
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


@pytest.mark.parametrize(
    "kind, supervision",
    [
        *((kind, "final-hidden") for kind in KINDS),
        *((k, s) for k in KINDS if k != "eagle" for s in ("logits", "target-probs")),
    ],
)
def test_a_batch_of_the_target_has_the_loss_of_the_dataset(kind, supervision, model, dataset, head):
    draft = build_draft(kind, dataset, head, **CHANGED.get(kind, {}))
    draft.train(kind not in ("peagle", "eagle3"))  # in evaluation: the same elements; every slot
    rows = pack_documents(dataset.lengths.tolist(), WIDTH)
    offline = batch_of(dataset, rows, WIDTH)
    counts = draft.slot_counts(offline)
    torch.manual_seed(0)
    expected = draft.batch_loss(offline, head, counts)

    vocabulary = draft.draft_ids if supervision == "target-probs" else None
    batch = online_batch(model, rows, supervision=supervision, draft_vocabulary=vocabulary)
    needed = supervision == "final-hidden" or kind in BLOCK_KINDS or kind == "eagle"
    if needed:
        with pytest.raises(DatasetError, match="needs the target's head"):
            draft.loss(batch)
    torch.manual_seed(0)
    online = draft.loss(batch, head if needed else None, counts)

    # Stored states are rounded to bf16 once; everything else is the same. A mean over all slots.
    terms = 1 / max(1, int(counts.sum()))
    close(online.loss, expected.loss, terms=terms, dtype=torch.bfloat16)
    for name in ("supervised", "drafted", "chains"):
        assert torch.equal(online.sums[name], expected.sums[name]), name
    # Both take the target's full distribution: EAGLE-3 and P-EAGLE have a reduced vocabulary here.
    acceptance = "acceptance"
    close(online.sums[acceptance], expected.sums[acceptance], terms=4, dtype=torch.bfloat16)


def test_a_batch_holds_what_the_dataset_holds(model, dataset):
    rows = pack_documents(dataset.lengths.tolist(), WIDTH)
    offline, online = batch_of(dataset, rows, WIDTH), online_batch(model, rows)
    for name in ("input_ids", "loss_mask", "document_ids", "position_ids"):
        assert torch.equal(getattr(online, name), getattr(offline, name)), name
    real = offline.document_ids >= 0
    assert torch.equal(online.target_argmax[real], offline.target_argmax[real])
    assert online.hidden.keys() == {*map(layer_column, LAYERS), FINAL}
    for name, states in online.hidden.items():
        close(states, offline.hidden[name], terms=1, dtype=torch.bfloat16, name=name)


def test_a_layer_that_the_target_does_not_capture_is_named(model, dataset, head):
    draft = build_draft("eagle3", dataset, head)
    batch = online_batch(model, [[0, 1]])
    del batch.hidden[layer_column(2)]
    with pytest.raises(DatasetError, match=r"no column hidden\.L2"):
        draft.loss(batch, head)
