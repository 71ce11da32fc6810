"""The tiny targets: files that transformers and engines load, and their slow forward pass.

All weights are whole numbers over a power of two, drawn by a generator of integers: the same on
every machine, and exact in bfloat16 and float32.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_data.shards.files import dump_json, write_atomically
from spec_train.conformance.references import layer as slow

HIDDEN, VOCAB, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 128, 6, 4, 2, 32, 128
LAYERS = (1, 2, 3)
"""Layers that drafts read, as outputs of blocks counted from 0."""
BOS, EOS, MASK = 1, 2, 3
FIRST = 8
"""The first token of text; those before it are special."""


def drawn(shape: tuple[int, ...], generator: torch.Generator, size: float) -> Tensor:
    """Return random numbers [shape] of about the size `size`, exact in bfloat16, as float64."""
    whole = torch.randint(-64, 65, shape, generator=generator).double()
    return whole * 2.0 ** round(math.log2(size / 37))  # 37: root mean square of the whole numbers


def drawn_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the random weight `name` [shape]: of a norm near 1, of a projection by its width."""
    if len(shape) == 1:
        return drawn(shape, generator, 0.25) + ("norm" in name)
    return drawn(shape, generator, 1.0 if "embed" in name else 1.2 / math.sqrt(shape[-1]))


def inv_freq(theta: float) -> Tensor:
    """Return the rotary frequencies [head size / 2] of the default rope."""
    return theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


@dataclasses.dataclass(frozen=True)
class TinyTarget:
    """A target of random weights, float64, under the names of its checkpoint without `model.`."""

    name: str
    config: dict[str, Any]
    state: dict[str, Tensor]
    sizes: slow.Sizes

    @property
    def head(self) -> Tensor:
        return self.state["lm_head.weight"]

    def answer(self, prompt: list[int], count: int) -> "Answer":
        """Answer a prompt greedily by `count` tokens."""
        rows: list[list[slow.Row]] = [[] for _ in range(BLOCKS)]
        tokens, states, logits = list(prompt), [], []
        for t in range(len(prompt) + count - 1):
            x = self.state["embed_tokens.weight"][tokens[t]]
            outputs = [x]
            for k in range(BLOCKS):
                name = f"layers.{k}"
                u = self.sizes.norm(x, self.state[f"{name}.input_layernorm.weight"])
                rows[k].append(slow.keys_values(self.state, name, u, t, self.sizes))
                heads = slow.attend(self.state, name, u, t, rows[k], self.sizes)
                x = slow.finish(self.state, name, x, heads, self.sizes)
                outputs.append(x)
            final = self.sizes.norm(x, self.state["norm.weight"])
            states.append(torch.stack([*outputs, final]))
            logits.append(self.head @ final)
            if t + 1 >= len(prompt):
                tokens.append(int(logits[-1].argmax()))
        return Answer(len(prompt), tokens, torch.stack(states), torch.stack(logits))

    def write(self, folder: Path) -> None:
        """Write the model and its tokenizer, as `from_pretrained` reads them."""
        folder.mkdir(parents=True)
        tensors = {n if n == "lm_head.weight" else f"model.{n}": v for n, v in self.state.items()}
        floats = {n: v.float().contiguous() for n, v in sorted(tensors.items())}
        save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
        write_atomically(folder / "config.json", dump_json(self.config))
        for name, value in TOKENIZER.items():
            write_atomically(folder / name, json.dumps(value, indent=1))


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt with the target's greedy answer, T tokens, one more than there are states."""

    prompt: int  # number of its tokens
    tokens: list[int]
    states: Tensor  # [T - 1, blocks + 2, H]: the embedding, outputs of blocks, after the final norm
    logits: Tensor  # [T - 1, V]


def make_target(name: str) -> TinyTarget:
    """Return a target of the family `name`, llama or qwen3."""
    qwen, generator = name == "qwen3", torch.Generator().manual_seed(len(name))
    config = {
        "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": name,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6 if qwen else 1e-5,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    for k in range(BLOCKS):
        name_of = f"layers.{k}."
        shapes |= {
            f"{name_of}input_layernorm.weight": (HIDDEN,),
            f"{name_of}post_attention_layernorm.weight": (HIDDEN,),
            f"{name_of}self_attn.q_proj.weight": (q, HIDDEN),
            f"{name_of}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{name_of}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{name_of}self_attn.o_proj.weight": (HIDDEN, q),
            f"{name_of}mlp.gate_proj.weight": (WIDTH, HIDDEN),
            f"{name_of}mlp.up_proj.weight": (WIDTH, HIDDEN),
            f"{name_of}mlp.down_proj.weight": (HIDDEN, WIDTH),
        }
        if qwen:
            shapes |= {f"{name_of}self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    state = {n: drawn_weight(n, shape, generator) for n, shape in shapes.items()}
    state["lm_head.weight"][:FIRST] = 0  # a special token is never chosen
    return TinyTarget(name, config, state, sizes_of(config))


def sizes_of(config: dict[str, Any]) -> slow.Sizes:
    """Return the sizes of a layer for the references, by a config.json."""
    return slow.Sizes(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_inv_freq=inv_freq(config["rope_parameters"]["rope_theta"]),
    )


_LETTERS = [chr(i) for i in (*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0xB9), 0x10A, 0x120)]
_WORDS = ["<unk>", "<s>", "</s>", *(f"<{i}>" for i in range(3, FIRST)), *_LETTERS, '!"']
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKENIZER: dict[str, Any] = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        "model_max_length": 256,
    },
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [
            {
                **{"id": i, "content": word, "single_word": False, "lstrip": False},
                **{"rstrip": False, "normalized": False, "special": True},
            }
            for i, word in enumerate(_WORDS[:FIRST])
        ],
        "pre_tokenizer": _BYTES,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(_WORDS)},
            "merges": ['! "'],
        },
    },
}
"""Files of a byte-level tokenizer that engines load; its text means nothing."""
