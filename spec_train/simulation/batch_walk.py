"""The documents of a batch, walked with the chains that a draft proposes at their slots."""

from collections.abc import Iterator

from torch import Tensor

from spec_train.data.batch import DraftBatch
from spec_train.simulation.walk import Arrays, ServingSums, document_sums


def documents_of(batch: DraftBatch, chains: Tensor) -> Iterator[tuple[int, Arrays]]:
    """Yield the number of each document of a batch, and its arrays for `walk.judge_chains`.

    `chains` are target ids, int64 [B, T, S], as from `Draft.chains`.
    """
    ids, mask, best, documents = (
        t.cpu().numpy()
        for t in (batch.input_ids, batch.loss_mask, batch.target_argmax, batch.document_ids)
    )
    drafted = chains.cpu().numpy()
    for b in range(len(ids)):
        for document in range(documents[b].max() + 1):
            own = documents[b] == document
            yield (
                batch.rows[b][document],
                (drafted[b, own], ids[b, own], best[b, own], mask[b, own]),
            )


def serving_sums(batch: DraftBatch, chains: Tensor) -> ServingSums:
    """Sum over the documents of a batch; arguments as for `documents_of`."""
    total = ServingSums.zero(chains.shape[-1])
    for _, arrays in documents_of(batch, chains):
        total += document_sums(*arrays)
    return total
