"""`--mask`: the masks of another policy, from the stored turns, compared with plain loops."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

import spec_data
import spec_train
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.mixture import PolicyDataset, open_documents, open_with_mask
from spec_train.data.splits import make_splits
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import read_run
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from tests.factory import tiny_dataset
from tests.spec_data.runs import run as generate
from tests.spec_data.runs import save_target
from tests.spec_data.shards.integrity_tools import write_manifest
from tests.spec_train import flat
from tests.spec_train.data.rewriting import rewritten

POLICIES = ("assistant", "last-turn", "first-2", "roles=assistant", "roles=text")
ROWS = [
    *(
        {
            "messages": [
                message
                for turn in range(1 + row % 3)
                for message in (
                    {"role": "user", "content": f"question {row}.{turn}"},
                    {"role": "assistant", "content": f"answer {row}, {turn} " + "so " * (row % 5)},
                )
            ]
        }
        for row in range(24)
    ),
    {"text": "a text without any turn, supervised as a whole"},
    {"input_ids": [5, 6, 7, 8, 9, 10, 11], "loss_mask": [0, 1, 1, 0, 0, 1, 1]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """One corpus of chats, a text and given masks, captured with every policy of `generate`."""
    folder = tmp_path_factory.mktemp("masks")
    save_target(folder / "target")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "c.jsonl").write_text(lines)
    for policy in ("assistant", "last-turn", "all"):
        given = {"mask": policy, "layers": "0,2", "teacher": "all"}
        generate(folder / "target", folder / "c.jsonl", folder / policy, **given)
    generate(
        folder / "target", folder / "c.jsonl", folder / "sparse", final="supervised", layers="0,2"
    )
    return folder


def plain_mask(document: dict, policy: str) -> list[int]:
    """Return the mask of a stored document, one token at a time."""
    turns, mask = document["turns"], []
    for token in range(len(document["input_ids"])):
        inside = [i for i, turn in enumerate(turns) if turn["start"] <= token < turn["end"]]
        if policy == "all":
            wanted = True
        elif policy == "last-turn":
            wanted = len(turns) - 1 in inside
        elif policy.startswith("first-"):
            wanted = any(i < int(policy[6:]) for i in inside)
        elif policy.startswith("roles="):
            wanted = any(turns[i]["role"] in policy[6:].split(",") for i in inside)
        else:
            wanted = bool(inside)
        mask.append(int(wanted))
    return mask


def fit(data, out: Path, **changes):
    given = dict(
        steps=2, batch_size=2, seq_len=64, validation=0.25, ttt_steps=2, draft_vocab_size=64,
        device="cpu",
    )  # fmt: skip
    return flat.fit("eagle3", data, out, **given | changes)


@pytest.mark.parametrize("policy", ["assistant", "last-turn", "all"])
def test_the_policy_of_generate_derives_the_stored_masks(place, policy):
    stored, derived = HiddenStatesDataset(place / policy), PolicyDataset(place / policy, policy)
    assert len(stored) >= 25
    for row in range(len(stored)):
        assert torch.equal(derived[row]["loss_mask"], stored[row]["loss_mask"]), row
        assert stored[row]["loss_mask"].tolist() == plain_mask(stored[row], policy), row
    assert np.array_equal(derived.supervised, stored.supervised)
    assert np.array_equal(derived.first_supervised, stored.first_supervised)
    assert type(open_with_mask(place / policy, policy)) is HiddenStatesDataset
    assert type(open_with_mask(place / policy, None)) is HiddenStatesDataset


@pytest.mark.parametrize("policy", POLICIES)
def test_masks_and_their_statistics_are_those_of_plain_loops(place, policy):
    stored, derived = HiddenStatesDataset(place / "all"), PolicyDataset(place / "all", policy)
    buffer = torch.ones(200, dtype=torch.bool)
    for row, document in enumerate(stored):
        mask = plain_mask(document, policy)
        assert derived[row]["loss_mask"].tolist() == mask
        assert derived[row - len(stored)]["loss_mask"].tolist() == mask
        assert derived.mask_of(row).tolist() == [bool(value) for value in mask]
        assert derived.supervised[row] == sum(mask)
        assert derived.first_supervised[row] == (mask.index(1) if 1 in mask else len(mask))
        buffer[:] = True
        count = derived.read_into(row, {"loss_mask": buffer}, 3, 10)  # cut, and with an offset
        assert buffer[3 : 3 + count].tolist() == [bool(value) for value in mask[:10]]
        assert buffer[:3].all() and buffer[3 + count :].all()
        buffer[:] = True
        assert derived.read_into(row, {"loss_mask": buffer.numpy()}, 3, 10) == count
        assert buffer[3 : 3 + count].tolist() == [bool(value) for value in mask[:10]]
        states = torch.zeros(len(mask), 32)
        derived.read_into(row, {"hidden.L2": states})
        assert torch.equal(states, document["hidden.L2"].float())


def test_training_with_a_mask_equals_training_on_data_generated_with_it(place, tmp_path):
    """Same documents, same states: only their stored masks, ids and order of hashes differ."""
    derived = fit(place / "assistant", tmp_path / "a", mask="last-turn", validation=0)
    copied = tmp_path / "copy"
    old = HiddenStatesDataset(place / "assistant")
    rewritten(
        old.path,
        copied,
        lambda row: row | {"loss_mask": torch.tensor(plain_mask(row, "last-turn")).bool()},
        documents=structs.replace(old.manifest.documents, stored=len(old)),
        mask="last-turn",
    )
    stored = fit(copied, tmp_path / "b", validation=0)
    assert [line["loss"] for line in derived.training] == [line["loss"] for line in stored.training]
    plain = fit(place / "assistant", tmp_path / "c", validation=0)
    assert [line["loss"] for line in plain.training] != [line["loss"] for line in stored.training]


def test_a_run_keeps_its_mask_and_eval_uses_it(place, tmp_path):
    run = fit(place / "assistant", tmp_path / "run", mask="last-turn")
    with pytest.raises(ConfigError, match="mask: 'last-turn' -> 'first-1'"):
        fit(place / "assistant", tmp_path / "run", mask="first-1")
    with pytest.raises(ConfigError, match="mask: 'last-turn' -> None"):
        fit(place / "assistant", tmp_path / "run")
    facts = read_run(run.directory, run.directory / "best")
    dataset = PolicyDataset(place / "assistant", "last-turn")
    config = Training(
        data=str(place / "assistant"), out="x", seq_len=64, validation=0.25, mask="last-turn"
    )
    held_out = set(range(len(dataset))) - set(make_splits(dataset, config).train.rows.tolist())
    measured, split = choose_documents(HiddenStatesDataset(place / "assistant"), "auto", facts)
    assert split == "validation" and set(measured) <= held_out and measured
    report = spec_train.evaluate(run.directory, data=place / "assistant")
    found = report.data
    assert found.figures["mask"] == "last-turn"
    assert found.documents == len(measured)
    whole = spec_train.evaluate(run.directory, data=place / "assistant", mask="assistant").data
    assert whole.supervised_tokens > found.supervised_tokens
    other = spec_train.evaluate(run.directory, data=place / "all").data  # not the run's own data
    assert other.figures["mask"] == "all"


def test_under_another_mask_too_a_run_trained_on_what_it_trained_on(tmp_path):
    """Documents 10 to 19 have one supervised token, so the run used none of them."""
    documents = [
        (list(range(i, i + 20)), [0] * 12 + ([1] * 8 if i < 10 else [0] * 7 + [1]), turns)
        for i in range(20)
        for turns in [[("user", 0, 12), ("assistant", 12, 20)]]
    ]
    data = tiny_dataset(tmp_path / "data", documents=documents)
    run = fit(data, tmp_path / "run")
    facts = read_run(run.directory, run.directory / "best")
    assert [
        choose_documents(open_with_mask(data, mask), split, facts)[0]
        for split in ("train", "validation")
        for mask in (None, "assistant", "all")
    ] == [
        choose_documents(HiddenStatesDataset(data), split, facts)[0]
        for split in ("train", "train", "train", "validation", "validation", "validation")
    ]


def test_a_document_is_on_one_side_under_every_mask(place, tmp_path):
    source, view = str(place / "assistant"), str(tmp_path / "view")
    spec_data.select(source, view, mask="all")
    config = Training(data=[source, view], out="x", seq_len=64, validation=0.4)
    mixture = open_documents(parse_sources(config.data))
    splits = make_splits(mixture, config)
    tokens = [tuple(HiddenStatesDataset(d)[i]["input_ids"].tolist()) for d, i in both(source, view)]
    assert len(set(mixture.id_array.to_pylist())) > len(set(tokens)), (
        "some documents have another mask"
    )
    sides = {
        side: {tokens[row] for row in rows.tolist()}
        for side, rows in (("train", splits.train.rows), ("validation", splits.measured))
    }
    assert all(sides.values()) and not sides["train"] & sides["validation"]


def both(*datasets: str) -> list[tuple[str, int]]:
    """The documents of datasets, in the order of a mixture."""
    return [(data, i) for data in datasets for i in range(len(HiddenStatesDataset(data)))]


def test_mixtures_use_the_mask_in_every_dataset(place, tmp_path):
    data = [str(place / "assistant"), f"{place / 'all'}:0.5"]
    mixture = open_documents(parse_sources(data), mask="last-turn")
    size = len(HiddenStatesDataset(place / "assistant"))
    for row in range(len(mixture)):
        name, own = ("assistant", row) if row < size else ("all", row - size)
        document = HiddenStatesDataset(place / name)[own]
        assert mixture.supervised[row] == sum(plain_mask(document, "last-turn"))
    assert fit(data, tmp_path / "run", mask="last-turn").finished


def test_states_that_were_not_stored_are_refused(place, tmp_path):
    with pytest.raises(
        DatasetError, match=r"--mask all .*hidden\.final and target_argmax.* --teacher all"
    ):
        PolicyDataset(place / "sparse", "all")
    stored = HiddenStatesDataset(place / "sparse")
    fewer = PolicyDataset(place / "sparse", "first-1")
    for row in range(len(stored)):  # the rows of sparse columns are still found
        states = (dataset[row]["hidden.final"].nan_to_num(7.0) for dataset in (fewer, stored))
        assert torch.equal(*states)
    assert fit(place / "sparse", tmp_path / "run", mask="last-turn").finished


@pytest.mark.parametrize(
    ("name", "change", "policy", "said"),
    [
        ("all", {}, "roles=assistant,user", "no document has a turn of role user; stored"),
        ("last-turn", {"mask": "assistant"}, "all", "stored mask is not that of its turns under"),
        ("assistant", {"documents": 7}, "first-2", "7 conversations were rendered turn by turn"),
    ],
    ids=["roles", "other masks", "in pieces"],
)
def test_masks_that_cannot_be_derived_are_refused(place, tmp_path, name, change, policy, said):
    shutil.copytree(place / name, tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "manifest.json").read_text())
    if "documents" in change:
        raw["documents"]["rendering"]["turn by turn"] = change["documents"]
    write_manifest(tmp_path / "d", raw | {"mask": change.get("mask", raw["mask"])})
    with pytest.raises(DatasetError, match=said):
        PolicyDataset(tmp_path / "d", policy)


def test_a_mask_needs_all_documents_and_a_dataset():
    with pytest.raises(ConfigError, match="--mask all and --follow"):
        Training(data="d", out="o", mask="all", follow=True)
