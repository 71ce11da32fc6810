"""What every backend must satisfy: subclass `BackendContract`, and set what is special to one.

The reference is transformers, one document at a time, in float32: `hidden_states[k + 1]` of block
k, but for the last block, whose entry transformers has passed through the final norm; its raw
output is the input of that norm.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spec_data.capture.backend import BackendOptions, States, TargetBackend, open_backend
from spec_data.capture.mask_forms import ROWS, SINGLE
from spec_data.generation.capture import forward_batches
from spec_data.shards.errors import RunError, TargetError
from tests.families import tiny_model
from tests.tolerance import close, network, tolerance

LENGTHS = (9, 24, 3, 17, 1, 30)
PACK = 48  # holds several of these documents
BAD_TOKEN = 7  # the token whose embedding is not finite, where that is planted


def documents_of(lengths: tuple[int, ...], vocab: int, seed: int = 0) -> list[Tensor]:
    """Random token ids int64 [T_d], without the bad token."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]
    return [torch.where(d == BAD_TOKEN, BAD_TOKEN + 1, d) for d in ids]


def captured(
    backend: TargetBackend, documents: list[Tensor], form: str, *, full_logits: bool = False
) -> list[States]:
    """Capture documents in batches, as `generate` does; the states of each document."""
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
    ids = torch.cat(documents).numpy()
    found: dict[int, States] = {}
    for batch in forward_batches(offsets, ids, form, PACK, 2 * PACK):
        states = backend.capture(batch, form, full_logits=full_logits)
        assert len(states.final) == batch.tokens, "the real tokens of the batch, and no others"
        start = 0
        for d, length in zip(batch.documents, batch.lengths, strict=True):
            part = slice(start, start + length)
            found[d] = states.each(lambda values, part=part: values[part])
            start += length
    return [found[d] for d in range(len(documents))]


class BackendContract:
    """Tests of one backend; `name` is its --backend."""

    name = "hf"
    layers: tuple[int, ...] | None = None  # None: embedding output, some blocks, the last block

    def make_model(self) -> Any:
        """Return a tiny model of transformers that the backend can load, float32."""
        return tiny_model("llama")

    def open(self, path: Path, **changes: Any) -> TargetBackend:
        """Open the backend on a model directory."""
        options = {"path": path, "layers": self.layers, "device": "cpu"} | changes
        return open_backend(self.name, BackendOptions(**options))

    def close_to(self, actual: Tensor, expected: Tensor, name: str) -> None:
        """Compare states or logits with the reference, up to the rounding of float32."""
        assert actual.shape == expected.shape, name
        terms = network(self.blocks)
        close(actual.float().cpu(), expected.float(), terms=terms, dtype=torch.float32, name=name)

    @pytest.fixture(scope="class")
    def model(self) -> Any:
        """The model; its norms have weights that are not all one, as trained ones."""
        model = self.make_model().eval()
        torch.manual_seed(0)
        for name, module in model.named_modules():
            if "norm" in name and getattr(module, "weight", None) is not None:
                nn.init.normal_(module.weight, 1.0, 0.3)
        type(self).blocks = model.config.num_hidden_layers
        if self.layers is None:
            type(self).layers = (-1, 0, self.blocks // 2, self.blocks - 1)
        return model

    @pytest.fixture(scope="class")
    def model_dir(self, model, tmp_path_factory) -> Path:
        path = tmp_path_factory.mktemp("target")
        model.save_pretrained(path)
        return path

    @pytest.fixture(scope="class")
    def backend(self, model_dir):
        backend = self.open(model_dir)
        yield backend
        backend.close()
        backend.close()  # twice is harmless

    @pytest.fixture(scope="class")
    def documents(self, model) -> list[Tensor]:
        return documents_of(LENGTHS, model.config.vocab_size)

    @torch.no_grad()
    def plain(self, model: Any, ids: Tensor) -> tuple[dict[int, Tensor], Tensor, Tensor]:
        """Layers, input of the head, and logits of one document, by transformers alone."""
        raw = []
        handle = model.model.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0][0]))
        found = model(ids[None], output_hidden_states=True, use_cache=False)
        handle.remove()
        hidden = [h[0] for h in found.hidden_states]
        layers = {k: hidden[k + 1] for k in range(-1, self.blocks - 1)}
        return layers | {self.blocks - 1: raw[0]}, hidden[-1], found.logits[0]

    def test_states_of_a_document_are_those_of_plain_transformers(self, model, backend, documents):
        assert backend.layers == tuple(sorted(self.layers)) and backend.num_layers == self.blocks
        for ids, states in zip(
            documents, captured(backend, documents, SINGLE, full_logits=True), strict=True
        ):
            layers, final, logits = self.plain(model, ids)
            assert set(states.layers) == set(backend.layers)
            for k, value in states.layers.items():
                self.close_to(value, layers[k], f"layer {k}")
            self.close_to(states.final, final, "final")
            self.close_to(states.logits, logits, "logits")

    def test_packed_states_are_those_of_documents_alone(self, backend, documents):
        proof = backend.prove(documents, PACK)
        assert proof.noise is None or proof.noise <= proof.tolerance
        assert set(proof.differences) >= {proof.form}
        alone = captured(backend, documents, SINGLE)
        for form in {proof.form, ROWS, SINGLE}:
            for d, states in enumerate(captured(backend, documents, form)):
                for k in backend.layers:
                    where = f"{form}, document {d}, layer {k}"
                    self.close_to(states.layers[k], alone[d].layers[k].cpu(), where)
                self.close_to(states.final, alone[d].final.cpu(), f"{form}, document {d}, final")

    def test_without_full_logits_none_are_returned(self, backend, documents):
        (states,) = captured(backend, documents[:1], SINGLE)
        assert states.logits is None
        assert states.final.device == states.layers[backend.layers[0]].device == backend.device
        assert states.final.dtype == backend.dtype

    def test_the_head_is_proven_and_its_logits_are_the_models(self, model, backend, documents):
        assert backend.prove_head(documents) < tolerance(torch.float32, network(self.blocks))
        for document in documents[:3]:
            _, final, logits = self.plain(model, document)
            final = final.to(backend.device, backend.dtype)
            self.close_to(backend.logits_of(final), logits, "logits")

    def test_the_stored_head_is_that_of_the_model(self, model, backend):
        tensors = backend.head_tensors()
        assert torch.equal(tensors["embed_tokens"], model.get_input_embeddings().weight)
        head = tensors.get("lm_head", tensors["embed_tokens"])
        assert torch.equal(head, model.get_output_embeddings().weight)
        assert torch.equal(tensors["norm"], model.model.norm.weight)
        assert ("lm_head" in tensors) == (not backend.head.tied)
        assert (backend.head.vocab_size, backend.head.hidden_size) == tuple(head.shape)
        assert all(t.device.type == "cpu" and t.is_contiguous() for t in tensors.values())

    def test_the_rotary_frequencies_are_those_of_the_model(self, model, backend):
        found = backend.positions(64)
        assert found.proven, found.reason
        (table,) = found.tables.values()
        assert torch.equal(table.inv_freq, model.model.rotary_emb.inv_freq.float())

    def test_states_that_are_not_finite_are_returned_as_they_are(
        self, model, documents, tmp_path_factory
    ):
        """A document is left out for them later; no backend replaces or hides them."""
        path, embedding = tmp_path_factory.mktemp("broken"), model.get_input_embeddings().weight
        kept = embedding.data[BAD_TOKEN].clone()
        embedding.data[BAD_TOKEN] = torch.nan
        model.save_pretrained(path)
        embedding.data[BAD_TOKEN] = kept
        broken = documents[1].clone()
        broken[5] = BAD_TOKEN
        backend = self.open(path)
        states = captured(backend, [documents[0], broken, documents[3]], SINGLE)
        finite = [bool(torch.isfinite(s.final).all()) for s in states]
        assert finite == [True, False, True]
        assert not bool(torch.isfinite(states[1].layers[backend.layers[-1]][5]).any())
        with pytest.raises(RunError, match="not finite"):
            backend.prove([broken, broken], PACK)
        whole, with_broken = (backend.prove([*more, *documents], PACK) for more in ([], [broken]))
        assert with_broken.form == whole.form != SINGLE, "it says nothing about packing"
        backend.close()

    def test_what_it_is_can_be_written_to_a_manifest(self, backend):
        found = backend.describe()
        assert {"dtype", "attn", "backend", "backend_version", "devices"} <= set(found)
        assert found["backend"] == self.name
        assert found["dtype"] == str(backend.dtype).removeprefix("torch.")
        assert json.loads(json.dumps(found)) == found
        ran = []
        share = backend.peak_memory(lambda: ran.append(1))
        assert share is None or (0 <= share <= 1 and ran)
        chunks = backend.logit_chunks(10_000)
        assert [i for part in chunks for i in range(part.start, part.stop)] == list(range(10_000))

    def test_layers_that_do_not_exist_are_refused(self, model_dir):
        with pytest.raises(TargetError, match="do not exist"):
            self.open(model_dir, layers=(0, 99))
