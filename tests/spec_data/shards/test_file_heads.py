"""A file that is not what its name says is named by what it is, wherever it is read."""

import gzip
import json
import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from spec_data.corpus.sources import resolve
from spec_data.models.loading import load_model
from spec_data.models.reading import load_config
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import ConfigError, CorpusError, DatasetError, DraftError, TargetError
from spec_data.shards.file_heads import instead, no_data
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.config import read_config_file
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import read_target
from tests.factory import tiny_dataset
from tests.spec_data.runs import save_target
from tests.spec_train.formats.published import test_modelopt, tiny

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e"
    b"adbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = b"\n  <!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
CONTENTS = {
    "pointer": (POINTER, "this is a Git LFS pointer and not the file itself; run `git lfs pull`"),
    "annex": (b"/annex/objects/SHA256E-s9--1.json\n", "this is a git-annex pointer"),
    "page": (PAGE, "this is an HTML page, which a server sent instead of the file"),
    "answer": (b"Entry not found", "this is an error message of a server"),
    "xml": (b"<?xml version='1.0'?><Error/>", "this is an error message of a server"),
    "empty": (b"", r"empty \(0 bytes\); download it again"),
    "zeros": (bytes(4096), "zeros at its start, as a download that broke off"),
    "gzip": (gzip.compress(b"{}"), "this is packed with gzip, under the name of another kind"),
    "gguf": (b"GGUF\3\0\0\0", "this is in the GGUF form of llama.cpp"),
}
EVERY = pytest.mark.parametrize(("content", "said"), CONTENTS.values(), ids=CONTENTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "t")


@EVERY
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_of_a_target(target, tmp_path, name, content, said):
    folder = shutil.copytree(target, tmp_path / "t")
    (folder / name).write_bytes(content)
    with pytest.raises(TargetError, match=rf"{name}: {said}"):
        load_config(folder)
        load_tokenizer(folder)
        load_model(str(folder))
    if name == "config.json":
        with pytest.raises(TargetError, match=rf"{name}: {said}"):
            read_target(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model", "added_tokens.json"])
@pytest.mark.parametrize("content", [POINTER, PAGE], ids=["pointer", "page"])
def test_files_that_a_library_would_take_as_they_are(target, tmp_path, name, content):
    folder = shutil.copytree(target, tmp_path / "t")
    for file in (name, "vocab.json"):
        (folder / file).write_bytes(content)
    with pytest.raises(TargetError, match=rf"{name}: this is .* \(so are vocab.json\)"):
        load_config(folder)


@EVERY
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_files_of_a_draft(tmp_path, name, content, said):
    weights = "model.safetensors" if name == "config.json" else name
    tensors = tiny.eagle3_tensors("layers.0.") | {"d2t": torch.arange(tiny.VD)}
    folder = tiny.write(tmp_path / "d", test_modelopt.CONFIG, tensors, weights)
    assert load_draft(folder, tiny.target()).name == "eagle3"
    (folder / name).write_bytes(content)
    with pytest.raises(DraftError, match=rf"{name}: {said}"):
        load_draft(folder, tiny.target())


def test_tensors_under_the_suffix_of_another_form(tmp_path):
    tensors = tiny.eagle3_tensors("layers.0.") | {"d2t": torch.arange(tiny.VD)}
    folder = tiny.write(tmp_path, test_modelopt.CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DraftError, match=r"give it the suffix \.safetensors"):
        load_draft(folder, tiny.target())
    (folder / "pytorch_model.bin").unlink()
    torch.save(tensors, folder / "model.safetensors")
    with pytest.raises(DraftError, match="this is a zip archive, under the name of another"):
        load_draft(folder, tiny.target())


@EVERY
@pytest.mark.parametrize("name", ["shards/unit-00000.arrow", "target/head.safetensors"])
def test_files_of_a_dataset(tmp_path, name, content, said):
    path = tiny_dataset(tmp_path / "data", n_docs=4)
    (path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=said):
        HiddenStatesDataset(path).file(name)


@EVERY
def test_a_manifest(tmp_path, content, said):
    path = tiny_dataset(tmp_path / "data", n_docs=4)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(DatasetError, match=rf"manifest.json: {said}"):
        HiddenStatesDataset(path)


@EVERY
@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.csv", "c.parquet", "c.txt"])
def test_files_of_a_corpus(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    text = name == "c.txt" and "pointer" not in said
    if text or (not content and name != "c.parquet"):
        assert resolve(str(tmp_path / name), "train"), "a text may be anything"
        return
    for where in (tmp_path / name, tmp_path):
        with pytest.raises(CorpusError, match=rf"{name}: {said}"):
            resolve(str(where), "train")


def test_a_saved_dataset_without_its_arrow_files(tmp_path):
    Dataset.from_list([{"text": "some text"}]).save_to_disk(tmp_path / "d")
    assert resolve(str(tmp_path / "d"), "train")
    next((tmp_path / "d").glob("*.arrow")).write_bytes(POINTER)
    with pytest.raises(CorpusError, match="this is a Git LFS pointer"):
        resolve(str(tmp_path / "d"), "train")


def test_files_that_are_what_they_say(tmp_path):
    rows = ['{"text":{"a":1}}', "[1]", "\0\0\0\0", "versions", "<htm", "PAR", " {}"]
    for row in rows:
        (tmp_path / "x.jsonl").write_text(row + "\n")
        assert instead(tmp_path / "x.jsonl", "fine") == "fine" or row.startswith("\0")
        assert no_data(tmp_path / "x.jsonl") is None
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(json.dumps({}).encode()))
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    for name in ("x.jsonl.gz", "x.safetensors"):
        assert instead(tmp_path / name, "fine") == "fine"


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@pytest.mark.parametrize("kind", ["pointer", "page", "gzip"])
def test_files_of_options(tmp_path, suffix, kind):
    content, said = CONTENTS[kind]
    (tmp_path / f"o{suffix}").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"o{suffix}: {said}"):
        read_config_file(tmp_path / f"o{suffix}")
