"""Rules of generate: a dataset depends only on its settings, however often the run was killed."""

import json
import os
import re

import pytest
import torch
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spec_data.generation import units
from spec_data.generation.units import check_free_space, finalize
from spec_data.shards.errors import (
    ConfigError,
    DatasetError,
    MissingError,
    RunError,
)
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.resumable import write_record
from spec_data.shards.schema import TEACHERS
from tests import forked
from tests.marks import long_but
from tests.spec_data.runs import digests, run, save_target, verify, with_teacher
from tests.spec_data.shards.integrity_tools import flip
from tests.tolerance import close, network, same_choice

one_thread = forked.one_thread
FORWARD = {"terms": network(6), "dtype": torch.float32}  # the six layers of the tiny targets


def test_documents_equal_a_plain_forward_of_the_rendered_chat(reference, target, corpus):
    dataset = HiddenStatesDataset(reference)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert len(dataset) == len(rows)
    assert len(dataset.manifest.shards) > 2
    head = load_head_tensors(reference)
    assert torch.equal(head["embed_tokens"], model.get_input_embeddings().weight)
    assert torch.equal(head["lm_head"], model.get_output_embeddings().weight)
    for index in (0, 1, 13, 29):
        row = dataset[index]
        ids = tokenizer.apply_chat_template(rows[index]["messages"], return_dict=False)
        assert tokenizer.decode(ids[-1:]) == "\n"  # after the last end-of-turn token: the tail
        ids = ids[:-1]
        assert row["input_ids"].tolist() == ids
        with torch.no_grad():
            plain = model(torch.tensor([ids]), output_hidden_states=True)
        for k in (0, 2, 4):
            state = plain.hidden_states[k + 1][0]
            stored = row[f"hidden.L{k}"].float()
            close(stored, state, **FORWARD, stored=torch.bfloat16)
        final = plain.hidden_states[-1][0]
        close(row["hidden.final"].float(), final, **FORWARD, stored=torch.bfloat16)
        logits = plain.logits[0]
        kept = with_teacher(row)
        same_choice(logits[kept], row["target_argmax"][kept].long(), **FORWARD)
        close(row["target_logsumexp"][kept], logits[kept].logsumexp(-1), **FORWARD)
        text = tokenizer.decode(row["input_ids"][row["loss_mask"]])
        answers = [m["content"] for m in rows[index]["messages"] if m["role"] == "assistant"]
        assert text == "".join(a + "<|im_end|>" for a in answers)


def test_config_of_the_target_is_complete_and_names_no_path(reference, target):
    """Defaults that the code of the family would add are written out for the trainer."""
    stored = json.loads((reference / "target" / "config.json").read_text())
    assert AutoConfig.from_pretrained(reference / "target").to_diff_dict() | {
        "dtype": None
    } == AutoConfig.from_pretrained(target).to_diff_dict() | {"dtype": None}
    sparse = json.loads((target / "config.json").read_text())
    assert {"rms_norm_eps", "rope_parameters", "head_dim"} <= set(stored)
    assert set(sparse) - {"_name_or_path"} <= set(stored)
    assert stored["dtype"] == "float32"
    assert str(target) not in json.dumps(stored)


def test_a_crash_while_sealing_is_finished_by_the_same_command(
    reference, target, corpus, tmp_path, monkeypatch
):
    out = tmp_path / "data"

    def crash(*_):
        raise OSError("no power")

    monkeypatch.setattr(units, "temporary_files", crash)
    with pytest.raises(OSError, match="no power"):
        run(target, corpus, out)
    monkeypatch.undo()
    run(target, corpus, out)
    assert digests(out) == digests(reference)


def test_workers_then_seal_give_the_same_bytes(reference, target, corpus, tmp_path):
    out = tmp_path / "data"
    run(target, corpus, out, workers="0/2")  # another n, before
    for worker in (2, 0):
        assert run(target, corpus, out, workers=f"{worker}/3", num_proc=1 + worker) is None
    with pytest.raises(MissingError, match=r"units are not finished"):
        finalize(out, set())
    assert run(target, corpus, out, workers="1/3") is not None  # the last one seals
    assert digests(out) == digests(reference)
    finalize(out, set())  # nothing to do
    assert run(target, corpus, out, workers="0/3") is not None
    assert digests(out) == digests(reference)


def test_changed_settings_never_mix(target, corpus, tmp_path):
    out = tmp_path / "data"
    run(target, corpus, out, workers="0/3")

    def files():
        return {name: data for name, data in digests(out).items() if not name.endswith(".lock")}

    before = files()
    thinking = {"chat_template_kwargs": '{"enable_thinking": false}'}
    for change, named in (
        ({"layers": "0,2"}, "layers"),
        ({"mask": "last-turn"}, "mask"),
        ({"limit": 5}, "limit"),
        (thinking, "tokenizer.chat_template_kwargs.enable_thinking"),
        ({"codec": "fine"}, "codec.aux"),
        ({"final": "supervised"}, "final"),
    ):
        with pytest.raises(ConfigError, match=f"other settings.*\n  {re.escape(named)}: "):
            run(target, corpus, out, **change)
        assert files() == before


def test_foreign_directories_are_not_touched(target, corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DatasetError, match="not empty"):
        run(target, corpus, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_every_document_is_stored_or_counted(target, tmp_path):
    good = {"role": "assistant", "content": "yes " * 30}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, good]},
        {"messages": [{"role": "user", "content": "a"}, good]},  # duplicate
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "user", "content": "long " * 200}, good]},  # answer past the cut
        {"messages": [{"role": "user", "content": "b"}, {**good, "content": "w " * 400}]},  # cut
    ]
    rows += [{"messages": [{"role": "user", "content": f"{i}"}, good]} for i in range(300)]
    file = tmp_path / "mixed.jsonl"
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, "{broken")
    file.write_text("\n".join(lines))
    counts = run(target, file, tmp_path / "data", max_length=256).documents
    assert counts.read == 306
    assert counts.bad_rows == 1
    assert counts.unrendered == {"no-assistant-turn": 1}
    assert counts.dropped == {"duplicate": 1, "nothing-supervised-within-max-length": 1}
    assert counts.cut == 2
    assert counts.stored == 302
    assert counts.read == counts.bad_rows + 1 + counts.rendered
    assert counts.rendered == counts.stored + sum(counts.dropped.values())


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
def test_families_from_disk_to_dataset(corpus, tmp_path, family):
    target = save_target(tmp_path / "target", family)
    manifest = run(target, corpus, tmp_path / "data", limit=12)
    form = manifest.packing.form
    assert (form == "rows") == (family == "mamba")
    dataset = HiddenStatesDataset(tmp_path / "data")
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for index in (0, 11):
        row = dataset[index]
        with torch.no_grad():
            logits = model(row["input_ids"][None]).logits[0]
        kept = with_teacher(row)
        close(row["target_logsumexp"][kept], logits[kept].logsumexp(-1), **FORWARD)


def test_broken_states_stop_the_run_and_nothing_is_stored(target, corpus, tmp_path):
    poisoned = tmp_path / "target"
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(poisoned)
    tokenizer.save_pretrained(poisoned)
    with pytest.raises(RunError, match="all documents that were tried are not finite"):
        run(poisoned, corpus, tmp_path / "data")
    assert not list((tmp_path / "data").glob("shards/*"))


def test_equal_top_logits_and_a_zero_embedding_are_no_broken_states(target, corpus, tmp_path):
    """In bfloat16 the two largest logits are often equal; padding may have an embedding of zeros,
    and chat templates use its token."""
    changed = tmp_path / "target"
    model = AutoModelForCausalLM.from_pretrained(target).bfloat16()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model.get_input_embeddings().weight.data[tokenizer.eos_token_id] = 0
    model.save_pretrained(changed)
    tokenizer.save_pretrained(changed)
    for out, given in (("ties", {"supervision": "topk:2"}), ("zeros", {"layers": "-1,2"})):
        manifest = run(changed, corpus, tmp_path / out, **given)
        assert not manifest.documents.dropped
        assert verify(data=str(tmp_path / out), device="cpu") == 0
    top = [row["topk_logits"][with_teacher(row)] for row in HiddenStatesDataset(tmp_path / "ties")]
    assert any((logits[:, 0] == logits[:, 1]).any() for logits in top), "the test has no tie"
    rows = HiddenStatesDataset(tmp_path / "zeros")
    assert any((row["hidden.L-1"] == 0).all(-1).any() for row in rows), "it has no zeros"


@pytest.mark.parametrize(
    ("shards", "packing"), [("100MB", "auto"), ("2KB", "auto"), ("100MB", "block-causal")]
)
def test_one_document_with_unusable_states_is_left_out_and_counted(
    target, corpus, tmp_path, shards, packing
):
    """One document has a token whose embedding is infinite; no other document has that token.

    It is one of the proofs' documents, and has no shard for itself. A mask lets what is not finite
    through to the other documents of its pack.
    """
    poisoned = tmp_path / "target"
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    used = {t for line in corpus.read_text().splitlines() for t in tokenizer(line)["input_ids"]}
    free = next(i for i in range(40, len(tokenizer)) if i not in used)
    model.get_input_embeddings().weight.data[free] = float("inf")
    model.save_pretrained(poisoned)
    tokenizer.save_pretrained(poisoned)
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    file = tmp_path / "chats.jsonl"
    bad = {"input_ids": [5, 6, free, 7], "loss_mask": [0, 0, 1, 1]}
    file.write_text("\n".join(json.dumps(r) for r in [*rows, bad]))
    manifest = run(poisoned, file, tmp_path / "data", max_shard_size=shards, packing=packing)
    counts = manifest.documents
    assert sum(v for k, v in counts.dropped.items() if k.startswith("non-finite")) == 1
    assert counts.stored == len(rows)
    assert manifest.packing.form not in ("rows", "single"), "its packs prove nothing"
    run(target, file, tmp_path / "intact")
    prompts = HiddenStatesDataset(tmp_path / "intact").prompts
    assert manifest.left_out.prompts == [f"{int(prompts[-1]):016x}"], "it may be held out"
    assert (HiddenStatesDataset(tmp_path / "data").prompts == prompts[:-1]).all()


def test_a_full_disk_is_found_before_the_run_and_survived_during_it(
    target, corpus, tmp_path, monkeypatch
):
    with pytest.raises(RunError, match="bytes are still to be written"):
        check_free_space(tmp_path, 1 << 60)
    out = tmp_path / "data"
    real = units.write_shard
    calls = []

    def full(path, unit, columns):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", str(path))
        return real(path, unit, columns)

    monkeypatch.setattr(units, "write_shard", full)
    with pytest.raises(RunError, match="the disk is full"):
        run(target, corpus, out)
    assert len(list((out / "shards").iterdir())) == 2
    monkeypatch.undo()
    run(target, corpus, out)
    assert len(HiddenStatesDataset(out)) == 30


def test_target_files_that_changed_before_sealing_stop_it(target, corpus, tmp_path):
    out = tmp_path / "data"
    run(target, corpus, out, workers="0/2")
    tokenizer = out / "target" / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:100])
    for _ in range(2):
        with pytest.raises(DatasetError, match=r"tokenizer\.json: changed since it was written"):
            run(target, corpus, out, workers="1/2")


def test_a_finished_dataset_is_not_captured_again(reference, source, caplog):
    caplog.set_level("INFO")
    assert run(*source, reference) is not None
    assert "is complete already: nothing to do" in caplog.text
    with pytest.raises(ConfigError, match=r"other settings.*\n  layers: "):
        run(*source, reference, layers="0,2")


def test_a_unit_with_a_damaged_record_is_captured_again(target, corpus, tmp_path):
    given = {"workers": "0/2", "max_shard_size": "20KB"}
    run(target, corpus, tmp_path / "data", **given)
    file = tmp_path / "data" / ".generate" / "unit-00000.json"
    assert units.finished_unit(tmp_path / "data", 0)
    raw = json.loads(file.read_text())
    raw["agreement"][0][2] += 1.0
    before = digests(tmp_path / "data" / "shards")
    write_record(tmp_path / "other.json", raw | {"agreement": {"tokens": []}})
    with_other_fields = (tmp_path / "other.json").read_text()
    for text in (json.dumps(raw), '{"record":', with_other_fields):
        file.write_text(text)
        assert units.finished_unit(tmp_path / "data", 0) is None
        run(target, corpus, tmp_path / "data", **given)
        assert digests(tmp_path / "data" / "shards") == before
    shard = tmp_path / "data" / "shards" / "unit-00000.arrow"
    os.truncate(shard, 999)
    (killed := shard.with_name(f".{shard.name}.0123456789ab.tmp")).write_text("half a shard")
    run(target, corpus, tmp_path / "data", **given)
    assert not killed.exists()
    assert digests(tmp_path / "data" / "shards") == before
    flip(shard)  # is found when the dataset is sealed
    with pytest.raises(DatasetError, match=r"unit-00000\.arrow"):
        run(target, corpus, tmp_path / "data", **given | {"workers": "1/2"})


@pytest.mark.parametrize("supervision", long_but(["topk:5"], ["final-hidden", "topk:5", "logits"]))
def test_a_teacher_at_every_token_agrees_with_one_where_it_is_read(
    target, corpus, tmp_path, supervision
):
    given = {"supervision": supervision}
    some = run(target, corpus, tmp_path / "some", **given)
    every = run(target, corpus, tmp_path / "every", teacher="all", **given)
    assert [m.teacher for m in (some, every)] == ["supervised", "all"]
    few, many = HiddenStatesDataset(tmp_path / "some"), HiddenStatesDataset(tmp_path / "every")
    for index in range(len(few)):
        a, b = few[index], many[index]
        kept = with_teacher(a)
        assert kept.any() and not kept.all()
        for name in few.columns:
            if name in TEACHERS:
                assert not a[name][~kept].any()
                assert b[name][~kept].any()
            if name in TEACHERS and a[name].is_floating_point():  # other rows share a product
                stored = torch.bfloat16 if name == "logits" else torch.float32
                close(a[name][kept].float(), b[name][kept].float(), **FORWARD, stored=stored)
            else:
                there = kept if name in TEACHERS else slice(None)
                assert torch.equal(a[name][there], b[name][there])
    figures = [structs.asdict(m.agreement.total) for m in (some, every)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert verify(data=str(tmp_path / "some"), target=str(target), device="cpu") == 0
