"""What holds for every kind of draft: files, sums over micro-batches, low precision, resumed runs.

What a loss computes is compared with slow loops in the `test_references`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_data.shards.batch import DraftBatch, padding_batch
from spec_data.shards.errors import ConfigError, DatasetError, DraftError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.stream import read_packs
from spec_train.drafts import DRAFTS, load_draft
from spec_train.drafts.draft import Draft, DraftLoss
from spec_train.drafts.eagle3.draft import Eagle3Config
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.training.fit import fit
from tests.factory import tiny_dataset
from tests.marks import long_but
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import (
    BLOCK_KINDS,
    SHAPED,
    SMALL,
    batch_of,
    build_draft,
    packed,
)
from tests.spec_train.drafts.cases import small_target
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.test_trainer_resume import stop_after
from tests.spec_train.training.tools import change, masters, metrics
from tests.tolerance import close, close_gradients, close_in_norm, network, roundings

dataset, head = any_draft.dataset, any_draft.head
data, config = trainer_tools.data, trainer_tools.config

FORWARD = {"terms": network(4), "dtype": torch.float32}  # sums are kept in float64
BACKWARD = {"terms": network(4, backward=True, slots=320)}
Options = dict[str, Any]
PLAIN: list[tuple[str, Options]] = [(name, {}) for name in DRAFTS]
VARIANTS: list[tuple[str, Options]] = [
    ("eagle", {"num_layers": 2}),
    ("eagle3", {"draft_vocab_size": 0}),
    ("eagle3", {"fc_norm": True, "loss": "lk-lambda"}),
    ("peagle", {"draft_vocab_size": 0, "fc_norm": True}),
    ("peagle", {"segments": 3, "gradient_checkpointing": True}),
    ("dspark", {"draft_vocab_size": 40, "markov_head_type": "gated"}),
    ("dspark", {"markov_head_type": "rnn", "layout": "mask", "num_anchors": 5}),
    ("dspark", {"markov_rank": 0, "confidence_weight": 0.0}),
    ("dflash", {"layout": "anchor", "draft_vocab_size": 40}),
    ("dflash2", {"conv_kernel_size": 3, "loss": "kl", "gradient_checkpointing": True}),
    ("domino", {"layout": "mask", "pure_draft_prefix_len": 0, "gru_hidden_dim": 3}),
    ("xpress", {"xpress_mlp_hidden": 3, "loss": "kl"}),
]


def loss_of(draft: Draft, batch: DraftBatch, head: TargetHead) -> DraftLoss:
    """The loss of a batch over its own counts; every call draws the same random numbers."""
    torch.manual_seed(3)
    counts = draft.slot_counts(batch)
    torch.manual_seed(3)
    return draft.loss(batch, head, counts)


def gradients(draft: Draft, loss: Tensor) -> dict[str, Tensor]:
    names = {k: p for k, p in draft.named_parameters() if p.requires_grad}
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), PLAIN, ids=str)
def test_a_document_is_a_batch_with_the_head_of_its_dataset(dataset, head, name, options):
    draft = build_draft(name, dataset, head, **options).eval()
    columns = draft.columns(dataset.manifest.supervision)
    for index in (0, 3):
        row = dataset[index]
        batch = read_packs(dataset, [[index]], columns, len(row["input_ids"]), torch.float32)
        torch.manual_seed(3)
        one = draft.loss(row)
        torch.manual_seed(3)
        whole = draft.loss(batch, head, None)
        assert one.loss > 0 and torch.equal(one.loss, whole.loss)
        assert draft.summarise(one.sums) == draft.summarise(whole.sums)
        drafted = draft.propose(row, 2)
        assert drafted.shape == (len(row["input_ids"]), 2) and drafted.max() >= 0
        assert torch.equal(drafted[:-1], draft.chains(batch, head, 2)[0, : len(drafted) - 1])
    assert set(draft.state_dict()) == set(build_draft(name, dataset, head, **options).state_dict())


def test_what_is_no_document_of_this_draft_is_named(dataset, head):
    draft = build_draft("eagle3", dataset, head)
    with pytest.raises(DatasetError, match="needs the target's head"):
        draft.loss(dict(dataset[0]))  # nobody knows where it was read
    with pytest.raises(DatasetError, match="no target_argmax, hidden"):
        draft.propose(HiddenStatesDataset(dataset.path, ["input_ids", "loss_mask"])[0])
    with pytest.raises(DatasetError, match="needs the target's head"):
        draft.loss(packed(dataset))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), PLAIN + VARIANTS, ids=str)
def test_a_saved_draft_reads_back_and_saves_the_same_bytes(dataset, head, tmp_path, name, options):
    draft, batch = build_draft(name, dataset, head, **options), packed(dataset)
    draft.save_pretrained(tmp_path / "a")
    again = load_draft(tmp_path / "a")
    assert type(again) is DRAFTS[name]
    assert again.options == draft.options and again.config == draft.config
    assert torch.equal(loss_of(draft, batch, head).loss, loss_of(again, batch, head).loss)
    assert torch.equal(draft.chains(batch, head, 2), again.chains(batch, head, 2))
    again.save_pretrained(tmp_path / "b")
    files = ["config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    # some engines do not read null; an MTP block keeps the config.json of its target
    assert name == "mtp" or "null" not in (tmp_path / "a" / "config.json").read_text()
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight)  # the target's dtype
    if not draft.full_vocabulary:
        ids = torch.arange(40) + tensors["d2t"]  # offsets, not ids
        assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
        assert torch.equal(tensors["lm_head.weight"], head.head_weight[ids])
    assert ("d2t" in tensors) == ("t2d" in tensors) == (not draft.full_vocabulary)


@pytest.mark.parametrize("name", DRAFTS)
def test_damaged_and_foreign_checkpoints_are_refused(dataset, head, tmp_path, name):
    build_draft(name, dataset, head).save_pretrained(tmp_path)
    other = "eagle" if name == "dflash" else "dflash"
    with pytest.raises(DraftError):
        DRAFTS[other].from_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    raw = json.loads(path.read_text())
    section = raw["spec_train"]
    for wrong in (
        {"architectures": ["Other"]},
        {"head_dim": ...},
        {"spec_train": section | {"draft": "other"}},
        {"spec_train": {"draft": name}},
    ):
        path.write_text(json.dumps({k: v for k, v in (raw | wrong).items() if v is not ...}))
        with pytest.raises(DraftError, match=r"config\.json"):
            load_draft(tmp_path, accept_edited=True)
    path.write_text(json.dumps(raw | {"spec_train": section | {"options": {"x": 1}}}))
    with pytest.raises(ConfigError, match="no option 'x'"):
        load_draft(tmp_path, accept_edited=True)
    path.write_text(json.dumps(raw))
    tensors = load_file(weights)
    tensors["other.weight"] = tensors.pop("fc.weight")
    save_file(tensors, weights)
    with pytest.raises(DraftError, match=r"missing fc\.weight.*unexpected other"):
        load_draft(tmp_path, accept_edited=True)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DraftError, match="damaged"):
        load_draft(tmp_path, accept_edited=True)
    weights.unlink()
    with pytest.raises(MissingError, match=r"model\.safetensors"):
        load_draft(tmp_path, accept_edited=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    """A dataset of another target."""
    folder = tmp_path_factory.mktemp("other") / "data"
    return HiddenStatesDataset(tiny_dataset(folder, n_docs=2, seed=5))


@pytest.mark.parametrize("name", DRAFTS)
def test_another_target_is_refused_and_the_same_one_shares_its_embedding(
    dataset: HiddenStatesDataset,
    other: HiddenStatesDataset,
    head: TargetHead,
    tmp_path: Path,
    name: str,
) -> None:
    build_draft(name, dataset, head).save_pretrained(tmp_path / "draft")
    again = load_draft(tmp_path / "draft")
    assert again.join(head, dataset.manifest, "here") == []
    assert again.embed_tokens.weight.data_ptr() == head.embed_weight.data_ptr()
    with pytest.raises(DraftError, match="a draft of another target"):
        again.join(TargetHead.from_dataset(other.path), other.manifest, "here")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("eagle", {"depth": 0}),
        ("mtp", {"depth": 0}),
        ("eagle3", {"ttt_steps": 0}),
        ("eagle3", {"draft_vocab_size": -1}),
        ("peagle", {"cod_ratio": 1.5}),
        ("peagle", {"mask_token_id": -2}),
        ("dflash", {"block_size": 1}),
        ("dflash2", {"selector_top_k": 0}),
        ("lilicorr", {"penalty_weight": -1.0}),
        ("domino", {"base_weight": 1.5}),
        ("domino", {"base_decay": 0.0}),
        ("dspark", {"markov_rank": -1}),
        ("dspark", {"confidence_weight": float("inf")}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(name: str, wrong: Options) -> None:
    with pytest.raises(DraftError, match=next(iter(wrong)).replace("_", ".")):
        DRAFT_OPTIONS[name](**wrong)


def test_options_that_the_dataset_cannot_serve_are_refused(dataset, head):
    for layers, message in (("0,7", r"no layer \[7\]"), ("0;1", "commas")):
        with pytest.raises(DraftError, match=message):
            build_draft("eagle3", dataset, head, layers=layers)
    assert build_draft("eagle3", dataset, head, layers="2,0,2").config.layers == (0, 2)


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"loss": "jsd"}) for name in DRAFTS),
        *((name, {"loss_target": "hard"}) for name in DRAFTS),
        *((name, {"position_weights": "0.5"}) for name in DRAFTS if name != "eagle"),
        ("eagle", {"noise": 0.5}),
        ("eagle3", {"step_decay": 0.5}),
        ("mtp", {"step_decay": 0.5}),
        ("peagle", {"cod_ratio": 0.4}),
        ("dspark", {"confidence_weight": 0.5}),
        ("dflash2", {"selector_weight": 0.5}),
        ("domino", {"position_weights": "dpace:0.3"}),
        ("lilicorr", {"position_weights": "dpace:0.3"}),
        ("lilicorr", {"margin_weight": 0.5}),
        ("lilicorr", {"penalty_weight": 0.5}),
    ],
    ids=str,
)
def test_an_option_of_a_loss_changes_it(dataset, head, name, options):
    batch = packed(dataset)
    losses = [
        float(loss_of(build_draft(name, dataset, head, **given), batch, head).loss.detach())
        for given in ({}, options)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "name", [name for name in DRAFTS if name not in ("eagle", "eagle3", "mtp")]
)
def test_no_more_is_proposed_than_a_draft_drafts(dataset, head, name):
    draft = build_draft(name, dataset, head)
    assert draft.propose(dataset[0], draft.max_depth).shape[1] == draft.max_depth
    with pytest.raises(ConfigError, match=f"drafts at most {draft.max_depth}"):
        draft.propose(dataset[0], draft.max_depth + 1)


@pytest.mark.parametrize(("name", "options"), PLAIN + VARIANTS, ids=str)
def test_micro_batches_with_the_counts_of_the_whole_add_up(dataset, head, name, options):
    if name == "eagle":
        options = options | {"noise": 0.0}
    draft = build_draft(name, dataset, head, **options)
    draft.train(name != "peagle")  # it draws by the shape of a batch; in evaluation, by document
    whole = batch_of(dataset, [[i] for i in range(8)], 40)
    parts = [batch_of(dataset, [[i], [i + 1]], 40) for i in range(0, 8, 2)]
    counts = torch.stack([draft.slot_counts(part) for part in parts]).sum(0)
    close(counts, draft.slot_counts(whole), **FORWARD)
    torch.manual_seed(0)
    expected = draft.loss(whole, head, counts)
    torch.manual_seed(0)
    outs = [draft.loss(part, head, counts) for part in parts]
    total = torch.stack([out.loss for out in outs]).sum()
    close(total, expected.loss, **FORWARD)
    wanted = gradients(draft, expected.loss)
    assert all(g.abs().max() > 0 for g in wanted.values())
    close_gradients(gradients(draft, total), wanted, **BACKWARD)
    for key, value in expected.sums.items():
        added = torch.stack([out.sums[key] for out in outs]).sum(0)
        close(added, value, **FORWARD, magnitude=value.abs(), name=key)


@pytest.mark.parametrize("name", DRAFTS)
def test_nothing_supervised_gives_zero_gradients_everywhere(dataset, head, name):
    # longer than the padding
    longer = {"block_size": 16} if name in BLOCK_KINDS else {}
    draft, batch = build_draft(name, dataset, head, **longer), packed(dataset)
    assert not draft.slot_counts(padding_batch()).any()  # a rank without a batch
    batch.loss_mask.zero_()
    for of_dtype in (head, TargetHead.from_dataset(dataset.path, torch.bfloat16)):
        out = loss_of(draft, batch, of_dtype)
        assert float(out.loss.detach()) == 0
        assert all(not g.any() for g in gradients(draft, out.loss).values())
        metrics = draft.summarise(out.sums)
        assert metrics["loss"] is metrics["acceptance_length"] is None


@pytest.mark.parametrize(
    ("name", "options"), [*PLAIN, ("peagle", {"segments": 3, "gradient_checkpointing": True})]
)
def test_bfloat16_and_autocast_stay_near_float32(dataset, head, name, options):
    draft, batch = build_draft(name, dataset, head, **options), packed(dataset)
    exact = loss_of(draft, batch, head)
    expected = gradients(draft, exact.loss)["fc.weight"]
    low_head = TargetHead.from_dataset(dataset.path, torch.bfloat16)
    low_batch = batch.to("cpu", torch.bfloat16)
    draft.embed_tokens.weight.data = low_head.embed_weight
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss_of(draft, low_batch, low_head)
    found = gradients(draft, mixed.loss)
    assert all(g.dtype == torch.float32 for g in found.values())
    close_in_norm(found["fc.weight"], expected, torch.bfloat16, roundings(4, backward=True))
    low = loss_of(draft.to(torch.bfloat16), low_batch, low_head)
    close_in_norm(
        gradients(draft, low.loss)["fc.weight"].float(),
        expected,
        torch.bfloat16,
        roundings(4, backward=True),
    )
    slots = int(exact.sums["supervised"].sum())
    for out in (mixed, low):
        assert out.loss.dtype == torch.float32
        close(out.loss, exact.loss, dtype=torch.bfloat16, terms=roundings(4) / slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_deliver_gradients_layer_by_layer(dataset, head, dtype):
    """Several processes send those of the last layer while the first one is differentiated."""
    draft = build_draft("peagle", dataset, head, num_layers=2, segments=3)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = loss_of(draft, packed(dataset), head).loss
    events: list[str] = []
    names = {parameter: name for name, parameter in draft.named_parameters()}
    for parameter in draft.trainable_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: events.append(names[p]))
    loss.backward()
    layers = [name.split(".")[1] for name in events if name.startswith("layers.")]
    assert layers == sorted(layers, reverse=True) and set(layers) == {"0", "1"}


@pytest.mark.parametrize("name", DRAFTS)
def test_training_lowers_the_loss_and_leaves_the_embedding_and_the_frequencies(dataset, head, name):
    draft, batch = build_draft(name, dataset, head), packed(dataset)
    embedding, exact = head.embed_weight.clone(), draft.rotary.inv_freq.clone()
    optimizer = torch.optim.Adam(draft.trainable_parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = draft.loss(batch, head, draft.slot_counts(batch)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(draft.embed_tokens.weight, embedding)
    draft.to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert torch.equal(draft.rotary.inv_freq, exact)


# --- runs ----------------------------------------------------------------------------------------


def small(name: str, **changes: Any) -> Any:
    return DRAFT_OPTIONS[name](**SMALL[name] | changes)


@pytest.mark.parametrize("name", long_but(["eagle3", "peagle", "mtp", "dspark", "dflash2"], DRAFTS))
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(config, tmp_path, name, monkeypatch):
    """Noise, samples and blocks go on where they stopped."""
    config = change(config, steps=6, eval_every=3)
    fit(name, change(config, out=str(tmp_path / "whole")), small(name))
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        assert fit(name, config, small(name)).step == 4
    torch.rand(17)  # other draws of the process must not matter
    assert fit(name, config, small(name)).finished
    whole, resumed = masters(tmp_path / "whole"), masters(config.out)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert metrics(tmp_path / "whole") == metrics(config.out)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, "head_dim = 7: rotary positions need an even size"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
        ({"hidden_act": "swilu"}, "no such activation; did you mean"),
        ({"hidden_act": "xielu"}, "activation with weights"),
        ({"intermediate_size": -1}, "--intermediate-size -1: expected"),
        ({"layer_types": "sliding_attention"}, "--sliding-window N is needed"),
        ({"layer_types": "slides"}, "layer_types: slides unknown"),
        ({"sliding_window": 4, "layer_types": "full_attention"}, "no layer of layer_types"),
        (
            {"sliding_window": 4, "layer_types": "sliding_attention,full_attention"},
            "layer_types has 2 entries; the draft has 1 layers",
        ),
    ],
)
def test_an_impossible_shape_is_refused(dataset, head, options, message):
    with pytest.raises((ConfigError, DraftError), match=message):
        build_draft("eagle3", dataset, head, **options)


def test_longrope_has_no_factors_for_another_head_size() -> None:
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32},
        **{"short_factor": [1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0]},
    }
    sizes = {"layers": (1,), "vocab_size": 8, "draft_vocab_size": 8}
    target = small_target(12, 4, 2, rope)  # heads of size 6
    assert Eagle3Config.from_target(target, options=Eagle3Options(), **sizes).head_dim == 6
    with pytest.raises(DraftError, match=r"head_dim = 4: .* has 3 numbers in short_factor"):
        Eagle3Config.from_target(target, options=Eagle3Options(head_dim=4), **sizes)


# --- an embedding of its own ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPED)
def test_it_starts_as_the_targets_and_is_trained(dataset, head, name):
    draft = build_draft(name, dataset, head, train_embeddings=True)
    own = draft.embed_tokens.weight
    assert torch.equal(own, head.embed_weight) and own is not head.embed_weight
    assert any(p is own for p in draft.trainable_parameters())
    batch = batch_of(dataset, [[0, 1], [2]], 64)
    draft.loss(batch, head, None).loss.backward()
    assert own.grad is not None and bool(own.grad.any())
    frozen = build_draft(name, dataset, head)
    assert not any(p is frozen.embed_tokens.weight for p in frozen.trainable_parameters())


@pytest.mark.parametrize("name", SHAPED)
def test_joining_a_target_neither_refuses_nor_replaces_it(dataset, head, name):
    for trained in (True, False):
        draft = build_draft(name, dataset, head, train_embeddings=trained)
        changed = head.embed_weight + torch.randn_like(head.embed_weight)
        draft.embed_tokens.weight = torch.nn.Parameter(changed, requires_grad=trained)
        again = type(draft).from_files(draft.files(torch.float32, "here"))
        if not trained:  # the same edit of a frozen embedding is another target's
            with pytest.raises(DraftError, match="a draft of another target"):
                again.join(head, dataset.manifest, "here")
            continue
        warnings = again.join(head, dataset.manifest, "here")
        assert any("embedding differs from the target's by" in line for line in warnings)
        assert torch.equal(again.embed_tokens.weight, changed)
        assert again.embed_tokens.weight.requires_grad
        batch = batch_of(dataset, [[0], [1, 2]], 64)
        before = again.chains(batch, head, 2)
        again.share(head)
        assert torch.equal(again.chains(batch, head, 2), before)


def test_joining_its_own_target_warns_of_nothing_and_another_vocabulary_is_refused(dataset, head):
    draft = build_draft("eagle3", dataset, head, train_embeddings=True)
    with torch.no_grad():
        draft.embed_tokens.weight += 0.3 * head.embed_weight.std()  # as training moves it
    assert draft.join(head, dataset.manifest, "here") == []
    draft.embed_tokens.weight = torch.nn.Parameter(head.embed_weight[:-1].clone())
    with pytest.raises(DraftError, match="a draft of another target"):
        draft.join(head, dataset.manifest, "here")
