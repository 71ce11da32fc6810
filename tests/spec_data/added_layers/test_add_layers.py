"""`add-layers` against a plain forward of transformers: values, bytes, kills, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import spec_data
from spec_data import cli
from spec_data.added_layers import layer_capture
from spec_data.added_layers import run as running
from spec_data.added_layers.run import add_layers, layer_sizes
from spec_data.options.dataset_options import VerifyConfig
from spec_data.options.layer_options import AddLayersConfig
from spec_data.shards.errors import ConfigError, DatasetError, RunError, TargetError
from spec_data.shards.files import dump_json
from spec_data.shards.lossy import LOSSY, Bound
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest, fingerprint
from spec_data.shards.sides import stored_records
from spec_data.verification.run import examine
from spec_data.views import appending
from tests.factory import states_of
from tests.spec_data.runs import digests, save_target
from tests.spec_data.views.view_tools import killed_after
from tests.tolerance import close, network


def options(data, target, out=None, **changes) -> AddLayersConfig:
    given = {"data": str(data), "target": str(target), "layers": "1,3", "device": "cpu"}
    return AddLayersConfig(**given | {"out": str(out) if out else None} | changes)


def assert_verified(path, target) -> None:
    found = examine(VerifyConfig(data=str(path), target=str(target), samples=3, device="cpu"))
    assert not found.failures, found.text()


def copied(data: Path, out: Path) -> Path:
    return Path(shutil.copytree(data, out))


def with_manifest(data: Path, change) -> None:
    """Change the manifest of a dataset as somebody would who also computes its fingerprint."""
    raw = json.loads((data / "manifest.json").read_text())
    change(raw)
    raw["fingerprint"] = fingerprint(raw)
    (data / "manifest.json").write_text(dump_json(raw))


# -- what is written --------------------------------------------------------------------------


def test_added_layers_are_those_of_a_plain_forward(plain, wide, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    before, after = HiddenStatesDataset(plain), HiddenStatesDataset(wide)
    assert after.manifest.layers == (0, 1, 3, 4) and len(after) == len(before)
    assert after.manifest.raw["format_version"] == "1.3"
    for index in range(len(after)):
        old, new = before[index], after[index]
        for name in old:  # nothing that was there is another value
            same = (
                torch.equal if isinstance(old[name], torch.Tensor) else old[name].__class__.__eq__
            )
            assert same(old[name], new[name]), name
        states = states_of(model, new["input_ids"].tolist(), (1, 3))
        for name in ("hidden.L1", "hidden.L3"):
            close(new[name].float(), states[name], terms=network(6), stored=torch.bfloat16)
    assert_verified(wide, target)


def test_nothing_that_is_stored_is_written_again(plain, wide, target, tmp_path):
    own = copied(plain, tmp_path / "own")
    times = {p: p.stat().st_mtime_ns for p in own.glob("shards/*")}
    manifest = add_layers(options(own, target))
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert digests(own) == digests(wide)  # in place, and beside
    assert not (own / ".view").exists()
    links = [(wide / record.file).stat().st_nlink for record in manifest.shards]
    assert min(links) > 1, "--out links what does not change"
    assert manifest.raw["view"]["command"] == "add-layers"
    old = Manifest.read(plain / "manifest.json")
    assert manifest.raw["ancestors"] == [{"fingerprint": old.fingerprint, "documents": 20}]
    (side,) = manifest.raw["sides"]
    assert set(side["evidence"]["columns"]) == {"hidden.L0", "hidden.L4", "hidden.final"}
    for figures in side["evidence"]["columns"].values():
        assert 0 <= figures["difference"] <= figures["allowed"]


def test_the_dry_run_tells_the_exact_bytes(plain, wide, target, tmp_path, capsys):
    sizes = layer_sizes(options(plain, target, tmp_path / "none"))
    manifest = Manifest.read(wide / "manifest.json")
    new = stored_records(manifest)[len(manifest.shards) :]
    assert sizes.bytes == sum(record.bytes for record in new) and sizes.files == len(new)
    assert sizes.bytes + sizes.kept_bytes == manifest.raw["totals"]["bytes"]
    command = ["add-layers", str(plain), "--target", str(target), "--layers", "1,3", "--dry-run"]
    assert cli.main(command) == 0
    assert f"{sizes.bytes:,} bytes" in capsys.readouterr().out
    assert not (tmp_path / "none").exists() and not (plain / ".view").exists()


def test_lossy_layers_have_tables_of_their_own(coded, target, tmp_path):
    own = copied(coded, tmp_path / "own")
    before = HiddenStatesDataset(coded)
    sizes = layer_sizes(options(own, target))
    manifest = add_layers(options(own, target))
    after = HiddenStatesDataset(own)
    assert after.tables.keys() == before.tables.keys() | {"hidden.L1", "hidden.L3"}
    for name, table in before.tables.items():
        assert torch.equal(table.mean, after.tables[name].mean)
    entries = {entry["name"]: entry for entry in manifest.raw["columns"]}
    assert [entries[n]["codec"] for n in ("hidden.L0", "hidden.L1")] == ["lm4c", "lm4c"]
    assert 0 < entries["hidden.L3"]["error"]["mse_median"] < LOSSY["lm4c"].bound.median
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for index in (0, 7, 19):
        row = after[index]
        states = states_of(model, row["input_ids"].tolist(), (1, 3))
        for name in ("hidden.L1", "hidden.L3"):
            error = (row[name].float() - states[name]).norm() / states[name].norm()
            assert 0 < float(error) < 0.3, "four bits"
    new = stored_records(manifest)[len(manifest.shards) :]
    assert 0 <= sum(r.bytes for r in new) - sizes.bytes <= len(new) * 64 + 200 * (2 * 32 + 4)
    assert_verified(own, target)


def test_layers_are_added_again_and_for_a_draft(wide, target, tmp_path):
    own = copied(wide, tmp_path / "own")
    manifest = add_layers(options(own, target, layers=None, for_drafts="dspark"))
    assert manifest.layers == (0, 1, 2, 3, 4) and len(manifest.raw["sides"]) == 2
    assert manifest.raw["sides"][1]["columns"] == ["hidden.L2"]
    assert manifest.raw["draft_layers"] == {"dspark": [1, 2, 3, 4]}
    assert [a["documents"] for a in manifest.raw["ancestors"]] == [20, 20]
    assert_verified(own, target)
    with pytest.raises(ConfigError, match="nothing is to be added"):
        add_layers(options(own, target, layers=None, for_drafts="dspark"))


def test_the_python_function(plain, wide, target, tmp_path):
    result = spec_data.add_layers(plain, target, tmp_path / "v", layers=[1, 3], device="cpu")
    assert result.documents == 20 and result.reused_shards == result.shards
    assert result.fingerprint == Manifest.read(wide / "manifest.json").fingerprint


# -- kills ------------------------------------------------------------------------------------


KILLS = [("write_once", 0), ("write_shard", 1), ("save_finished", 0), ("save_finished", 1)]


@pytest.mark.parametrize(("codec", "beside"), [("plain", False), ("coded", False), ("coded", True)])
def test_killed_anywhere_it_ends_in_the_same_bytes(
    request, target, tmp_path, monkeypatch, codec, beside
):
    data = request.getfixturevalue(codec)
    add_layers(options(data, target, tmp_path / "whole"))
    own, out = copied(data, tmp_path / "own"), tmp_path / "out"
    given = options(own, target, out if beside else None)
    places = [(running, *kill) for kill in KILLS] + [(running, "seal" if beside else "stage", 0)]
    places += [] if beside else [(appending, "replace_durably", 2)]
    for module, name, count in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed_after(getattr(module, name), count))
            with pytest.raises(KeyboardInterrupt):
                add_layers(given)
        if module is running and not beside:
            assert digests_of_shards(own) == digests_of_shards(data), "it is what it was"
            assert not HiddenStatesDataset(own).manifest.raw.get("sides")
    if not beside:
        with pytest.raises(DatasetError):  # tables or an index that the manifest does not name
            _ = HiddenStatesDataset(own)[0]
    add_layers(given)
    assert digests(out if beside else own) == digests(tmp_path / "whole")


def digests_of_shards(path: Path) -> dict[str, str]:
    names = {record.file for record in Manifest.read(path / "manifest.json").shards}
    return {name: value for name, value in digests(path).items() if name in names}


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layers": "1,4"}, ConfigError, "has layer 4 already"),
        ({"layers": "6"}, TargetError, "do not exist"),
        ({"layers": "1", "for_drafts": "dspark"}, ConfigError, "--layers or --for"),
        ({"layers": None}, ConfigError, "--layers or --for"),
    ],
)
def test_layers_that_cannot_be_added_are_refused(plain, target, change, error, words):
    with pytest.raises(error, match=words):
        add_layers(options(plain, target, **change))
    assert not (plain / ".view").exists()


def test_another_target_is_refused_by_its_files(plain, target, tmp_path):
    tuned = save_target(tmp_path / "tuned")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[5].mlp.down_proj.weight[0, 0] += 0.5
    model.save_pretrained(tuned)
    with pytest.raises(DatasetError, match=r"not the target.*\n.*weights_hash"):
        add_layers(options(plain, tuned))
    config = json.loads((target / "config.json").read_text())
    assert not (plain / ".view").exists()
    shutil.copytree(target, tmp_path / "rope")
    config["rope_parameters"]["rope_theta"] = 5000.0
    (tmp_path / "rope" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DatasetError, match="rope_theta"):
        add_layers(options(plain, tmp_path / "rope"))


def test_a_quantised_target_is_refused(plain, target, tmp_path):
    """The dataset was captured from weights of four bits; the files given are the plain ones."""
    own = copied(plain, tmp_path / "own")
    with_manifest(own, lambda raw: raw["target"].update(quantised_as={"method": "bnb", "bits": 4}))
    with pytest.raises(DatasetError, match="quantised_as: the dataset has"):
        add_layers(options(own, target))


def test_another_target_is_refused_by_its_states(plain, target, tmp_path):
    """All recorded facts are those of the other weights, so only the states can tell."""
    other = save_target(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.mlp.down_proj.weight.mul_(1.2)
    model.save_pretrained(other)
    facts = {}
    own = copied(plain, tmp_path / "own")
    made = spec_data.models.identify.identify_files(other, False)[0]
    facts["weights_hash"] = made["weights_hash"]
    with_manifest(own, lambda raw: raw["target"].update(facts))
    with pytest.raises(
        DatasetError, match=r"does not compute the states.*\n.*differs from a fresh"
    ):
        add_layers(options(own, other))
    assert not list(own.glob("shards/*side*"))


def test_a_target_that_changes_meanwhile_is_found(plain, target, tmp_path, monkeypatch):
    """A document of each shard is compared while it is captured, not only the sample before."""
    own, real, seen = copied(plain, tmp_path / "own"), layer_capture.prove, []

    def then_broken(config, wider, plan, loaded):
        found = real(config, wider, plan, loaded)
        with torch.no_grad():
            loaded.target.model.model.layers[2].mlp.down_proj.weight.mul_(3.0)
        seen.append(1)
        return found

    monkeypatch.setattr(running, "prove", then_broken)
    with pytest.raises(DatasetError, match="does not compute the states"):
        add_layers(options(own, target))
    assert seen and not list(own.glob("shards/*side*"))


def test_a_codec_above_its_bound_stops_it_before_the_first_file(
    coded, target, tmp_path, monkeypatch
):
    own = copied(coded, tmp_path / "own")
    strict = LOSSY["lm4c"].__class__(**vars(LOSSY["lm4c"]) | {"bound": Bound(1e-9, 1e-9, 1e-9)})
    monkeypatch.setitem(LOSSY, "lm4c", strict)
    with pytest.raises(RunError, match="above its bound"):
        add_layers(options(own, target))
    assert not list(own.glob("shards/*side*"))


def test_broken_states_name_the_document(plain, target, tmp_path, monkeypatch):
    own, real = copied(plain, tmp_path / "own"), layer_capture.encode_columns

    def broken(values, columns, tables):
        for value in values.values():
            value[3] = torch.nan
        return real(values, columns, tables)

    monkeypatch.setattr(layer_capture, "encode_columns", broken)
    with pytest.raises(RunError, match=r"documents have unusable states.*non-finite-hidden\.L[13]"):
        add_layers(options(own, target))


def test_another_device_does_not_resume(plain, target, tmp_path, monkeypatch):
    own = copied(plain, tmp_path / "own")
    with monkeypatch.context() as patch:
        patch.setattr(running, "write_shard", killed_after(running.write_shard, 0))
        with pytest.raises(KeyboardInterrupt):
            add_layers(options(own, target))
    real = running.running_facts
    monkeypatch.setattr(running, "running_facts", lambda *a: real(*a) | {"device": "cuda"})
    with pytest.raises(ConfigError, match=r"other settings:\n  device"):
        add_layers(options(own, target))
