"""What lossy codecs store, and what readers get back: laws, and a second reader."""

import itertools
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from spec_data.shards import codecs
from spec_data.shards.codecs import bf16_bits
from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset, open_dataset
from tests.factory import tiny_dataset
from tests.spec_data.runs import run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED
from tests.spec_data.shards.format_files import reader

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


def test_the_reader_in_numpy_decodes_what_generate_wrote(lossy):
    theirs = list(reader.Dataset(lossy.path))
    for index, document in enumerate(theirs):
        for name in COLUMNS:
            assert np.array_equal(document[name], bf16_bits(lossy[index][name])), name


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
                wanted = row[name][:length].to(values.dtype)  # NaN: no row
                own, wanted = (x.nan_to_num(7.0) for x in (values[4 : 4 + length], wanted))
                assert torch.equal(own, wanted)
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


def test_bits_that_the_library_reads_of_bf16_are_decoded_by_the_line_of_the_pages(tmp_path):
    """Arrow has no bfloat16: `load_from_disk` returns integers. The line is in three pages."""
    path = tiny_dataset(tmp_path / "data", n_docs=2)
    line = "torch.tensor(x).to(torch.uint16).view(torch.bfloat16)"
    for place in ("FORMAT.md", "dataset_card.py"):
        assert line in (Path(codecs.__file__).parent / place).read_text("utf-8")
    saved, ours = datasets.load_from_disk(str(path)), open_dataset(path)
    for row, document in zip(saved, ours, strict=True):
        x = row["hidden.L1"]
        assert isinstance(x[0][0], int)
        decoded = torch.tensor(x).to(torch.uint16).view(torch.bfloat16)
        assert torch.equal(decoded, document["hidden.L1"])
    assert torch.tensor([16344]).to(torch.uint16).view(torch.bfloat16).item() == 1.6875
