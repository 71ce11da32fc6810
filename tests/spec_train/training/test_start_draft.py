"""`--init-from` brings the shape of its draft: no option has to repeat it."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

import spec_data
import spec_train
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import read_record, write_record
from spec_train.cli import main
from spec_train.data.order import SPLIT_BY_TOKENS
from spec_train.data.splits import HeldOut
from spec_train.drafts import load_draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.evaluation.run_record import read_run
from spec_train.formats.draft_files import read_files
from spec_train.formats.draft_seal import SECTION
from spec_train.options.training import Training
from spec_train.training.fit import fit
from spec_train.training.run_cost import dry_run
from tests import factory
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train import flat
from tests.spec_train.formats.published import tiny

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LAYER = {"intermediate_size": 24, **HEADS}
SHAPES = {
    "eagle": {**LAYER, "num_layers": 2, "hidden_act": "gelu", "depth": 2},
    "eagle3": {
        **LAYER,
        **{"num_layers": 2, "layers": "0,2", "draft_vocab_size": 40, "ttt_steps": 2},
        **{"qk_norm": True, "norm_before_fc": False, "norm_before_residual": True},
        **{"norm_output": True, "sliding_window": 9},
    },
    "peagle": {**LAYER, "num_layers": 2, "draft_vocab_size": 40, "depths": 3, "fc_norm": True},
    "dspark": {
        **LAYER,
        **{"num_layers": 1, "block_size": 4, "markov_rank": 6, "markov_head_type": "gated"},
        **{"confidence_weight": 0.0, "draft_vocab_size": 40, "mask_token_id": 5},
    },
    "dflash": {**LAYER, "num_layers": 1, "block_size": 4},
    "dflash2": {
        **LAYER,
        "num_layers": 1,
        "block_size": 4,
        "selector_rank": 6,
        "conv_group_size": 4,
    },
    "lilicorr": {
        **LAYER,
        **{"num_layers": 1, "block_size": 4, "lilicorr_candidate_topk": 3},
        **{"lilicorr_hidden_size": 8, "lilicorr_num_heads": 4, "lilicorr_factor_dim": 5},
    },
    "domino": {**LAYER, "num_layers": 1, "block_size": 4, "emb_dim": 5, "gru_hidden_dim": 3},
    "xpress": {**LAYER, "num_layers": 1, "block_size": 4, "xpress_rank": 5},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(tiny_dataset(tmp_path_factory.mktemp("start") / "data", n_docs=20))


def run(name: str, data: str, out: Path, **given):
    """Fit for a step as the command line does, options that are not given are at their default."""
    return fit(name, *flat.split(name, **_of(data, out) | given))


def _of(data: str, out: Path) -> dict[str, object]:
    return {"data": data, "out": str(out), "steps": 1, "seq_len": 48, "device": "cpu"}


def foreign(folder: Path, out: Path) -> Path:
    """Copy a draft as another program would have written it: without our section."""
    files = read_files(folder)
    config = {key: value for key, value in files.config.items() if key != SECTION}
    return tiny.write(out, config, files.tensors)


@pytest.fixture(scope="module")
def first(data: str, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns a draft of a kind with its own shape; do not change it."""

    @functools.cache
    def fitted(name: str) -> Path:
        out = tmp_path_factory.mktemp("first") / name
        run(name, data, out, **SHAPES[name])
        return out / "last"

    return fitted


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("whose", ["ours", "foreign"])
def test_the_shape_comes_from_the_draft(name, whose, data, first, tmp_path):
    start = first(name)
    if whose == "foreign":
        start = foreign(start, tmp_path / "foreign")
    second = tmp_path / "second"
    run(name, data, second, init_from=str(start), lr=1e-30)
    old, new = (load_draft(folder) for folder in (start, second / "last"))
    assert old.config.shape_json() == new.config.shape_json()
    for key, value in old.state_dict().items():
        assert torch.allclose(value.float(), new.state_dict()[key].float(), atol=1e-6), key
    table = json.loads((second / "fit.json").read_text())
    assert {k: table[k] for k in LAYER} == LAYER
    assert run(name, data, second, init_from=str(start), lr=1e-30).finished  # resumes


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_vocabulary_chosen_by_coverage_is_kept(name, data, tmp_path):
    shape = {key: value for key, value in SHAPES[name].items() if key != "draft_vocab_size"}
    run(name, data, tmp_path / "first", **shape, draft_vocab_coverage=0.7)
    start = tmp_path / "first" / "last"
    run(name, data, tmp_path / "second", init_from=str(start))
    old, new = (load_draft(folder) for folder in (start, tmp_path / "second" / "last"))
    assert old.config.draft_vocab_size < old.config.vocab_size
    assert torch.equal(old.draft_ids, new.draft_ids)


def test_a_preset_asks_for_no_other_vocabulary(data, first, tmp_path):
    """`smoke` has another size than the default, and so than a draft of that."""
    start = first("eagle3")
    given = _of(data, tmp_path / "run") | {"init_from": str(start), "preset": "smoke"}
    spec_train.fit(Training(**given), Eagle3Options())
    old, new = (load_draft(folder) for folder in (start, tmp_path / "run" / "last"))
    assert old.config.draft_vocab_size == new.config.draft_vocab_size < old.config.vocab_size


def test_a_run_resumes_without_the_draft_that_it_began_with(data, tmp_path, caplog):
    caplog.set_level("INFO")
    run("eagle3", data, tmp_path / "first", **SHAPES["eagle3"])
    start = foreign(tmp_path / "first" / "last", tmp_path / "start")
    caplog.clear()
    run("eagle3", data, tmp_path / "second", init_from=str(start))
    assert "layers     0, 2 (outputs of these blocks, from 0): those of the draft of" in caplog.text
    start.rename(tmp_path / "moved")
    assert run("eagle3", data, tmp_path / "second", init_from=str(start)).finished


def test_a_start_and_a_vocabulary_are_found_from_anywhere(data, tmp_path, monkeypatch):
    """By a relative path, or another spelling of it, from here or elsewhere, or not any more."""
    (tmp_path / "else").mkdir()
    words = ["fit", "eagle3", "--data", str(data), "--steps", "2", "--device", "cpu"]
    words += ["--seq-len", "64"]
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--out", "start"]) == 0
    assert main([*words, "--out", "run", "--init-from", "start"]) == 0
    (tmp_path / "v.json").write_text(json.dumps(list(range(20))))
    assert main([*words, "--out", "small", "--draft-vocab", "v.json"]) == 0
    assert main([*words, "--out", "run", "--init-from", "./start"]) == 0
    monkeypatch.chdir(tmp_path / "else")
    again = {n: ["fit", "eagle3", "--config", f"../{n}/fit.json", "--out", f"../{n}"]
             for n in ("run", "small")}  # fmt: skip
    assert [main(words) for words in again.values()] == [0, 0]
    facts = read_run(tmp_path / "run", tmp_path / "run" / "last")
    assert facts is not None and facts.unknown is None and len(facts.earlier) == 1, (
        "its data is known"
    )
    (tmp_path / "start").rename(tmp_path / "gone")
    assert main(again["run"]) == 0
    assert main([*words, "--out", "new", "--init-from", "../start"]) == 2


def test_what_a_draft_was_trained_on_is_not_held_out_when_it_is_trained_further(
    data, tmp_path, caplog
):
    def border(name: str, **given) -> int:
        caplog.clear()
        run("eagle3", data, tmp_path / name, **given)
        identity = json.loads((tmp_path / name / "run.json").read_text())["identity"]
        return identity["split_border"]

    first = border("first", validation=0.3)
    raised = border("raised", init_from=str(tmp_path / "first"), validation=0.6)
    assert raised == first and "fewer than --validation asks for" in caplog.text
    assert "warning[init-from]" in caplog.text
    caplog.clear()
    again = _of(data, tmp_path / "dry") | {"init_from": str(tmp_path / "first" / "last")}
    dry_run("eagle3", *flat.split("eagle3", **again, validation=0.6))
    assert "fewer than --validation asks for" in caplog.text
    lowered = border("lowered", init_from=str(tmp_path / "first"), validation=0.2)
    assert lowered < first and "init-from" not in caplog.text
    assert border("seed", init_from=str(tmp_path / "first"), validation=0.6, split_seed=1) > first
    assert "which documents it held out is not known" in caplog.text
    shutil.copytree(tmp_path / "first" / "best", tmp_path / "moved")
    assert border("copy", init_from=str(tmp_path / "moved"), validation=0.6) > first
    assert "which documents it held out is not known" in caplog.text
    documents = random_documents(20, 64, 7)  # of the same target
    other = tiny_dataset(tmp_path / "other", model=tiny_llama(64), documents=documents)
    caplog.clear()
    run("eagle3", str(other), tmp_path / "more", init_from=str(tmp_path / "moved"), validation=0.6)
    assert "init-from" not in caplog.text
    border("all", validation=0)
    own = border("own", init_from=str(tmp_path / "all"), validation=0.3)
    assert own == first and "held out 0 of these documents" in caplog.text


def test_a_draft_of_a_run_that_split_by_tokens_goes_on_with_its_rule(data, tmp_path, caplog):
    """Such runs are of before documents were held out by their prompts."""
    run("eagle3", data, tmp_path / "first", validation=0.3)
    file = tmp_path / "first" / "run.json"
    record = read_record(file)
    record["identity"]["split_rule"] = SPLIT_BY_TOKENS
    record["identity"].pop("split_common", None)
    write_record(file, record)
    caplog.clear()
    run("eagle3", data, tmp_path / "more", init_from=str(tmp_path / "first/last"), validation=0.3)
    identity = json.loads((tmp_path / "more" / "run.json").read_text())["identity"]
    before = record["identity"]
    assert identity["split_rule"] == SPLIT_BY_TOKENS
    assert identity["split_border"] <= before["split_border"], "nothing trained is held out"
    assert "warning[init-from]: the run of --init-from is of an earlier release" in caplog.text
    config = Training(**_of(data, tmp_path / "x"), validation=0.3)
    rule = HeldOut.of(identity)
    held = rule.below(HiddenStatesDataset(data), config.split_seed)
    old = HeldOut.of(before).below(HiddenStatesDataset(data), config.split_seed)
    assert held.any() and not (held & ~old).any()


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_the_lm_head_is_trained_only_if_asked(name, data, tmp_path):
    target = load_file(Path(data) / "target" / "head.safetensors")
    target = target.get("lm_head", target["embed_tokens"])
    for trained in (False, True):
        out = tmp_path / str(trained)
        run(name, data, out, **SHAPES[name], train_head=trained)
        draft = load_draft(out / "last")
        same = torch.equal(draft.lm_head.weight, target[draft.draft_ids])
        state = load_file(out / "last" / "training_state.safetensors")
        assert same is not trained and ("master.lm_head.weight" in state) is trained


@pytest.mark.parametrize("name, scale", [("eagle3", 1.0), ("dspark", 1.0), ("eagle3", 1 / 13)])
def test_what_is_the_targets_is_written_as_it_has_it(
    name, scale, data, tmp_path, caplog, monkeypatch
):
    """In every dtype of the run; bfloat16 is the default of a GPU, and this target has float32."""
    if scale != 1:  # Granite's; a draft's head has it in its rows
        save = factory._save_target
        scaled = lambda *given: structs.replace(save(*given), scale=scale)  # noqa: E731
        monkeypatch.setattr(factory, "_save_target", scaled)
        data = str(tiny_dataset(tmp_path / "data"))
    target = load_file(Path(data) / "target" / "head.safetensors")
    embedding = target["embed_tokens"]
    rows = target.get("lm_head", embedding) * scale
    assert not torch.equal(embedding, embedding.bfloat16().float())
    given = {"dtype": "bfloat16", "steps": 2} | SHAPES[name]
    assert not fit(name, *flat.split(name, **_of(data, tmp_path / "a") | given), 1).finished
    assert run(name, data, tmp_path / "a", **given).finished  # resumed
    start = {"init_from": str(tmp_path / "a")}
    run(name, data, tmp_path / "b", dtype="bfloat16", **start)
    run(name, data, tmp_path / "c", dtype="float32", **start)
    for out in "abc":
        draft = load_draft(tmp_path / out / "last")
        assert torch.equal(draft.embed_tokens.weight, embedding)
        assert torch.equal(draft.lm_head.weight, rows[draft.draft_ids])
        assert not main(["eval", "--draft", str(tmp_path / out), "--data", data, "--quiet"])
    assert "warning[lm-head]" not in caplog.text


def test_a_view_has_the_mask_token_of_its_source(tmp_path):
    """The tokenizer is beside the source, not beside the view's manifest."""
    source, taken = tiny_dataset(tmp_path / "source", n_docs=4), {}
    words = {f"w{i}": i for i in range(32, 64)}  # the others have no text
    raw = {"model": {"type": "BPE", "vocab": words}}
    (source / "target" / "tokenizer.json").write_text(json.dumps(raw))
    spec_data.select(source, tmp_path / "view", where="length > 0")
    for name in ("source", "view"):
        run("dflash", str(tmp_path / name), tmp_path / f"of-{name}", **SHAPES["dflash"])
        taken[name] = load_draft(tmp_path / f"of-{name}" / "last").config.mask_token_id
    assert taken["view"] == taken["source"] < 32


def test_a_head_that_is_not_the_targets_is_rounded_once_and_resumes_bit_for_bit(tmp_path, caplog):
    data = str(tiny_dataset(tmp_path / "data", n_docs=20, model=tiny_llama(64).bfloat16()))
    run("eagle3", data, tmp_path / "first", **SHAPES["eagle3"])
    files = read_files(tmp_path / "first" / "last")
    config = {key: value for key, value in files.config.items() if key != SECTION}
    head = torch.randn(files.tensors["lm_head.weight"].shape)
    wide = {n: x.float() if x.is_floating_point() else x for n, x in files.tensors.items()}
    config |= {"dtype": "float32", "torch_dtype": "float32"}  # the target has bfloat16
    start = tiny.write(tmp_path / "start", config, wide | {"lm_head.weight": head})
    common = {"init_from": str(start), "steps": 4}
    whole = run("eagle3", data, tmp_path / "whole", **common)
    assert "warning[lm-head]: the draft's lm_head is not made of the target's rows" in caplog.text
    for until in (2, None):
        again = fit("eagle3", *flat.split("eagle3", **_of(data, tmp_path / "two") | common), until)
    assert whole.finished and again.finished
    served = load_file(tmp_path / "two" / "last" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(served, head.bfloat16()) and served.dtype == torch.bfloat16
    state = "last/training_state.safetensors"
    one, two = (load_file(tmp_path / name / state) for name in ("whole", "two"))
    learned = [name for name in one if name.startswith("master.")]
    assert learned and all(torch.equal(one[name], two[name]) for name in learned)


def test_an_option_that_is_given_stays_and_is_compared(data, tmp_path):
    run("eagle3", data, tmp_path / "first", **SHAPES["eagle3"])
    start = str(tmp_path / "first" / "last")
    with pytest.raises(DraftError, match=r"another shape.*\n  head_dim: 16 -> 8"):
        run("eagle3", data, tmp_path / "second", init_from=start, head_dim=8)
    # a value that equals the default, or the target's size, is given as well
    for given in ({"num_layers": 1}, {"head_dim": 0}, {"draft_vocab_size": 32000}):
        name, value = next(iter(given.items()))
        with pytest.raises(DraftError, match=f"Leave --{name.replace('_', '-')} {value} out"):
            run("eagle3", data, tmp_path / "second", init_from=start, **given)
