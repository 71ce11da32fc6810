"""The speculators library loads our exports, computes our logits, and reads our states."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spec_data.commands.convert import convert, export_dataset
from spec_data.models.mtp import mtp_tensors, own_tensors
from spec_data.shards.batch import DraftBatch
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, layer_column
from spec_train.attention.plain import attend_block
from spec_train.drafts import load_draft
from spec_train.drafts.block.blocks import Blocks
from spec_train.drafts.mtp.draft import MtpConfig, MtpDraft
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from tests.engines.engine_tools import (
    LAYERS,
    fitted,
    load_speculators,
    make_dataset,
    make_prompts,
    make_target,
    needs,
)
from tests.spec_data.conversion import layouts
from tests.spec_train.drafts.mtp.targets import BLOCKS, write_target
from tests.spec_train.formats.tools import export
from tests.tolerance import close, close_in_norm, network, roundings

pytestmark = needs("speculators")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a dataset of its answers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_target(request.param, folder / "target")
    make_dataset(model, make_prompts(4), folder / "data")
    return folder


class Seen(Exception):
    """Ends a forward whose loss is of no interest (and needs a GPU)."""


def logits_of(model: Any, run: Callable[[], Any]) -> torch.Tensor:
    """What its LM head gives in `run`, [1, T, Vd], the first time."""

    def stop(_: Any, __: Any, output: torch.Tensor) -> None:
        raise Seen(output.detach())

    hook = model.lm_head.register_forward_hook(stop)
    with torch.no_grad(), pytest.raises(Seen) as caught:
        run()
    hook.remove()
    return caught.value.args[0]


@pytest.mark.parametrize(
    ("kind", "options", "taken"),
    [
        ("eagle3", {"ttt_steps": 3}, {"ttt_steps": 1}),
        ("eagle3", {"ttt_steps": 3, "fc_norm": True, "norm_output": True}, {"ttt_steps": 1}),
        # its forward samples depths at random: depth 0, a causal pass, is compared
        ("peagle", {"depths": 3, "num_layers": 2, "mask_token_id": 2}, {"num_depths": 1}),
    ],
    ids=str,
)
def test_chains(place, tmp_path, kind, options, taken):
    options = {"draft_vocab_size": 128} | options
    draft = fitted(kind, place / "data", tmp_path / "run", 5, **options)
    model = load_speculators(export(draft, "speculators", tmp_path / "out", place / "target"))
    assert model.target_layer_ids == [k + 1 for k in LAYERS]
    ours, length = load_draft(draft).eval().float(), 20
    aux, tokens = torch.randn(1, length, 3 * 64), torch.randint(3, 192, (1, length))
    positions = torch.arange(length)[None]
    if kind == "peagle":
        assert model.config.mask_token_id == 2 and len(model.layers) == 2
        ones = torch.ones(1, length, dtype=torch.bool)
        taken = taken | {"loss_mask": ones, "verifier_last_hidden_states": aux[..., :64]}
    theirs = logits_of(
        model,
        lambda: model(
            hidden_states=aux,
            input_ids=tokens,
            document_ids=torch.zeros(1, length, dtype=torch.long),
            position_ids=positions,
            **taken,
        ),
    )
    with torch.no_grad():
        caches = [ours.new_caches()] if kind == "peagle" else []
        mine = ours.logits(ours.step(tokens, ours.project(aux), positions, *caches))
    close(theirs, mine, terms=network(4))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dspark", {"markov_rank": 8}),
        ("dspark", {"markov_rank": 8, "draft_vocab_size": 128, "layout": "mask"}),
        ("dflash", {}),
        ("dflash2", {"selector_top_k": 6, "selector_rank": 8}),
    ],
    ids=str,
)
def test_block_drafts(place, tmp_path, kind, options):
    """States, logits and Markov bias of one block after a context."""
    options = {"block_size": 4, "num_layers": 2, "mask_token_id": 2} | options
    options |= {"num_anchors": 8}
    draft = fitted(kind, place / "data", tmp_path / "run", 5, **options)
    out = export(draft, "speculators", tmp_path / "out", place / "target")
    full = "draft_vocab_size" not in options
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if full else set())
    model = load_speculators(out, frozenset(shared))
    assert model.target_layer_ids == [k + 1 for k in LAYERS]
    model.load_verifier_weights()
    ours, length, anchor = load_draft(draft).eval().float(), 20, 11
    aux, tokens = torch.randn(1, length, 3 * 64), torch.randint(3, 192, (1, length))
    loss_mask = torch.zeros(1, length, dtype=torch.bool)
    loss_mask[:, anchor] = True
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            aux,
            tokens,
            loss_mask,
            torch.randn(1, length, 64),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        context = ours.context(aux[:, :anchor], torch.arange(anchor)[None])
        block = torch.tensor([[int(tokens[0, anchor]), 2, 2, 2]])
        positions = anchor + torch.arange(4)[None]
        states = ours.forward_blocks(
            block, positions, context, [partial(attend_block, window=None)] * len(context)
        )
        close(hidden, states, terms=network(4))
        head = TargetHead.from_dataset(place / "data")
        mine = states @ ours.head_rows(head).T
        close(logits, mine, terms=network(4))
        if getattr(ours, "markov_head", None) is not None:
            before = tokens[:, anchor : anchor + 4]
            theirs = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
            own = ours.markov_head.markov_w2(ours.markov_head.block(ours.previous(before), states))
            close(theirs, own, terms=network(4))


@pytest.mark.parametrize(
    ("kind", "own", "theirs_own"),
    [
        ("dflash2", {"selector_rank": 8, "selector_top_k": 6, "selector_weight": 0.7},
         {"gamma": 7.0, "selector_loss_alpha": 0.7}),
        ("dspark", {"markov_rank": 8, "confidence_weight": 0.7},
         {"gamma": 4.0, "confidence_head_alpha": 0.7}),
        ("dspark", {"markov_rank": 8, "layout": "mask"}, {"gamma": 4.0}),
    ],
    ids=["dflash2", "dspark", "dspark, mask"],
)  # fmt: skip
def test_the_loss_its_gradients_and_the_path_of_block_drafts(
    place, tmp_path, kind, own, theirs_own
):
    """On random weights: the library's loss divides by the drafts, ours by their weights."""
    from speculators.losses.eager import kl_div_loss, tv_loss
    from torch.nn.attention.flex_attention import create_mask

    options = {"block_size": 4, "num_layers": 2, "mask_token_id": 2, "loss": "kl"}
    draft = fitted(kind, place / "data", tmp_path / "run", 1, **options | own)
    ours = load_draft(draft).float()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "conv" in name or "selector" in name or "markov" in name or "confidence" in name:
                parameter += torch.randn_like(parameter) * 0.3
    ours.save_pretrained(tmp_path / "random", torch.float32)
    out = export(tmp_path / "random", "speculators", tmp_path / "out", place / "target")
    model = load_speculators(out, frozenset({"embed_tokens.weight", "lm_head.weight"})).float()
    model.load_verifier_weights()
    # its flex attention has no gradient on a CPU
    model._attn_impl = model.config.transformer_layer_config._attn_implementation = "sdpa"
    model._create_mask_fn = create_mask
    ours, length = load_draft(tmp_path / "random"), 20
    head = TargetHead.from_dataset(place / "data", torch.float32)
    aux, tokens = torch.randn(1, length, 3 * 64), torch.randint(3, 192, (1, length))
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[:, 8:15] = True
    final, documents = torch.randn(1, length, 64), torch.zeros(1, length, dtype=torch.long)
    chosen: list[torch.Tensor] = []
    make_masks = model._build_attention_mask

    def recorded(*arguments: Any) -> Any:
        made = make_masks(*arguments)
        chosen.extend(made[2:])
        return made

    model._build_attention_mask = recorded
    _, theirs, metrics = model(
        aux,
        tokens,
        mask,
        final,
        documents,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
        tv_loss_fn=tv_loss,
        max_anchors=4,
        **theirs_own,
    )
    theirs.backward()
    anchors, real = chosen
    assert bool(real.all())
    with torch.no_grad():
        z = model.verifier_lm_head(model.verifier_norm(final))
    if ours.config.sample_from_anchor:  # its mask is of the slots, ours of the tokens they draft
        mask = mask | mask.roll(1, 1)
    states = zip(map(layer_column, ours.config.layers), aux.split(64, -1), strict=True)
    slots = torch.arange(length)[None]
    batch = DraftBatch(
        input_ids=tokens,
        loss_mask=mask,
        position_ids=slots,
        document_ids=documents,
        hidden=dict(states) | {"logits": z},
        target_argmax=z.argmax(-1),
    )
    total = "unary_candidate_recall_at_6" if kind == "dflash2" else "confidence_abs_error"
    count = float(metrics[f"{total}_total"])
    blocks = Blocks(anchors[None], torch.ones_like(anchors[None], dtype=torch.bool))
    mine = ours.batch_loss(batch, head, torch.tensor([count, count]), blocks)
    mine.loss.backward()
    close(mine.loss.detach(), theirs.detach(), terms=network(4))
    figures = ours.summarise(mine.sums)
    for name, other in COMPARED if kind == "dflash2" else ():
        expected = float(metrics[f"{other}_sum"] / metrics[f"{other}_total"].clamp(min=1))
        if name != "candidate_mass":  # theirs counts an inserted token
            assert abs((figures[name] or 0.0) - expected) < 1e-5, name
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == gradients.keys() - {"embed_tokens.weight", "lm_head.weight"}
    rounded = 16 * roundings(4, backward=True)  # of both sides; q - p cancels in both
    for name, gradient in trained.items():
        assert gradient is not None and bool(gradient.any()), name
        close_in_norm(gradient, gradients[name], torch.float32, rounded)
    mask[:, 15:] = False
    # the greedy path of one block, walked with the library's second stage
    first = 0 if ours.config.sample_from_anchor else 1
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            aux, tokens, mask, final, documents, max_anchors=4
        )
        anchor = int(chosen[-2][0])  # it draws them again
        path = [tokens[0, anchor]]
        for slot in range(first, 4):
            if kind == "dflash2":
                ids, scores = model.candidate_selector.select(
                    logits[0, slot], hidden[0, slot], path[-1]
                )
                path.append(ids[scores.argmax()])
            else:
                bias = model.markov_head.block_bias(
                    prev_token_ids=path[-1][None, None], hidden_states=hidden[:, slot][:, None]
                )
                path.append((logits[0, slot] + bias[0, 0]).argmax())
        drafted, _ = ours.drafter(head).propose(
            tokens[0, 1 : anchor + 1].tolist(), aux[:, :anchor], 4 - first, Greedy()
        )
    assert drafted.tolist() == [int(token) for token in path[1:]]


COMPARED = (
    ("candidate_recall", "unary_candidate_recall_at_6"),
    ("candidate_mass", "unary_candidate_target_mass_at_6"),
    ("selector_accuracy", "teacher_forced_selector_acc"),
)
MTP_NAMES = {"hidden_layernorm": "hnorm", "token_layernorm": "enorm", "input_proj": "fc"}
MTP_NAMES |= {"final_layernorm": "norm"}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_the_loss_its_gradients_and_the_tokens_of_mtp(tmp_path, family):
    """One step: in later ones, the library's slots see the states of that step at all tokens, and
    ours those that serving has, of the first step."""
    from speculators.models.mtp.core import MTPDraftModel

    write_target(tmp_path, family)
    target = AutoConfig.from_pretrained(tmp_path)
    given = {"num_speculative_steps": 1, "verifier_name_or_path": str(tmp_path)}
    theirs = MTPDraftModel.from_training_args(target, **given).float()
    options = MtpOptions(depth=1, loss_target="hard")
    config = MtpConfig.from_target(
        target.to_dict(), options=options, vocab_size=target.vocab_size, dtype="float32"
    )
    ours, head = (
        MtpDraft(config, options),
        TargetHead.from_model(AutoModelForCausalLM.from_pretrained(tmp_path)),
    )
    own, _ = own_tensors(mtp_tensors(tmp_path, BLOCKS), BLOCKS)
    assert ours.load_state_dict(own, strict=False).missing_keys == ["embed_tokens.weight"]
    ours.adopt(head)
    length, first = 20, 8
    ids = torch.randint(3, target.vocab_size, (1, length))
    states = torch.randn(1, length, target.hidden_size)
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[:, first:] = True
    after_known = mask.clone()  # ours also needs the token before to be supervised
    after_known[:, first] = False
    (logits,), their_loss, _ = theirs(ids, states, loss_mask=after_known.long())
    their_loss.backward()
    batch = DraftBatch(
        input_ids=ids,
        loss_mask=mask,
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        hidden={FINAL: states},
        target_argmax=ids.roll(-1, 1),  # the library's labels are the tokens
        rows=[[0]],
    )
    loss = ours.loss(batch, head, ours.slot_counts(batch)).loss
    loss.backward()
    close(loss.detach(), their_loss.detach(), terms=network(4))
    drafted = ours.chains(batch, head, 1)[0, : length - 2, 0]
    assert torch.equal(drafted, logits[0].argmax(-1))
    gradients = {}
    for name, parameter in theirs.mtp_layers[0].named_parameters():
        module = name.partition(".")[0]
        ours_name = name.replace(module, MTP_NAMES.get(module, f"block.{module}"), 1)
        gradients[ours_name] = parameter.grad
    trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == gradients.keys()
    rounded = 16 * roundings(4, backward=True)
    for name, gradient in trained.items():
        if gradient is None or gradients[name] is None:  # an expert that no token chose
            assert gradient is None or not gradient.any(), name
            continue
        close_in_norm(gradient, gradients[name], torch.float32, rounded)


def test_its_own_dataset_returns_our_states(tmp_path):
    from speculators.train.data import ArrowDataset

    target = layouts.tiny_target(tmp_path / "target")
    source = layouts.specforge(tmp_path / "source", layouts.make_samples(target))
    given = {"source": str(source), "from_": "specforge", "target": str(target)}
    given |= {"out": str(tmp_path / "data"), "codec": "bf16"}
    convert(**given)
    other = tmp_path / "other"
    export_dataset(given["out"], "speculators", other)

    theirs = ArrowDataset(max_len=512, datapath=str(other), on_missing="raise")
    ours = HiddenStatesDataset(given["out"])
    weight = load_head_tensors(given["out"])["norm"]
    assert len(theirs) == len(ours)
    for i, document in enumerate(ours):
        sample = theirs[i]
        assert torch.equal(sample["input_ids"], document["input_ids"].long())
        assert torch.equal(sample["loss_mask"].long(), document["loss_mask"].long())
        aux = torch.cat([document[f"hidden.L{k}"] for k in (1, 2, 4)], -1)
        assert torch.equal(sample["hidden_states"], aux)
        last = sample["verifier_last_hidden_states"].float()
        final = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(final, document["hidden.final"].float(), rtol=0.02, atol=0.02)
