"""Capture: hooks return what the model computes; batches hold it in the frame of the trainer."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spec_data.capture.hooks import capturing, decoder_layers
from spec_data.capture.model import Target
from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import DatasetError, RunError, TargetError
from spec_data.shards.layer_ids import choose_layers
from tests.factory import tiny_llama
from tests.families import LAYERS, VOCAB, tiny_model
from tests.tolerance import LAYER, close, network, same_choice, tolerance

CHOSEN = (0, 2, 4)
FORWARD = {"terms": network(6), "dtype": torch.float32}  # the six layers of the tiny targets


def ids_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("planted", ["before the norm", "normed twice", "broken"])
@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_final_states_on_the_wrong_side_of_the_norm_are_refused(family, planted, monkeypatch):
    model = tiny_model(family)
    target = Target(model, (LAYERS - 1,))
    forward = target.forward
    norm = getattr(model, model.base_model_prefix)
    norm = norm.ln_f if family == "gpt2" else norm.norm

    def wrong(*arguments, **options):
        captured = forward(*arguments, **options)
        raw = captured.layers[LAYERS - 1]
        normed = captured.final * torch.nan if planted == "broken" else norm(captured.final)
        captured.final = raw if planted == "before the norm" else normed
        return captured

    for module in norm.modules():  # trained norms have weights that are not all one
        if getattr(module, "weight", None) is not None:
            nn.init.normal_(module.weight, 1.0, 0.5)
    assert target.prove_head(ids_of(9, 5)) < tolerance(torch.float32, LAYER)
    monkeypatch.setattr(target, "forward", wrong)
    refused = (TargetError, r"head\(final hidden\) is not the model's logits")
    error, text = (RunError, "not finite") if planted == "broken" else refused
    with pytest.raises(error, match=text):
        target.prove_head(ids_of(9, 5))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_states_that_a_later_block_changes_in_place_are_refused():
    model, chosen = tiny_model("llama"), CHOSEN[0]
    first, block = model.model.layers[chosen], model.model.layers[chosen + 1]

    @torch.no_grad()
    def forward() -> None:
        with capturing(model, CHOSEN):
            model(torch.arange(3, 12)[None])

    def in_place(_: Any, args: Any) -> Any:
        return args[0].add_(1), *args[1:]

    def again(_: Any, args: Any, given: Any) -> Any:
        return (first(*args, **given), *args[1:]), given

    handle = block.register_forward_pre_hook(in_place)
    with pytest.raises(TargetError, match=rf"changes its output of block {chosen} in place"):
        forward()
    handle.remove()
    forward()
    block.register_forward_pre_hook(again, with_kwargs=True)
    with pytest.raises(TargetError, match="several times in one forward"):
        forward()


def test_hooks_are_removed_after_errors_too():
    model = tiny_model("llama")
    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="stop"), capturing(model, CHOSEN):
        assert hooks_of(model) == before + len(CHOSEN) + 1
        raise RuntimeError("stop")
    assert hooks_of(model) == before
    with pytest.raises(TargetError, match="do not exist"), capturing(model, (0, LAYERS)):
        pass
    assert hooks_of(model) == before


class Blocks(nn.Module):
    """A model that consists of the path to its decoder blocks only."""

    def __init__(self, path: str, container: nn.Module) -> None:
        super().__init__()
        *parents, last = path.split(".")
        place: nn.Module = self
        for name in parents:
            place.add_module(name, nn.Module())
            place = getattr(place, name)
        place.add_module(last, container)


@pytest.mark.parametrize("path", ["model.layers", "language_model.layers", "transformer.h"])
def test_blocks_are_found_in_a_list_and_in_a_dict_with_numbers_as_keys(path):
    blocks = [nn.Identity() for _ in range(12)]
    by_key = {str(i): block for i, block in sorted(enumerate(blocks), key=lambda b: str(b[0]))}
    assert decoder_layers(Blocks(path, nn.ModuleList(blocks))) == blocks
    assert decoder_layers(Blocks(path, nn.ModuleDict(by_key))) == blocks, "numeric, not lexical"
    with pytest.raises(TargetError, match="only decoder-only causal"):
        decoder_layers(Blocks(path, nn.ModuleDict({"first": nn.Identity()})))


def test_states_of_blocks_in_a_dict_are_those_of_a_list():
    model, (ids,) = tiny_model("llama"), ids_of(9)
    target, whole = Target(model, CHOSEN), torch.ones(1, 9, dtype=torch.long)
    wanted = target.generate_batch(ids[None], whole, whole)
    blocks = model.model.layers
    model.model.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
    model.model.forward = _forward_of(model.model, blocks)
    found = Target(model, CHOSEN).generate_batch(ids[None], whole, whole)
    assert all(torch.equal(found.hidden[n], wanted.hidden[n]) for n in wanted.hidden)


def _forward_of(decoder: nn.Module, blocks: nn.ModuleList) -> Any:
    """Return the forward of a decoder that iterates over the values of its blocks."""
    plain = type(decoder).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept, decoder._modules["layers"] = decoder._modules["layers"], blocks
        try:
            return plain(decoder, *args, **kwargs)
        finally:
            decoder._modules["layers"] = kept

    return forward


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_input_embedding_is_found_under_any_name(family):
    model = tiny_model(family)
    name = "transformer.wte" if family == "gpt2" else "model.embed_tokens"
    assert Target(model, CHOSEN).get_input_embeddings() is model.get_submodule(name)


def test_a_model_without_decoder_blocks_is_refused():
    with pytest.raises(TargetError, match="only decoder-only causal language models"):
        decoder_layers(nn.Linear(2, 2))


def test_auto_layers_are_the_eagle3_recipe():
    assert choose_layers("auto", (), 36) == ((1, 17, 32), {})
    assert choose_layers("5,1,3", (), 8) == ((1, 3, 5), {})
    with pytest.raises(TargetError, match="--layers 0,2,4"):  # six blocks: too few for it
        Target(tiny_model("llama"))
    assert Target(tiny_model("llama"), "spread:3").layers == (1, 2, 4)
    assert Target(tiny_llama(layers=8)).layers == (1, 3, 4)
    for wrong in ("1,1", "1,8", "-2", "one", ""):
        with pytest.raises(TargetError):
            choose_layers(wrong, (), 8)


def test_a_target_is_in_evaluation_mode_whatever_the_model_was_in():
    model = tiny_model("gpt2")
    model.config.resid_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    ids = torch.stack(ids_of(9))
    layout = torch.zeros_like(ids), torch.arange(9)[None]
    expected = Target(model.eval(), CHOSEN).forward(ids, *layout, None)
    with capturing(model.train(), CHOSEN) as dropped:
        model(ids, use_cache=False)
    assert not torch.equal(dropped.layers[4], expected.layers[4]), "dropout must matter here"
    found = Target(model.train(), CHOSEN).forward(ids, *layout, None)
    assert all(torch.equal(found.layers[k], expected.layers[k]) for k in CHOSEN)
    assert torch.equal(found.final, expected.final) and not model.training


# --- generate_batch ---


def padded(documents: list[torch.Tensor], width: int):
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, document in enumerate(documents):
        ids[b, : len(document)] = document
        mask[b, : len(document)] = 1
    return ids, mask


def test_a_plain_batch_is_what_the_model_computes_and_padding_is_zero():
    model = tiny_model("qwen3")
    documents = ids_of(7, 4)
    ids, attention = padded(documents, 8)
    loss = attention.clone()
    loss[:, :3] = 0
    target = Target(model, CHOSEN, supervision="logits")
    batch = target.generate_batch(ids, attention, torch.ones_like(loss))
    assert torch.equal(batch.loss_mask, attention.bool())
    batch = target.generate_batch(ids, attention, loss)
    assert torch.equal(batch.input_ids, ids) and torch.equal(batch.loss_mask, loss.bool())
    for b, document in enumerate(documents):
        n = len(document)
        plain = model(document[None], output_hidden_states=True, use_cache=False)
        aux = torch.cat([plain.hidden_states[k + 1] for k in CHOSEN], -1)[0]
        close(batch.aux(CHOSEN)[b, :n], aux, **FORWARD)
        close(batch.hidden["logits"][b, :n], plain.logits[0], **FORWARD)
        same_choice(plain.logits[0], batch.target_argmax[b, :n], **FORWARD)
        for values in (batch.aux(CHOSEN), batch.hidden["logits"], batch.target_argmax):
            assert not values[b, n:].any()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("supervision", ["final-hidden", "logits", "target-probs"])
def test_packed_batch_equals_each_document_alone(family, supervision):
    vocabulary = torch.arange(0, VOCAB, 2) if supervision == "target-probs" else None
    target = Target(
        tiny_model(family), CHOSEN, supervision=supervision, draft_vocabulary=vocabulary
    )
    documents = ids_of(5, 20, 11)
    row, attention = padded([torch.cat(documents)], 40)
    batch = target.generate_batch(row, attention, attention, seq_lens=[[5, 20, 11]])
    start = 0
    for document in documents:
        n = len(document)
        ids, ones = padded([document], n)
        alone = target.generate_batch(ids, ones, ones)
        for name, value in (alone.plain() | alone.hidden).items():
            if name == "document_ids":
                continue
            packed = (batch.plain() | batch.hidden)[name][0, start : start + n]
            if name == "target_argmax" and supervision == "logits":
                same_choice(alone.hidden["logits"][0], packed, **FORWARD)
            else:
                close(packed, value[0], **FORWARD, name=name)
        start += n


def test_arrays_and_lists_are_batches_too_and_what_is_none_is_refused():
    target = Target(tiny_model("llama"), np.array(CHOSEN))
    assert target.layers == Target(tiny_model("llama"), list(map(np.int64, CHOSEN))).layers
    ids, attention = padded(ids_of(6, 4), 8)
    whole = target.generate_batch(ids, attention, attention, seq_lens=[[6], [4]])
    for form in (lambda rows: rows.tolist(), lambda rows: rows.numpy(), torch.Tensor.int):
        given = [form(rows) for rows in (ids, attention, attention)]
        batch = target.generate_batch(*given, seq_lens=np.array([[6], [4]]))
        assert all(torch.equal(v, batch.plain()[name]) for name, v in whole.plain().items())
    as_float = target.generate_batch(ids, attention, attention.float())
    assert torch.equal(as_float.loss_mask, attention.bool())
    for wrong, said in (
        (([[1, 2], [3]], attention, attention), "input_ids: expected a tensor"),
        ((["a b", "c"], attention, attention), "input_ids: expected a tensor"),
        ((ids.float(), attention, attention), "input_ids: expected token ids"),
        ((ids[0], attention[0], attention[0]), "input_ids: expected token ids"),
        ((ids, attention, attention * 0.5), "loss_mask: expected 0 and 1"),
        ((ids, attention, attention[:, :4]), "loss_mask.*same shape"),
        ((ids, attention, attention, [6, 4]), "seq_lens"),
    ):
        with pytest.raises(TargetError, match=said):
            target.generate_batch(*wrong)
    with pytest.raises(TargetError, match="expected ids, such as"):
        Target(tiny_model("llama"), [0.5])


def test_batches_that_contradict_themselves_are_refused():
    model = tiny_model("llama")
    target = Target(model, CHOSEN)
    ids, attention = padded(ids_of(6), 8)
    with pytest.raises(TargetError, match="add up to"):
        target.generate_batch(ids, attention, attention, seq_lens=[[3, 2]])
    left = attention.flip(1)
    with pytest.raises(TargetError, match="right-padded"):
        target.generate_batch(ids, left, attention)


def test_a_batch_has_exactly_one_teacher_in_the_slots_of_its_tokens():
    target, (ids,) = Target(tiny_model("llama"), CHOSEN), ids_of(9)
    whole = torch.ones(1, 9, dtype=torch.long)
    batch = target.generate_batch(ids[None], whole, whole)
    assert batch.supervisions == ["hidden.final"]
    columns = batch.plain() | batch.hidden
    assert DraftBatch.of(columns).supervisions == ["hidden.final"]
    for name in ("logits", "topk_logits", "target_probs"):
        with pytest.raises(DatasetError, match=r"one of hidden\.final, .* and not several"):
            DraftBatch.of(columns | {name: torch.zeros(1, 9, VOCAB)})
    with pytest.raises(DatasetError, match=r"exactly one of hidden\.final, .* this one has none"):
        DraftBatch.of({n: v for n, v in columns.items() if n != "hidden.final"})
    with pytest.raises(DatasetError, match=r"loss_mask has shape .* rows and slots must be"):
        DraftBatch.of(columns | {"loss_mask": torch.zeros(1, 8, dtype=torch.bool)})
    assert not batch.without_hidden().supervisions


@pytest.mark.parametrize("how", ["none", "raises", "no module"])
def test_a_class_without_an_input_embedding_is_refused_in_words(how):
    def get_input_embeddings(_self):
        if how == "raises":
            raise NotImplementedError
        return None if how == "none" else torch.nn.Dropout()

    model = tiny_model("llama")
    odd = {"get_input_embeddings": get_input_embeddings}
    odd["get_output_embeddings"] = lambda self: self.lm_head  # transformers asks the first for it
    model.__class__ = type("Odd", (type(model),), odd)
    with pytest.raises(TargetError, match="Odd has no input embedding that can be found"):
        Target(model, [1, 3])
