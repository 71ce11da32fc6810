"""verify passes intact datasets, and names shard, row and column of what was changed."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_data.cli import main
from spec_data.shards.checksums import list_views
from spec_data.shards.files import unit_name
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification import fresh
from spec_data.verification.findings import VerifyReport
from tests.faults.datasets import trace_everywhere
from tests.spec_data.runs import run, save_target, verify, write_corpus
from tests.spec_data.shards import integrity_tools


@pytest.fixture
def data(target, tmp_path):
    run(target, write_corpus(tmp_path / "chats.jsonl", 12), tmp_path / "data")
    return tmp_path / "data"


def failures(data: Path, capsys, **changes) -> str:
    code = verify(data=str(data), device="cpu", **changes)
    out = capsys.readouterr().out
    assert code == int("FAIL" in out)
    return out


def test_intact_data_passes(data, target, capsys):
    out = failures(data, capsys, target=str(target), samples=5)
    assert "FAIL" not in out
    assert "ok    8 checks" in out


def rewrite(data: Path, shard: int, column: str, change) -> None:
    """Change a column of a shard in place and update every checksum."""
    raw = bytearray((data / "shards" / f"{unit_name(shard)}.arrow").read_bytes())
    (batch,) = pa.ipc.open_stream(pa.py_buffer(raw))
    offsets, values = list_views(batch.column(column))
    start = values.ctypes.data - pa.py_buffer(raw).address
    changed = values.ravel().copy()
    change(changed, offsets)
    raw[start : start + changed.nbytes] = changed.tobytes()
    trace_everywhere(data, shard, bytes(raw))


def test_states_of_another_document_are_caught_by_the_head(data, capsys):
    def swap(values, offsets):
        half = values[: 6 * 32].copy()
        values[: 6 * 32] = values[10 * 32 : 16 * 32]
        values[10 * 32 : 16 * 32] = half

    rewrite(data, 0, "hidden.final", swap)
    assert "columns hidden.final / target_argmax / target_logsumexp" in failures(
        data, capsys, samples=100
    )


def test_aux_states_of_another_layer_are_caught_by_a_fresh_forward(data, target, capsys):
    rewrite(data, 0, "hidden.L2", lambda values, _: np.add(values, 1 << 7, out=values))
    assert "FAIL" not in failures(data, capsys, samples=100)
    out = failures(data, capsys, samples=100, target=str(target))
    assert "column hidden.L2: differs from a fresh forward" in out


def test_a_few_swapped_tokens_of_a_long_document_are_caught(data, target, capsys):
    """They are too few to change the mean of a document, and too many to be rounding."""

    def swap(values, offsets):
        for start, end in itertools.pairwise(offsets):
            last = values[(end - 1) * 32 : end * 32].copy()
            values[(end - 1) * 32 : end * 32] = values[start * 32 : (start + 1) * 32]
            values[start * 32 : (start + 1) * 32] = last

    rewrite(data, 0, "hidden.L2", swap)
    out = failures(data, capsys, samples=100, target=str(target))
    assert "column hidden.L2" in out


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    """Data whose logits are small differences of states, so that a codec changes some by much."""
    folder = tmp_path_factory.mktemp("rough")
    save_target(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight *= 0.02  # the states are those of the embedding
        even = torch.randn(model.model.embed_tokens.weight[:, ::2].shape)
        model.model.embed_tokens.weight[:, ::2] = even
        model.model.embed_tokens.weight[:, 1::2] = 0.3 * torch.randn(even.shape) - even
        rows = 0.1 * torch.randn(model.lm_head.weight[:, ::2].shape)
        model.lm_head.weight[:, ::2] = rows
        model.lm_head.weight[:, 1::2] = rows
    model.save_pretrained(folder / "target")
    corpus = write_corpus(folder / "chats.jsonl", 60)
    run(folder / "target", corpus, folder / "data", codec="default")
    return folder / "data"


def test_what_a_codec_loses_of_sound_data_is_no_fault(rough, capsys):
    assert "FAIL" not in failures(rough, capsys, samples=1000)


def test_what_a_codec_loses_of_a_small_state_is_no_fault(tmp_path, capsys):
    """One channel is nearly all of a state, so a token where it is small has a small state."""
    target = save_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[7] *= 1e4
    model.bfloat16().save_pretrained(target)
    corpus = write_corpus(tmp_path / "chats.jsonl", 24)
    run(target, corpus, tmp_path / "data", codec="default")
    out = failures(tmp_path / "data", capsys, samples=24, target=str(target))
    assert "FAIL" not in out

    dataset = HiddenStatesDataset(tmp_path / "data")
    report = VerifyReport(data="data", fingerprint="")
    document = dataset[0]
    states = document["hidden.L2"]
    fresh._compare_states(dataset, document, "hidden.L2", states, "document 0", report)
    assert report.ok
    fresh._compare_states(dataset, document, "hidden.L2", states.roll(1, 0), "document 0", report)
    assert "column hidden.L2" in report.failures[0], "states of the tokens before are a fault"


@pytest.mark.parametrize(
    ("shift", "shards", "said"),
    [(2.0, 1, "token"), (0.2, 1, "half of its"), (0.05, 9, "half of the")],
)
def test_a_fault_is_found_in_rough_data_too(rough, tmp_path, capsys, shift, shards, said):
    """Of one token, of the documents of a shard, or small but everywhere."""
    data = Path(shutil.copytree(rough, tmp_path / "data"))
    for shard in range(min(shards, len(list((data / "shards").iterdir())))):
        rewrite(data, shard, "target_logsumexp", lambda v, _: np.add(v, shift, out=v))
    out = failures(data, capsys, samples=1000)
    assert f"columns hidden.final / target_argmax / target_logsumexp: {said}" in out


@pytest.mark.parametrize(
    ("supervision", "column", "change"),
    [
        ("topk:3", "topk_ids", lambda v, _: v.__setitem__(slice(1, None, 3), v[2::3].copy())),
        ("topk:3", "topk_logits", lambda v, _: v.__setitem__(slice(1, None, 3), v[1::3] - 3)),
        ("logits", "logits", lambda v, _: v.__setitem__(slice(None), np.roll(v, 96))),
        ("final-hidden", "target_argmax", lambda v, _: v.__setitem__(slice(None), np.roll(v, 1))),
    ],
)
def test_teachers_that_are_not_the_targets_are_caught(
    target, tmp_path, capsys, supervision, column, change
):
    corpus = write_corpus(tmp_path / "chats.jsonl", 6)
    run(target, corpus, tmp_path / "data", supervision=supervision)
    rewrite(tmp_path / "data", 0, column, change)
    out = failures(tmp_path / "data", capsys, target=str(target), samples=100)
    assert "FAIL" in out
    assert column in out


def test_exit_codes_of_the_command(data, capsys):
    assert main(["verify", str(data), "--device", "cpu"]) == 0
    shard = sorted((data / "shards").iterdir())[0]
    integrity_tools.flip(shard, -100)
    assert main(["verify", str(data), "--device", "cpu"]) == 1
    shard.unlink()
    assert main(["verify", str(data)]) == 2
    assert "shard is missing" in capsys.readouterr().err


def poison(values, offsets):
    values[offsets[2] * 32 + 32 * 3 + 5] = 0x7FC0  # a bf16 NaN: row 2, token 3


def flatten(values, offsets):
    values[offsets[1] * 32 : (offsets[1] + 1) * 32] = 0


def flip(values, offsets):
    values[0] = 1 - values[0]


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("hidden.L2", poison, "row 2, column hidden.L2: not finite at token 3"),
        ("hidden.final", flatten, "row 1, column hidden.final: a constant vector at token 0"),
        ("loss_mask", flip, "row 0, column loss_mask"),
    ],
)
def test_damaged_values_are_named_by_shard_row_and_column(data, capsys, column, change, said):
    rewrite(data, 0, column, change)
    assert f"FAIL  shards/unit-00000.arrow {said}" in failures(data, capsys)
