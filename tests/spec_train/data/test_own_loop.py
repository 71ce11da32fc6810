"""Documents become batches whoever puts them together, and a loop of one's own has the packs of
`fit`."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import spec_train
from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.packing import PADDING
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.stream import read_packs
from tests.factory import tiny_dataset
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import SMALL, build_draft
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head


@pytest.fixture
def draft(dataset, head):
    return build_draft("eagle3", dataset, head).eval()


def equal(one: DraftBatch, other: DraftBatch) -> bool:
    pairs = [(one.plain(), other.plain()), (one.hidden, other.hidden)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


def test_every_form_of_the_same_documents_is_the_same_batch(dataset):
    batch = spec_train.collate([dataset[i] for i in range(3)])
    assert batch.rows == [[0], [1], [2]] and batch.hidden["hidden.L0"].dtype == torch.bfloat16
    lengths = dataset.lengths[:3].tolist()
    assert (batch.document_ids != PADDING).sum(1).tolist() == lengths
    for i, length in enumerate(lengths):
        row = dataset[i]
        assert torch.equal(batch.input_ids[i, :length], row["input_ids"].long())
        assert not batch.input_ids[i, length:].any() and not batch.loss_mask[i, length:].any()
        assert torch.equal(batch.hidden["hidden.final"][i, :length], row["hidden.final"])
    width = max(lengths)
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=7)
        for name, values in dataset[0:3].items()
        if isinstance(values[0], torch.Tensor)
    }
    padded["attention_mask"] = torch.arange(width) < torch.tensor(lengths)[:, None]
    forms = [
        *(dataset[0:3], dataset[[0, 1, 2]], tuple(dataset[i] for i in range(3))),
        *([dict(dataset[i]) for i in range(3)], dict(dataset[0:3]), padded, batch),
        [
            {n: getattr(v, "tolist", lambda v=v: v)() for n, v in dataset[i].items()}
            for i in range(3)
        ],
    ]
    for form in forms:
        again = spec_train.collate(form, dtype=torch.bfloat16)
        assert equal(again, batch), type(form)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_give_batches_that_a_draft_takes(dataset, draft, workers):
    alone = [draft.loss(dataset[i]).loss for i in range(len(dataset))]
    for options in ({}, {"batch_size": None}):
        for loss, row in zip(
            alone, DataLoader(dataset, num_workers=workers, **options), strict=True
        ):
            assert torch.equal(draft.loss(row).loss, loss)
    torch.manual_seed(1)
    options = {"batch_size": 3, "num_workers": workers, "shuffle": True}
    rows = []
    for batch in DataLoader(dataset, collate_fn=spec_train.collate, **options):
        rows += batch.rows
        chosen = [row for (row,) in batch.rows]
        assert torch.equal(draft.loss(batch).loss, draft.loss(dataset[chosen]).loss)
    assert sorted(rows) == [[i] for i in range(len(dataset))] and rows != sorted(rows)


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"mtp", "peagle"}))  # these need more, or draw
def test_a_row_per_document_has_the_loss_of_packs(dataset, head, name):
    options = {"noise": 0.0} if name == "eagle" else {}
    draft = build_draft(name, dataset, head, **options).eval()
    columns = draft.columns(dataset.manifest.supervision)
    for batch in (spec_train.collate(dataset[0:4]), dataset[0:4]):
        torch.manual_seed(2)
        rows = draft.loss(batch)
        torch.manual_seed(2)
        padded = read_packs(dataset, [[0], [1], [2], [3]], columns, 64, torch.float32)
        found = draft.loss(padded, head)
        close(rows.loss, found.loss, terms=network(4))


def test_documents_tell_where_they_were_read_in_other_processes(dataset):
    row = dataset[-1]
    for other in (copy.copy(row), row.copy(), pickle.loads(pickle.dumps(row)), copy.deepcopy(row)):
        assert other.origin == dataset.origin and other.number == len(dataset) - 1
        assert other.keys() == row.keys()
    assert copy.copy(row).dataset is dataset
    batch = spec_train.collate(row)
    assert batch.origin == dataset.origin and batch.rows == [[len(dataset) - 1]]
    assert batch.to("cpu", torch.float32).origin == batch.origin


BAD = {
    "no documents": lambda ds: 5,
    "expected documents": lambda ds: torch.zeros(2, 3),
    "a list with int": lambda ds: [1, 2],
    "no document;": lambda ds: [],
    "no loss_mask, target_argmax": lambda ds: {"input_ids": [1, 2]},
    "input_ids and": lambda ds: dict(ds[0]) | {"loss_mask": torch.zeros(1)},
    "other widths": lambda ds: [ds[0], dict(ds[1]) | {"hidden.L0": ds[1]["hidden.L0"][:, :4]}],
    "has 1 rows": lambda ds: dict(ds[0:2]) | {"loss_mask": ds[0:1]["loss_mask"]},
    "padding on the left": lambda ds: {
        **{n: v[None] for n, v in ds[0].items() if isinstance(v, torch.Tensor)},
        "attention_mask": torch.arange(len(ds[0]["input_ids"]))[None] > 0,
    },
    "packs, not documents": lambda ds: dict(ds[0:2]) | {"document_ids": torch.zeros(2, 3)},
    "the document has no hidden.L1": lambda ds: [
        ds[0],
        {n: v for n, v in ds[1].items() if n != "hidden.L1"},
    ],
}


@pytest.mark.parametrize("said", list(BAD)[1:])
def test_what_is_no_document_is_refused_by_name(dataset, draft, said):
    with pytest.raises(DatasetError, match=said):
        draft.loss(BAD[said](dataset))


def test_documents_of_several_targets_are_refused_and_of_one_target_mixed(dataset, draft, tmp_path):
    other = HiddenStatesDataset(tiny_dataset(tmp_path / "other", n_docs=2, seed=5))
    with pytest.raises(DatasetError, match="several targets"):
        draft.loss([dataset[0], other[0]])
    assert draft.loss([dataset[0], dict(other[0])]).loss > 0  # nobody knows, nobody says


# --- the packs of fit -----------------------------------------------------------------------------


def read(dataset, draft, **options):
    options = {"seq_len": 64, "batch_size": 2, "validation": 0.0} | options
    return spec_train.loader(dataset, draft, **options)


def test_batches_are_in_new_memory_and_epochs_differ(dataset, draft):
    batches = read(dataset, draft)
    first = list(batches)
    assert len(first) == len(read(dataset, draft)) > 1
    kept = [copy.deepcopy(batch) for batch in first]
    second = list(batches)
    assert all(equal(a, b) for a, b in zip(first, kept, strict=True)), "overwritten"
    documents = sorted(row for batch in first for pack in batch.rows for row in pack)
    assert documents == list(range(len(dataset)))
    assert documents == sorted(row for batch in second for pack in batch.rows for row in pack)
    assert [b.rows for b in first] != [b.rows for b in second]
    batches.set_epoch(0)
    assert next(iter(batches)).rows == first[0].rows
    assert [b.rows for b in batches] == [b.rows for b in first], "a look at one batch loses none"
    batches.set_epoch(0)
    both = [b.rows for b in batches.repeat(len(first) + 1)]
    assert both == [b.rows for b in first] + [second[0].rows]


def test_a_position_is_resumed(dataset, draft):
    batches = read(dataset, draft, batch_size=1)
    every = [b.rows for b in batches]
    batches.set_epoch(0)
    walked = iter(batches)
    assert next(walked).rows == every[0]
    state = batches.state_dict()
    again = read(dataset, draft, batch_size=1)
    again.load_state_dict(state)
    assert [b.rows for b in again] == every[1:]
    with pytest.raises(ConfigError, match="another order"):
        read(dataset, draft, seed=7).load_state_dict(state)


def test_ranks_share_the_packs_of_an_epoch(dataset, draft):
    alone = [b.rows for b in read(dataset, draft, batch_size=1)]
    ranks = [
        [b.rows for b in read(dataset, draft, batch_size=1, rank=rank, world_size=3)]
        for rank in range(3)
    ]
    assert len({len(rows) for rows in ranks}) == 1
    joined = [rows[i] for i in range(len(ranks[0])) for rows in ranks]
    assert [rows for rows in joined if rows != [[]]] == alone
    padding = [b for b in read(dataset, draft, batch_size=1, rank=2, world_size=3) if not b.tokens]
    for batch in padding:
        assert draft.loss(batch).loss == 0


def test_the_draws_of_a_batch_are_its_own(dataset, head):
    draft = build_draft("dspark", dataset, head, num_anchors=2)
    (batch,) = read(dataset, draft, seq_len=512)
    before = torch.random.get_rng_state()
    first = draft.loss(batch).loss
    torch.manual_seed(99)
    assert torch.equal(first, draft.loss(batch).loss)
    torch.random.set_rng_state(before)
    batch.seed = None
    draft.loss(batch)
    assert not torch.equal(before, torch.random.get_rng_state()), "without a seed it draws torch's"


def test_what_a_loader_cannot_read_is_refused(dataset, draft, tmp_path):
    with pytest.raises(ConfigError, match="rank = 2"):
        read(dataset, draft, rank=2, world_size=2)
    with pytest.raises(ConfigError, match="choose from train"):
        read(dataset, draft, split="test")
    with pytest.raises(DatasetError, match="holds no document out"):
        read(dataset, draft, split="validation")
    other = tiny_dataset(tmp_path / "other", n_docs=2, layers=(0, 1))
    with pytest.raises(spec_train.SpecDataError, match="without"):
        read(other, draft)
    held = {
        row
        for b in read(dataset, draft, split="validation", validation=0.4)
        for pack in b.rows
        for row in pack
    }
    kept = {row for b in read(dataset, draft, validation=0.4) for pack in b.rows for row in pack}
    assert held and kept and not held & kept and held | kept == set(range(len(dataset)))


def test_dir_shows_public_names(dataset, draft):
    for thing in (dataset, draft):
        assert not [name for name in dir(thing) if name.startswith("_")]
    assert {"lengths", "features", "text", "tokenizer"} <= set(dir(dataset))
    assert {"loss", "propose", "save_pretrained", "parameters", "midlayer"} <= set(dir(draft))
    for name in set(dir(dataset)) - {"tokenizer"}:
        assert hasattr(dataset, name), name
