"""What engines read of the windows in exported files, by readers written from their sources.

`export` must refuse a draft for an engine exactly where its reader finds another attention than the
draft was trained with.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.formats.draft_files import read_files
from spec_train.formats.preflight import Subject, preflight
from spec_train.formats.read import own_form
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.write import write_form
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset, head = any_draft.dataset, any_draft.head

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 6
MIXED = f"{SLIDING},{FULL}"
LAYERS: dict[str, dict[str, Any]] = {
    "eagle": {"num_layers": 2},
    "eagle3": {"num_layers": 2},
    "peagle": {},
    "dspark": {},
    "dflash": {"layout": "mask", "block_size": 4},
}

Attention = list[tuple[int | None, bool]]
"""Per layer: its window, and whether slots of a block see no later ones."""


def vllm_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The config that vLLM makes of a speculators file: its layer config with some keys added."""
    if "speculators_model_type" not in raw:
        return raw
    layer = dict(raw["transformer_layer_config"])
    if raw["speculators_model_type"] == "dflash":
        causal = not raw.get("sliding_window_non_causal", True)
        layer["dflash_config"] = {"causal": causal}
    return layer


def hf_window(raw: dict[str, Any]) -> tuple[list[str], int | None]:
    """Layer types and window after transformers' config class, which engines read."""
    made = Qwen3Config if raw.get("model_type") == "qwen3" else LlamaConfig
    names = ("num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window")
    config = made(**{name: raw[name] for name in names if name in raw})
    types = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return types, getattr(config, "sliding_window", None)


def vllm(raw: dict[str, Any], kind: str) -> Attention:
    raw = vllm_of(raw)
    types, window = hf_window(raw)
    out: Attention = []
    for of_layer in types:
        slides = of_layer == SLIDING
        causal = raw.get("is_causal")
        if causal is None:
            causal = (raw.get("dflash_config") or {}).get("causal")
        out.append((window if slides else None, slides if causal is None else causal))
    return out


def sglang(raw: dict[str, Any], kind: str) -> Attention:
    types, window = hf_window(raw)
    causal = raw.get("is_causal")
    if kind not in ("dspark", "dflash"):
        return [(None, False) for _ in types]  # the files are not read for windows
    return [
        (window if t == SLIDING else None, t == SLIDING if causal is None else causal)
        for t in types
    ]


def llama_cpp(raw: dict[str, Any], kind: str) -> Attention:
    if kind not in ("dspark", "dflash"):
        return [(None, False)] * raw.get("num_hidden_layers", 1)
    causal = raw.get("is_causal")
    if causal is None:
        causal = (raw.get("dflash_config") or {}).get("causal") or False
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return [(window if t == SLIDING else None, causal) for t in raw["layer_types"]]


READERS = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp}


def trained(draft: Any, kind: str) -> Attention:
    if kind not in ("dspark", "dflash"):
        return [(window, False) for window in draft.config.windows]
    return [(None, False) if w is None else (w.size, w.causal) for w in draft.config.block_windows]


def make(
    kind: str, dataset: HiddenStatesDataset, head: TargetHead, folder: Path, **options: Any
) -> Any:
    draft = build_draft(kind, dataset, head, **LAYERS[kind], **options)
    draft.save_pretrained(folder)
    return draft


def findings(folder: Path, form: str) -> dict[str, list[Any]]:
    own = read_files(folder)
    return preflight(Subject(own, TargetFacts(name="the-target"), form))


WINDOWS: dict[str, dict[str, Any]] = {
    "no window": {},
    "window": {"sliding_window": WINDOW},
    "mixed": {"sliding_window": WINDOW, "layer_types": MIXED},
}
BOTH_WAYS = {
    "non-causal window": {"sliding_window": WINDOW, "sliding_window_non_causal": True},
    "non-causal mixed": WINDOWS["mixed"] | {"sliding_window_non_causal": True},
}
CASES = [
    *((kind, name) for kind in LAYERS for name in WINDOWS),
    *((kind, name) for kind in ("dspark", "dflash") for name in BOTH_WAYS),
]
SERVED = {
    "eagle": ("vllm", "sglang"),
    "eagle3": ("vllm", "sglang", "llama.cpp"),
    "peagle": ("vllm",),
    "dspark": ("vllm", "sglang", "llama.cpp"),
    "dflash": ("vllm", "sglang", "llama.cpp"),
}


@pytest.mark.parametrize("form", ["hf", "speculators"])
@pytest.mark.parametrize("kind, name", CASES)
def test_check_refuses_an_engine_exactly_where_it_reads_other_windows(
    kind, name, form, dataset, head, tmp_path
):
    if (kind, form) == ("eagle", "speculators"):
        pytest.skip("there is no such form")
    draft = make(kind, dataset, head, tmp_path / "own", **(WINDOWS | BOTH_WAYS)[name])
    own = read_files(tmp_path / "own")
    facts = TargetFacts(name="the-target", embedding=head.embed_weight)
    written = own if form == "hf" else write_form(own, form, facts)
    assert DRAFTS[kind].from_files(own_form(written, facts)).config == draft.config
    found = findings(tmp_path / "own", form)
    for engine in SERVED[kind] if form == "hf" else ("vllm",):
        read, wanted = READERS[engine](written.config, kind), trained(draft, kind)
        if kind not in ("dspark", "dflash"):
            read = [(window, False) for window, _ in read]
        said = [f for f in found[engine] if "sliding" in f.text or "window" in f.text]
        refused = any(f.level == "refuse" for f in said)
        if (engine, kind, name) == ("sglang", "eagle3", "window"):  # an option of its command line
            assert [f.level for f in said] == ["warn"]
            assert f"--speculative-draft-window-size {WINDOW - 1}" in said[0].text
        elif (engine, kind) == ("vllm", "eagle"):
            assert refused == ("layer_types" in written.config)  # it fails on the key
        else:
            assert refused != (read == wanted), (engine, read, said)


@pytest.mark.parametrize("kind, words", [("eagle3", "sees s positions more"), ("dspark", "before")])
def test_the_trainer_of_speculators_is_named_for_its_other_edge_of_the_window(
    kind, words, dataset, head, tmp_path
):
    make(kind, dataset, head, tmp_path / "own", sliding_window=WINDOW)
    said = findings(tmp_path / "own", "speculators")["speculators"]
    assert any(f.level == "warn" and words in f.text for f in said)
    make(kind, dataset, head, tmp_path / "full")
    assert all("window" not in f.text for f in findings(tmp_path / "full", "hf")["speculators"])


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark", "dflash"])
def test_mixed_layers_need_one_cache_group_in_the_runner_that_peagle_has(
    kind, dataset, head, tmp_path
):
    """The other drafts have vLLM's default, its V2 runner, which knows several groups."""
    make(kind, dataset, head, tmp_path / "own", **WINDOWS["mixed"])
    said = [f.text for f in findings(tmp_path / "own", "hf")["vllm"] if "sliding" in f.text]
    assert len(said) == (kind == "peagle")
    assert all("--disable-hybrid-kv-cache-manager" in text for text in said)


def test_a_window_shorter_than_a_block_is_refused(dataset, head):
    with pytest.raises(DraftError, match="sliding_window = 2 is less than block_size = 3"):
        build_draft("dspark", dataset, head, sliding_window=2)
