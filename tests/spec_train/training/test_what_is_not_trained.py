"""What a run does not train is said before its first step, with counts that plain loops give."""

import logging
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import spec_data
from spec_data.shards.errors import ConfigError
from spec_data.shards.loss_masks import masks_under
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.seal import seal
from spec_train.data.splits import make_splits
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import OPTIONS, change, run

data, config = trainer_tools.data, trainer_tools.config


def answers(tmp_path, length: int, longer: int = 0):
    """Forty documents of answers of `length` tokens, after 5 of a prompt; `longer` ones of 20."""
    lengths = [20] * longer + [length] * (40 - longer)
    documents = [
        (list(range(i % 30, i % 30 + 5 + n)), [0] * 5 + [1] * n, [("assistant", 5, 5 + n)])
        for i, n in enumerate(lengths)
    ]
    return str(tiny_dataset(tmp_path / f"answers-{length}-{longer}", documents=documents))


def test_places_that_no_answer_reaches_are_counted(tmp_path, config, caplog):
    options = replace(OPTIONS, ttt_steps=6)
    for name, longer, named in (("none", 0, True), ("some", 20, False)):
        caplog.clear()
        path = answers(tmp_path, 4, longer)
        given = change(config, data=path, out=str(tmp_path / name), steps=1)
        run(given, options)
        assert ("warning[short-answers]" in caplog.text) == named
        if named:
            dataset = HiddenStatesDataset(path)
            slots = [0] * 7
            for row in make_splits(dataset, given).train.rows.tolist():
                mask = dataset[row]["loss_mask"].tolist()
                for known in range(1, len(mask)):
                    for d in range(1, 7):
                        if known + d < len(mask) and all(mask[known : known + d + 1]):
                            slots[d] += 1
            assert slots[4] == 0 < slots[3]
            said = f"token 4 has {slots[4]} slots to learn from, the first one {slots[1]}"
            assert said in caplog.text


def test_a_vocabulary_that_holds_few_of_the_tokens_is_named_with_its_share(config, caplog):
    run(change(config, steps=1), replace(OPTIONS, draft_vocab_size=16))
    said = re.search(
        r"warning\[vocabulary\]: .* of 16 tokens holds only (\d+) % of the superv", caplog.text
    )
    assert 10 < int(said[1]) < 60
    assert "warning[vocabulary]" in caplog.text
    caplog.clear()
    given = change(config, steps=1, out=config.out + "-b")
    run(given, replace(OPTIONS, draft_vocab_size=64))
    assert "holds only" not in caplog.text


@pytest.mark.parametrize(("seq_len", "named"), [(20, True), (64, False)])
def test_tokens_beyond_seq_len_are_named_with_their_share(config, caplog, seq_len, named):
    run(change(config, steps=1, seq_len=seq_len))
    assert ("warning[seq-len]" in caplog.text) == named
    if named:
        dataset = HiddenStatesDataset(config.data)
        lengths = [len(d["input_ids"]) for d in dataset if d["loss_mask"].any()]
        firsts = [int(d["loss_mask"].int().argmax()) for d in dataset if d["loss_mask"].any()]
        pairs = list(zip(lengths, firsts, strict=True))
        kept = sum(min(n, seq_len) for n, first in pairs if first < seq_len)
        share, beyond = 1 - kept / sum(lengths), sum(first >= seq_len for _, first in pairs)
        assert f"{100 * share:.0f} % of all tokens are not trained on" in caplog.text
        assert f"and {beyond} have their first answer after it" in caplog.text


def test_several_datasets_tell_their_shares_and_what_they_have_in_common(
    data, config, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    again = shutil.copytree(data, tmp_path / "again")
    with pytest.raises(ConfigError, match=r"again:2: the very dataset of .*set, .*:2$"):
        run(change(config, data=(str(data), f"{again}:2")))
    spec_data.select(str(data), tmp_path / "half", sample=0.5)
    run(change(config, data=(str(data), f"{tmp_path / 'half'}:2"), steps=1))
    shares = [float(share) for share in re.findall(r"share .*: ([\d.]+) % of the", caplog.text)]
    assert len(shares) == 2 and abs(sum(shares) - 100) < 0.2
    assert "warning[mixture]: 30 of 90 documents are in several of the datasets" in caplog.text


def test_the_probability_that_k_logits_lack_is_said(tmp_path, config, caplog):
    caplog.set_level(logging.INFO)
    path = tiny_dataset(tmp_path / "topk", n_docs=30, supervision="topk:4", seed=3)
    given = change(config, data=str(path), steps=1)
    run(given)
    said = re.search(
        r"topk:4: the logits lack ([\d.e+-]+) % .* \(at most ([\d.e+-]+) %", caplog.text
    )
    dataset, missing = HiddenStatesDataset(path), []
    for row in make_splits(dataset, given).measured.tolist():
        document = dataset[row]
        for t in range(len(document["input_ids"]) - 1):
            if document["loss_mask"][t + 1]:
                known = document["topk_logits"][t].double() - document["target_logsumexp"][t]
                missing.append(1 - float(known.exp().sum()))
    assert abs(float(said[1]) - 100 * np.mean(missing)) < 0.06 * 100 * np.mean(missing)
    assert abs(float(said[2]) - 100 * max(missing)) < 0.06 * 100 * max(missing)


def test_last_turn_leaves_out_documents_that_were_cut(tmp_path, caplog):
    """Their last turn is not complete: they are counted, and no other turn stands for it."""
    documents = [
        (
            ids[:30],
            ([0] * 5 + [1] * 5) * 3,
            [("assistant", 5 + 10 * i, 10 + 10 * i) for i in range(3)],
        )
        for ids, _, _ in random_documents(12, 64, 0, shortest=30)
    ]
    documents[3:5] = [(ids[:28], mask[:28], [*turns[:2], ("assistant", 25, 28)])
                      for ids, mask, turns in documents[3:5]]  # fmt: skip
    path = tiny_dataset(tmp_path / "cut", documents=documents)
    manifest = HiddenStatesDataset(path).manifest
    for stored, cut, named in ((28, 3, "Up to 1 others"), (28, 2, ""), (28, 0, None)):
        counts = type(manifest.documents)(**{"read": 12, "cut": cut, "dropped": {}})
        settings = {"max_length": stored}
        draft = manifest.changed(files={}, card=None, documents=counts, settings=settings)
        seal(path, draft, manifest.shards)
        caplog.clear()
        masks = masks_under(HiddenStatesDataset(path), "last-turn")
        left_out = [row for row in range(12) if not masks.supervised[row]]
        if named is None:
            assert left_out == [] and "last-turn" not in caplog.text
            continue
        assert left_out == [3, 4]
        assert "warning[last-turn]" in caplog.text and "2 documents that were cut" in caplog.text
        assert named in caplog.text and ("Up to" in caplog.text) == bool(named)
        assert torch.from_numpy(masks.mask(0, 30)).nonzero()[:, 0].tolist() == list(range(25, 30))


def test_of_merged_datasets_the_documents_that_any_length_cut_are_left_out(tmp_path, caplog):
    """The merge had the length of its first dataset alone: what the other cut was trained on."""
    sets = []
    for seed, length in ((1, 40), (2, 20), (3, 12)):
        documents = [
            (ids[:n], [0] * 5 + [1] * (n - 5), [("assistant", 5, n)])
            for n, (ids, _, _) in zip(
                (9, length, 8), random_documents(3, 64, seed, shortest=40), strict=True
            )
        ]
        model = tiny_llama()  # of one target
        path = tiny_dataset(tmp_path / f"{length}", seed=seed, documents=documents, model=model)
        manifest = HiddenStatesDataset(path).manifest
        counts = type(manifest.documents)(read=3, cut=1, dropped={})
        settings = {"max_length": length}
        draft = manifest.changed(files={}, card=None, documents=counts, settings=settings)
        seal(path, draft, manifest.shards)
        sets.append(path)
    merged = spec_data.merge(sets[:2], tmp_path / "merged").path
    spec_data.merge([merged, sets[2]], tmp_path / "more")
    spec_data.copy(tmp_path / "more", tmp_path / "copied")
    for name, cut in (("merged", {1, 4}), ("more", {1, 4, 7}), ("copied", {1, 4, 7})):
        caplog.clear()
        masks = masks_under(HiddenStatesDataset(tmp_path / name), "last-turn")
        assert set(np.flatnonzero(masks.supervised == 0).tolist()) == cut, name
        assert f"{len(cut)} documents that were cut" in caplog.text and "Up to" not in caplog.text
