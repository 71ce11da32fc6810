"""The dataset on disk: FORMAT.md read with numpy alone, copies, projection, damage."""

import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_data.shards import shard as shard_module
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from tests.factory import random_documents, states_of, tiny_dataset, tiny_llama
from tests.spec_data.shards.integrity_tools import flip

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("reader") / "data", n_docs=25, docs_per_shard=7)


@pytest.fixture
def damaged(tmp_path):
    return tiny_dataset(tmp_path / "data", n_docs=9, docs_per_shard=4)


def test_round_trip_is_the_target_to_one_bf16_rounding(path):
    dataset, model = HiddenStatesDataset(path), tiny_llama()
    documents = random_documents(25, 64, 0)
    assert len(dataset) == 25
    assert len(dataset.manifest.shards) == 4
    for index, (ids, mask, turns) in enumerate(documents):
        row = dataset[index]
        assert row["input_ids"].tolist() == ids
        assert row["loss_mask"].int().tolist() == mask
        assert [(t["role"], t["start"], t["end"]) for t in row["turns"]] == turns
        for name, value in states_of(model, ids, LAYERS).items():
            expected = value.to(torch.bfloat16) if name.startswith("hidden") else value
            assert torch.equal(row[name], expected), name
        assert dataset.lengths[index] == len(ids)
        assert dataset.supervised[index] == sum(mask)
        assert dataset.first_supervised[index] == mask.index(1)


def test_format_md_names_every_column_codec_and_manifest_key(path):
    import spec_data.shards as package

    text = (Path(package.__path__[0]) / "FORMAT.md").read_text()
    dataset = HiddenStatesDataset(path)
    for column in dataset.manifest.columns:
        assert re.sub(r"L\d+", "L<k>", column.name) in text
        assert f"`{column.codec}`" in text
    for key in dataset.manifest.to_json():
        assert f"`{key}`" in text, key


def test_another_process_gets_a_handle_of_some_bytes_and_plain_documents(damaged):
    """After a read, mapped shards once made it impossible."""
    dataset = HiddenStatesDataset(damaged, ["input_ids", "hidden.L1"])
    row = dataset[5]
    assert dataset.index.num_rows == 9 and row.dataset is dataset
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.columns == dataset.columns and torch.equal(again[5]["hidden.L1"], row["hidden.L1"])
    plain = pickle.loads(pickle.dumps(row))
    assert "dataset" not in vars(plain) and plain["doc_id"] == row["doc_id"]
    shutil.rmtree(damaged)
    tiny_dataset(damaged, n_docs=8)
    with pytest.raises(DatasetError, match="replaced by another dataset"):
        pickle.loads(sent)


def test_what_is_handed_out_may_be_modified(path):
    dataset = HiddenStatesDataset(path)
    first = dataset[3]
    for value in first.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert dataset[3]["hidden.L0"].abs().sum() > 0


def test_arrays_receive_what_tensors_receive(path):
    dataset = HiddenStatesDataset(path)
    columns = {c.name: c for c in dataset.manifest.columns}
    tensors = {
        "hidden.L1": torch.full((60, 32), 7.0, dtype=torch.bfloat16),
        "hidden.L2": torch.full((60, 32), 7.0),
        "input_ids": torch.full((60,), -9),
        "target_logsumexp": torch.zeros(60),
    }
    same = {name: values.clone() for name, values in tensors.items()}
    arrays = {name: columns[name].coder.bits(values) for name, values in same.items()}
    for row in (5, 3):
        assert dataset.read_into(row, arrays, 2, 9) == dataset.read_into(row, tensors, 2, 9)
        assert all(torch.equal(same[name], values) for name, values in tensors.items())
    assert columns["hidden.L2"].coder.bits(torch.zeros(1, dtype=torch.float16)) is None
    for given in (arrays, tensors):
        with pytest.raises(DatasetError, match="too short"):
            dataset.read_into(5, given, start=59)
    with pytest.raises(DatasetError, match="no column 'logits'"):
        dataset.read_into(5, {"logits": torch.zeros(9)})


def test_opening_touches_no_shard(path, monkeypatch):
    opened = []
    real = shard_module.StreamFile
    monkeypatch.setattr(
        shard_module, "StreamFile", lambda p: opened.append(Path(p).name) or real(p)
    )
    dataset = HiddenStatesDataset(path)
    assert len(dataset) == 25
    assert opened == []
    _ = dataset[0], dataset.lengths
    assert opened == ["unit-00000.arrow"]


def test_damage_is_an_error_that_names_the_file(damaged):
    shard = damaged / "shards" / "unit-00001.arrow"
    whole = shard.read_bytes()
    os.truncate(shard, len(whole) - 1)
    with pytest.raises(DatasetError, match=r"unit-00001\.arrow: .* bytes, the manifest says"):
        HiddenStatesDataset(damaged)
    shard.unlink()
    with pytest.raises(MissingError, match=r"unit-00001\.arrow: shard is missing"):
        HiddenStatesDataset(damaged)
    shard.write_bytes(b"\0" * len(whole))
    with pytest.raises(DatasetError, match=r"unit-00001\.arrow: damaged"):
        HiddenStatesDataset(damaged)[5]
    shard.write_bytes(whole)
    (damaged / "index.arrow").write_bytes(b"rubbish")
    with pytest.raises(DatasetError, match=r"index\.arrow: changed or damaged"):
        _ = HiddenStatesDataset(damaged).lengths


def test_head_tensors_are_checked(damaged):
    assert set(load_head_tensors(damaged)) == {"embed_tokens", "lm_head", "norm"}
    file = damaged / "target" / "head.safetensors"
    flip(file, -1)
    with pytest.raises(DatasetError, match="changed or damaged"):
        load_head_tensors(damaged)
    file.unlink()
    with pytest.raises(MissingError, match="missing"):
        load_head_tensors(damaged)
    config = damaged / "target" / "config.json"
    assert HiddenStatesDataset(damaged).target_config()["model_type"] == "llama"
    config.write_text(config.read_text().replace("llama", "other"))
    with pytest.raises(DatasetError, match=r"config\.json: changed or damaged"):
        HiddenStatesDataset(damaged).target_config()


def test_documents_are_reached_as_rows_of_a_datasets_dataset(path):
    dataset = HiddenStatesDataset(path, columns=("input_ids", "hidden.L1"))
    count = len(dataset)
    assert len(list(dataset)) == count
    assert dataset.column_names == ["doc_id", "source", "turns", "input_ids", "hidden.L1"]
    assert list(dataset[0]) == dataset.column_names == list(dataset.features)
    assert dataset.features["hidden.L1"] == "bfloat16 [T, 32]"
    assert dataset.features["input_ids"] == "int64 [T]"
    some = dataset[1:4]
    assert list(some) == dataset.column_names and all(len(v) == 3 for v in some.values())
    for place, row in enumerate((1, 2, 3)):
        assert some["doc_id"][place] == dataset[row]["doc_id"]
        assert torch.equal(some["hidden.L1"][place], dataset[row]["hidden.L1"])
    ids = dataset.doc_ids
    for chosen in ([-1, 0], np.array([-1, 0]), torch.tensor([-1, 0])):
        assert dataset[chosen]["doc_id"] == [ids[-1], ids[0]]
    for number in (2, np.int64(2), torch.tensor(2), 2 - count):
        assert dataset[number]["doc_id"] == ids[2]
    assert dataset[count:]["doc_id"] == [] and dataset[::-1]["doc_id"][-1] == ids[0]
    for wrong, kind in (
        (count, IndexError),
        ([count], IndexError),
        (1.5, TypeError),
        ([True], TypeError),
        (torch.tensor([True]), TypeError),
    ):
        with pytest.raises(kind):
            dataset[wrong]
    with pytest.raises(TypeError, match=r"columns=\['input_ids'\]"):
        dataset["input_ids"]
