"""A published block draft, read and written in the form of an engine, is read back as the same."""

from typing import Any

import pytest
import torch

from spec_train.drafts import load_draft, own_files
from spec_train.formats.draft_files import write_files
from spec_train.formats.write import write_form
from tests.spec_train.formats.published import blocks, parallel, tiny
from tests.spec_train.formats.published.test_speculators_blocks import (
    SLIDES,
    block_config,
    layer_config,
    peagle_config,
)
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG, JETSPEC
from tests.spec_train.formats.published.tiny import VD, H
from tests.spec_train.formats.tools import same_weights

SLIDING = "sliding_attention"
WINDOW = {"layer_types": [SLIDING, SLIDING], "sliding_window": 7, "use_sliding_window": True}


def published(kind: str, embedding: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and tensors of a draft that uses what is rare."""
    if kind == "z-lab":
        return CONFIG | WINDOW, blocks.block_tensors()
    if kind == "z-lab, not causal":
        return CONFIG | WINDOW | {"is_causal": False}, blocks.block_tensors()
    if kind == "JetSpec":
        return CONFIG | JETSPEC, blocks.block_tensors()
    if kind == "speculators DSpark":
        own = {"markov_head_type": "gated", "confidence_head_with_markov": False}
        tensors = blocks.block_tensors(markov="gated", confidence=H, rows=VD)
        ids = tiny.some_ids("random")
        tensors |= {"lm_head.weight": tiny.noise(VD, H)} | tiny.maps(ids)
        return block_config("dspark", layer_config(**WINDOW), draft_vocab_size=VD, **own), tensors
    tensors = parallel.peagle_tensors(qk_norm=True, norm_before_fc=True, bias=True)
    if kind == "P-EAGLE, own embedding":
        embedding = tiny.noise(*embedding.shape)
    tensors |= {"embed_tokens.weight": embedding} | tiny.maps(tiny.some_ids())
    layer = SLIDES | {"attention_bias": True, "mlp_bias": True}
    return peagle_config(norm_before_fc=True, norm_output=True, layer=layer), tensors


CASES = [
    *(
        (kind, form)
        for kind in ("z-lab", "z-lab, not causal", "JetSpec")
        for form in ("vllm", "speculators")
    ),
    ("JetSpec", "sglang"),
    ("speculators DSpark", "sglang"),
    ("speculators DSpark", "speculators"),
    ("speculators P-EAGLE", "vllm"),
    ("speculators P-EAGLE", "speculators"),
    ("P-EAGLE, own embedding", "vllm"),
    ("P-EAGLE, own embedding", "speculators"),
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_every_form_reads_back_as_the_same_draft(tmp_path, kind, form):
    facts = tiny.target()
    folder = tiny.write(tmp_path / "theirs", *published(kind, facts.embedding))
    draft = load_draft(folder, facts)
    own = own_files(draft, "here")
    write_files(write_form(own, form, facts), tmp_path / "ours")
    again = load_draft(tmp_path / "ours", facts)
    assert again.config == draft.config and again.options == draft.options
    assert same_weights(again, draft)
