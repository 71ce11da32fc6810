"""Lossy codecs from target to reader: laws of generate, FORMAT.md in numpy, errors, small data."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_data.calibrate as calibrate_module
from spec_data.calibrate import sample_documents
from spec_data.generate import seal_directory
from spec_data.options import GenerateConfig, VerifyConfig
from spec_data.plan import make_plan, set_up
from spec_data.report import dataset_text, estimate_text
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.lossy import LOSSY, bf16_bits
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verify import verify
from tests.spec_data.runs import digests, options, run, save_target, start_cli, write_corpus

MIXED = {"codec": "aux=lm4c,final=int8c", "final": "supervised"}
COLUMNS = ("hidden.L0", "hidden.L2", "hidden.L4", "hidden.final")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target whose token "~" makes massive activations in three channels."""
    path = save_target(tmp_path_factory.mktemp("target"))
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    (massive,) = tokenizer("~")["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[massive, :3] = 3000.0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Chats, every seventh with one "~" in its question."""
    file = write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 40)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[::7]:
        row["messages"][0]["content"] += " ~ !"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def exact(target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("exact") / "data"
    run(target, corpus, out)
    return HiddenStatesDataset(out)


@pytest.fixture(scope="module", params=[*LOSSY, "mixed"])
def lossy(request, target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("lossy") / "data"
    given = MIXED if request.param == "mixed" else {"codec": request.param}
    run(target, corpus, out, **given)
    return HiddenStatesDataset(out)


@pytest.fixture(scope="module")
def mixed(target, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "data"
    run(target, corpus, out, **MIXED)
    return out


def kept(row) -> torch.Tensor:
    out = torch.zeros_like(row["loss_mask"])
    out[:-1] = row["loss_mask"][1:]
    return out


def test_states_are_the_exact_ones_within_the_declared_error(lossy, exact):
    assert len(lossy) == len(exact)
    declared = {c["name"]: c.get("error") for c in lossy.manifest.raw["columns"]}
    escaped = 0
    for name in COLUMNS:
        squares, spread = [], []
        for index in range(len(exact)):
            row, back = exact[index], lossy[index]
            tokens = kept(row) if lossy.final == "supervised" and name == "hidden.final" else ...
            true, found = row[name].float()[tokens], back[name].float()[tokens]
            massive = true.abs().amax(-1) > 1000
            escaped += int(massive.sum())
            assert torch.equal(found[massive], true[massive])
            squares.append((true - found)[~massive].square())
            spread.append(true[~massive])
        error = torch.cat(squares).mean(0) / torch.cat(spread).var(0)
        assert float(error.median()) == pytest.approx(declared[name]["mse_median"], rel=0.5)
        assert float(error.median()) < lossy.manifest.columns[2].lossy.bound.median
    assert escaped > 5


def test_the_other_columns_are_untouched(lossy, exact):
    for index in (0, 7, 39):
        row, back = exact[index], lossy[index]
        for name in ("input_ids", "loss_mask", "target_argmax"):
            assert torch.equal(row[name], back[name])
        torch.testing.assert_close(row["target_logsumexp"], back["target_logsumexp"])
        assert row["turns"] == back["turns"]


_STRANGER = """
import json, sys
import numpy as np, pyarrow as pa
from safetensors.numpy import load_file
root = sys.argv[1]
manifest = json.load(open(root + "/manifest.json"))
tables = load_file(root + "/codec.safetensors")
H = manifest["head"]["hidden_size"]
def part(batch, name, r, width):
    a = batch.column(name)
    v = a.values.values if width else a.values
    v = v.to_numpy()
    v = v.reshape(-1, width) if width else v
    o = a.offsets.to_numpy()
    return v[o[r] : o[r + 1]]
def bf16(u):
    return (u.astype(np.uint32) << 16).view(np.float32)
def decode(batch, X, codec, r):
    bytes_ = {"int8c": H, "fp8": H, "lm4c": H // 2, "lm6c": 3 * H // 4}[codec]
    codes, scale = part(batch, X, r, bytes_), bf16(part(batch, X + ".scale", r, None))
    levels, mean, std = (tables.get(X + "." + k) for k in ("levels", "mean", "std"))
    n = len(codes)
    if codec == "int8c":
        v = codes.astype(np.float32)
    elif codec == "fp8":
        v = levels[codes]
    elif codec == "lm4c":
        v = levels[np.stack([codes & 15, codes >> 4], -1)].reshape(n, H)
    else:
        lo, hi = codes[:, : H // 2], codes[:, H // 2 :]
        hi = np.concatenate([hi & 15, hi >> 4], 1)
        v = levels[np.stack([lo & 15 | (hi & 3) << 4, lo >> 4 | hi >> 2 << 4], -1)].reshape(n, H)
    v = v * scale[:, None]
    if codec != "fp8":
        v = v * std
        v = v + mean
    u = v.view(np.uint32)
    u = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    u[part(batch, X + ".escape_index", r, None)] = part(batch, X + ".escape", r, H)
    return u
out = {}
for shard in manifest["shards"]:
    for batch in pa.ipc.open_stream(pa.memory_map(root + "/" + shard["file"])):
        for r in range(batch.num_rows):
            mask = part(batch, "loss_mask", r, None)
            for c in manifest["columns"]:
                if not c["name"].startswith("hidden."):
                    continue
                u = decode(batch, c["name"], c["codec"], r)
                if c["tokens"] == "supervised":
                    whole = np.zeros((len(mask), H), np.uint16)
                    whole[:-1][mask[1:] == 1] = u
                    u = whole
                out.setdefault(c["name"], []).append(u)
assert not {"spec_data", "torch", "datasets"} & set(sys.modules)
np.savez(sys.argv[2], **{k: np.concatenate(v) for k, v in out.items()})
"""


def test_format_md_is_enough_to_decode_every_codec_with_numpy(lossy, tmp_path):
    command = [sys.executable, "-c", _STRANGER, str(lossy.path), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, capture_output=True)
    theirs = np.load(tmp_path / "out.npz")
    for name in COLUMNS:
        ours = torch.cat([lossy[i][name] for i in range(len(lossy))])
        assert np.array_equal(theirs[name], bf16_bits(ours)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_into_is_the_row_wherever_it_is_cut(lossy, dtype):
    for index in (0, 7, 30):
        row = lossy[index]
        total = len(row["input_ids"])
        for length in (1, total // 2, total - 1, total):
            buffer = {n: torch.full((total + 9, 32), 7.0, dtype=dtype) for n in COLUMNS}
            assert lossy.read_into(index, buffer, 4, length) == length
            for name, values in buffer.items():
                assert torch.equal(values[4 : 4 + length], row[name][:length].to(dtype))
                assert bool((values[:4] == 7).all() and (values[4 + length :] == 7).all())


def test_projection_is_by_column_and_datasets_opens_the_parts(lossy):
    some = HiddenStatesDataset(lossy.path, columns=("input_ids", "hidden.L2"))
    assert set(some[3]) == {"doc_id", "source", "turns", "input_ids", "hidden.L2"}
    assert torch.equal(some[3]["hidden.L2"], lossy[3]["hidden.L2"])
    with pytest.raises(DatasetError, match=r"no column hidden\.L2\.scale"):
        HiddenStatesDataset(lossy.path, columns=("hidden.L2.scale",))
    theirs = datasets.load_from_disk(str(lossy.path))
    width = lossy.manifest.columns[2].stored_width
    assert len(theirs) == len(lossy) and len(theirs[7]["hidden.L0"][0]) == width
    assert len(theirs[7]["hidden.L0.scale"]) == lossy.lengths[7]
    assert len(theirs[7]["hidden.L0.escape"]) == len(theirs[7]["hidden.L0.escape_index"])


def test_final_is_zero_exactly_where_it_was_not_kept(mixed, exact):
    dataset = HiddenStatesDataset(mixed)
    assert dataset.final == dataset.manifest.final == "supervised" and exact.final == "all"
    for index in range(len(dataset)):
        row = dataset[index]
        there = row["hidden.final"].abs().sum(-1) > 0
        assert torch.equal(there, kept(row))
    stored = sum(s.bytes for s in dataset.manifest.shards)
    assert stored < 0.6 * sum(s.bytes for s in exact.manifest.shards)  # hidden size 32: texts weigh


@pytest.mark.parametrize("given", [{"final": "supervised"}, {"codec": "int8c"}, MIXED])
def test_estimate_is_exact_but_for_escaped_tokens(target, corpus, tmp_path, given):
    run(target, corpus, tmp_path / "data", **given)
    setup = set_up(GenerateConfig(**options(target, corpus, tmp_path / "none", **given)))
    plan = make_plan(setup)
    predicted = [plan.unit_bytes(u, setup.columns) for u in range(len(plan.units))]
    found = [s.bytes for s in HiddenStatesDataset(tmp_path / "data").manifest.shards]
    if "codec" not in given:
        assert predicted == found
    assert sum(predicted) == pytest.approx(sum(found), rel=0.01)
    text = estimate_text(setup, plan)
    assert "per massive token and lossy column" in text or "codec" not in given
    assert "tail tokens trimmed" in text and "hidden.final" in text


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_killed_runs_end_in_the_same_bytes(mixed, target, corpus, tmp_path, share):
    out = tmp_path / "data"
    units = len(HiddenStatesDataset(mixed).manifest.shards)
    process = start_cli(options(target, corpus, out, **MIXED))
    while process.poll() is None:
        done = len(list((out / ".generate").glob("unit-*.json"))) if out.exists() else 0
        if done >= share * units and (out / "codec.safetensors").exists():
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start_cli(options(target, corpus, out, **MIXED))
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert digests(out) == digests(mixed)


def test_workers_then_seal_give_the_same_bytes(mixed, target, corpus, tmp_path):
    for worker in (1, 0):
        assert run(target, corpus, tmp_path / "data", workers=f"{worker}/2", **MIXED) is None
    seal_directory(tmp_path / "data")
    assert digests(tmp_path / "data") == digests(mixed)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"codec": "int8c"}, "codec"), ({"final": "all"}, "final"), ({"keep_tails": True}, "keep_t")],
)
def test_changed_settings_never_mix(mixed, target, corpus, change, named):
    with pytest.raises(ConfigError, match=f"other settings.*\n  {named}"):
        run(target, corpus, mixed, **MIXED | change)


def test_a_column_beyond_its_bound_stops_before_the_first_shard(
    target, corpus, tmp_path, monkeypatch
):
    out = tmp_path / "data"
    bound = dataclasses.replace(LOSSY["lm4c"].bound, median=1e-3)
    strict = dataclasses.replace(LOSSY["lm4c"], bound=bound)
    monkeypatch.setitem(LOSSY, "lm4c", strict)
    with pytest.raises(RunError) as caught:
        run(target, corpus, out, codec="lm4c")
    assert "hidden.L0 (lm4c): mse_median" in str(caught.value)
    assert "Use --codec aux=lm6c,final=lm6c" in str(caught.value)
    assert not list(out.glob("shards/*")) and not (out / "manifest.json").exists()


def test_states_of_a_large_mean_are_too_much_for_fp8(corpus, tmp_path):
    """Relative to its spread, a channel far from zero loses more in floating point."""
    path = save_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.get_input_embeddings().weight.data += 8.0
    model.save_pretrained(path)
    with pytest.raises(RunError, match=r"hidden\.L0 \(fp8\).*\n(.*\n)*Use --codec aux=int8c"):
        run(path, corpus, tmp_path / "data", codec="aux=fp8")


def test_calibration_is_spread_over_the_plan():
    lengths = np.full(1000, 50)
    chosen = sample_documents(lengths, 5000)
    assert len(chosen) == 100 and chosen[0] < 10 and chosen[-1] >= 990
    assert np.unique(np.diff(chosen)).tolist() == [10]
    assert sample_documents(lengths, 1) == [500]
    assert sample_documents(lengths, 10**9) == list(range(1000))
    assert sample_documents(np.array([7]), 100) == [0]


def test_one_document_is_enough(target, tmp_path):
    manifest = run(target, write_corpus(tmp_path / "one.jsonl", 1), tmp_path / "data", **MIXED)
    assert manifest.codec["documents"] == 1
    assert len(HiddenStatesDataset(tmp_path / "data")) == 1


def test_a_sample_without_finite_states_is_an_error(target, corpus, tmp_path, monkeypatch):
    real = calibrate_module.capture_sample

    def poisoned(*arguments):
        states, numbers = real(*arguments)
        return {n: torch.full_like(s, torch.nan) for n, s in states.items()}, numbers

    monkeypatch.setattr(calibrate_module, "capture_sample", poisoned)
    with pytest.raises(RunError, match="no token of the calibration sample has finite states"):
        run(target, corpus, tmp_path / "data", **MIXED)


def test_inspect_says_what_was_lost(mixed):
    text = dataset_text(HiddenStatesDataset(mixed).manifest)
    assert "hidden.L0      lm4c" in text and ".scale" in text and "teacher KL" in text
    assert "tokens whose next token is supervised" in text


def test_verify_passes_and_names_foreign_tables(mixed, target, tmp_path, capsys):
    given = VerifyConfig(data=str(mixed), device="cpu", target=str(target), samples=40)
    assert verify(given) == 0
    out = capsys.readouterr().out
    assert "hidden.L0: lm4c: error / channel variance" in out and "FAIL" not in out
    file = mixed / "codec.safetensors"
    whole = file.read_bytes()
    try:
        tables = load_file(file)
        tables["hidden.L0.mean"][3] += 1
        save_file(tables, file)
        assert verify(given) == 1
        assert "these are the tables of another dataset" in capsys.readouterr().out
        with pytest.raises(DatasetError, match="another dataset"):
            _ = HiddenStatesDataset(mixed)[0]
        _ = HiddenStatesDataset(mixed, columns=("input_ids",))[0]
        file.unlink()
        with pytest.raises(MissingError, match="cannot be decoded"):
            _ = HiddenStatesDataset(mixed)[0]
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "zip"},
        {"codec": "aux=int8c,other=bf16"},
        {"codec": "final=int8c", "supervision": "logits"},
        {"final": "supervised", "supervision": "topk:4"},
    ],
)
def test_contradictions_are_refused(change):
    with pytest.raises(ConfigError):
        GenerateConfig(**{"target": "t", "corpus": ("c",), "out": "o"} | change)


def test_codecs_by_kind():
    def codecs(**change):
        return GenerateConfig(**{"target": "t", "corpus": ("c",), "out": "o"} | change).codecs

    assert codecs() == {"aux": "bf16", "final": "bf16"}
    assert codecs(codec="lm4c") == {"aux": "lm4c", "final": "lm4c"}
    assert codecs(codec="lm4c", supervision="logits") == {"aux": "lm4c", "final": "bf16"}
    assert codecs(codec="final=int8c") == {"aux": "bf16", "final": "int8c"}


def test_tails_are_trimmed_counted_and_kept_on_request(target, tmp_path):
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
    whole = run(target, file, tmp_path / "whole", max_length=1024, keep_tails=True)
    trimmed = cut.raw["documents"]["tail_tokens_trimmed"]
    assert whole.raw["documents"]["tail_tokens_trimmed"] == 0
    assert cut.raw["documents"]["cut"] == 0  # only the tail was beyond 64 tokens
    assert cut.raw["totals"]["tokens"] + trimmed == whole.raw["totals"]["tokens"]
    assert cut.raw["totals"]["supervised"] == whole.raw["totals"]["supervised"]
    short, long = HiddenStatesDataset(tmp_path / "cut"), HiddenStatesDataset(tmp_path / "whole")
    for index in range(5):
        a, b = short[index], long[index]
        length = len(a["input_ids"])
        assert bool(a["loss_mask"][-1]) and not bool(b["loss_mask"][length:].any())
        assert torch.equal(a["input_ids"], b["input_ids"][:length])
        torch.testing.assert_close(
            a["hidden.L4"].float(), b["hidden.L4"][:length].float(), rtol=2e-2, atol=1e-3
        )
