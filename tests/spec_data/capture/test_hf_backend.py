"""The backend of transformers satisfies the contract of all backends, and the planted failures."""

import dataclasses
import gc
import weakref

import pytest
import torch

from spec_data.capture.backend import BackendOptions, open_backend
from spec_data.capture.model import Target
from tests.spec_data.capture.backend_contract import BackendContract


class TestTransformers(BackendContract):
    """`--backend hf`."""

    def test_closing_frees_the_model(self, model_dir):
        backend = self.open(model_dir)
        assert isinstance(backend, Target)
        alive = weakref.ref(backend.model)
        backend.close()
        gc.collect()
        assert alive() is None


class TestOfAShiftedBackend:
    """The contract fails for a backend with layer ids that are off by one."""

    def test_the_contract_finds_it(self, tmp_path):
        contract = TestTransformers()
        model = contract.make_model().eval()
        type(contract).blocks = model.config.num_hidden_layers
        model.save_pretrained(tmp_path)
        options = BackendOptions(path=tmp_path, layers=(0, 2), device="cpu")
        backend = open_backend("hf", options)
        capture = backend.capture

        def shifted(batch, form, *, full_logits=False):
            found = capture(batch, form, full_logits=full_logits)
            return dataclasses.replace(found, layers={0: found.layers[2], 2: found.layers[0]})

        backend.capture = shifted
        contract.layers = (0, 2)
        documents = [torch.arange(3, 20)]
        with pytest.raises(AssertionError, match="layer 0"):
            contract.test_states_of_a_document_are_those_of_plain_transformers(
                model, backend, documents
            )
