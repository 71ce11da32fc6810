"""Lossy columns decoded after the move to the device: the very batches that the reader decodes."""

import numpy as np
import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, BufferOptions
from tests.spec_data.runs import run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED

target, corpus = codec_tools.target, codec_tools.corpus
COLUMNS = ("hidden.L0", "hidden.L2", "hidden.final", "target_argmax")
SMALL = ("input_ids", "loss_mask", "position_ids", "document_ids", "target_argmax")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]


@pytest.fixture(scope="module", params=["default", "mixed", "partly"])
def lossy(request, target, corpus, tmp_path_factory):
    given = {"mixed": MIXED, "partly": {"codec": "default,final=bf16", "final": "supervised"}}
    out = tmp_path_factory.mktemp("lossy") / "data"
    run(target, corpus, out, **given.get(request.param, {"codec": request.param}))
    return HiddenStatesDataset(out)


def batches(dataset, decode_on, dtype, device="cpu", seq_len=40):
    """Two epochs of packs, cut ones among them, as a draft gets them."""
    every = np.arange(len(dataset))
    plan = BatchPlan(dataset.lengths, every, seq_len=seq_len, packs_per_batch=4)
    stream = BatchStream(
        dataset,
        plan,
        COLUMNS,
        batch_size=2,
        buffers=BufferOptions(dtype=dtype, decode_on=decode_on, pin=device == "cuda"),
    )
    for step in stream.take(2 * len(plan.batches(0))):
        for batch in step.batches:
            yield batch, batch.to(device, dtype, non_blocking=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draft_sees_the_same_bits_wherever_they_are_decoded(lossy, dtype, device):
    escaped = padded = cut = 0
    found = batches(lossy, device, dtype, device)
    for (_, a), (host, b) in zip(batches(lossy, None, dtype), found, strict=True):
        assert a.rows == b.rows and not a.coded and not b.coded
        for name in SMALL:
            assert torch.equal(getattr(a, name), getattr(b, name).cpu())
        assert a.hidden.keys() == b.hidden.keys()
        for name, states in a.hidden.items():
            assert states.dtype == b.hidden[name].dtype
            assert torch.equal(states, b.hidden[name].cpu()), name
        assert host.coded and not any(name in host.hidden for name in host.coded)
        assert torch.equal(a.aux((0, 2)), b.aux((0, 2)).cpu())
        empty = b.document_ids.cpu() < 0
        assert not any(states.cpu()[empty].any() for states in b.hidden.values())
        escaped += int((a.hidden["hidden.L0"].abs() > 1000).any(-1).sum())
        padded += int(empty.sum())
        cut += sum(int(lossy.lengths[row]) > 40 for pack in a.rows for row in pack)
    assert escaped > 5 and padded > 100 and cut > 0


def test_only_codes_cross_the_bus(lossy):
    """What is held for the move has a byte a value."""
    batch, _ = next(batches(lossy, "cpu", torch.bfloat16))
    columns = {c.name: c for c in lossy.manifest.columns}
    for name, rows in batch.coded.items():
        assert rows.count <= batch.tokens
        assert rows.codes.nbytes == rows.codes.shape[0] * columns[name].width
        if columns[name].sparse:
            assert rows.count < batch.tokens
    assert not batch.without_hidden().coded
