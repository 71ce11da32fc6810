"""The test files of the format: small datasets in `format/`, and what a reader must find in them.

`SPEC_WRITE_FORMAT=1 python -m pytest -k test_the_test_files` writes them anew. Every value is
drawn as bits or as a code, so that no CPU rounds it otherwise. `expected.json` has type, shape and
sha256 of the decoded bytes of each column, all documents joined; decoding is done here by integers,
and never by the code of the package.
"""

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

import spec_data
from spec_data.shards import writer
from spec_data.shards.codecs import TABLES, Tables, bf16_bits, encode, save_tables
from spec_data.shards.files import dump_json, sha256_file
from spec_data.shards.records import plain
from spec_data.shards.schema import (
    FORMAT,
    FORMAT_VERSION,
    Column,
    Manifest,
    ShardRecord,
    predicts_supervised,
    token_columns,
)
from spec_data.shards.seal import seal
from spec_data.shards.writer import UnitData, write_shard
from tests.spec_data.shards.test_lossy import slow_values

FILES = Path(__file__).parent / "format"
READER = Path(__file__).parents[3] / "docs" / "examples" / "read_dataset.py"
VOCAB, WIDTH, SMALL, LENGTHS = 16, 132, 4, (9, 2, 7, 12, 5)
Documents = list[dict[str, Any]]
_LOSSY: dict[str, Any] = {
    "layers": (1,),
    "hidden_size": WIDTH,
    "supervision": "final-hidden",
    "qualities": {"hidden.L1": 0.05, "hidden.final": 0.02},
    "final_tokens": "supervised",
    "teacher_tokens": "supervised",
}
SETS: dict[str, dict[str, Any]] = {
    "bf16": {"layers": (0, 2), "hidden_size": WIDTH, "supervision": "final-hidden"},
    "packed": _LOSSY,
    "rotated": _LOSSY,
    "topk": {
        "layers": (),
        "hidden_size": SMALL,
        "supervision": "topk:3",
        "teacher_tokens": "supervised",
    },
    "logits": {"layers": (-1,), "hidden_size": SMALL, "supervision": "logits"},
}
"""The stored datasets, as arguments of `token_columns`; all have the same documents."""
REACH: dict[str, Any] = {
    "rotated": 20,  # of all codes
    "packed": np.repeat([90, 7, 6, 2, 1, 0], [66, 11, 9, 14, 23, 9]),  # by component, of all bases
}


def _second_reader() -> Any:
    spec = importlib.util.spec_from_file_location("read_dataset", READER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = _second_reader()


def any_bits(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Bits of finite bfloat16 values, also of zeros and subnormals, uint16."""
    bits = generator.integers(0, 1 << 16, shape, dtype=np.uint16)
    return np.where(bits & 0x7F80 == 0x7F80, bits & 0x80FF, bits)


@functools.cache
def tables(name: str) -> Tables:
    """Tables of integers and short fractions, whose inverse is well conditioned."""
    generator = np.random.default_rng(sum(name.encode()))
    basis = generator.integers(-2, 3, (WIDTH, WIDTH)) + 100 * np.eye(WIDTH, dtype=np.int64)
    return Tables(
        mean=torch.from_numpy(generator.integers(-99, 99, WIDTH) / 8).float(),
        scale=torch.from_numpy(generator.integers(1, 9, WIDTH) / 1024).float(),
        basis=torch.from_numpy(basis.astype(np.int8)),
        factors=torch.from_numpy(np.where(np.arange(WIDTH) < 3, 3, 1).astype(np.int16)),
    )


def states(
    name: str, generator: np.random.Generator, count: int, reach: Any
) -> tuple[np.ndarray, np.ndarray]:
    """States float32 [count, H] of a lossy column, and the bits that it gives back."""
    own = tables(name)
    codes = generator.integers(-reach, reach + 1, (count, WIDTH))
    matrix = own.factors.double().numpy()[:, None] * own.basis.double().numpy()
    between = codes + generator.integers(-30, 31, codes.shape) / 100  # rounds to the code
    true = (between @ matrix * own.scale.double().numpy() + own.mean.double().numpy()).astype("f4")
    back = bf16_bits(torch.from_numpy(slow_values(codes, own)))
    away = np.arange(count) % 5 == 3  # far outside: stored as they are
    true[away, :3] = 3000.0
    back[away] = bf16_bits(torch.from_numpy(true[away]))
    return true, back


def documents() -> Documents:
    """Texts, token ids and masks."""
    generator = np.random.default_rng(5)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = generator.integers(0, VOCAB, length).astype(np.int32)
        bounds = [0, length // 4, length // 2, 3 * length // 4, length]
        roles, mask = ("user", "assistant") * 2, np.zeros(length, np.uint8)
        turns = [(r, a, b) for r, a, b in zip(roles, bounds, bounds[1:], strict=False) if a < b]
        for role, start, end in turns:
            mask[start:end] = role == "assistant"
        texts = {
            "doc_id": doc_id(ids, mask),
            "source": f"quéstions-{number % 2}.jsonl",
            "turns": turns,
        }
        found.append({**texts, "input_ids": ids, "loss_mask": mask})
    return found


def doc_id(ids: np.ndarray, mask: np.ndarray) -> str:
    """The id of a document of `ids` int32 [T] and `mask` uint8 [T]."""
    both = hashlib.sha256(ids.tobytes() + mask.tobytes())
    return hashlib.sha256(ids.tobytes()).hexdigest()[:16] + both.hexdigest()[:16]


def values_of(column: Column, generator: np.random.Generator, count: int) -> np.ndarray:
    """Values [count] or [count, W] of a plain column, as they are stored."""
    shape = (count, column.width) if column.width else (count,)
    if column.codec == "bf16":
        return any_bits(generator, *shape)
    if column.codec == "int32":
        return generator.integers(0, VOCAB, shape).astype(np.int32)
    return (generator.integers(-999, 999, shape) / 16).astype(np.float32)


def _absent(kind: np.dtype) -> float:
    """What a reader returns where nothing is stored: NaN (of bf16, its bits) or -1."""
    if kind == np.uint16:
        return 0x7FC0
    return np.nan if kind == np.float32 else -1


def make(name: str, folder: Path) -> tuple[Documents, Documents]:
    """Write a stored dataset; return its documents as they are read, and the true lossy states."""
    generator = np.random.default_rng(11)
    columns = tuple(
        structs.replace(c, codec=name) if c.lossy else c
        for c in token_columns(vocab_size=VOCAB, **SETS[name])
    )
    found, true = documents(), [{} for _ in LENGTHS]
    rows: dict[str, list[Any]] = {c.name: [d[c.name] for d in found] for c in columns[:2]}
    for column in columns[2:]:
        rows[column.name] = []
        for number, document in enumerate(found):
            stored = predicts_supervised(document["loss_mask"])
            count = int(stored.sum()) if column.sparse else len(stored)
            if column.lossy:
                exact, back = states(column.name, generator, count, REACH[name])
                true[number][column.name] = exact
                coded = encode(torch.from_numpy(exact), tables(column.name), name)
                rows[column.name].append(coded)
            else:
                back = values_of(column, generator, count)
                rows[column.name].append(back)
            empty = _absent(back.dtype) if column.sparse else 0
            whole = np.full((len(stored), *back.shape[1:]), empty, back.dtype)
            whole[stored if column.sparse else ...] = back
            document[column.name] = whole
    (folder / "shards").mkdir(parents=True)
    records = [
        _write(folder / "shards" / f"unit-{number:05d}.arrow", found[part], columns, rows, part)
        for number, part in enumerate((slice(0, 3), slice(3, None)))
    ]
    seal(folder, _manifest(name, folder, columns), records)
    for document in found:
        document["turns"] = [
            {"role": role, "start": start, "end": end} for role, start, end in document["turns"]
        ]
    return found, true


def _write(file: Path, found: Documents, columns: tuple, rows: dict, part: slice) -> ShardRecord:
    """Write a shard of several record batches."""
    texts = ([document[key] for document in found] for key in ("doc_id", "source", "turns"))
    unit = UnitData(*texts, np.cumsum([0, *(len(d["input_ids"]) for d in found)]))
    for column in columns:
        if column.lossy:
            unit.coded[column.name] = rows[column.name][part]
        else:
            unit.tokens[column.name] = np.concatenate(rows[column.name][part])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "RECORD_BATCH_BYTES", 10_000)
        return write_shard(file, unit, columns)


def _manifest(name: str, folder: Path, columns: tuple) -> Manifest:
    """Write target and tables; return the manifest without what `seal` counts."""
    given, odd = SETS[name], name == "topk"  # one with every part of a head
    generator = np.random.default_rng(3)
    parts = {"embed_tokens": (VOCAB, given["hidden_size"]), "norm": (given["hidden_size"],)}
    parts |= {"lm_head_bias": (VOCAB,)} if odd else {"lm_head": (VOCAB, given["hidden_size"])}
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(dump_json({"model_type": "llama"}))
    save_file(
        {n: torch.from_numpy(generator.integers(-9, 9, s) / 8).float() for n, s in parts.items()},
        folder / "target" / "head.safetensors",
    )
    codec = {}
    if coded := {c.name: tables(c.name) for c in columns if c.lossy}:
        (folder / TABLES).write_bytes(save_tables(coded))
        codec = {"codec": {"file": TABLES, "sha256": sha256_file(folder / TABLES)}}
    return Manifest.of(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "settings": {},
            "target": {"name": "test-files", "dtype": "bfloat16", "num_layers": 4},
            "corpus": [{"source": source} for source in ("quéstions-0.jsonl", "quéstions-1.jsonl")],
            "layers": list(given["layers"]),
            "supervision": given["supervision"],
            "final": given.get("final_tokens", "all"),
            "teacher": given.get("teacher_tokens", "all"),
            "columns": plain(columns),
            "head": {
                "vocab_size": VOCAB,
                "hidden_size": given["hidden_size"],
                "tied": odd,
                "has_bias": odd,
                "scale": 0.5 if odd else 1.0,
                "softcap": 3.0 if odd else None,
            },
            "packing": {"form": "rows"},
            "policy": "off-policy",
            "documents": {"read": len(LENGTHS), "dropped": {}},
            **codec,
        }
    )


def make_all(folder: Path) -> tuple[dict[str, Documents], dict[str, Documents]]:
    """Write every dataset, and two views; return what `make` does, by name."""
    made = {name: make(name, folder / name) for name in SETS}
    found = {name: documents for name, (documents, _) in made.items()}
    spec_data.join([folder / "rotated", folder / "bf16"], folder / "joined")
    spec_data.select(folder / "joined", folder / "selected", where="length > 6", mask="last-turn")
    pairs = zip(found["bf16"], found["rotated"], strict=True)
    found["joined"] = [exact | first for exact, first in pairs]  # of both, the first has it
    found["selected"] = [_last_turn(d) for d in found["joined"] if len(d["input_ids"]) > 6]
    return found, {name: true for name, (_, true) in made.items()}


def _last_turn(document: dict[str, Any]) -> dict[str, Any]:
    """A document supervised in its last turn alone."""
    start, mask = document["turns"][-1]["start"], document["loss_mask"].copy()
    mask[:start] = 0
    other = document | {"loss_mask": mask, "doc_id": doc_id(document["input_ids"], mask)}
    for name in ("hidden.final", "target_argmax", "target_logsumexp"):  # sparse in "rotated"
        other[name] = document[name].copy()
        other[name][~predicts_supervised(mask)] = _absent(document[name].dtype)
    return other


def digest(found: Documents) -> dict[str, Any]:
    """Return what `expected.json` says of documents."""
    columns = {}
    for name, value in found[0].items():
        if isinstance(value, np.ndarray):
            joined = np.concatenate([document[name] for document in found])
            columns[name] = {
                "dtype": str(joined.dtype),
                "shape": list(joined.shape),
                "sha256": hashlib.sha256(np.ascontiguousarray(joined).tobytes()).hexdigest(),
            }
    texts = [{name: document[name] for name in ("doc_id", "source", "turns")} for document in found]
    return {"documents": texts, "columns": columns}
