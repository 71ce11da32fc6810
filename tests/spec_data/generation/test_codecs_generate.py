"""Generate with lossy codecs: estimates, resuming, calibration, errors, reports."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_data
import spec_data.generation.calibrate as calibrate_module
from spec_data.commands.estimate import estimated
from spec_data.generation import units
from spec_data.generation.options import CaptureOptions, column_qualities
from spec_data.generation.setup import announce_drafts, make_plan
from spec_data.shards import schema
from spec_data.shards.blobs import PACKED, ROTATED
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Column, HeadSpec
from tests import forked
from tests.spec_data.runs import (
    digests,
    estimate_with,
    inputs_of,
    options,
    run,
    verify,
    write_corpus,
)
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED
from tests.spec_data.views.view_tools import killed_after

one_thread = forked.one_thread
target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed


@pytest.mark.parametrize("given", [{"final": "supervised", "codec": "bf16"}, MIXED])
def test_estimate_is_exact_without_a_lossy_codec_and_bounds_one(target, corpus, tmp_path, given):
    run(target, corpus, tmp_path / "data", **given)
    rows, setup = inputs_of(**options(target, corpus, tmp_path / "none", **given))
    plan = make_plan(rows, setup)
    predicted = [plan.unit_bytes(u, setup.columns) for u in range(len(plan.units))]
    manifest = HiddenStatesDataset(tmp_path / "data").manifest
    found = [s.bytes for s in manifest.shards]
    if given["codec"] == "bf16":
        assert predicted == found
    result = estimated(setup, plan, announce_drafts(setup), tmp_path)
    assert result.bytes_least <= sum(found) <= result.bytes * 1.02
    assert (result.bytes_bf16 > result.bytes) == (given["codec"] != "bf16")
    assert "tail tokens trimmed" in result.text and "hidden.final" in result.text
    assert ("--probe measures" in str(result)) == (given["codec"] != "bf16")
    measured = [plan.unit_bytes(u, manifest.columns) for u in range(len(plan.units))]
    assert sum(measured) == pytest.approx(sum(found), rel=0.03)


def test_a_probe_measures_the_bytes(target, corpus, tmp_path):
    found = estimate_with(**options(target, corpus, tmp_path / "none", **MIXED), probe=True)
    made = run(target, corpus, tmp_path / "data", **MIXED)
    assert found.bytes == found.bytes_least == pytest.approx(made.totals.bytes, rel=0.03)


def test_what_cannot_be_met_is_stored_in_bf16_and_changes_no_other_column(
    target, corpus, tmp_path, monkeypatch, caplog
):
    """No default ends in an error."""
    plain = run(target, corpus, tmp_path / "plain", codec="default")
    real = calibrate_module._excess
    never = {"hidden.L2": 1e9}
    monkeypatch.setattr(calibrate_module, "_excess", lambda c, e: never.get(c.name, real(c, e)))
    with caplog.at_level("WARNING"):
        manifest = run(target, corpus, tmp_path / "data", codec="default")
    codecs = {c.name: c.codec for c in manifest.columns if c.name.startswith("hidden")}
    assert [name for name, codec in codecs.items() if codec == "bf16"] == ["hidden.L2"]
    assert any("warning[codec]: hidden.L2 is stored in bf16" in r.message for r in caplog.records)
    expected = estimate_with(**options(target, corpus, tmp_path / "none", codec="default"))
    assert manifest.totals.bytes < expected.bytes_bf16
    assert f"in bf16 {expected.bytes_bf16 / expected.tokens:,.1f};" in str(expected)
    assert [c for c in manifest.columns if c.name == "hidden.L0"] == [
        c for c in plain.columns if c.name == "hidden.L0"
    ]
    assert verify(data=str(tmp_path / "data"), device="cpu", target=str(target)) == 0
    never |= dict.fromkeys(codecs, 1e9)
    manifest = run(target, corpus, tmp_path / "none", codec="default")
    assert manifest.codec is None and not (tmp_path / "none" / "codec.safetensors").exists()


def test_the_errors_are_what_was_asked_for(target, corpus, tmp_path):
    manifest = run(target, corpus, tmp_path / "data", codec="fine,L2=0.1,final=bf16")
    assert 0 < manifest.codec.held_out_tokens < manifest.codec.tokens
    found = {c.name: c for c in manifest.columns if c.name.startswith("hidden")}
    assert [found[f"hidden.{n}"].quality for n in ("L0", "L2", "L4", "final")] == [
        0.01,
        0.1,
        0.01,
        0,
    ]
    assert found["hidden.final"].codec == "bf16"
    for column in found.values():
        if column.lossy:
            assert 0.5 * column.quality < column.error.total <= column.quality
    assert found["hidden.L2"].error.bits < found["hidden.L0"].error.bits


def test_one_document_is_enough(target, tmp_path):
    manifest = run(target, write_corpus(tmp_path / "one.jsonl", 1), tmp_path / "data", **MIXED)
    assert manifest.codec.documents == 1
    assert len(HiddenStatesDataset(tmp_path / "data")) == 1


def test_a_sample_without_finite_states_is_an_error(target, corpus, tmp_path, monkeypatch):
    real = calibrate_module.capture_sample

    def poisoned(*arguments):
        return {n: torch.full_like(s, torch.nan) for n, s in real(*arguments).items()}

    monkeypatch.setattr(calibrate_module, "capture_sample", poisoned)
    with pytest.raises(RunError, match="no token of the calibration sample has finite states"):
        run(target, corpus, tmp_path / "data", **MIXED)


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e-32])
def test_the_error_of_very_small_states_is_measured_too(size):
    torch.manual_seed(0)
    states = size * torch.randn(400, 8)
    column = Column(name="hidden.L0", codec=PACKED, width=8, quality=0.02)
    spec = HeadSpec(vocab_size=1, hidden_size=8, tied=True)
    head = calibrate_module.Head(torch.device("cpu"), spec, {})
    found, _ = calibrate_module.fitted(column, states[:300], [states[300:]], head)
    assert 0.01 < found.error.total <= 0.02


def test_verify_passes_and_reports_tables_of_another_dataset(mixed, target, tmp_path, capsys):
    given = {"data": str(mixed), "device": "cpu", "target": str(target), "samples": 40}
    assert verify(**given) == 0
    out = capsys.readouterr().out
    assert "hidden.L0: packed: " in out and "FAIL" not in out
    file = mixed / "codec.safetensors"
    whole = file.read_bytes()
    try:
        tables = load_file(file)
        tables["hidden.L0.mean"][3] += 1
        save_file(tables, file)
        assert verify(**given) == 1
        assert "FAIL  codec.safetensors: sha256" in capsys.readouterr().out
        with pytest.raises(DatasetError, match="another dataset"):
            _ = HiddenStatesDataset(mixed)[0]
        _ = HiddenStatesDataset(mixed, columns=("input_ids",))[0]
        file.unlink()
        with pytest.raises(MissingError, match="cannot be decoded"):
            _ = HiddenStatesDataset(mixed)[0]
    finally:
        file.write_bytes(whole)


def blobs_of(path: Path) -> list[list[int]]:
    """The stored bytes of a lossy column, by document."""
    shards = sorted((path / "shards").iterdir())
    return [b for s in shards for b in pa.ipc.open_stream(s).read_all()["hidden.L0"].to_pylist()]


def test_a_dataset_of_the_codec_before_is_resumed_repaired_and_copied_with_its_bytes(
    target, corpus, tmp_path, monkeypatch
):
    whole, data = tmp_path / "whole", tmp_path / "data"
    given = MIXED | {"max_shard_size": "20KB"}
    with monkeypatch.context() as older:
        older.setattr(schema, "PACKED", ROTATED)
        run(target, corpus, whole, **given)
        older.setattr(units, "write_shard", killed_after(units.write_shard, 1))
        with pytest.raises(KeyboardInterrupt):
            run(target, corpus, data, **given)
    manifest = run(target, corpus, data, **given)
    assert {c.codec for c in manifest.columns if c.lossy} == {ROTATED}
    assert len(manifest.shards) > 1 and digests(data) == digests(whole)
    (data / manifest.shards[0].file).unlink()
    run(target, corpus, data, **given)
    assert digests(data) == digests(whole)
    spec_data.copy(data, tmp_path / "copy")
    assert blobs_of(tmp_path / "copy") == blobs_of(data)  # in shards of other sizes
    with pytest.raises(ConfigError, match="nothing would change"):
        spec_data.recode(data, tmp_path / "new", MIXED["codec"])


def test_new_and_older_datasets_of_one_target_are_read_as_one(
    target, corpus, mixed, tmp_path, monkeypatch
):
    with monkeypatch.context() as older:
        older.setattr(schema, "PACKED", ROTATED)
        run(target, corpus, tmp_path / "older", **MIXED)
    new, older = HiddenStatesDataset(mixed), HiddenStatesDataset(tmp_path / "older")
    assert {c.codec for c in new.manifest.columns if c.lossy} == {PACKED}
    assert older.manifest.totals.tokens == new.manifest.totals.tokens
    for own, other in zip(new, older, strict=True):
        for name in ("hidden.L0", "hidden.final"):
            assert torch.equal(own[name].nan_to_num(7), other[name].nan_to_num(7))
    middle = int(np.median(new.lengths))
    spec_data.select(new.path, tmp_path / "long", where=f"length > {middle}")
    spec_data.select(older.path, tmp_path / "short", where=f"length <= {middle}")
    spec_data.merge([tmp_path / "long", tmp_path / "short"], tmp_path / "view")
    spec_data.copy(tmp_path / "view", tmp_path / "copy")
    for path in ("view", "copy"):
        assert verify(data=str(tmp_path / path), device="cpu") == 0
    found = {d["doc_id"]: d for d in HiddenStatesDataset(tmp_path / "copy")}
    for row in older:
        assert torch.equal(row["hidden.L4"], found[row["doc_id"]]["hidden.L4"])


def test_qualities_by_column():
    def codecs(**change):
        return CaptureOptions(**change).codecs

    assert codecs() == {"aux": 0.02, "final": 0.02}
    assert codecs(codec="bf16") == {"aux": 0, "final": 0}
    assert codecs(codec="0.03", supervision="logits") == {"aux": 0.03, "final": 0}
    assert codecs(codec="final=fine") == {"aux": 0.02, "final": 0.01}
    assert codecs(codec="small,L3=bf16") == {"aux": 0.05, "final": 0.05, "L3": 0}
    assert codecs(codec="aux=fine, hidden.L-1=0.1")["L-1"] == 0.1
    for wrong in ("lm4c", "0", "0.7", "aux=", "other=fine", "fine,small", "nan", "L3"):
        with pytest.raises(ConfigError, match="--codec"):
            codecs(codec=wrong)
    with pytest.raises(ConfigError, match="L9 is not captured"):
        column_qualities(codecs(codec="L9=fine"), [0, 2])
