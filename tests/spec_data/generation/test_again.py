"""What a finished dataset has lost comes back with the sealed bytes, or nothing is replaced."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs

import spec_data
from spec_data import cli
from spec_data.generation import again, proof
from spec_data.generation import run as run_module
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.files import MANIFEST
from spec_data.shards.reader import INDEX, HiddenStatesDataset
from spec_data.shards.schema import Manifest
from tests.spec_data.runs import ON_CPU, call, digests, options, run, save_target, write_corpus
from tests.spec_data.shards.integrity_tools import flip

UNIT = "shards/unit-{:05d}.arrow"
VARIANTS = {
    "exact": {},
    "lossy": {"codec": "default", "max_shard_size": "20KB"},
    "rows": {"packing": "rows", "final": "supervised"},
    "top-k": {"supervision": "topk:4"},
    "automatic": {"max_shard_size": "auto", "batch_tokens": "64"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("again") / "target")


@pytest.fixture(scope="module")
def corpus(target):
    return write_corpus(target.parent / "chats.jsonl")


@pytest.fixture(scope="module")
def whole(target, corpus):
    """Finished datasets by name, made once."""
    made = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = target.parent / name
            run(target, corpus, made[name], **VARIANTS[name])
        return made[name]

    return of


@pytest.fixture
def data(whole, tmp_path):
    return Path(shutil.copytree(whole("exact"), tmp_path / "data"))


@pytest.fixture
def captured(monkeypatch):
    """The units that are captured again."""
    units = []
    real = again.capture_units

    def noted(target, plan, wanted, *rest):
        wanted = list(wanted)
        units.extend(wanted)
        return real(target, plan, wanted, *rest)

    monkeypatch.setattr(again, "capture_units", noted)
    return units


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def swapped(file: Path) -> None:
    shutil.copy(file.with_name("unit-00001.arrow"), file)


def linked(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, zeroed, swapped, linked])
def test_one_lost_shard_is_captured_again_alone(target, corpus, data, captured, damage):
    before = digests(data)
    damage(data / UNIT.format(0))
    run(target, corpus, data)
    assert captured == [0]
    assert digests(data) == before


@pytest.mark.parametrize("name", VARIANTS)
def test_every_file_but_the_manifest_comes_back(target, corpus, whole, tmp_path, name, captured):
    """Each alone, of every way to store states; and all of them at once."""
    before = digests(whole(name))
    names = sorted(before.keys() - {MANIFEST})
    assert {INDEX, "README.md", "state.json", "target/head.safetensors"} <= set(names)
    folders = [[n] for n in names if name == "exact" or n in (INDEX, "codec.safetensors")]
    for n, lost in enumerate([*folders, names]):
        out = Path(shutil.copytree(whole(name), tmp_path / str(n)))
        for file in lost:
            (out / file).unlink()
        for folder in ("shards", "target"):
            if lost == names:
                shutil.rmtree(out / folder)
        captured.clear()
        run(target, corpus, out, **VARIANTS[name])
        assert digests(out) == before, lost
        assert len(captured) == sum(file.startswith("shards/") for file in lost)


def test_several_workers_bring_back_their_own_shards(target, corpus, data, captured):
    before = digests(data)
    shards = sorted((data / "shards").iterdir())
    assert len(shards) > 2
    for file in shards:
        file.unlink()
    call(spec_data.generate, options(target, corpus, data, workers="1/2"))
    assert captured == list(range(1, len(shards), 2))
    run(target, corpus, data, workers="0/2")
    assert sorted(captured) == list(range(len(shards)))
    assert digests(data) == before


def test_answers_that_the_target_sampled_come_back_too(target, tmp_path):
    """A corpus of `regenerate`, captured with --on-policy: the same command, the same bytes."""
    prompts = write_corpus(tmp_path / "prompts.jsonl", 12)
    own = tmp_path / "own.jsonl"
    made = spec_data.regenerate(str(prompts), str(own), target=str(target), max_new_tokens=6)
    assert made is not None
    out = tmp_path / "data"
    given = {"max_shard_size": "20KB", "allow_high_nll": True}
    run(target, own, out, **given)
    before = digests(out)
    (out / UNIT.format(1)).unlink()
    run(target, own, out, **given)
    assert digests(out) == before


def test_documents_that_were_left_out_stay_left_out(corpus, tmp_path, captured):
    """A unit of which one document had states that are not finite."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    poisoned = save_target(tmp_path / "poisoned")
    model = AutoModelForCausalLM.from_pretrained(poisoned)
    tokenizer = AutoTokenizer.from_pretrained(poisoned)
    used = {t for line in corpus.read_text().splitlines() for t in tokenizer(line)["input_ids"]}
    free = next(i for i in range(40, len(tokenizer)) if i not in used)
    model.get_input_embeddings().weight.data[free] = float("inf")
    model.save_pretrained(poisoned)
    file = tmp_path / "chats.jsonl"
    bad = {"input_ids": [5, 6, free, 7], "loss_mask": [0, 0, 1, 1]}
    file.write_text(corpus.read_text() + json.dumps(bad))
    out = tmp_path / "data"
    manifest = run(poisoned, file, out)
    (unit,) = manifest.left_out.units
    before = digests(out)
    for name in (UNIT.format(unit), "left_out.arrow", INDEX):
        (out / name).unlink()
    run(poisoned, file, out)
    assert captured == [unit] and digests(out) == before


def test_a_view_of_a_repaired_dataset_reads_again(target, corpus, data, tmp_path):
    spec_data.select(data, tmp_path / "view", sample="5")
    expected = [d["doc_id"] for d in HiddenStatesDataset(tmp_path / "view")]
    (data / UNIT.format(0)).unlink()
    run(target, corpus, data)
    assert [d["doc_id"] for d in HiddenStatesDataset(tmp_path / "view")] == expected


def test_a_lost_manifest_is_said_to_need_a_copy_and_nothing_is_overwritten(
    target, corpus, whole, data, tmp_path
):
    """A whole capture by the same releases has the very manifest that was lost."""
    (data / MANIFEST).unlink()
    before = digests(data)
    with pytest.raises(DatasetError, match=r"without their manifest\.json.*Restore that file"):
        run(target, corpus, data)
    with pytest.raises(MissingError, match=r"without their manifest\.json.*Restore that file"):
        HiddenStatesDataset(data)
    assert digests(data) == before
    run(target, corpus, tmp_path / "again")
    shutil.copy(tmp_path / "again" / MANIFEST, data)
    assert digests(data) == digests(whole("exact"))


# -- other bytes ----------------------------------------------------------------------------------


@pytest.fixture
def other_machine(monkeypatch):
    """A target whose states differ in their last bits, and what it says of itself."""
    real = again.capture_units

    def rounded(*given):
        for unit, captured in real(*given):
            captured.data.tokens["hidden.L2"] ^= 1
            yield unit, captured

    monkeypatch.setattr(again, "capture_units", rounded)
    facts = proof.running_facts

    def elsewhere(target, size):
        return facts(target, size) | {"device": "another GPU"}

    monkeypatch.setattr(again, "running_facts", elsewhere)


def test_other_bytes_replace_nothing_and_what_differs_is_said(
    target, corpus, data, other_machine, monkeypatch
):
    flip(data / UNIT.format(0))
    (data / UNIT.format(2)).unlink()
    (data / "state.json").unlink()
    before = digests(data)
    with pytest.raises(RunError) as caught:
        run(target, corpus, data)
    said = str(caught.value)
    rows = Manifest.read(data / MANIFEST).shards[0].rows
    assert f"unit-00000.arrow: captured again, its bytes are others (of {rows} of {rows}" in said
    assert "Sealed with device cpu, here another GPU" in said
    assert "capture the whole dataset again: into another --out, or after deleting" in said
    after = digests(data)
    assert after.pop("state.json")  # what could be made was put back
    assert after == before
    monkeypatch.undo()
    run(target, corpus, data)  # the machine that made it
    assert spec_data.verify(data, running=ON_CPU).ok


def test_other_releases_are_tried_and_their_bytes_decide(target, corpus, data, monkeypatch):
    """With nothing lost they are refused as ever; with a lost shard its bytes are compared."""
    before = digests(data)
    here = proof.versions()
    for place in ("setup", "proof"):
        monkeypatch.setattr(
            f"spec_data.generation.{place}.versions", lambda: here | {"transformers": "9.9.0"}
        )
    with pytest.raises(ConfigError, match=r"versions\.transformers: '.*' -> '9\.9'"):
        run(target, corpus, data)
    (data / UNIT.format(1)).unlink()
    run(target, corpus, data)
    assert digests(data) == before


def test_a_forward_of_another_size_that_finished_it_is_tried(
    target, corpus, data, captured, monkeypatch
):
    """A run that was out of memory went on with smaller forwards: the manifest has both."""
    manifest = Manifest.read(data / MANIFEST)
    size = manifest.captured_with["batch_tokens"]
    runs = [structs.asdict(manifest)["captured_with"] | {"batch_tokens": size}]
    changed = manifest.changed(
        captured_with=manifest.captured_with | {"batch_tokens": 64}, also_captured_with=runs
    ).with_fingerprint()
    real = Manifest.read
    monkeypatch.setattr(
        Manifest, "read", lambda *a: changed if Path(a[0]) == data / MANIFEST else real(*a)
    )
    tried = []
    settings = again.CaptureSettings
    monkeypatch.setattr(
        again,
        "CaptureSettings",
        lambda **given: tried.append(given["batch_tokens"]) or settings(**given),
    )
    before = digests(data / "shards")
    (data / UNIT.format(0)).unlink()
    (data / "state.json").unlink()  # of the manifest that was read
    run(target, corpus, data)
    assert digests(data / "shards") == before
    assert tried in ([64], [64, size])


def test_other_settings_and_another_corpus_are_refused_first(target, corpus, data, tmp_path):
    (data / UNIT.format(0)).unlink()
    before = digests(data)
    more = tmp_path / "chats.jsonl"
    more.write_text(corpus.read_text() + corpus.read_text().splitlines()[0])
    for source, changes, words in [
        (corpus, {"layers": "0,2"}, "layers: "),
        (more, {}, "corpus: "),
        (corpus, {"max_length": 12}, "max_length: "),
    ]:
        with pytest.raises(ConfigError, match=rf"other settings.*\n  {words}"):
            run(target, source, data, **changes)
    assert digests(data) == before


def test_a_plan_of_other_documents_is_refused_in_words(target, corpus, data, monkeypatch):
    """Another release of a tokenizer, say, makes other tokens of the same rows."""
    (data / UNIT.format(0)).unlink()
    real = again.make_plan

    def shorter(corpus, setup, *rest):
        return real(
            corpus, again.replace(setup, options=again.replace(setup.options, max_length=40))
        )

    monkeypatch.setattr(again, "make_plan", shorter)
    with pytest.raises(RunError, match="gives other documents here than were captured"):
        run(target, corpus, data)


def test_a_readme_that_somebody_edited_is_left_alone(target, corpus, data):
    (data / "README.md").write_text("mine")
    run(target, corpus, data)
    assert (data / "README.md").read_text() == "mine"


def test_a_killed_repair_leaves_nothing_half_done(target, corpus, data, monkeypatch):
    before = digests(data)
    for unit in (0, 1):
        (data / UNIT.format(unit)).unlink()
    real = again.write_shard

    def killed(path, *rest):
        if path.name == "unit-00001.arrow":
            path.with_name(".unit-00001.arrow.0123456789ab.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        return real(path, *rest)

    monkeypatch.setattr(again, "write_shard", killed)
    monkeypatch.setattr(again.shutil, "rmtree", lambda *a, **k: None)  # as if by SIGKILL
    with pytest.raises(KeyboardInterrupt):
        run(target, corpus, data)
    assert (data / UNIT.format(0)).is_file() and not (data / UNIT.format(1)).exists()
    monkeypatch.undo()
    run(target, corpus, data)
    assert digests(data) == before


# -- said beforehand ------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_captured_and_changes_nothing(
    target, corpus, data, tmp_path, captured, capsys
):
    given = {**options(target, corpus, data), "corpus": str(corpus)}
    words = [w for name, v in given.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    assert cli.main(["generate", *words, "--dry-run"]) == 0
    assert "complete: every file is what was sealed" in capsys.readouterr().out
    (data / UNIT.format(0)).unlink()
    flip(data / UNIT.format(2))
    before = digests(data)
    assert cli.main(["generate", *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    shards = len(Manifest.read(data / MANIFEST).shards)
    assert f"2 of {shards} shards would be captured again" in said.out
    assert "unit-00000.arrow: missing" in said.out
    assert "unit-00002.arrow: its bytes are not those that were sealed" in said.out
    assert "next:  spec-data generate" in said.err and "--dry-run" not in said.err
    assert not captured and digests(data) == before
    words[words.index("--out") + 1] = str(tmp_path / "new")
    assert cli.main(["generate", *words, "--dry-run"]) == 0
    assert "the whole corpus would be captured" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_ray_leaves_a_repair_to_one_process(target, corpus, data, monkeypatch):
    (data / UNIT.format(0)).unlink()
    corpus, setup = _inputs(target, corpus, data)
    from spec_data.generation.output import LocalOutput
    from spec_data.generation.workers import Worker

    with pytest.raises(ConfigError, match="run the same command without --engine"):
        run_module.write_dataset(corpus, setup, LocalOutput(data), Worker(), fleet=object())


def _inputs(target, corpus, out):
    from tests.spec_data.runs import inputs_of

    return inputs_of(**options(target, corpus, out))


def test_a_folder_in_the_place_of_a_shard_is_not_removed(target, corpus, data):
    (data / UNIT.format(0)).unlink()
    (data / UNIT.format(0)).mkdir()
    (data / UNIT.format(0) / "mine").write_text("mine")
    with pytest.raises(RunError, match="a folder lies in the place of a file; move it away"):
        run(target, corpus, data)
    assert (data / UNIT.format(0) / "mine").read_text() == "mine"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_shard_of_a_gpu_comes_back_there(target, corpus, tmp_path):
    out = tmp_path / "data"
    run(target, corpus, out, device="cuda")
    before = digests(out)
    (out / UNIT.format(0)).unlink()
    run(target, corpus, out, device="cuda")
    assert digests(out) == before
