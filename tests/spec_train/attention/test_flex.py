"""flex_attention: its blocks are those of torch, its graphs few, its limit an error.

It is compiled here by Inductor's split of forward and backward, without a compiler.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.parallel import DistributedDataParallel

from spec_train.attention import flex
from spec_train.attention.flex import GraphLimitError, flex_mask
from spec_train.attention.masked import default_backend, small_case
from spec_train.attention.masks import (
    AttentionMask,
    BlockWindow,
    block_mask,
    causal_mask,
    parallel_mask,
)
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset
from tests.spec_data.capture.test_attention_in_parts import Largest
from tests.spec_train.drafts.any_draft import SMALL

# -- masks ----------------------------------------------------------------------------------------


def random_mask(seed: int) -> AttentionMask:
    """Spans that begin and end anywhere; many are long or alike, so that blocks are seen whole."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    packs, queries, common, own = (draw.choice(x) for x in ((1, 3), *[(1, 90, 256, 300)] * 3))

    def spans(start: int, count: int) -> Tensor:
        scale = draw.choice((1, 40, count))  # distance of the ends from those of all keys
        shape = packs, queries
        first = torch.randint(0, min(scale, count), shape, generator=generator)
        last = count - 1 - torch.randint(0, min(scale, count) + 1, shape, generator=generator)
        return start + torch.stack([first, last], -1)

    ends = torch.cat([spans(0, common), spans(common, own)], -1)
    return AttentionMask(common + own, ends)


def of_torch(mask: AttentionMask) -> Any:
    table, (packs, queries, _) = mask.dense(), mask.ends.shape
    return create_block_mask(
        lambda b, h, q, k: table[b, 0, q, k], packs, None, queries, mask.keys, "cpu"
    )


def test_the_blocks_are_those_that_torch_makes_of_the_whole_table() -> None:
    whole = 0
    for seed in range(60):
        mask = random_mask(seed)
        blocks, expected = flex_mask(mask), of_torch(mask)
        assert blocks.shape == expected.shape and blocks.BLOCK_SIZE == expected.BLOCK_SIZE
        names = [f"{kind}{key}_num_blocks" for kind in ("", "full_") for key in ("kv", "q")]
        for name in names:
            numbers, wanted = (getattr(x, name) for x in (blocks, expected))
            rows = wanted.shape[-1]
            assert torch.equal(numbers[..., :rows], wanted) and not numbers[..., rows:].any()
            name = name.replace("num_blocks", "indices")
            order, wanted = (getattr(x, name) for x in (blocks, expected))
            assert torch.equal(order[..., :rows, : wanted.shape[-1]], wanted)
        whole += int(blocks.full_kv_num_blocks.sum())
        pack, query, key = (
            torch.arange(n) for n in (len(mask.ends), mask.ends.shape[1], mask.keys)
        )
        seen = blocks.mask_mod(pack[:, None, None], torch.zeros(()), query[:, None], key)
        assert torch.equal(seen, mask.dense()[:, 0])
    assert whole > 20


def test_no_mask_needs_a_number_for_every_query_and_key() -> None:
    length, size = 2048, 8
    documents = (torch.arange(length) // 700).expand(2, -1)
    anchors = torch.arange(0, length, 4).expand(2, -1)
    every = torch.arange(length).expand(2, -1)
    where = torch.cat([every, anchors], 1)
    depths = torch.cat([torch.zeros_like(every), torch.ones_like(anchors)], 1)
    makes = [
        lambda: causal_mask(documents, 100),
        lambda: parallel_mask(documents.gather(1, where), where, depths, length, 100),
        lambda: block_mask(documents, anchors, anchors >= 0, size, BlockWindow(100, True)),
    ]
    for make in makes:
        with Largest() as largest:
            mask = make()
            flex_mask(mask)
        table = mask.ends[..., 0].numel() * mask.keys
        assert 0 < largest.elements < table / 100
    with Largest() as planted:
        of_torch(causal_mask(documents))
    assert planted.elements >= documents.numel() * length


# -- graphs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiling() -> Iterator[pytest.MonkeyPatch]:
    """Compile flex_attention on CPUs, as on a GPU of a run with DDP; graphs are counted anew."""
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    default_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch, functorch.patch(donated_buffer=True):
        patch.setattr(flex, "COMPILED", ("cpu",))
        patch.setattr(flex, "COMPILER", "aot_eager_decomp_partition")
        patch.setattr(flex, "LEAST_SIZE", 8)
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)  # refuses a CPU's
        ddp = SimpleNamespace(bucket_bytes_cap=1)
        patch.setattr(DistributedDataParallel, "_get_active_ddp_module", lambda: ddp)
        yield patch
    flex._compiled.cache_clear()
    default_backend.cache_clear()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("flex") / "data", n_docs=24, mtp=True)


WINDOWS = {"sliding_window": 9, "layer_types": "sliding_attention,full_attention"}
CHANGED = {"peagle": WINDOWS, "dspark": WINDOWS}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_four_graphs_serve_a_fit_of_every_draft(
    name: str, compiling: Any, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial, two epochs with a last micro-batch of one pack, validations; a break is an error.

    All drafts share them, as they have the same heads.
    """
    config = Training(
        data=str(data), out=str(tmp_path), epochs=2, batch_size=2, seq_len=80, validation=0.2,
        dtype="bfloat16", eval_every=100, device="cpu",
    )  # fmt: skip
    options = DRAFT_OPTIONS[name](**SMALL[name] | CHANGED.get(name, {}))
    default_backend.cache_clear()
    with caplog.at_level("INFO", "spec_train"):
        fit(name, config, options)
    assert "torch.bfloat16, head size 8: flex" in caplog.text
    assert flex._compiled().graphs <= 4
    if name == next(iter(SMALL)):
        for kind in ("one pack, with", "several packs, with", "several packs, without"):
            assert f"compiled (torch.bfloat16, head size 8, {kind} gradients)" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_graph_too_many_is_an_error(compiling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit, torch would go on uncompiled, after one line in a log."""
    monkeypatch.setattr(flex, "GRAPHS", max(1, flex._compiled().graphs))
    monkeypatch.setattr(flex, "_settings", flex._settings.__wrapped__)  # not those of before
    with pytest.raises(GraphLimitError, match=r"compiled \d time.* in this process"):
        for heads in (4, 2):
            small_case("flex", torch.device("cpu"), torch.float32, (heads, 1, 8))
