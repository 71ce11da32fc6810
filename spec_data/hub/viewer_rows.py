"""The documents of a dataset without states: what the Hub's viewer and people read.

They are Arrow streams like the shards, because `load_dataset` reads all configurations of a card in
one format.
"""

from pathlib import Path

import pyarrow as pa

from spec_data.models.reading import load_tokenizer
from spec_data.progress import progress
from spec_data.shards.files import replace_durably, temporary_name, writing
from spec_data.shards.reader import HiddenStatesDataset

_PER_FILE, _PER_GROUP = 100_000, 1_000
_SCHEMA = pa.schema(
    {
        "doc_id": pa.string(),
        "source": pa.string(),
        "text": pa.string(),
        "supervised_text": pa.string(),
        "tokens": pa.int32(),
        "supervised": pa.int32(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
    }
)


def write_viewer_rows(dataset: HiddenStatesDataset, folder: Path) -> None:
    """Write `part-00000.arrow`, ... of all documents to `folder`; files that exist are kept."""
    reader = HiddenStatesDataset(dataset.path, ["input_ids", "loss_mask"])
    tokenizer = load_tokenizer(dataset.target_dir, False)
    folder.mkdir(parents=True, exist_ok=True)
    with progress(total=len(reader), desc="documents", unit="docs", leave=False) as bar:
        for number, first in enumerate(range(0, len(reader), _PER_FILE)):
            file = folder / f"part-{number:05d}.arrow"
            last = min(first + _PER_FILE, len(reader))
            if file.is_file():
                bar.update(last - first)
                continue
            temporary = temporary_name(file)
            with (
                writing(file, temporary),
                pa.OSFile(str(temporary), "wb") as sink,
                pa.ipc.new_stream(sink, _SCHEMA) as writer,
            ):
                for start in range(first, last, _PER_GROUP):
                    stop = min(start + _PER_GROUP, last)
                    rows = [_row(reader[i], tokenizer) for i in range(start, stop)]
                    writer.write_table(pa.Table.from_pylist(rows, _SCHEMA))
                    bar.update(stop - start)
            replace_durably(temporary, file)


def _row(document: dict, tokenizer: object) -> dict:
    ids, mask = document["input_ids"].tolist(), document["loss_mask"].long().tolist()
    decode = tokenizer.decode  # type: ignore[attr-defined]
    return {
        "doc_id": document["doc_id"],
        "source": document["source"],
        "text": decode(ids),
        "supervised_text": decode([i for i, m in zip(ids, mask, strict=True) if m]),
        "tokens": len(ids),
        "supervised": sum(mask),
        "input_ids": ids,
        "loss_mask": mask,
    }
