"""`generate`, `fit` and drafting with every tensor on cuda:0: devices, values, host syncs.

The table of host syncs is host_syncs.md. `SPEC_WRITE_SYNCS=1` writes its numbers anew and keeps
the reasons; a new line gets "?" as its reason, which this test refuses.
"""

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spec_data.generation import halving
from spec_data.shards.blobs import decompress
from spec_data.shards.codecs import Basis, encode
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.shard import CodedRows, StoredRows
from spec_train.diagnosis.examination import examine
from spec_train.drafts import DRAFTS
from spec_train.drafts.frames import slots_of
from spec_train.drafts.peagle import draft as peagle
from spec_train.evaluation.evaluate import Documents, measure
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from tests.factory import mtp_block
from tests.gpu.fake_cuda import (
    CudaTensor,
    FakeCuda,
    MixedDevices,
    Syncs,
    counting,
    download,
    upload,
)
from tests.gpu.machine import fit_on, gpu
from tests.marks import long_but
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import roundings

PAGE = Path(__file__).with_name("host_syncs.md")
ROW = re.compile(
    r"^\| (generate|fit|validate|decode) \| `(\S+)` \| ([a-z ]+) \| (\d+) \| (.+) \|$", re.MULTILINE
)
Rows = dict[tuple[str, str, str], int]
SECOND = "cuda:1"  # while the current device is cuda:0
NAMES = tuple(DRAFTS)
FITTED = tuple(name for name in NAMES if name != "dflash")  # it trains with the code of dspark
SHORT = ("eagle3", "dspark")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Datasets of one target made on the CPU and on the GPU, and the syncs of the last unit."""
    folder = tmp_path_factory.mktemp("made")
    target, corpus = save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 12)
    weights = target / "model.safetensors"
    block = mtp_block(AutoModelForCausalLM.from_pretrained(target))
    save_file(load_file(weights) | block, weights, metadata={"format": "pt"})
    given = {"codec": "aux=default,final=fine", "batch_tokens": 4096, "max_shard_size": "1GB"}
    run(target, corpus, folder / "cpu", **given)
    capture, found = halving.capture_units, []

    def counted(*given: Any) -> Any:
        units = capture(*given)
        while True:
            with counting() as syncs:
                captured = next(units, None)
            if captured is None:
                return
            found.append(syncs)
            yield captured

    with gpu(SECOND) as patch:
        patch.setattr(halving, "capture_units", counted)
        run(target, corpus, folder / "gpu", device=SECOND, **given)
    return folder, found[-1]


@pytest.fixture(scope="module")
def fitted(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: two steps of a draft on the GPU, or one on the CPU in float32, from lossy
    columns."""
    folder = tmp_path_factory.mktemp("fitted")

    @functools.cache
    def run_of(name: str, device: str) -> Any:
        steps = 1 if device == "cpu" else 2
        return fit_on(device, name, made[0] / "cpu", folder / f"{name}-{device[:4]}", steps)

    return run_of


def test_a_dataset_made_on_the_gpu_equals_that_of_the_cpu(made: Any) -> None:
    """Forward, proofs, head, figures and codecs; the stand-in's arithmetic is that of the CPU."""
    one, two = (HiddenStatesDataset(made[0] / name) for name in ("cpu", "gpu"))
    assert len(one) == len(two) == 12
    for row in range(len(one)):
        a, b = one[row], two[row]
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, b[name], rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("name", long_but(SHORT, FITTED))
def test_the_first_loss_is_that_of_the_cpu_in_float32(fitted: Any, name: str) -> None:
    gpu_loss, cpu_loss = (fitted(name, device).losses[0] for device in (SECOND, "cpu"))
    allowed = torch.finfo(torch.bfloat16).eps * roundings(2) ** 0.5
    assert abs(gpu_loss - cpu_loss) <= allowed * abs(cpu_loss)
    weights = fitted(name, SECOND).trainer.masters.params
    assert all(isinstance(p, CudaTensor) and p.dtype == torch.float32 for p in weights)


@pytest.fixture(scope="module")
def decoded(made: Any) -> dict[str, tuple[list[Any], list[Any], Syncs]]:
    """What every draft drafts in three rounds, on the CPU and on the GPU; the last one's syncs."""
    return {name: _decoded(made[0] / "cpu", name) for name in NAMES}


def _decoded(data: Path, name: str) -> tuple[list[Any], list[Any], Syncs]:
    dataset = HiddenStatesDataset(data)
    head = TargetHead.from_dataset(dataset.path)
    draft = build_draft(name, dataset, head).eval()
    states = torch.randn(1, 9, len(draft.state_columns) * dataset.manifest.hidden_size)
    drafted: list[list[Any]] = []
    syncs: Syncs = Counter()
    for place in ("cpu", "cuda"):
        with gpu(), torch.no_grad():
            drafter = draft.to(place).drafter(head.to(place))
            chains, at = [], 0
            for count in (4, 2, 3):
                part = states[:, at : at + count].to(place)
                with counting() as syncs:
                    ids, _ = drafter.propose(list(range(at, at + count)), part, 2, Greedy())
                assert ids.device.type == place
                chains.append(download(ids).tolist())
                at += count
        drafted.append(chains)
    return drafted[0], drafted[1], syncs


def _observed(made: Any, fits: Sequence[Any], decoded: Any) -> Rows:
    """Return the syncs of a captured unit of one batch, and the most that any draft has in its
    second step, in its last validation, and in a round of drafting.
    """
    rows = {("generate", *key): count for key, count in made[1].items()}
    for command, counts in {
        "fit": [fit.syncs[1] for fit in fits],
        "validate": [fit.validations[-1] for fit in fits],
        "decode": [syncs for _, _, syncs in decoded.values()],
    }.items():
        most: Syncs = Counter()
        for syncs in counts:
            most |= syncs
        rows |= {(command, *key): count for key, count in most.items()}
    return rows


def _write(rows: Rows) -> None:
    """Write the numbers into the page; keep the reasons that are there."""
    text = PAGE.read_text(encoding="utf-8")
    known = {m.group(1, 2, 3): m.group(5) for m in ROW.finditer(text)}
    lines = [
        f"| {command} | `{where}` | {what} | {count} | {known.get((command, where, what), '?')} |"
        for (command, where, what), count in sorted(rows.items(), reverse=True)
    ]
    head = "| --- | --- | --- | --: | --- |\n"
    before, _, after = text.partition(head)
    rest = ROW.sub("", after).lstrip("\n")
    PAGE.write_text(before + head + "\n".join(lines) + "\n" + rest, encoding="utf-8")


@pytest.mark.parametrize("names", [SHORT, pytest.param(FITTED, marks=pytest.mark.long)], ids=len)
def test_every_host_sync_is_in_the_table_with_its_reason(
    made: Any, fitted: Any, decoded: Any, names: tuple[str, ...]
) -> None:
    rows = _observed(made, [fitted(name, SECOND) for name in names], decoded)
    if names == FITTED and os.environ.get("SPEC_WRITE_SYNCS"):
        _write(rows)
    found = list(ROW.finditer(PAGE.read_text(encoding="utf-8")))
    table = {m.group(1, 2, 3): int(m.group(4)) for m in found}
    new = {key: count for key, count in rows.items() if count > table.get(key, 0)}
    assert not new, f"new host syncs; avoid them, or SPEC_WRITE_SYNCS=1 and give a reason: {new}"
    gone = table.keys() - rows.keys() if names == FITTED else set()
    assert not gone, f"host_syncs.md names host syncs that are gone; SPEC_WRITE_SYNCS=1: {gone}"
    assert all(m.group(5).strip() not in ("", "?") for m in found)


@pytest.mark.parametrize("documents", [0, pytest.param(12, marks=pytest.mark.long)])
def test_eval_and_doctor_run_on_the_second_gpu(made: Any, fitted: Any, documents: int) -> None:
    """What names no device, or waits for another one, is refused there."""
    folder, draft = made[0], fitted("eagle3", "cpu").trainer.config.out
    data = str(folder / "cpu")
    with gpu(SECOND):
        report = measure(draft, Documents(data=data), None, draft_tokens=[0], device=SECOND)
        diagnosis = examine(draft, data, None, device=SECOND, documents=documents)
    assert report["device"].startswith(SECOND)
    assert diagnosis.kind == "eagle3" and bool(diagnosis.tried) == bool(documents)
    planted = (
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream(),
        lambda: torch.ones(2, device="cuda"),
    )
    with gpu(SECOND):
        for fault in planted:
            with pytest.raises(MixedDevices, match="cuda is not cuda:1"):
                fault()


def test_a_planted_sync_and_a_planted_cpu_tensor_are_found(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(draft: Any, batch: Any) -> Any:
        found = slots_of(draft, batch)
        assert found[1].sum().item() >= 0
        return found

    monkeypatch.setattr(peagle, "slots_of", waits)
    syncs = fit_on("cuda", "peagle", made[0] / "cpu", tmp_path / "waits").syncs[0]
    assert any("PeagleDraft.slot_counts" in where for where, _ in syncs)

    def mixes(draft: Any, batch: Any) -> Any:
        mask, rows, choice = slots_of(draft, batch)
        return mask, rows, choice + torch.zeros(len(choice))

    monkeypatch.setattr(peagle, "slots_of", mixes)
    with pytest.raises(MixedDevices):
        fit_on("cuda", "peagle", made[0] / "cpu", tmp_path / "mixes")


def test_the_codec_on_the_gpu_makes_the_bits_of_the_cpu() -> None:
    """Both ways, with escaped tokens, through the buffers of the training stream."""
    values = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[[3, 17]] *= 500
    tables = Basis(values).tables(0.5)
    encoded = encode(values, tables)
    codes = decompress(encoded.blob, 40, 48)
    with FakeCuda(), torch.no_grad():
        on_device = encode(upload(values), tables)
        buffers = [CodedRows(48, 40, False) for _ in ("cpu", "cuda")]
        for rows in buffers:
            rows.add(StoredRows(codes, encoded.rows, encoded.states), tables, np.arange(40))
        states = [
            rows.states(40, place, torch.bfloat16, False)
            for rows, place in zip(buffers, ("cpu", "cuda"), strict=True)
        ]
        assert states[1].is_cuda
        found = download(states[1])
    for part in ("blob", "rows", "states"):
        np.testing.assert_array_equal(getattr(encoded, part), getattr(on_device, part))
    assert len(encoded.rows) >= 2
    assert torch.equal(found.view(torch.int16), states[0].view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_decoding_steps_stay_on_the_gpu(decoded: Any, name: str) -> None:
    """Three rounds of drafting: the tokens of the CPU."""
    on_cpu, on_gpu, _ = decoded[name]
    assert on_cpu == on_gpu
