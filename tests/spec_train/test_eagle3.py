"""The EAGLE-3 draft: its files, its rope, batches against plain tensors, training against serving.

(The loss itself is held against slow loops in `test_eagle3_reference`.)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_data.shards.packing import pack_documents, row_layout, shift_left
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.batch import DraftBatch
from spec_train.drafts import DRAFTS, load_draft
from spec_train.drafts.eagle3 import (
    DraftCache,
    Eagle3Config,
    Eagle3Draft,
    Eagle3Options,
    Unroll,
    eagle3_loss,
    serving_chains,
)
from spec_train.drafts.eagle3_unroll import document_lengths, document_offsets
from spec_train.drafts.layers import RopeSettings, Rotary, rope_parameters
from spec_train.head import TargetHead
from spec_train.metrics import add_sums
from tests.factory import tiny_dataset

LENGTHS = (9, 23, 4, 1, 12, 17)
OPTIONS = Eagle3Options(draft_vocab_size=40, ttt_steps=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("eagle3") / "data", n_docs=8))


@pytest.fixture
def head(dataset: HiddenStatesDataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path)


def _build(dataset: HiddenStatesDataset, head: TargetHead, **changes: Any) -> Eagle3Draft:
    torch.manual_seed(1)
    counts = torch.zeros(head.spec.vocab_size, dtype=torch.long)
    for i in range(len(dataset)):
        row = dataset[i]
        counts += torch.bincount(row["input_ids"][row["loss_mask"]], minlength=len(counts))
    options = Eagle3Options(**{"draft_vocab_size": 40, "ttt_steps": 4} | changes)
    return Eagle3Draft.build(
        options,
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
    )


def _batch(dataset: HiddenStatesDataset, rows: Sequence[Sequence[int]], width: int) -> DraftBatch:
    """Documents `rows` packed into rows of `width`."""
    document_ids, position_ids = row_layout(
        [[int(dataset.lengths[i]) for i in row] for row in rows], width
    )
    out: dict[str, Tensor] = {}
    for b, row in enumerate(rows):
        start = 0
        for i in row:
            item = {k: v for k, v in dataset[i].items() if isinstance(v, Tensor)}
            for name, value in item.items():
                value = value.float() if name.startswith("hidden.") else value
                shape = (*document_ids.shape, *value.shape[1:])
                whole = out.setdefault(name, torch.zeros(shape, dtype=value.dtype))
                whole[b, start : start + len(value)] = value
            start += int(dataset.lengths[i])
    return DraftBatch(
        document_ids=document_ids,
        position_ids=position_ids,
        hidden={k: out.pop(k) for k in list(out) if k.startswith("hidden.")},
        rows=[list(row) for row in rows],
        **out,
    )


def _packed(dataset: HiddenStatesDataset, width: int = 64) -> DraftBatch:
    return _batch(dataset, pack_documents(dataset.lengths.tolist(), width), width)


def _gradients(draft: Eagle3Draft, loss: Tensor) -> dict[str, Tensor]:
    names = {k: p for k, p in draft.named_parameters() if p.requires_grad}
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"slots": "shifted", "loss": "lambda"}, {"layers": "0,2"}])
def test_the_loss_of_a_batch_is_that_of_its_shifted_tensors(
    dataset: HiddenStatesDataset, head: TargetHead, changes: dict[str, Any]
) -> None:
    draft, batch = _build(dataset, head, **changes), _packed(dataset)
    ids = batch.document_ids
    plain = eagle3_loss(
        draft,
        aux_hidden_states=batch.aux(draft.config.layers),
        input_ids=shift_left(batch.input_ids, ids),
        loss_mask=shift_left(batch.loss_mask, ids),
        final_hidden=shift_left(batch.hidden["hidden.final"], ids),
        head=head,
        target_argmax=shift_left(batch.target_argmax, ids),
        document_ids=ids,
        slots=draft.options.slots,
        steps=4,
        kind=draft.options.loss,
    )
    counts = draft.slot_counts(batch)
    found = draft.loss(batch, head, counts)
    torch.testing.assert_close(found.loss, plain.loss)
    assert torch.equal(counts, plain.sums["supervised"])
    assert counts[0] > counts[3] > 0
    assert found.sums.keys() == plain.sums.keys()
    for name, value in plain.sums.items():
        torch.testing.assert_close(found.sums[name], value)
    figures = Eagle3Draft.summarise(found.sums)
    assert figures["loss"] == pytest.approx(float(found.loss.detach()), rel=1e-6)


@pytest.mark.parametrize("backend", ["dense", "merged"])
def test_packing_and_order_change_neither_loss_nor_gradient(
    dataset: HiddenStatesDataset, head: TargetHead, backend: str
) -> None:
    draft = _build(dataset, head)
    draft.attention_backend = backend
    layouts = [
        (pack_documents(dataset.lengths.tolist(), 64), 64),
        ([[i] for i in range(len(dataset))], 40),
        (pack_documents(dataset.lengths.tolist(), 90)[::-1], 97),
    ]
    results = []
    for rows, width in layouts:
        batch = _batch(dataset, rows, width)
        out = draft.loss(batch, head, draft.slot_counts(batch))
        results.append((out, _gradients(draft, out.loss)))
    first, gradients = results[0]
    assert all(g.abs().max() > 0 for g in gradients.values())
    for out, other in results[1:]:
        torch.testing.assert_close(out.loss, first.loss, rtol=1e-6, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)
        for name, value in first.sums.items():
            torch.testing.assert_close(out.sums[name], value)


def test_micro_batches_with_the_counts_of_the_whole_add_up(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = _build(dataset, head, loss="lambda")
    whole = _batch(dataset, [[i] for i in range(8)], 40)
    parts = [_batch(dataset, [[i], [i + 1]], 40) for i in range(0, 8, 2)]
    counts = torch.stack([draft.slot_counts(part) for part in parts]).sum(0)
    assert torch.equal(counts, draft.slot_counts(whole))
    expected = draft.loss(whole, head, counts)
    outs = [draft.loss(part, head, counts) for part in parts]
    total = torch.stack([out.loss for out in outs]).sum()
    torch.testing.assert_close(total, expected.loss, rtol=1e-6, atol=1e-6)
    gradients = _gradients(draft, expected.loss)
    for name, gradient in _gradients(draft, total).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
    figures = Eagle3Draft.summarise(add_sums(out.sums for out in outs))
    assert figures == pytest.approx(Eagle3Draft.summarise(expected.sums), rel=1e-5)


def test_nothing_supervised_gives_zero_gradients_everywhere(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft, batch = _build(dataset, head), _packed(dataset)
    batch.loss_mask.zero_()
    out = draft.loss(batch, head, draft.slot_counts(batch))
    gradients = _gradients(draft, out.loss)
    assert float(out.loss.detach()) == 0
    assert all(not g.any() for g in gradients.values())
    assert Eagle3Draft.summarise(out.sums)["acceptance_length"] is None


def test_bfloat16_and_autocast_stay_near_float32(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft, batch = _build(dataset, head), _packed(dataset)
    counts = draft.slot_counts(batch)
    exact = draft.loss(batch, head, counts)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = draft.loss(batch.to("cpu", torch.bfloat16), head, counts)
    expected, found = (_gradients(draft, out.loss)["fc.weight"] for out in (exact, mixed))
    assert (found - expected).norm() < 0.1 * expected.norm()
    low = draft.to(torch.bfloat16).loss(batch.to("cpu", torch.bfloat16), head, counts)
    for out in (mixed, low):
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, exact.loss, rtol=2e-2, atol=0)


def test_training_lowers_the_loss_and_leaves_the_embedding(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft, batch = _build(dataset, head), _packed(dataset)
    counts, before = draft.slot_counts(batch), head.embed_weight.clone()
    optimizer = torch.optim.Adam(draft.trainable_parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = draft.loss(batch, head, counts).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(draft.embed_tokens.weight, before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": None},
        {"slot_mask": torch.ones(1, 5)},
        {"final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "target_probs": torch.zeros(1, 5, 40)},
        {"slots": "all"},
        {"kind": "mse"},
    ],
)
def test_contradictory_arguments_are_refused(
    dataset: HiddenStatesDataset, head: TargetHead, wrong: dict[str, Any]
) -> None:
    good = {
        "aux_hidden_states": torch.zeros(1, 5, 96),
        "input_ids": torch.zeros(1, 5, dtype=torch.long),
        "loss_mask": torch.ones(1, 5),
        "logits": torch.zeros(1, 5, 64),
    }
    draft = _build(dataset, head)
    eagle3_loss(draft, **good)
    with pytest.raises(DraftError):
        eagle3_loss(draft, **good | wrong)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("backend", ["dense", "merged"])
@torch.no_grad()
def test_serving_drafts_what_the_unroll_computes(
    dataset: HiddenStatesDataset, head: TargetHead, norm_output: bool, backend: str
) -> None:
    """Decode loop with a KV cache, document by document, against chains inside packs."""
    draft, depth = _build(dataset, head, norm_output=norm_output), 4
    draft.attention_backend = backend
    batch = _packed(dataset)
    chains = serving_chains(draft, batch, head, depth)
    known = shift_left(batch.input_ids, batch.document_ids)
    every = torch.arange(known.shape[1]).expand_as(known)
    aux = batch.aux(draft.config.layers)
    unroll = Unroll(draft, aux, known, batch.document_ids, batch.position_ids, every)
    states = [unroll.advance(known)]
    states += [unroll.advance(chains[..., s]) for s in range(depth - 1)]
    logits = torch.stack([draft.logits(state) for state in states], dim=2)  # [B, T, S, Vd]
    for b in range(len(known)):
        for d in range(int(batch.document_ids[b].max()) + 1):
            slots = (batch.document_ids[b] == d).nonzero().squeeze(1)[:-1]
            cache, features = DraftCache(), draft.project(aux[b : b + 1, slots])
            for t, slot in enumerate(slots.tolist()):
                token, carried = known[b, slot].view(1, 1), features[:, t : t + 1]
                for s in range(depth):
                    carried = draft.step(token, carried, torch.tensor([[t + s]]), cache)
                    served = draft.logits(carried)[0, 0]
                    torch.testing.assert_close(served, logits[b, slot, s], rtol=1e-5, atol=1e-5)
                    token = draft.draft_ids[served.argmax()].view(1, 1)
                    assert token == chains[b, slot, s]
                cache.crop(t + 1)
                assert cache.length == t + 1


@torch.no_grad()
def test_a_prefill_in_pieces_is_the_prefill_in_one(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = _build(dataset, head)
    tokens, carried = torch.randint(0, 64, (1, 7)), torch.randn(1, 7, 32)
    positions, cache = torch.arange(7)[None], DraftCache()
    whole = draft.step(tokens, carried, positions)
    pieces = [
        draft.step(tokens[:, part], carried[:, part], positions[:, part], cache)
        for part in (slice(0, 3), slice(3, 4), slice(4, 7))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 0}, {"fc_norm": True}])
def test_a_saved_draft_reads_back_and_saves_the_same_bytes(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path, changes: dict[str, Any]
) -> None:
    draft, batch = _build(dataset, head, **changes), _packed(dataset)
    draft.save_pretrained(tmp_path / "a")
    again = load_draft(tmp_path / "a")
    assert isinstance(again, Eagle3Draft) and again.options == draft.options
    assert again.config == draft.config
    counts = draft.slot_counts(batch)
    assert torch.equal(draft.loss(batch, head, counts).loss, again.loss(batch, head, counts).loss)
    again.save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_tensor_names_types_and_embedding_are_those_the_engines_read(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path
) -> None:
    draft = _build(dataset, head)
    draft.save_pretrained(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    names = ["fc", "norm", "lm_head", "embed_tokens", *(f"midlayer.{x}" for x in layer)]
    assert set(tensors) == {f"{name}.weight" for name in names} | {"d2t", "t2d"}
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = torch.arange(40) + tensors["d2t"]  # offsets, not ids
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight.bfloat16())
    assert torch.equal(tensors["lm_head.weight"], head.head_weight[ids].bfloat16())
    draft.save_pretrained(tmp_path)  # the target's own dtype: bit for bit
    saved = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(saved, head.embed_weight)


def test_the_full_vocabulary_has_no_map(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path
) -> None:
    _build(dataset, head, draft_vocab_size=1000).save_pretrained(tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["draft_vocab_size"] == raw["vocab_size"] == 64


def test_the_config_loads_everywhere(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path
) -> None:
    _build(dataset, head, layers="0,2").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 3]  # input of the block
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]  # its output
    expected = {
        "num_hidden_layers": 1,
        "draft_vocab_size": 40,
        "vocab_size": 64,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "dtype": "float32",
    }
    assert {key: raw[key] for key in expected} == expected
    assert "output of decoder block k" in raw["spec_train"]["layer_convention"]
    assert raw["spec_train"]["layers"] == [0, 2]
    assert "null" not in (tmp_path / "config.json").read_text()


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path
) -> None:
    _build(dataset, head).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    save_file(tensors, weights)
    with pytest.raises(
        DraftError, match=r"missing norm\.weight.*unexpected model\.norm.*fc\.weight"
    ):
        load_draft(tmp_path)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DraftError, match="damaged"):
        load_draft(tmp_path)
    weights.unlink()
    with pytest.raises(MissingError, match=r"model\.safetensors"):
        load_draft(tmp_path)


def test_foreign_or_damaged_configs_are_refused(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path
) -> None:
    _build(dataset, head).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for change in ({"architectures": ["Other"]}, {"spec_train": None}, {"head_dim": ...}):
        kept = {k: v for k, v in (raw | change).items() if v is not ...}
        path.write_text(json.dumps(kept))
        with pytest.raises(DraftError, match=r"config\.json"):
            load_draft(tmp_path)
    path.write_text(json.dumps(raw | {"spec_train": raw["spec_train"] | {"options": {"x": 1}}}))
    with pytest.raises(ConfigError, match="unknown option x"):
        load_draft(tmp_path)
    with pytest.raises(MissingError, match=r"config\.json"):
        load_draft(tmp_path / "absent")


def test_what_is_trained_is_all_but_the_embedding_and_frequencies_stay_exact(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = _build(dataset, head)
    assert DRAFTS["eagle3"] is Eagle3Draft
    assert draft.embed_tokens.weight.data_ptr() == head.embed_weight.data_ptr()
    trained = {id(p) for p in draft.trainable_parameters()}
    assert {n for n, p in draft.named_parameters() if id(p) not in trained} == {
        "embed_tokens.weight"
    }
    exact = draft.rotary.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert draft.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rotary.inv_freq, exact)


def test_options_that_the_dataset_cannot_serve_are_refused(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    for changes, message in (
        ({"layers": "0,7"}, r"no layer \[7\]"),
        ({"layers": "0;1"}, "commas"),
        ({"ttt_steps": 0}, "ttt_steps"),
    ):
        with pytest.raises(DraftError, match=message):
            _build(dataset, head, **changes)
    assert _build(dataset, head, layers="2,0,2").config.layers == (0, 2)
    assert not _build(dataset, head, head_init="random").lm_head.weight.isnan().any()


# --- shapes and rope from the target -------------------------------------------------------------


def test_document_offsets_and_lengths() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1]])
    assert document_offsets(ids).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert document_lengths(ids).tolist() == [[3, 3, 3, 1, 2, 2, 2, 2]]


def _config(target: dict[str, Any]) -> Eagle3Config:
    return Eagle3Config.from_target(
        target, layers=(1, 2), vocab_size=64, draft_vocab_size=64, options=Eagle3Options()
    )


def test_shapes_come_from_the_targets_text_config() -> None:
    text = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,  # not 48 / 6
        "intermediate_size": 100,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "dtype": "float16",
        "eos_token_id": [3, 4],
    }
    for target in (text, {"text_config": text, "model_type": "multi", "hidden_size": 7}):
        config = _config(target)
        assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (48, 16, 2)
        assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-3, 4096)
        assert config.dtype == "float16" and config.token_ids == {"eos_token_id": [3, 4]}
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(DraftError, match="hidden_size"):
        _config({"num_attention_heads": 2})
    with pytest.raises(DraftError, match="kv heads"):
        _config(text | {"num_key_value_heads": 4})


_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 8.0]}
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
            "beta_fast": 8.0,
        }
    },
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 150.0, "factor": 2.0}},
]


@pytest.mark.parametrize("rope", _ROPES, ids=lambda r: str(r)[:40])
def test_rope_is_the_targets(rope: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    target = LlamaConfig(**json.loads(json.dumps(shape | rope)))
    positions = torch.tensor([[0, 1, 31, 32, 100, 127], [5, 4, 3, 2, 1, 0]])
    expected = LlamaRotaryEmbedding(target)(torch.zeros(1), positions)
    for raw in (shape | rope, target.to_dict()):  # an older file, and what transformers 5 saves
        config = _config(raw | {"num_key_value_heads": 4})
        for found, wanted in zip(Rotary(config.rope)(positions), expected, strict=True):
            assert torch.equal(found, wanted)
        # An engine that reads the draft's config.json arrives at the same frequencies.
        saved = json.loads(json.dumps(config.to_json(Eagle3Options())))
        reader = LlamaRotaryEmbedding(LlamaConfig.from_dict(saved))
        assert torch.equal(reader(torch.zeros(1), positions)[0], expected[0])


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_longrope_and_partial_rope_are_those_of_phi3(partial: float) -> None:
    count = int(4 * partial)
    factors = {k: v[:count] for k, v in _FACTORS.items()}
    target = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        partial_rotary_factor=partial,
        rope_scaling={"type": "longrope", **factors},
        pad_token_id=0,
    )
    rotary, theirs = Rotary(_config(target.to_dict()).rope), Phi3RotaryEmbedding(target)
    short, long = torch.arange(32)[None], torch.arange(33)[None]
    for positions in (short, long):
        for found, wanted in zip(rotary(positions), theirs(torch.zeros(1), positions), strict=True):
            assert found.shape[-1] == 8 * partial
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    # In one batch every document has the factors it would have alone.
    both = rotary(torch.cat([long, short.new_zeros(1, 33)]))[0]
    assert torch.equal(both[0], rotary(long)[0][0])
    lengths = torch.tensor([[32, 33]])
    mixed = rotary(torch.tensor([[7, 7]]), lengths)[0][0]
    assert torch.equal(mixed[0], rotary(short)[0][0, 7])
    assert torch.equal(mixed[1], rotary(long)[0][0, 7])


def test_partial_default_rope_is_that_of_phi3() -> None:
    target = Phi3Config(
        hidden_size=32, num_attention_heads=4, partial_rotary_factor=0.5, pad_token_id=0
    )
    positions = torch.arange(20)[None]
    found = Rotary(_config(target.to_dict()).rope)(positions)
    expected = Phi3RotaryEmbedding(target)(torch.zeros(1), positions)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_per_layer_type_settings_give_those_of_full_attention() -> None:
    raw = Gemma3TextConfig(num_hidden_layers=6).to_dict()
    found = rope_parameters(raw)
    assert found == raw["rope_parameters"]["full_attention"]
    assert found["rope_theta"] == 1_000_000.0
    with pytest.raises(DraftError, match="full_attention"):
        rope_parameters({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}})
    with pytest.raises(DraftError, match="mrope"):
        rope_parameters({"rope_scaling": {"type": "mrope"}})


@pytest.mark.parametrize("longrope", [False, True])
def test_packed_documents_keep_their_own_rope(longrope: bool) -> None:
    """The unroll passes each document's own length on: no batch decides for a document."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 50.0}
    if longrope:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 12, **_FACTORS}
    settings = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    draft = Eagle3Draft(_config(settings | {"rope_parameters": rope}))
    assert isinstance(draft.config.rope, RopeSettings)
    document_ids, position_ids = row_layout([LENGTHS], sum(LENGTHS))
    aux, tokens = torch.randn(1, sum(LENGTHS), 32), torch.randint(0, 64, (1, sum(LENGTHS)))
    every = torch.arange(sum(LENGTHS))[None]
    with torch.no_grad():
        packed = Unroll(draft, aux, tokens, document_ids, position_ids, every).advance(tokens)
        for d, length in enumerate(LENGTHS):
            own = document_ids[0] == d
            alone = torch.arange(length)[None]
            state = Unroll(draft, aux[:, own], tokens[:, own], 0 * alone, alone, alone).advance(
                tokens[:, own]
            )
            torch.testing.assert_close(packed[:, own], state, rtol=1e-5, atol=1e-6)
