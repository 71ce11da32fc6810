"""Read a dataset with numpy and pyarrow alone, as spec_data/shards/FORMAT.md (1.0 and 1.1) says.

    python read_dataset.py DIR    # compare every sha256, decode every document, print what is there

    from read_dataset import Dataset, floats
    data = Dataset("DIR")
    for document in data:
        states = floats(document["hidden.L1"])    # float32 [T, H]; the bits are uint16

Nothing of spec-data is imported: copy this file into your project. It is proof that the format can
be read without us, and not fast: `spec_data.open_dataset` maps, checks and prefetches.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

VERSIONS = ("1.0", "1.1")
PLAIN = {"bf16": np.uint16, "int32": np.int32, "float32": np.float32, "bool8": np.uint8}
LOSSY = ("packed", "rotated")
BASES = {1: 255, 2: 15, 3: 5, 5: 3}  # of the codes, by how many are in a byte
ABSENT = {"u": 0x7FC0, "f": np.nan, "i": -1}  # what is not stored: NaN (of bf16, its bits) or -1
NUMBERS = {"F16": np.float16, "F32": np.float32, "I8": np.int8, "I16": np.int16, "BF16": np.uint16}


def floats(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bits (uint16) of any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to the nearest bfloat16, ties to even; return the bits, uint16."""
    u = values.view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name; bfloat16 as bits."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[first:last], NUMBERS[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


class Dataset:
    """A dataset or a view, by the number of a document.

    A document is a dict: `doc_id`, `source`, `turns`, and an array by token column, [T] or [T, W],
    in the numpy type of its codec; bfloat16 as its bits, uint16. At tokens that a sparse column
    does not store, it has the value of ABSENT.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a directory.

        Raises:
            ValueError: another format, version or codec, or a manifest that was edited.
        """
        self.path = Path(path)
        self.manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        kind = self.manifest.get("format"), self.manifest.get("format_version")
        if kind not in [("spec-data", version) for version in VERSIONS]:
            raise ValueError(f"{path}: {kind} instead of spec-data {' or '.join(VERSIONS)}")
        if self.manifest["fingerprint"] != fingerprint(self.manifest):
            raise ValueError(f"{path}: the manifest was edited")
        self.columns = {column["name"]: column for column in self.manifest["columns"]}
        for name, column in self.columns.items():
            if column["codec"] not in (*PLAIN, *LOSSY):
                raise ValueError(f"{path}: {name} has the unknown codec {column['codec']}")
        self.view = self.manifest.get("view")
        declared = self.view["sources"] if self.view else []
        self.sources = [Dataset(self.path / source["path"]) for source in declared]
        prints = [source.manifest["fingerprint"] for source in self.sources]
        if prints != [source["fingerprint"] for source in declared]:
            raise ValueError(f"{path}: a view of datasets that were replaced")
        self._open: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self.manifest["totals"]["documents"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.document, range(len(self)))

    @cached_property
    def index(self) -> list[dict[str, Any]]:
        """A row per document."""
        return (
            pa.ipc.open_stream(pa.memory_map(str(self.path / "index.arrow"))).read_all().to_pylist()
        )

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """Tables of the lossy columns."""
        return read_tensors(self.path / self.manifest["codec"]["file"])

    def document(self, number: int) -> dict[str, Any]:
        """Return a document, counted from 0."""
        if self.view is None:
            return self._stored(number, list(self.columns))
        row, document = self.index[number], {}
        for group, names in enumerate(self.view["groups"]):
            source = self.sources[row[f"source_number.{group}"]]
            part = source._stored(row[f"document.{group}"], [n for n in names if n in self.columns])
            document = part | document  # texts of the first group
        document["doc_id"] = row["doc_id"]
        if self.view.get("remasked"):
            mask = np.zeros(row["tokens"], np.uint8)
            for start, end in np.reshape(row["spans"], (-1, 2)):
                mask[start:end] = 1
            document["loss_mask"] = mask
        for name, column in self.columns.items():
            if column["tokens"] == "supervised":
                values = document[name]
                values[~predicting(document["loss_mask"])] = ABSENT[values.dtype.kind]
        return document

    def _stored(self, number: int, names: list[str]) -> dict[str, Any]:
        """Return a document of a stored dataset with some of the columns."""
        entry = self.index[number]
        batch, row = self._locate(entry["shard"], entry["row"])
        document = {name: batch.column(name)[row].as_py() for name in ("doc_id", "source", "turns")}
        mask = field_values(batch, "loss_mask", row)
        stored = predicting(mask)
        for name in names:
            column = self.columns[name]
            sparse, width = column["tokens"] == "supervised", column.get("width")
            tokens = int(stored.sum()) if sparse else len(mask)
            if column["codec"] in LOSSY:
                values = self._decoded(batch, name, row, tokens, width)
            else:
                values = field_values(batch, name, row, width).astype(PLAIN[column["codec"]])
            if sparse:
                shape = (len(mask), *values.shape[1:])
                rows, values = values, np.full(shape, ABSENT[values.dtype.kind], values.dtype)
                values[stored] = rows
            document[name] = values
        return document

    def _decoded(self, batch: Any, name: str, row: int, tokens: int, width: int) -> np.ndarray:
        """Decode a document of a lossy column to bfloat16 bits [tokens, H]."""
        mean, scale, basis, factors = (
            self.tables[f"{name}.{part}"] for part in ("mean", "scale", "basis", "factors")
        )
        blob = field_values(batch, name, row).tobytes()
        codes = codes_of(blob, self.columns[name]["codec"], tokens, width)
        matrix = factors[:, None].astype(np.float32) * basis.astype(np.float32)
        values = codes.astype(np.float32) @ matrix  # exact in any order
        values = values * scale
        values = values + mean
        bits = bfloat16_bits(values)
        escaped = field_values(batch, f"{name}.escape_index", row)
        bits[escaped] = field_values(batch, f"{name}.escape", row, width)
        return bits

    def _locate(self, shard: int, row: int) -> tuple[Any, int]:
        """Return the record batch that has a row of a shard, and its row in it."""
        if self._open[0] != shard:
            file = self.path / self.manifest["shards"][shard]["file"]
            batches = list(pa.ipc.open_stream(pa.memory_map(str(file))))
            self._open = (shard, batches)
        for batch in self._open[1]:
            if row < batch.num_rows:
                return batch, row
            row -= batch.num_rows
        raise ValueError(f"{self.path}: shard {shard} has too few rows")

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """Return the tensors of a file of `target/`, such as "head"."""
        if self.sources:
            return self.sources[0].tensors(name)
        return read_tensors(self.path / "target" / f"{name}.safetensors")

    def logits(self, final: np.ndarray) -> np.ndarray:
        """Return the target's logits float32 [T, V] of `hidden.final` (bits [T, H])."""
        head, tensors = self.manifest["head"], self.tensors("head")
        weight = tensors["embed_tokens" if head.get("tied") else "lm_head"]
        z = floats(final) @ (floats(weight) if weight.dtype == np.uint16 else weight).T
        if head.get("has_bias"):
            bias = tensors["lm_head_bias"]
            z = z + (floats(bias) if bias.dtype == np.uint16 else bias)
        z = z * np.float32(head["scale"])
        cap = head.get("softcap")
        return z if cap is None else cap * np.tanh(z / cap)

    def damage(self) -> list[str]:
        """Return the names of files whose bytes are not those that the manifest names by sha256."""
        records = {record["file"]: record["sha256"] for record in self.manifest.get("shards", [])}
        for name, record in self.manifest.get("files", {}).items():
            if self.view is None or not name.startswith("target/"):  # those of the first source
                records[name] = record["sha256"]
        if self.view is None:
            records["README.md"] = self.manifest["card"]
        if codec := self.manifest.get("codec"):
            records[codec["file"]] = codec["sha256"]
        return [
            name
            for name, digest in records.items()
            if hashlib.sha256((self.path / name).read_bytes()).hexdigest() != digest
        ]


def fingerprint(manifest: dict[str, Any]) -> str:
    """Return what a manifest's `fingerprint` must be."""
    rest = {name: value for name, value in manifest.items() if name != "fingerprint"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def codes_of(blob: bytes, codec: str, tokens: int, width: int) -> np.ndarray:
    """Return the codes of a document in a lossy column, [tokens, width]."""
    codes = np.zeros((tokens, width), int)
    if not tokens:
        return codes
    to_a_byte = np.ones(width, np.uint8)
    if codec == "packed":
        start = 4 + int.from_bytes(blob[:4], "little")
        to_a_byte, blob = inflated(blob[4:start], width), blob[start:]
    kinds = [(np.flatnonzero(to_a_byte == digits), digits, base) for digits, base in BASES.items()]
    flat = inflated(blob, tokens * sum(-(-len(places) // digits) for places, digits, _ in kinds))
    if codec == "rotated":
        flat = flat + np.uint8(127)  # int8 as a digit
    for places, digits, base in kinds:
        step = -(-len(places) // digits)
        joined = np.zeros((tokens, step), np.uint8)
        for start in range(0, step, 128):
            frame = joined[:, start : start + 128]
            frame[:] = flat[: frame.size].reshape(frame.shape)
            flat = flat[frame.size :]
        for start in range(0, len(places), max(step, 1)):
            here = places[start : start + step]
            codes[:, here] = (joined % base).astype(int)[:, : len(here)] - base // 2
            joined //= base
    return codes


def inflated(frames: bytes, size: int) -> np.ndarray:
    """Return the bytes that zstd frames hold, uint8 [size]."""
    raw = pa.Codec("zstd").decompress(frames, decompressed_size=size) if size else b""
    return np.frombuffer(raw, np.uint8)


def predicting(mask: np.ndarray) -> np.ndarray:
    """Return which tokens a sparse column stores, bool [T]: those whose next one is supervised."""
    stored = np.zeros(len(mask), bool)
    stored[:-1] = mask[1:] == 1
    return stored


def field_values(batch: Any, name: str, row: int, width: int | None = None) -> np.ndarray:
    """Return the values of a row of a list field, [n] or [n, width], without a copy."""
    column = batch.column(name)
    first, last = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
    if width is None:
        return column.values[first:last].to_numpy()
    vectors = column.values[first:last]
    return vectors.flatten().to_numpy().reshape(-1, width)


if __name__ == "__main__":
    opened = Dataset(sys.argv[1])
    for place in [opened, *opened.sources]:
        print(f"{place.path}: {len(place)} documents, damaged files: {place.damage() or 'none'}")
    count = sum(len(document["input_ids"]) for document in opened)
    print(f"{count} tokens decoded; columns: {', '.join(opened.columns)}")
