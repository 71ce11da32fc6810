"""The two programs meet: a batch straight from the target and the stored dataset give one loss."""

import pytest
import torch

from spec_data.shards.packing import pack_documents
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.target.model import Target
from spec_train.drafts.eagle3.draft import eagle3_loss
from spec_train.head import TargetHead
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.drafts.eagle3.tools import batch_of, build
from tests.tolerance import close

LAYERS, WIDTH = (0, 1, 2), 64


@pytest.mark.parametrize("supervision", ["final-hidden", "logits", "target-probs"])
def test_target_batches_give_the_loss_of_the_dataset(tmp_path, supervision):
    model = tiny_llama()
    dataset = HiddenStatesDataset(tiny_dataset(tmp_path / "data", n_docs=12, model=model))
    head = TargetHead.from_dataset(dataset.path, torch.float32, "cpu")
    draft = build(dataset, head)
    rows = pack_documents(dataset.lengths.tolist(), WIDTH)
    offline = batch_of(dataset, rows, WIDTH)
    counts = draft.slot_counts(offline)
    expected = draft.loss(offline, head, counts)

    ids = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    documents = random_documents(12, 64, 0)
    for b, row in enumerate(rows):
        start = 0
        for d in row:
            tokens, supervised, _ = documents[d]
            span = slice(start, start + len(tokens))
            ids[b, span], attention[b, span] = torch.tensor(tokens), 1
            mask[b, span] = torch.tensor(supervised)
            start += len(tokens)
    vocabulary = draft.draft_ids if supervision == "target-probs" else None
    target = Target(model, LAYERS, supervision=supervision, draft_vocabulary=vocabulary)
    lengths = [[len(documents[d][0]) for d in row] for row in rows]
    batch = target.generate_batch(ids, attention, mask, seq_lens=lengths)
    extra = {"head": head} if supervision == "final-hidden" else {}
    online = eagle3_loss(draft, **batch.to_trainer_inputs(), **extra, steps=4, counts=counts)

    # Stored states are rounded to bf16 once; everything else is the same. A mean over all slots.
    close(online.loss, expected.loss, terms=1 / int(counts.sum()), dtype=torch.bfloat16)
    for name in ("supervised", "drafted", "chains"):
        assert torch.equal(online.sums[name], expected.sums[name]), name
