"""Which engine loads the biases of a draft's layers, for each kind of draft.

A bias that an engine does not have is dropped without an error, so the draft computes something
else than what was trained. Sources: `llama_eagle.py`, `llama_eagle3.py` and `qwen3_dflash.py` of
vLLM; `llama.py`, on which `llama_eagle.py` builds, `llama_eagle3.py` and `dflash.py` of SGLang; the
layers of transformers that speculators and DeepSpec build on.
"""

from typing import Any

from spec_train.formats.preflight_notes import REFUSE, Finding
from spec_train.formats.rules import DEEPSPEC, LLAMA_CPP, SGLANG, SPECULATORS, TRANSFORMERS, VLLM

BIASES = ATTENTION, MLP = "attention_bias", "mlp_bias"
_BOTH, _ATTENTION, _NONE = {ATTENTION, MLP}, {ATTENTION}, set[str]()
_BLOCKS = {
    VLLM: _ATTENTION,
    SGLANG: _ATTENTION,
    LLAMA_CPP: _NONE,
    SPECULATORS: _ATTENTION,
    DEEPSPEC: _ATTENTION,
}
LOADED: dict[str, dict[str, set[str]]] = {
    "eagle": {VLLM: _BOTH, SGLANG: _ATTENTION},
    "eagle3": {
        VLLM: _BOTH,
        SGLANG: _NONE,
        LLAMA_CPP: _NONE,
        SPECULATORS: _BOTH,
        DEEPSPEC: _ATTENTION,
    },
    "peagle": {VLLM: _BOTH, SPECULATORS: _BOTH},
    "dspark": _BLOCKS,
    "dflash": {**_BLOCKS, TRANSFORMERS: _NONE},
}
"""The biases that an engine loads, by kind of draft; an engine that is absent cannot serve it."""


def biases(config: dict[str, Any]) -> list[str]:
    """Return which of the two kinds of biases a draft's config has."""
    return [name for name in BIASES if config.get(name)]


def refused_biases(kind: str, config: dict[str, Any], engine: str) -> list[Finding]:
    """Return a refusal for each kind of biases that an engine drops in a draft of this kind."""
    return [
        Finding(
            engine,
            REFUSE,
            f"{name}: its class for {kind} drafts has no such biases; --{name.replace('_', '-')} "
            "false fits a draft without them",
        )
        for name, engines in not_served(kind, config).items()
        if engine in engines
    ]


def not_served(kind: str, config: dict[str, Any]) -> dict[str, list[str]]:
    """Return, for each kind of biases that the draft has, the engines that do not load it."""
    return {
        name: [engine for engine, loaded in LOADED[kind].items() if name not in loaded]
        for name in biases(config)
    }
