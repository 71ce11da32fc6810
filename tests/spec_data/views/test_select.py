"""`select` against plain Python: which documents, which masks, what is refused, what is linked."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from spec_data.cli import main
from spec_data.corpus.prompt_overlap import Grams
from spec_data.options.view_options import DropColumnsConfig, SelectConfig
from spec_data.shards import seal as sealing
from spec_data.shards.errors import ConfigError, DatasetError, DraftError, RunError
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import Manifest
from spec_data.shards.turn_masks import supervised_spans
from spec_data.views import write_view as writing
from spec_data.views.benchmarks import read_benchmark
from spec_data.views.choosing import sample_size
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.scores import document_scores
from spec_data.views.select_view import plan_select
from spec_data.views.stored_documents import document_id
from spec_data.views.write_view import view_sizes, write_view
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import digests, run, save_target, write_corpus
from tests.spec_data.views.view_tools import (
    Killed,
    assert_same_documents,
    assert_verified,
    documents_of,
)


def select(data, out, **options) -> Manifest:
    return write_view(out, plan_select(SelectConfig(data=str(data), out=str(out), **options)))


def drop(data, out, **options) -> Manifest:
    config = DropColumnsConfig(data=str(data), out=str(out), **options)
    return write_view(out, plan_drop_columns(config))


def predicting(mask: torch.Tensor) -> torch.Tensor:
    """Which tokens predict a supervised one, in plain Python."""
    flags = mask.tolist()
    return torch.tensor([t + 1 < len(flags) and flags[t + 1] for t in range(len(flags))])


# -- which documents --------------------------------------------------------------------------


def test_conditions_keep_the_documents_that_plain_python_keeps(data, tmp_path):
    documents = documents_of(data)
    plain = [
        d
        for d in documents
        if 10 <= len(d["input_ids"]) <= 30 and 4 <= int(d["loss_mask"].sum()) <= 12
    ]
    assert 0 < len(plain) < len(documents)
    options = {"min_length": 10, "max_length": 30, "min_supervised": 4, "max_supervised": 12}
    sizes = view_sizes(
        plan_select(SelectConfig(data=str(data), out=str(tmp_path / "v"), **options))
    )
    assert not (tmp_path / "v").exists(), "sizes write nothing"
    manifest = select(data, tmp_path / "v", **options)
    assert_same_documents(tmp_path / "v", plain)
    assert_verified(tmp_path / "v")
    assert sizes.bytes == manifest.totals.bytes, "exact"
    counts = manifest.documents
    assert counts.stored + sum(counts.dropped.values()) == len(documents)
    assert set(counts.dropped) == {"select:length", "select:supervised"}
    assert manifest.view.of[0].fingerprint == HiddenStatesDataset(data).manifest.fingerprint


def test_whole_shards_are_links_and_the_rest_is_joined(data, tmp_path, monkeypatch):
    documents = documents_of(data)
    keep = [d for n, d in enumerate(documents) if n < 10 or n % 3 == 0]  # the first shard is whole
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(d["doc_id"] for d in reversed(keep)))
    manifest = select(data, tmp_path / "v", ids=str(ids))
    assert_same_documents(tmp_path / "v", keep)
    files = [tmp_path / "v" / record.file for record in manifest.shards]
    assert [f.stat().st_nlink for f in files] == [2, 1], "one linked, the parts of two joined"

    def no_links(*_):
        raise OSError("no hard links here")

    monkeypatch.setattr(writing.os, "link", no_links)
    select(data, tmp_path / "copied", ids=str(ids))
    assert digests(tmp_path / "copied") == digests(tmp_path / "v"), "the same bytes"


def test_a_sample_is_nested_and_does_not_depend_on_what_else_there_is(data, tmp_path):
    plain = {d["doc_id"] for d in documents_of(data)}
    chosen = {}
    for amount in ("6", "50%", "0.5"):
        out = tmp_path / amount
        select(data, out, sample=amount, seed=3)
        chosen[amount] = {d["doc_id"] for d in documents_of(out)}
    assert len(chosen["6"]) == 6 and chosen["6"] < chosen["50%"] == chosen["0.5"] < plain
    select(data, tmp_path / "other", sample="6", seed=4)
    assert {d["doc_id"] for d in documents_of(tmp_path / "other")} != chosen["6"]
    manifest = select(data, tmp_path / "rest", not_in=(str(tmp_path / "6"),))
    rest = {d["doc_id"] for d in documents_of(tmp_path / "rest")}
    assert rest == plain - chosen["6"]
    assert manifest.documents.dropped == {"select:in-other-dataset": 6}


@pytest.mark.parametrize("amount", ["0", "-5", "120%", "1.5", "some", "", "inf", "1e400", "nan"])
def test_a_wrong_sample_is_refused(amount):
    with pytest.raises(ConfigError, match="--sample"):
        sample_size(amount, 10)


@pytest.mark.parametrize("nats", [0.0, math.inf, math.nan])
def test_a_wrong_likelihood_is_refused(nats):
    with pytest.raises(ConfigError, match="finite number above 0"):
        SelectConfig(data="a", out="b", max_nll=nats)


def test_scores_are_those_of_all_logits(data):
    dataset = HiddenStatesDataset(data)
    head = load_head_tensors(data)["lm_head"].double()
    found = document_scores(dataset, np.arange(len(dataset)), nll=True)
    for number, row in enumerate(dataset):
        logits = row["hidden.final"].double() @ head.T
        pairs = [
            (
                int(row["target_argmax"][t]) == int(row["input_ids"][t + 1]),
                float(row["target_logsumexp"][t]) - logits[t][row["input_ids"][t + 1]].item(),
                -logits[t].log_softmax(-1)[row["input_ids"][t + 1]].item(),
            )
            for t in range(len(logits) - 1)
            if row["loss_mask"][t + 1]
        ]
        if not pairs:
            assert np.isnan(found.nll[number])
            continue
        share, nll, of_stored = (sum(p[i] for p in pairs) / len(pairs) for i in range(3))
        assert found.first_choice[number] == pytest.approx(share, rel=1e-12)
        assert found.nll[number] == pytest.approx(nll, rel=1e-9)
        assert nll == pytest.approx(of_stored, abs=0.02)  # the stored logsumexp is of f32 states


def test_likely_documents_are_kept(data, tmp_path):
    dataset = HiddenStatesDataset(data)
    nll = document_scores(dataset, np.arange(len(dataset)), nll=True).nll
    border = float(np.nanmedian(nll))
    select(data, tmp_path / "v", max_nll=border)
    plain = [d for d, own in zip(dataset, nll, strict=True) if own <= border]
    assert_same_documents(tmp_path / "v", plain)


# -- overlap with a benchmark -----------------------------------------------------------------


def test_overlap_is_that_of_sets_of_tuples():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 6, size).tolist() for size in (20, 9, 30, 5)]
    grams = Grams(10)
    for prompt in prompts:
        grams.add([prompt])
    assert grams.short == 1, "5 tokens say nothing"
    some = 0
    for _ in range(300):
        ids = rng.integers(0, 6, 12).tolist()
        if rng.random() < 0.5:  # plant a part of a prompt
            source = prompts[int(rng.integers(4))]
            at = int(rng.integers(max(1, len(source) - 9)))
            ids = ids[:3] + source[at : at + 10] + ids[3:]
        plain = set()
        for number, prompt in enumerate(prompts):
            size = min(10, len(prompt))
            known = {tuple(prompt[i : i + size]) for i in range(len(prompt) - size + 1)}
            own = {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}
            if size >= 8 and known & own:
                plain.add(number)
        some += bool(plain)
        assert grams.matches(np.array(ids, np.int32)) == plain
    assert 50 < some < 250


# -- masks ------------------------------------------------------------------------------------


def remasked(document: dict, policy: str) -> dict:
    """A document with another mask, and zeros where a sparse column stores nothing."""
    turns = [(t["role"], t["start"], t["end"]) for t in document["turns"]]
    mask = torch.zeros(len(document["input_ids"]), dtype=torch.bool)
    for start, end in supervised_spans(len(mask), turns, policy):
        mask[start:end] = True
    own = document_id(document["input_ids"].numpy(), mask.numpy())
    return document | {"loss_mask": mask, "doc_id": own}


def test_a_new_mask_changes_masks_and_ids_alone(data, tmp_path):
    plain = [remasked(d, "roles=user") for d in documents_of(data)]
    manifest = select(data, tmp_path / "v", mask="roles=user")
    assert_same_documents(tmp_path / "v", [d for d in plain if d["loss_mask"][1:].any()])
    assert_verified(tmp_path / "v")
    assert manifest.mask == "roles=user"


def test_a_narrower_mask_takes_rows_of_sparse_columns(data, sparse, tmp_path):
    select(data, tmp_path / "whole", mask="last-turn")
    drop(tmp_path / "whole", tmp_path / "expected", final="supervised", teacher="supervised")
    select(sparse, tmp_path / "n", mask="last-turn")
    stored, before = (
        sum(int(d["loss_mask"].sum()) for d in documents_of(path))
        for path in (tmp_path / "n", sparse)
    )
    assert stored < before
    assert_same_documents(tmp_path / "n", documents_of(tmp_path / "expected"))
    assert_verified(tmp_path / "n")
    with pytest.raises(DatasetError, match=r"--mask all supervises \d+ tokens.*--teacher all"):
        plan_select(SelectConfig(data=str(sparse), out=str(tmp_path / "a"), mask="all"))
    assert not (tmp_path / "a").exists()


# -- columns ----------------------------------------------------------------------------------


def test_dropped_columns_and_rows(data, sparse, tmp_path):
    expected = []
    for document in documents_of(data):
        keep = predicting(document["loss_mask"])
        own = dict(document)
        for name in ("hidden.final", "target_argmax", "target_logsumexp"):
            shape = keep if own[name].ndim == 1 else keep[:, None]
            own[name] = torch.where(shape, own[name], torch.zeros_like(own[name]))
        expected.append(own)
    assert_same_documents(sparse, expected)
    assert_verified(sparse)
    manifest = drop(sparse, tmp_path / "v", layers="0,2")
    assert_same_documents(
        tmp_path / "v", [{k: v for k, v in d.items() if k != "hidden.L1"} for d in expected]
    )
    assert manifest.layers == (0, 2)
    with pytest.raises(ConfigError, match="nothing would change"):
        drop(data, tmp_path / "same", layers="0,1,2")
    with pytest.raises(DraftError, match="no layer"):
        drop(data, tmp_path / "other", layers="0,5")
    with pytest.raises(ConfigError, match="records no layers"):
        drop(data, tmp_path / "other", for_draft="eagle3")


# -- the directory ----------------------------------------------------------------------------


def test_a_killed_view_resumes_to_the_same_bytes(data, tmp_path, monkeypatch):
    """Killed before each of its writes in turn, and run again."""
    options = {"mask": "roles=user", "max_length": 25}
    select(data, tmp_path / "whole", **options)
    expected = digests(tmp_path / "whole")
    write = Killed(writing.write_atomically)
    monkeypatch.setattr(writing, "write_atomically", write)
    monkeypatch.setattr(sealing, "write_atomically", write)
    for allowed in range(20):
        out, write.left = tmp_path / f"v{allowed}", allowed
        try:
            select(data, out, **options)
        except KeyboardInterrupt:
            assert not (out / MANIFEST).is_file()
        else:
            break
        (out / "shards" / ".unit-00000.arrow.abc012345678.tmp").write_bytes(b"half")
        write.left = 99
        if allowed == 2:
            with pytest.raises(ConfigError, match="other options"):
                select(data, out, mask="first-1")
        select(data, out, **options)
        assert digests(out) == expected, allowed
    assert 5 < allowed < 19
    assert select(data, out, **options).fingerprint == Manifest.read(out / MANIFEST).fingerprint


def test_directories_that_cannot_be_written_are_refused(data, tmp_path):
    before = digests(data)
    for out in (data, data / "inside", data.parent):
        with pytest.raises(ConfigError, match="--out"):
            plan_select(SelectConfig(data=str(data), out=str(out), max_length=20))
    select(data, tmp_path / "v", max_length=20)
    with pytest.raises(ConfigError, match="another dataset"):
        select(data, tmp_path / "v", max_length=21)
    with pytest.raises(ConfigError, match="no document is left"):
        plan_select(SelectConfig(data=str(data), out=str(tmp_path / "n"), min_length=10**6))
    (tmp_path / "g" / ".generate").mkdir(parents=True)
    with pytest.raises(ConfigError, match="being generated"):
        plan_select(SelectConfig(data=str(data), out=str(tmp_path / "g"), max_length=20))
    (tmp_path / "locked" / ".view").mkdir(parents=True)
    with (
        writing.view_lock(tmp_path / "locked" / ".view"),
        pytest.raises(RunError, match="another process"),
    ):
        select(data, tmp_path / "locked", max_length=20)
    assert digests(data) == before


def test_a_full_disk_counts_what_is_written_already(data, tmp_path, monkeypatch):
    view = plan_select(SelectConfig(data=str(data), out=str(tmp_path / "v"), mask="roles=user"))
    needed = view_sizes(view).bytes
    write = Killed(writing.write_atomically)
    monkeypatch.setattr(writing, "write_atomically", write)
    write.left = 2  # view.json and the record of the first shard
    with pytest.raises(KeyboardInterrupt):
        write_view(tmp_path / "v", view)
    write.left = 99
    first = (tmp_path / "v/shards/unit-00000.arrow").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    free = needed - first
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=free - 1))
    with pytest.raises(RunError, match=f"{free:,} bytes are still to be written"):
        write_view(tmp_path / "v", view)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=free))
    write_view(tmp_path / "v", view)
    assert_verified(tmp_path / "v")


def test_generate_refuses_the_directory_of_a_view(data, tmp_path):
    select(data, tmp_path / "v", max_length=20)
    before = digests(tmp_path / "v")
    target = save_target(tmp_path / "target")
    with pytest.raises(ConfigError, match="`spec-data select` made of others"):
        run(target, write_corpus(tmp_path / "chats.jsonl", 1), tmp_path / "v")
    assert digests(tmp_path / "v") == before


def test_damage_is_no_part_of_a_view(data, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(data, broken)
    record = json.loads((broken / MANIFEST).read_text())["shards"][1]
    file = broken / record["file"]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DatasetError, match="unit-00001"):
        select(broken, tmp_path / "v", sample="12")
    assert not (tmp_path / "v" / MANIFEST).exists()


@pytest.mark.parametrize("command", ["merge", "select"])
def test_a_damaged_shard_is_not_linked(data, tmp_path, command, capsys):
    """One bit of the states, which no view reads: every shard of these views is a link."""
    broken = Path(shutil.copytree(data, tmp_path / "broken"))
    record = json.loads((broken / MANIFEST).read_text())["shards"][1]
    with (broken / record["file"]).open("r+b") as file:
        content = pa.py_buffer((broken / record["file"]).read_bytes())
        (batch, *_) = pa.ipc.open_stream(content)
        place = batch.column("hidden.final").values.values.buffers()[1].address - content.address
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))
    out = tmp_path / "v"
    more = ["--max-length", "9999"] if command == "select" else [str(data)]
    assert main([command, str(broken), *more, "--out", str(out)]) == 2
    assert f"{broken / record['file']}: damaged" in capsys.readouterr().err
    assert not (out / MANIFEST).exists()


def test_datasets_opens_a_view(data, tmp_path):
    datasets = pytest.importorskip("datasets")
    select(data, tmp_path / "v", max_length=25)
    found = datasets.load_from_disk(str(tmp_path / "v"))
    assert found["doc_id"] == HiddenStatesDataset(tmp_path / "v").doc_ids


def test_prompts_are_compared_without_what_all_of_them_share(tmp_path):
    """The words of the user count; a system prompt and the template are in every document."""
    tok = tokenizer("chatml")
    tok.save_pretrained(tmp_path / "tokenizer")
    asked = "how many apples does each of the seven children carry home today"
    system = "you are a careful and friendly assistant that answers every question in full"
    rows = [
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": asked}]},
        {"prompt": "hi"},
    ]
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_benchmark(str(file), tmp_path / "tokenizer", 10)
    assert (found.grams.prompts, found.grams.short) == (2, 0)

    def matches(text):
        return found.grams.matches(np.array(tok(text)["input_ids"], np.int32))

    assert matches(f"<|im_start|>user\n{asked}<|im_end|>") == {0}
    assert matches(f"<|im_start|>system\n{system}<|im_end|>") == set()
    alone = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello"
    assert matches(alone) == {1}, "a short prompt is compared as all that serving sends"
    assert matches("<|im_start|>user\nhello" + alone) == set()


def test_temporary_files_of_other_programs_stay(data, tmp_path):
    """--out may be a directory with other files, such as a home directory."""
    out = tmp_path / "out"
    (out / "editor").mkdir(parents=True)
    foreign = [out / "editor" / ".notes.txt.tmp", out / ".cache.tmp", out / "editor" / ".a.zz.tmp"]
    for file in foreign:
        file.write_text("mine")
    write_view(out, plan_select(SelectConfig(data=str(data), out=str(out), sample="2")))
    assert all(file.read_text() == "mine" for file in foreign)
