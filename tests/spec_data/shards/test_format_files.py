"""FORMAT.md is enough: docs/examples/read_dataset.py, which imports nothing of ours, reads all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import spec_data
from spec_data.shards.blobs import LOSSY
from spec_data.shards.codecs import bf16_bits
from spec_data.shards.files import dump_json
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import apply_head
from spec_data.shards.seal import seal
from tests.spec_data.shards.format_files import FILES, READER, digest, make_all, reader, tables
from tests.spec_data.shards.integrity_tools import flip

NAMES = ("bf16", "packed", "rotated", "topk", "logits", "joined", "selected")
_FILES = ("card", "codec", "files", "fingerprint", "shards", "totals", "view")
"""Keys of a manifest with sizes and hashes of files, which a release of pyarrow decides, too."""


def as_bits(path: Path) -> list[dict[str, Any]]:
    """The documents as our own reader has them, in the second reader's form."""
    found = []
    for document in HiddenStatesDataset(path):
        found.append(dict(document))
        for name, values in document.items():
            if isinstance(values, torch.Tensor):
                states = values.dtype == torch.bfloat16
                found[-1][name] = bf16_bits(values) if states else values.numpy()
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    return folder, *make_all(folder)


def test_the_test_files_are_those_of_the_script(made):
    folder, found, _ = made
    expected = {name: digest(found[name]) for name in NAMES}
    if os.environ.get("SPEC_WRITE_FORMAT"):
        shutil.rmtree(FILES, ignore_errors=True)
        shutil.copytree(folder, FILES)
        text = json.dumps(expected, ensure_ascii=False).replace('}}}, "', '}}},\n"')  # a line each
        (FILES / "expected.json").write_text(text + "\n", encoding="utf-8")
    assert json.loads((FILES / "expected.json").read_text(encoding="utf-8")) == expected
    assert sum(f.stat().st_size for f in FILES.rglob("*") if f.is_file()) < 300_000
    for name in NAMES:
        present, new = (
            json.loads((place / name / "manifest.json").read_text(encoding="utf-8"))
            for place in (FILES, folder)
        )
        assert [present.pop(key, None) is None for key in _FILES] == [
            new.pop(key, None) is None for key in _FILES
        ]
        assert {**present, "provenance": None} == {**new, "provenance": None}


@pytest.mark.parametrize("name", NAMES)
def test_both_readers_find_what_was_written(name, made):
    folder, found, _ = made
    expected = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))[name]
    for place in (FILES, folder):
        opened = reader.Dataset(place / name)
        assert digest(list(opened)) == expected and not opened.damage()
        assert len(opened) == len(found[name])
    ours = as_bits(FILES / name)
    theirs = list(reader.Dataset(FILES / name))
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for key, value in own.items():
            floats = getattr(value, "dtype", None) == np.float32
            assert np.array_equal(value, other[key], equal_nan=floats), (name, key)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("column", ["hidden.L1", "hidden.final"])
def test_rounded_states_keep_the_bound_of_the_format(column, codec, made):
    _, found, true = made
    own = tables(column)
    steps = (own.factors.double()[:, None] * own.basis.double()).abs().sum(0) * own.scale.double()
    for document, exact in zip(found[codec], true[codec], strict=True):
        stored = ...
        if column == "hidden.final":
            stored = reader.predicting(document["loss_mask"])
        back = reader.floats(document[column][stored]).astype(np.float64)
        bound = 0.501 * steps.numpy() + np.abs(exact[column]) / 256
        error = np.abs(back - exact[column])
        assert np.all(error <= bound)
        if len(error):
            assert error.max() > 0.1 * bound.min(), "the bound says something"


@pytest.mark.parametrize("name", ["bf16", "topk"])
def test_the_head_as_data_is_that_of_the_package(name):
    opened, ours = reader.Dataset(FILES / name), HiddenStatesDataset(FILES / name)
    tensors, head = load_head_tensors(ours.path), ours.manifest.head
    weight = tensors["embed_tokens" if head.tied else "lm_head"]
    final = torch.randn(7, head.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = apply_head(final.bfloat16().float(), weight, tensors.get("lm_head_bias"), head)
    assert np.allclose(opened.logits(bf16_bits(final)), wanted, rtol=1e-5, atol=1e-5)


def test_it_runs_without_anything_of_ours():
    code = f"""
import runpy, sys
sys.argv = ["read_dataset.py", {str(FILES / "selected")!r}]
runpy.run_path({str(READER)!r}, run_name="__main__")
assert not {{"spec_data", "torch", "datasets", "safetensors", "xxhash"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("damaged files: none") == 3  # the view and what it is a view of
    assert len(READER.read_text(encoding="utf-8").splitlines()) <= 280


def edited(folder: Path, change: Any, sealed: bool = True) -> Path:
    file = folder / "manifest.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    change(raw)
    if sealed:
        raw["fingerprint"] = reader.fingerprint(raw)
    file.write_text(dump_json(raw), encoding="utf-8")
    return folder


def test_an_index_with_prompts_is_version_1_1_and_both_readers_read_it(tmp_path):
    folder = Path(shutil.copytree(FILES / "bf16", tmp_path / "data"))
    manifest = HiddenStatesDataset(FILES / "bf16").manifest
    numbers = np.array([2**64 - 1, 0, 7, 7, 1], np.uint64)
    draft = manifest.changed(files={}, card=None)
    assert seal(folder, draft, manifest.shards, prompts=numbers).format_version == "1.1"
    opened = reader.Dataset(folder)
    assert [row["prompt"] for row in opened.index] == numbers.tolist() and not opened.damage()
    assert digest(list(opened)) == digest(list(reader.Dataset(FILES / "bf16")))
    assert HiddenStatesDataset(folder).prompts.tolist() == numbers.tolist()
    spec_data.select(folder, tmp_path / "view", where="length > 6")
    view = HiddenStatesDataset(tmp_path / "view")
    places = [HiddenStatesDataset(folder).doc_ids.index(name) for name in view.doc_ids]
    assert view.prompts.tolist() == numbers[places].tolist()
    assert [
        row["prompt"] for row in reader.Dataset(tmp_path / "view").index
    ] == view.prompts.tolist()


def test_it_refuses_what_it_cannot_know_and_names_damage(tmp_path):
    folder = tmp_path / "data"

    def copied() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(FILES / "packed", folder))

    for change, message in (
        (lambda raw: raw.update(format_version="1.2"), "1.2"),
        (lambda raw: raw.update(format="other"), "other"),
        (lambda raw: raw["columns"][2].update(codec="packed-2"), "unknown codec packed-2"),
    ):
        with pytest.raises(ValueError, match=message):
            reader.Dataset(edited(copied(), change))
    with pytest.raises(ValueError, match="edited"):
        reader.Dataset(edited(copied(), lambda raw: raw.update(final="all"), sealed=False))
    for name in ("shards/unit-00001.arrow", "codec.safetensors", "target/head.safetensors"):
        flip(copied() / name, -1)
        assert reader.Dataset(folder).damage() == [name]


@pytest.mark.parametrize("name", ["bf16", *LOSSY])
def test_datasets_opens_a_directory(name, tmp_path):
    """By its own files, and `load_dataset` by the shards; columns are as they are stored."""
    shards = datasets.load_dataset(
        "arrow", data_files=str(FILES / name / "shards" / "*.arrow"), cache_dir=str(tmp_path)
    )["train"]
    saved = datasets.load_from_disk(str(FILES / name))
    wanted = list(reader.Dataset(FILES / name))
    for rows in (shards, saved):
        assert rows["doc_id"][:] == [document["doc_id"] for document in wanted]
        for row, document in zip(rows, wanted, strict=True):
            assert row["input_ids"] == document["input_ids"].tolist()
            if name == "bf16":
                assert row["hidden.L2"] == document["hidden.L2"].tolist()
