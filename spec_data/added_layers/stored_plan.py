"""A plan of the documents of a dataset: the units are its shards, the tokens those that are stored.

No corpus is read, so nothing can be rendered or tokenised in another way.
"""

import itertools
from pathlib import Path

import numpy as np

from spec_data.generation.plan import DocumentCounts, Plan, planned
from spec_data.generation.plan_file import PlannedDocuments, PlanWriter, Prepared, Scratch
from spec_data.terminal.progress import progress
from spec_data.views.stored_documents import StoredDocuments


def stored_plan(stored: StoredDocuments, folder: Path | None = None) -> Plan:
    """Read ids, masks and turns of every document, and return them as a plan.

    Args:
        stored: the dataset; each chunk that is read is compared with its checksum.
        folder: where the temporary file of the plan goes; None: where the system puts them.

    Raises:
        DatasetError: damage. OSError: the disk is full.
    """
    scratch = Scratch(folder)
    writer = PlanWriter(scratch.path / "plan.arrow")
    try:
        for number in progress(range(len(stored)), desc="documents", unit="docs", leave=False):
            found = stored.find(number)
            texts = found.shard.texts(found.place)
            ids = found.shard.values(stored.columns["input_ids"], found.place)
            writer.add(
                Prepared(
                    source=texts["source"],
                    digest=bytes.fromhex(texts["doc_id"]),
                    ids=ids.astype(np.int32).tobytes(),
                    mask=found.mask(None).astype(np.uint8).tobytes(),
                    turns=tuple(found.turns),
                )
            )
        record = writer.finish()
    except BaseException:
        writer.discard()
        raise
    documents = PlannedDocuments(scratch.path / "plan.arrow", record.sha256, kept=scratch)
    length = stored.manifest.raw["packing"].get("pack_length", 0)
    plan = planned(documents, DocumentCounts(), [], {}, length, unit_tokens=1)
    plan.units = list(itertools.pairwise(stored.bounds.tolist()))
    return plan
