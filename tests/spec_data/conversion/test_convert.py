"""`convert` from end to end: the dataset, resuming, refusals; `export` and back again."""

import errno
import json
import shutil
import threading
import time
from dataclasses import replace

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import spec_data
from spec_data import cli
from spec_data.commands.convert import convert
from spec_data.conversion import export
from spec_data.conversion import run as conversion
from spec_data.models.target_options import LoadOptions
from spec_data.pages.report import dataset_text
from spec_data.shards.errors import ConfigError, CorpusError, DatasetError, RunError
from spec_data.shards.files import write_atomically
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from tests.spec_data.conversion import layouts as write
from tests.spec_data.runs import digests, verify

pytestmark = pytest.mark.usefixtures("computed_once")
LAYERS = (1, 2, 4)
# The state before the norm, its length and the state after it are each rounded to bf16.
NORMED = {"rtol": 3 * torch.finfo(torch.bfloat16).eps / 2, "atol": 0.0}


def options(target, src, out, tool="specforge", **changes) -> dict:
    given = {"source": src, "from_": tool, "target": target, "out": out}
    given |= {"codec": "bf16", "loading": LoadOptions(device="cpu"), "max_shard_size": "40KB"}
    return given | changes


@pytest.fixture(scope="module")
def source(tmp_path_factory, samples):
    return write.specforge(tmp_path_factory.mktemp("source") / "states", samples)


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, source):
    out = tmp_path_factory.mktemp("data") / "set"
    convert(**options(target, source, out))
    return out


def check_states(path, samples, exact=True):
    """Every document has the states of its sample."""
    found = {tuple(d["input_ids"].tolist()): d for d in HiddenStatesDataset(path)}
    assert len(found) == len(samples)
    for s in samples:
        document = found[tuple(s.ids.tolist())]
        assert torch.equal(document["loss_mask"].long(), s.mask)
        for k in LAYERS:
            assert torch.equal(document[f"hidden.L{k}"], s.layers[k])
        if exact:
            assert torch.equal(document["hidden.final"], s.final)
        else:
            torch.testing.assert_close(document["hidden.final"], s.final, **NORMED)


def test_a_converted_dataset_has_the_stored_states_and_verifies(data, target, samples, capsys):
    check_states(data, samples)
    assert verify(data=str(data), target=str(target), samples=4, device="cpu") == 0
    assert "fresh forward of 4 documents" in capsys.readouterr().out
    raw = json.loads((data / "manifest.json").read_text())
    found = raw["target"]["converted"]
    assert found["tool"] == "SpecForge" and found["stored_layers"] == [1, 2, 4]
    assert raw["settings"]["converted"]["from"] == "specforge"
    assert raw["corpus"][0]["kind"] == "states of SpecForge"
    text = " ".join(dataset_text(Manifest.of(raw)).split())
    assert "by SpecForge; differs from the target's own blocks by" in text
    assert not (data / ".generate").exists() and len(raw["shards"]) > 1


def test_states_before_the_norm_become_final_states(tmp_path, target, samples):
    src = write.speculators(tmp_path / "src", samples)
    out = tmp_path / "set"
    convert(**options(target, src, out, "speculators"))
    check_states(out, samples, exact=False)
    assert verify(data=str(out), target=str(target), samples=3, device="cpu") == 0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_states_of_eight_bits_verify(tmp_path, target, samples, dtype):
    src = write.deepspec(tmp_path / "src", samples, dtype=dtype)
    out = tmp_path / "set"
    convert(**options(target, src, out, "deepspec"))
    assert verify(data=str(out), target=str(target), samples=12, device="cpu") == 0


def test_a_sample_that_was_not_compared_is_found_by_verify(tmp_path, target, samples, capsys):
    """8 of the 12 samples are compared; one of the others has the states of other tokens."""
    compared = {(2 * i + 1) * len(samples) // 16 for i in range(8)}
    wrong = min(set(range(12)) - compared)
    states = {k: v.flip(0) for k, v in samples[wrong].layers.items()}
    planted = [replace(s, layers=states) if i == wrong else s for i, s in enumerate(samples)]
    convert(**options(target, write.specforge(tmp_path / "src", planted), tmp_path / "set"))
    given = {"data": str(tmp_path / "set"), "target": str(target)}
    assert verify(**given, samples=12, device="cpu") == 1
    assert "differs from a fresh forward" in capsys.readouterr().out


def test_a_stopped_conversion_resumes_to_the_same_bytes(
    tmp_path, target, source, data, monkeypatch
):
    out = tmp_path / "set"
    read = conversion.StoredBackend.capture
    left = [3]

    def stop(self, *args, **given):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return read(self, *args, **given)

    monkeypatch.setattr(conversion.StoredBackend, "capture", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(**options(target, source, out))
    assert (out / ".generate" / "evidence.json").is_file()
    with pytest.raises(ConfigError, match="codec"):
        convert(**options(target, source, out, codec="fine"))
    monkeypatch.setattr(conversion.StoredBackend, "capture", read)
    monkeypatch.setattr(conversion, "find_conventions", None)  # found before
    convert(**options(target, source, out))
    assert digests(out) == digests(data)
    convert(**options(target, source, out))  # complete already
    other = shutil.copytree(source, tmp_path / "other")
    next(other.rglob("*.ckpt")).unlink()
    with pytest.raises(ConfigError, match="corpus"):
        convert(**options(target, other, out))
    next(out.glob("shards/*")).unlink()
    convert(**options(target, source, out))  # what a finished dataset lost is made again
    assert digests(out) == digests(data)


def test_states_that_were_written_again_are_refused_by_what_resumes(
    tmp_path, target, samples, monkeypatch
):
    """Under equal names and sizes: no digest of the source can tell."""
    out, read, left = tmp_path / "set", conversion.StoredBackend.capture, [3]

    def stop(self, *args, **given):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return read(self, *args, **given)

    src = write.specforge(tmp_path / "src", samples)
    monkeypatch.setattr(conversion.StoredBackend, "capture", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(**options(target, src, out))
    monkeypatch.setattr(conversion.StoredBackend, "capture", read)
    shutil.rmtree(src)
    others = [replace(s, layers={k: h.flip(0) for k, h in s.layers.items()}) for s in samples]
    write.specforge(src, others)
    with pytest.raises(RunError, match="begun with other stored states"):
        convert(**options(target, src, out))


def test_malformed_and_not_finite_samples_are_counted_listed_and_limited(
    tmp_path, target, samples, caplog
):
    src = write.specforge(tmp_path / "src", samples)
    file = src / "rows_0-2000" / "data_3.ckpt"
    file.write_bytes(file.read_bytes()[:200])
    file = file.with_name("data_11.ckpt")
    table = torch.load(file, weights_only=True)
    table["aux_hidden_state"][0, 20, 3] = torch.nan
    torch.save(table, file)
    out = tmp_path / "set"
    done = convert(**options(target, src, out, max_shard_size="auto"))
    assert done.dropped == {"non-finite-hidden.L1": 1}
    (entry,) = Manifest.read(out / "manifest.json").corpus
    assert (entry.rows, entry.bad) == (12, 1)
    assert "data_3.ckpt: the file is damaged" in entry.bad_examples[0]
    assert "rows skipped" in caplog.text
    check_states(out, [s for i, s in enumerate(samples) if i not in (3, 11)])
    with pytest.raises(CorpusError, match=r"data_3\.ckpt"):
        convert(**options(target, src, tmp_path / "b", max_bad_rows="0"))


def test_samples_without_a_mask(tmp_path, target, samples):
    src = write.modelopt(tmp_path / "src", samples, layers=LAYERS, masks=False)
    with pytest.raises(CorpusError, match=r"no loss mask is stored; .*mask all"):
        convert(**options(target, src, tmp_path / "a", "modelopt"))
    done = convert(**options(target, src, tmp_path / "b", "modelopt", mask="all"))
    assert done.supervised_tokens == done.tokens == sum(len(s.ids) for s in samples)


def test_the_command_and_the_function(tmp_path, target, source, data, capsys):
    words = ["convert", "--from", "specforge", str(source), "--target", str(target)]
    words += ["--codec", "bf16", "--device", "cpu"]
    words += ["--max-shard-size", "40KB", "--out"]
    assert cli.main([*words, str(tmp_path / "set")]) == 0
    assert "next:  spec-data verify" in capsys.readouterr().err
    assert digests(tmp_path / "set") == digests(data)
    made = spec_data.convert(**options(target, source, tmp_path / "set"))
    assert made.documents == 12 and made.layers == LAYERS


def test_a_dataset_is_written_for_specforge_and_read_again(tmp_path, target, data, samples):
    other = tmp_path / "other"
    made = spec_data.export_dataset(data, "specforge", other)
    assert made.documents == 12 and "1,2,4" in str(made)
    out = tmp_path / "set"
    convert(**options(target, other, out))
    check_states(out, samples)


def test_a_dataset_is_written_for_speculators_and_read_again(
    tmp_path, target, data, samples, capsys
):
    other = tmp_path / "other"
    assert cli.main(["export", "--to", "speculators", str(data), "--out", str(other)]) == 0
    assert "hidden.final by" in capsys.readouterr().out
    row = datasets.load_from_disk(str(other))[0]  # with tensors, as the library reads it
    assert torch.equal(row["input_ids"], samples[0].ids)
    assert int(row["seq_len"]) == len(samples[0].ids)
    out = tmp_path / "set"
    convert(**options(target, other, out, "speculators"))
    check_states(out, samples, exact=False)


def test_what_speculators_learns_from_is_not_the_lossy_output_of_the_last_block(tmp_path, target):
    rows = [{"input_ids": [3 + (7 * i + 5 * t) % 200 for t in range(60)]} for i in range(60)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = spec_data.CaptureOptions(
        layers="1,5", codec="default,final=bf16", device="cpu", num_proc=1, allow_high_nll=True
    )
    spec_data.generate(target, file, tmp_path / "data", options)
    made = spec_data.export_dataset(tmp_path / "data", "speculators", tmp_path / "other")
    dataset = spec_data.open_dataset(tmp_path / "data")
    assert dataset.declared["hidden.L5"].lossy and "hidden.final by" in str(made)
    norm = AutoModelForCausalLM.from_pretrained(target).model.norm
    for number in range(3):
        states = load_file(tmp_path / f"other/hidden_states/hs_{number}.safetensors")
        last = norm(states["hidden_states"][:, -1].float()).detach()
        wanted = dataset[number]["hidden.final"].float()
        assert float((last - wanted).norm() / wanted.norm()) < 5e-3


def arriving(tmp_path, samples, order):
    """A token dataset without states, and a function that brings its files one by one."""
    src = write.speculators(tmp_path / "src", samples)
    files = [src / "hidden_states" / f"hs_{i}.safetensors" for i in order]
    stored = [file.read_bytes() for file in files]
    for file in src.glob("hidden_states/*"):
        file.unlink()

    def write_them(end=True):
        for file, data in zip(files, stored, strict=True):
            file.write_bytes(data[: len(data) // 2])  # it is copied to its place
            time.sleep(0.03)
            file.write_bytes(data)
        if end:
            (src / "hidden_states" / "done").touch()

    return src, write_them


def test_states_are_converted_while_they_are_written(tmp_path, target, samples, monkeypatch):
    """In any order, some half written; the bytes are those of a conversion afterwards."""
    monkeypatch.setattr("spec_data.conversion.samples._POLL", 0.01)
    order = [3, 0, 1, 2, 5, 4, 6, 8, 7, 9, 11, 10]
    src, write_them = arriving(tmp_path, samples, order)
    out, made = tmp_path / "set", []
    given = options(target, src, out, "speculators", follow=True)
    thread = threading.Thread(target=lambda: made.append(convert(**given)))
    thread.start()
    writer = threading.Thread(target=write_them)
    writer.start()
    followed = FollowedDataset(out, timeout=20.0, await_start=True)
    assert followed.wait_for(range(len(followed)), threading.Event())
    thread.join()
    writer.join()
    assert made[0].documents == 12
    check_states(out, samples, exact=False)
    convert(**options(target, src, tmp_path / "later", "speculators"))
    assert digests(out / "shards") == digests(tmp_path / "later" / "shards")


def test_states_that_never_come_are_left_out_or_end_the_wait(
    tmp_path, target, samples, monkeypatch, caplog
):
    monkeypatch.setattr("spec_data.conversion.samples._POLL", 0.01)
    src, write_them = arriving(tmp_path, samples, [i for i in range(12) if i != 10])
    given = options(target, src, tmp_path / "set", "speculators", follow=True)
    given["max_shard_size"] = "auto"
    init = conversion.FollowedSamples.__init__
    monkeypatch.setattr(
        conversion.FollowedSamples,
        "__init__",
        lambda *args, **kw: init(*args, **kw | {"timeout": 0.3}),
    )
    with pytest.raises(RunError, match=r"no new file for 0\.3 s.*touch .*hidden_states/done"):
        convert(**given)
    write_them(end=False)
    with pytest.raises(RunError, match=r"no new file for 0\.3 s"):
        convert(**given)
    (src / "hidden_states" / "done").touch()
    assert list(convert(**given).dropped.values()) == [1]
    assert "warning[left-out-samples]" in caplog.text
    assert "hs_10.safetensors was never written" in caplog.text
    with pytest.raises(ConfigError, match="waits for the files of speculators"):
        convert(**options(target, src, tmp_path / "b", "deepspec", follow=True))


def test_a_malformed_file_that_is_followed_is_left_out(tmp_path, target, samples, caplog):
    src, write_them = arriving(tmp_path, samples, list(range(12)))
    write_them()
    shutil.copy(*(src / "hidden_states" / f"hs_{i}.safetensors" for i in (0, 5)))
    given = options(target, src, tmp_path / "set", "speculators", follow=True)
    assert list(convert(**given | {"max_shard_size": "auto"}).dropped.values()) == [1]
    assert "hs_5.safetensors is left out: the file has the states of other tokens" in caplog.text


def test_what_cannot_be_exported(tmp_path, data, target, source, monkeypatch):
    out = tmp_path / "o"
    with pytest.raises(ConfigError, match="the dataset has 1,2,4"):
        spec_data.export_dataset(data, "specforge", out, layers=[1, 3])
    sparse = tmp_path / "sparse"
    convert(**options(target, source, sparse, final="supervised"))
    with pytest.raises(DatasetError, match="not empty"):
        spec_data.export_dataset(data, "specforge", tmp_path)
    with pytest.raises(DatasetError, match="--final all"):
        spec_data.export_dataset(sparse, "specforge", out)
    written = []

    def fill_the_disk(file, data):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "no space left")
        written.append(file)
        write_atomically(file, data)

    with monkeypatch.context() as full:
        full.setattr(export, "write_atomically", fill_the_disk)
        with pytest.raises(RunError, match="the disk is full"):
            spec_data.export_dataset(data, "specforge", out)
    with pytest.raises(ConfigError, match="layers"):
        spec_data.export_dataset(data, "specforge", out, layers=[1, 4])
    times = [file.stat().st_mtime_ns for file in written]
    assert spec_data.export_dataset(data, "specforge", out).documents == 12  # goes on
    assert [file.stat().st_mtime_ns for file in written] == times
