"""Random combinations of the shape's switches: training, validation and exported files agree.

For each draft: the logits of training choose the tokens that `chains` drafts, and the files of each
form, read without the section of this project, are the same draft.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.evaluation.exporting import find_target
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.preflight import Subject, preflight, refusals
from spec_train.formats.write import write_form, writers_of
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import BLOCK_KINDS, SHAPED, batch_of, build_draft
from tests.spec_train.formats.published import tiny

dataset, head = any_draft.dataset, any_draft.head
SEEDS = range(3)
BLOCKS = BLOCK_KINDS
TYPES = ("full_attention", "sliding_attention")
NORMS = ("norm_before_fc", "norm_before_residual", "fc_norm")
EVERY: dict[str, dict[str, Any]] = {  # every slot counts, without noise
    "eagle": {"noise": 0.0},
    "peagle": {"cod_ratio": 1.0},
    **{name: {"num_anchors": 500} for name in BLOCKS},
}


def random_options(name: str, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{name} {seed}")
    count = draw.randint(1, 3)
    options: dict[str, Any] = {"num_layers": count}
    options |= {
        "intermediate_size": draw.choice([0, 20]),
        "num_attention_heads": draw.choice([0, 2]),
        "head_dim": draw.choice([0, 16]),
        "hidden_act": draw.choice(["silu", "silu", "gelu"]),
        "qk_norm": draw.choice([name in BLOCKS, True]),
        "attention_bias": draw.choice(["auto", "true"]),
        "mlp_bias": draw.choice(["auto", "false", "true"]),
        "train_embeddings": draw.choice([False, True]),
    }
    if draw.random() < 0.7:
        types = [draw.choice(TYPES) for _ in range(count - 1)]
        options |= {"sliding_window": 5, "layer_types": ",".join([TYPES[1], *types])}
    if name in ("eagle3", "peagle"):
        options |= {norm: draw.random() < 0.5 for norm in NORMS}
    if name == "eagle3":
        options["norm_output"] = draw.random() < 0.5
    if name == "dflash2":
        options |= {
            "conv_kernel_size": draw.choice([1, 2, 3]),
            "selector_top_k": draw.choice([2, 9]),
        }
        options["conv_group_size"] = draw.choice([1, 8, 32])
    elif name == "lilicorr":
        options |= {"lilicorr_candidate_topk": draw.choice([1, 9])}
        options["conv_kernel_size"] = draw.choice([0, 2])
    elif name == "domino":
        options |= {"emb_dim": draw.choice([1, 5]), "gru_hidden_dim": draw.choice([1, 7])}
        options["pure_draft_prefix_len"] = draw.choice([0, 1])
    elif name == "xpress":
        options |= {"xpress_rank": draw.choice([1, 5]), "xpress_mlp_hidden": draw.choice([1, 7])}
    elif name != "eagle":
        options["draft_vocab_size"] = draw.choice([0, 40])
    if name in BLOCKS:
        if name not in ("dflash2", "lilicorr", "xpress"):
            options["layout"] = draw.choice(["anchor", "mask"])
        options["sliding_window_non_causal"] = draw.random() < 0.5
    return options | EVERY.get(name, {})


def random_draft(name: str, seed: int, dataset: HiddenStatesDataset, head: TargetHead) -> Any:
    """Return a draft with large weights, also of biases and norms."""
    draft = build_draft(name, dataset, head, **random_options(name, seed))
    with torch.no_grad():
        for key, parameter in draft.named_parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * (0.1 if "norm" in key else 0.3)
    return draft.eval()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPED)
def test_training_chooses_the_tokens_that_chains_draft(dataset, head, name, seed):
    draft = random_draft(name, seed, dataset, head)
    batch = batch_of(dataset, [[0, 1], [2, 3]], 96)
    with torch.no_grad():
        chains = draft.chains(batch, head, 1)[..., 0]  # slot t drafts the token after token t + 1
        choice = torch.cat([batch.target_argmax[:, :1], chains[:, :-1]], dim=1)
        planted = dataclasses.replace(batch, target_argmax=choice)
        sums = draft.loss(planted, head, None).sums
        assert float(sums["drafted"][0]) > 10
        assert float(sums["hits"][0]) == float(sums["drafted"][0])
        other = dataclasses.replace(batch, target_argmax=choice.roll(1, dims=1))
        assert float(draft.loss(other, head, None).sums["hits"][0]) < float(sums["hits"][0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPED)
def test_files_of_every_form_are_the_same_draft_to_a_reader_of_public_keys(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path, name: str, seed: int
) -> None:
    draft = random_draft(name, seed, dataset, head)
    own, batch = draft.files(torch.float32, "own"), batch_of(dataset, [[0, 1], [2, 3]], 96)
    facts = dataclasses.replace(
        find_target(str(dataset.target_dir)),
        **{"name": "target", "embedding": head.embed_weight, "head": head.head_weight},
    )
    with torch.no_grad():
        wanted = draft.chains(batch, head, 2)
    for form in writers_of(own.config[SECTION]):
        if refusals(preflight(Subject(own, facts, form)), form):
            continue
        files = write_form(own, form, facts)
        public = {key: value for key, value in files.config.items() if key != SECTION}
        found = load_draft(tiny.write(tmp_path / form, public, files.tensors), facts).eval()
        assert found.config.train_embeddings == draft.config.train_embeddings, form
        assert found.config.windows == draft.config.windows, form
        with torch.no_grad():
            assert torch.equal(found.chains(batch, head, 2), wanted), form
