"""What lossy codecs store, and what readers get back: laws, and FORMAT.md in numpy."""

import itertools
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch

from spec_data.shards.codecs import bf16_bits
from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.runs import run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED

COLUMNS = ("hidden.L0", "hidden.L2", "hidden.L4", "hidden.final")

target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed


@pytest.fixture(scope="module")
def exact(target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("exact") / "data"
    run(target, corpus, out)
    return HiddenStatesDataset(out)


@pytest.fixture(scope="module", params=["default", "small", "mixed"])
def lossy(request, target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("lossy") / "data"
    given = MIXED if request.param == "mixed" else {"codec": request.param}
    run(target, corpus, out, **given)
    return HiddenStatesDataset(out)


def kept(row) -> torch.Tensor:
    out = torch.zeros_like(row["loss_mask"])
    out[:-1] = row["loss_mask"][1:]
    return out


def test_states_are_the_exact_ones_within_the_declared_error(lossy, exact):
    assert len(lossy) == len(exact)
    declared = {c.name: c.error for c in lossy.manifest.columns}
    escaped = 0
    for name in COLUMNS:
        squares, spread = [], []
        for index in range(len(exact)):
            row, back = exact[index], lossy[index]
            tokens = (
                kept(row)
                if lossy.manifest.final == "supervised" and name == "hidden.final"
                else ...
            )
            true, found = row[name].float()[tokens], back[name].float()[tokens]
            massive = true.abs().amax(-1) > 1000
            escaped += int(massive.sum())
            assert torch.equal(found[massive], true[massive])
            squares.append((true - found)[~massive].square())
            spread.append(true[~massive])
        error = torch.cat(squares).mean(0) / torch.cat(spread).var(0)
        assert float(error.median()) == pytest.approx(declared[name].mse_median, rel=0.5)
        assert declared[name].total <= lossy.declared[name].quality
    assert escaped > 5


_STRANGER = """
import json, sys
import numpy as np, pyarrow as pa
from safetensors.numpy import load_file
root = sys.argv[1]
manifest = json.load(open(root + "/manifest.json"))
tables = load_file(root + "/codec.safetensors")
H = manifest["head"]["hidden_size"]
def part(batch, name, r, width):
    a = batch.column(name)
    v = a.values.values if width else a.values
    v = v.to_numpy()
    v = v.reshape(-1, width) if width else v
    o = a.offsets.to_numpy()
    return v[o[r] : o[r + 1]]
def bf16(u):
    return (u.astype(np.uint32) << 16).view(np.float32)
def decode(batch, X, codec, r, n):
    if codec == "bf16":
        return part(batch, X, r, H)
    mean, scale, basis, factors = (
        tables[X + "." + k] for k in ("mean", "scale", "basis", "factors")
    )
    blob = part(batch, X, r, None).tobytes()
    raw = pa.Codec("zstd").decompress(blob, decompressed_size=int(n) * H)
    raw = np.frombuffer(raw, np.int8)
    codes, done = [], 0
    for k in range(0, H, 128):
        w = min(128, H - k)
        codes.append(raw[done : done + n * w].reshape(n, w))
        done += n * w
    codes = np.concatenate(codes, 1)
    matrix = factors[:, None].astype(np.float32) * basis.astype(np.float32)
    v = codes.astype(np.float32) @ matrix
    v = v * scale
    v = v + mean
    u = v.view(np.uint32)
    u = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    u[part(batch, X + ".escape_index", r, None)] = part(batch, X + ".escape", r, H)
    return u
out = {}
for shard in manifest["shards"]:
    for batch in pa.ipc.open_stream(pa.memory_map(root + "/" + shard["file"])):
        for r in range(batch.num_rows):
            mask = part(batch, "loss_mask", r, None)
            for c in manifest["columns"]:
                if not c["name"].startswith("hidden."):
                    continue
                sparse = c.get("tokens") == "supervised"
                n = int(mask[1:].sum()) if sparse else len(mask)
                u = decode(batch, c["name"], c["codec"], r, n)
                if sparse:
                    whole = np.zeros((len(mask), H), np.uint16)
                    whole[:-1][mask[1:] == 1] = u
                    u = whole
                out.setdefault(c["name"], []).append(u)
assert not {"spec_data", "torch", "datasets"} & set(sys.modules)
np.savez(sys.argv[2], **{k: np.concatenate(v) for k, v in out.items()})
"""


def test_format_md_is_enough_to_decode_with_numpy(lossy, tmp_path):
    command = [sys.executable, "-c", _STRANGER, str(lossy.path), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, capture_output=True)
    theirs = np.load(tmp_path / "out.npz")
    for name in COLUMNS:
        ours = torch.cat([lossy[i][name] for i in range(len(lossy))])
        assert np.array_equal(theirs[name], bf16_bits(ours)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_into_is_the_row_wherever_it_is_cut(exact, lossy, dtype):
    for dataset, index in itertools.product((exact, lossy), (0, 7, 30)):
        row = dataset[index]
        total = len(row["input_ids"])
        for length in (1, total // 2, total - 1, total):
            buffer = {n: torch.full((total + 9, 32), 7.0, dtype=dtype) for n in COLUMNS}
            buffer |= {n: torch.full((total + 9,), 7) for n in ("input_ids", "loss_mask")}
            assert dataset.read_into(index, buffer, 4, length) == length
            for name, values in buffer.items():
                assert torch.equal(values[4 : 4 + length], row[name][:length].to(values.dtype))
                assert bool((values[:4] == 7).all() and (values[4 + length :] == 7).all())


def test_projection_is_by_column_and_datasets_opens_the_parts(lossy):
    some = HiddenStatesDataset(lossy.path, columns=("input_ids", "hidden.L2"))
    assert set(some[3]) == {"doc_id", "source", "turns", "input_ids", "hidden.L2"}
    assert torch.equal(some[3]["hidden.L2"], lossy[3]["hidden.L2"])
    with pytest.raises(DatasetError, match=r"no column hidden\.L2\.escape"):
        HiddenStatesDataset(lossy.path, columns=("hidden.L2.escape",))
    theirs = datasets.load_from_disk(str(lossy.path))
    assert len(theirs) == len(lossy)
    assert len(theirs[7]["hidden.L0"]) < lossy.lengths[7] * 32  # bytes
    assert len(theirs[7]["hidden.L0.escape"]) == len(theirs[7]["hidden.L0.escape_index"])


def test_final_is_zero_exactly_where_it_was_not_kept(mixed, exact):
    dataset = HiddenStatesDataset(mixed)
    assert dataset.manifest.final == "supervised" and exact.manifest.final == "all"
    for index in range(len(dataset)):
        row = dataset[index]
        there = row["hidden.final"].abs().sum(-1) > 0
        assert torch.equal(there, kept(row))
    stored = sum(s.bytes for s in dataset.manifest.shards)
    assert stored < 0.6 * sum(s.bytes for s in exact.manifest.shards)  # hidden size 32: texts weigh
