"""`generate --tables-of`: two captures share their tables, so that they can be merged."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_data.generation.setup import set_up
from spec_data.options.dataset_options import VerifyConfig
from spec_data.options.generate_options import GenerateConfig
from spec_data.options.view_options import MergeConfig
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.lossy import LOSSY
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import fingerprint
from spec_data.verification.run import examine
from spec_data.views.joining import plan_merge
from spec_data.views.write_view import write_view
from tests.spec_data.runs import digests, options, run, save_target, write_corpus
from tests.spec_data.views.view_tools import assert_same_documents, documents_of

CODEC = {"codec": "aux=lm4c,final=int8c"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two files without a common row."""
    folder = tmp_path_factory.mktemp("corpora")
    rows = write_corpus(folder / "all.jsonl", 40).read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(rows[:24]))
    (folder / "b.jsonl").write_text("".join(rows[24:]))
    return folder / "a.jsonl", folder / "b.jsonl"


@pytest.fixture(scope="module")
def first(target, corpora, tmp_path_factory):
    out = tmp_path_factory.mktemp("first") / "a"
    run(target, corpora[0], out, **CODEC)
    return out


def merge(out, *data):
    config = MergeConfig(data=tuple(map(str, data)), out=str(out))
    return write_view(out, plan_merge(config))


def assert_verified(path):
    """Run every check of `verify`; it warns that the target is random."""
    found = examine(VerifyConfig(data=str(path), samples=4, device="cpu"))
    assert not found.failures, found.text()


def test_captures_that_share_their_tables_are_merged(target, corpora, first, tmp_path):
    own, b, both = tmp_path / "own", tmp_path / "b", tmp_path / "both"
    run(target, corpora[1], own, **CODEC)
    with pytest.raises(DatasetError, match="Generate the second with --tables-of the first"):
        merge(both, first, own)
    manifest = run(target, corpora[1], b, tables_of=str(first), **CODEC)
    given, used = load_file(first / "codec.safetensors"), load_file(b / "codec.safetensors")
    assert given.keys() == used.keys() and all(torch.equal(given[n], used[n]) for n in given)
    other = HiddenStatesDataset(first).manifest
    recorded = {"fingerprint": other.fingerprint, "sha256": other.codec["sha256"]}
    assert manifest.codec["tables_of"] == recorded
    assert manifest.raw["settings"]["tables_of"] == other.codec["sha256"]
    assert manifest.codec["held_out_tokens"] == manifest.codec["tokens"]  # none made the tables
    assert_verified(b)
    merge(both, first, b)
    assert_same_documents(both, documents_of(first) + documents_of(b))
    assert_verified(both)


def test_fewer_layers_take_their_part_of_the_tables(target, corpora, first, tmp_path):
    given = options(target, corpora[1], tmp_path / "b", layers="2", tables_of=str(first), **CODEC)
    set_up(GenerateConfig(**given), weights=False)  # as `estimate` does
    run(target, corpora[1], tmp_path / "b", layers="2", tables_of=str(first), **CODEC)
    tables = load_file(tmp_path / "b" / "codec.safetensors")
    assert {name.rpartition(".")[0] for name in tables} == {"hidden.L2", "hidden.final"}
    union = merge(tmp_path / "both", first, tmp_path / "b")
    assert union.layers == (2,)
    assert_verified(tmp_path / "both")


def test_resumed_and_shared_out_runs_write_the_same_bytes(target, corpora, first, tmp_path):
    given = {"tables_of": str(first), **CODEC}
    run(target, corpora[1], tmp_path / "b", **given)
    assert run(target, corpora[1], tmp_path / "two", workers="1/2", **given) is None
    run(target, corpora[1], tmp_path / "two", workers="0/2", **given)
    assert digests(tmp_path / "b") == digests(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"other settings.*\n  tables_of"):
        run(target, corpora[1], tmp_path / "two", **CODEC)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"codec": "bf16"}, ConfigError, "bf16 has no tables"),
        ({"codec": "int8c"}, DatasetError, r"hidden\.L0 has the codec lm4c, not int8c"),
        ({"layers": "0,1"}, DatasetError, r"no column hidden\.L1, only layers 0, 2, 4"),
        ({"dtype": "bfloat16"}, ConfigError, "loaded in another way:\n  dtype"),
    ],
)
def test_tables_that_do_not_fit_are_refused(target, corpora, first, tmp_path, change, error, words):
    given = CODEC | {"tables_of": str(first)} | change
    with pytest.raises(error, match=words):
        run(target, corpora[1], tmp_path / "b", **given)
    assert not list(tmp_path.glob("b/shards/*"))


def test_tables_of_another_target_are_refused(target, corpora, first, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    tuned = save_target(tmp_path / "tuned")
    model.save_pretrained(tuned)
    with pytest.raises(DatasetError, match=r"of another target:\n  weights_hash"):
        run(tuned, corpora[1], tmp_path / "b", tables_of=str(first), **CODEC)


def test_data_of_another_kind_is_warned_of_and_bounded(
    target, corpora, first, tmp_path, caplog, monkeypatch
):
    """A dataset that declares a tenth of the error stands for one whose data the tables fit."""
    manifest = first / "manifest.json"
    whole = manifest.read_text()
    raw = json.loads(whole)
    for entry in raw["columns"]:
        for name in ("mse_median", "mse_max"):
            if "error" in entry:
                entry["error"][name] /= 10
    raw["fingerprint"] = fingerprint(raw)
    manifest.write_text(json.dumps(raw))
    try:
        with caplog.at_level(logging.WARNING):
            run(target, corpora[1], tmp_path / "b", tables_of=str(first), **CODEC)
    finally:
        manifest.write_text(whole)
    assert "column hidden.L0 loses clearly more on this data: median channel" in caplog.text
    caplog.clear()
    run(target, corpora[1], tmp_path / "c", tables_of=str(first), **CODEC)
    assert "clearly more" not in caplog.text
    bound = LOSSY["lm4c"].bound.__class__(1e-9, 1e-9, 1e-9)
    strict = LOSSY["lm4c"].__class__(**{**vars(LOSSY["lm4c"]), "bound": bound})
    monkeypatch.setitem(LOSSY, "lm4c", strict)
    with pytest.raises(RunError, match="above its bound"):
        run(target, corpora[1], tmp_path / "d", tables_of=str(first), **CODEC)
