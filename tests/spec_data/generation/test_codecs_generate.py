"""Generate with lossy codecs: estimates, resuming, calibration, errors, reports."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_data.generation.calibrate as calibrate_module
from spec_data.commands.estimate import estimated
from spec_data.generation.options import CaptureOptions
from spec_data.generation.setup import announce_drafts, make_plan
from spec_data.shards.codecs import LOSSY
from spec_data.shards.errors import DatasetError, MissingError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from tests import forked
from tests.spec_data.runs import (
    options,
    run,
    setup_of,
    verify,
    write_corpus,
)
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED
from tests.tolerance import close, network

one_thread = forked.one_thread
target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed


@pytest.mark.parametrize("given", [{"final": "supervised"}, {"codec": "int8c"}, MIXED])
def test_estimate_is_exact_but_for_escaped_tokens(target, corpus, tmp_path, given):
    run(target, corpus, tmp_path / "data", **given)
    setup = setup_of(**options(target, corpus, tmp_path / "none", **given))
    plan = make_plan(setup)
    predicted = [plan.unit_bytes(u, setup.columns) for u in range(len(plan.units))]
    found = [s.bytes for s in HiddenStatesDataset(tmp_path / "data").manifest.shards]
    if "codec" not in given:
        assert predicted == found
    assert sum(predicted) == pytest.approx(sum(found), rel=0.01)
    text = estimated(setup, plan, announce_drafts(setup), tmp_path).text
    assert "per massive token" in text or "codec" not in given
    assert "tail tokens trimmed" in text and "hidden.final" in text


def with_bound(monkeypatch, codec, **bound):
    strict = dataclasses.replace(LOSSY[codec].bound, **bound)
    monkeypatch.setitem(LOSSY, codec, dataclasses.replace(LOSSY[codec], bound=strict))


def test_what_a_codec_cannot_meet_goes_to_a_finer_one(
    target, corpus, tmp_path, monkeypatch, caplog
):
    """No default ends in an error."""
    with_bound(monkeypatch, "lm4c", median=1e-9)
    one_unit = {"max_shard_size": "10MB"}
    with caplog.at_level("WARNING"):
        manifest = run(target, corpus, tmp_path / "finer", codec="lm4c", **one_unit)
    assert {c.codec for c in manifest.columns if "hidden" in c.name} == {"lm6c"}
    entry = next(c for c in manifest.columns if c.name == "hidden.final")
    assert entry.error.mse_median < entry.instead_of["lm4c"].mse_median
    told = [r.message for r in caplog.records if "lm4c would lose too much" in r.message]
    assert len(told) == 2 and "hidden.final is stored with lm6c" in told[1]
    run(target, corpus, tmp_path / "asked", codec="lm6c", **one_unit)  # the same bytes as asked for
    for shard in manifest.shards:
        other = tmp_path / "asked" / shard.file
        assert (tmp_path / "finer" / shard.file).read_bytes() == other.read_bytes()
    again = run(
        target, corpus, tmp_path / "finer", codec="lm4c", **one_unit
    )  # it is what was asked for
    assert again.fingerprint == manifest.fingerprint
    assert verify(data=str(tmp_path / "finer"), device="cpu") == 0


def test_what_no_codec_can_meet_is_stored_in_bf16(target, corpus, tmp_path, monkeypatch):
    for codec in ("lm4c", "lm6c", "int8c"):
        with_bound(monkeypatch, codec, median=0.0)
    manifest = run(target, corpus, tmp_path / "data", codec="lm4c")
    assert {c.codec for c in manifest.columns if "hidden" in c.name} == {"bf16"}
    assert manifest.codec is None and not (tmp_path / "data" / "codec.safetensors").exists()
    columns = [c for c in manifest.columns if "hidden" in c.name]
    assert all(list(c.instead_of) == ["lm4c", "lm6c", "int8c"] for c in columns)
    assert verify(data=str(tmp_path / "data"), device="cpu", target=str(target)) == 0


def test_one_document_is_enough(target, tmp_path):
    manifest = run(target, write_corpus(tmp_path / "one.jsonl", 1), tmp_path / "data", **MIXED)
    assert manifest.codec.documents == 1
    assert len(HiddenStatesDataset(tmp_path / "data")) == 1


def test_a_sample_without_finite_states_is_an_error(target, corpus, tmp_path, monkeypatch):
    real = calibrate_module.capture_sample

    def poisoned(*arguments):
        states, numbers = real(*arguments)
        return {n: torch.full_like(s, torch.nan) for n, s in states.items()}, numbers

    monkeypatch.setattr(calibrate_module, "capture_sample", poisoned)
    with pytest.raises(RunError, match="no token of the calibration sample has finite states"):
        run(target, corpus, tmp_path / "data", **MIXED)


def test_verify_passes_and_reports_tables_of_another_dataset(mixed, target, tmp_path, capsys):
    given = {"data": str(mixed), "device": "cpu", "target": str(target), "samples": 40}
    assert verify(**given) == 0
    out = capsys.readouterr().out
    assert "hidden.L0: lm4c: error / channel variance" in out and "FAIL" not in out
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


def test_codecs_by_kind():
    def codecs(**change):
        return CaptureOptions(**change).codecs

    assert codecs() == {"aux": "lm4c", "final": "lm4c"}
    assert codecs(codec="lm4c") == {"aux": "lm4c", "final": "lm4c"}
    assert codecs(codec="lm4c", supervision="logits") == {"aux": "lm4c", "final": "bf16"}
    assert codecs(codec="final=int8c") == {"aux": "lm4c", "final": "int8c"}
    assert codecs(codec="aux=int8c") == {"aux": "int8c", "final": "lm4c"}
    assert codecs(codec="aux=int8c", supervision="logits")["final"] == "bf16"


def test_tails_are_trimmed_and_counted(target, tmp_path):
    answer = {"role": "assistant", "content": "yes yes"}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                answer,
                {"role": "user", "content": "thanks " * i},
            ]
        }
        for i in range(1, 6)
    ]
    file = tmp_path / "tails.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    cut = run(target, file, tmp_path / "cut", max_length=64)
    whole = run(target, file, tmp_path / "whole", max_length=1024, mask="all")
    trimmed = cut.documents.tail_tokens_trimmed
    assert whole.documents.tail_tokens_trimmed == 0
    assert cut.documents.cut == 0  # only tails are longer than 64 tokens
    assert cut.totals.tokens + trimmed == whole.totals.tokens
    short, long = HiddenStatesDataset(tmp_path / "cut"), HiddenStatesDataset(tmp_path / "whole")
    for index in range(5):
        a, b = short[index], long[index]
        length = len(a["input_ids"])
        assert bool(a["loss_mask"][-1])
        assert torch.equal(a["input_ids"], b["input_ids"][:length])
        states, longer = a["hidden.L4"].float(), b["hidden.L4"][:length].float()
        close(states, longer, terms=network(6), stored=torch.bfloat16)
