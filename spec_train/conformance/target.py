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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_data.models.mtp import LAYOUTS, Layout
from spec_data.shards.files import dump_json, write_atomically
from spec_train.drafts import slow_layer as slow
from spec_train.drafts.mtp.reference import heads_of, row_of

HIDDEN, VOCAB, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 128, 6, 4, 2, 32, 128
LAYERS = (1, 2, 3)
"""Layers that drafts read, as outputs of blocks counted from 0."""
BOS, EOS, MASK = 1, 2, 3
FIRST = 8
"""The first token of text; those before it are special."""
BACKBONE, BLOCK = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
"""Of a target with an MTP block: the weights without it, its own, and which tensor is where."""
_TABLES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6},
    "mimo": {
        **{"architectures": ["MiMoForCausalLM", "Qwen2ForCausalLM"], "model_type": "qwen2"},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_nextn_predict_layers": 1},
    },
    "qwen3_5": {
        **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
        "rms_norm_eps": 1e-6,
        **{"layer_types": ["full_attention"] * BLOCKS, "mtp_num_hidden_layers": 1},
        "rope_parameters": {"partial_rotary_factor": 0.25},
    },
    "glm4_moe": {
        **{"architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": True, "attention_bias": True},
        **{"first_k_dense_replace": BLOCKS + 1, "num_nextn_predict_layers": 1},
        "rope_parameters": {"partial_rotary_factor": 0.5},
    },
    "deepseek_v3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 2},
        "rms_norm_eps": 1e-6,
        **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"qk_rope_head_dim": 64, "head_dim": 64, "qk_head_dim": 96},
        **{"first_k_dense_replace": BLOCKS + 1, "num_nextn_predict_layers": 1},
    },
}
"""What the config.json of a family has beside, or instead of, that of llama. A layer of experts is
dense here, and an attention layer of Qwen3.5 never recurrent: the block has the same wiring."""
_LAYOUTS = {"mimo": "mimo", "qwen3_5": "qwen", "glm4_moe": "deepseek", "deepseek_v3": "deepseek"}


def drawn(shape: tuple[int, ...], generator: torch.Generator, size: float) -> Tensor:
    """Return random numbers [shape] of about the size `size`, exact in bfloat16, as float64."""
    whole = torch.randint(-64, 65, shape, generator=generator).double()
    return whole * 2.0 ** round(math.log2(size / 37))  # 37: root mean square of the whole numbers


def drawn_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the random weight `name` [shape]: of a norm near 1, of a projection by its width."""
    if len(shape) == 1:
        return drawn(shape, generator, 0.25) + ("norm" in name)
    return drawn(shape, generator, 1.0 if "embed" in name else 1.2 / math.sqrt(shape[-1]))


def inv_freq(theta: float, size: int = HEAD_DIM) -> Tensor:
    """Return the rotary frequencies [size / 2] of the default rope."""
    return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


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

    @property
    def layout(self) -> Layout | None:
        """How its checkpoint names an MTP block; None: it has none."""
        return LAYOUTS.get(_LAYOUTS.get(self.name, ""))

    def from_file(self, state: dict[str, Tensor], sign: int = 1) -> dict[str, Tensor]:
        """Add 1 to the norms of a family whose files hold them less 1; `sign` -1: the way back."""
        one = sign * (self.name == "qwen3_5")
        return {n: v + one * ("norm" in n) for n, v in state.items()}

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
                rows[k].append(row_of(self.state, name, u, t, self.sizes))
                heads = heads_of(self.state, name, u, t, rows[k], self.sizes)
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
        state = self.from_file(self.state, -1)
        tensors = {n if n == "lm_head.weight" else f"model.{n}": v for n, v in state.items()}
        _save(tensors, folder / (BACKBONE if self.layout else "model.safetensors"))
        write_atomically(folder / "config.json", dump_json(self.config))
        for name, value in TOKENIZER.items():
            write_atomically(folder / name, json.dumps(value, indent=1))

    def write_block(self, own: dict[str, Tensor], folder: Path) -> None:
        """Write an MTP block, under our names as files hold it, beside the rest of the model."""
        assert self.layout is not None
        tensors = {self.layout.whole(name, BLOCKS): value for name, value in own.items()}
        prefix = f"model.layers.{BLOCKS}."
        if f"{prefix}enorm.weight" in tensors:  # such published files repeat both
            tensors[f"{prefix}embed_tokens.weight"] = self.state["embed_tokens.weight"]
            tensors[f"{prefix}shared_head.head.weight"] = self.head
        _save(tensors, folder / BLOCK)
        with safe_open(folder / BACKBONE, "pt") as backbone:
            files = dict.fromkeys(backbone.keys(), BACKBONE) | dict.fromkeys(tensors, BLOCK)
        index = {"metadata": {}, "weight_map": dict(sorted(files.items()))}
        write_atomically(folder / INDEX, dump_json(index))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    floats = {n: v.float().contiguous() for n, v in sorted(tensors.items())}
    save_file(floats, path, metadata={"format": "pt"})


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt with the target's greedy answer, T tokens, one more than there are states."""

    prompt: int  # number of its tokens
    tokens: list[int]
    states: Tensor  # [T - 1, blocks + 2, H]: the embedding, outputs of blocks, after the final norm
    logits: Tensor  # [T - 1, V]

    def gap(self, count: int) -> float:
        """Return the smallest gap between the two best tokens of the first `count` choices."""
        top = self.logits[self.prompt - 1 : self.prompt + count - 1].topk(2).values
        return float((top[:, 0] - top[:, 1]).min())


def make_target(name: str) -> TinyTarget:
    """Return a target of the family `name`, one of `_TABLES`."""
    generator, table = torch.Generator().manual_seed(len(name)), dict(_TABLES[name])
    rope = {"rope_type": "default", "rope_theta": 1e4} | table.pop("rope_parameters", {})
    config = {
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
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    } | table
    heads, latent = config["num_attention_heads"], config.get("kv_lora_rank", 0)
    q, kv = heads * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
    rows = {"q": q * (2 if name == "qwen3_5" else 1), "k": kv, "v": kv}
    attention: dict[str, tuple[int, ...]] = {
        f"{p}_proj.weight": (n, HIDDEN) for p, n in rows.items()
    }
    if latent:
        rank = config["q_lora_rank"]
        attention = {
            "q_a_proj.weight": (rank, HIDDEN),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * config["qk_head_dim"], rank),
            "kv_a_proj_with_mqa.weight": (latent + config["qk_rope_head_dim"], HIDDEN),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * 2 * HEAD_DIM, latent),
        }
    last: dict[str, tuple[int, ...]] = {}
    if name in ("mimo", "glm4_moe"):
        last = {f"{part}_proj.bias": (n,) for part, n in rows.items()}
    if name in ("qwen3", "qwen3_5", "glm4_moe"):
        last |= {f"{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
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
            **{f"{name_of}self_attn.{part}": shape for part, shape in attention.items()},
            f"{name_of}self_attn.o_proj.weight": (HIDDEN, q),
            f"{name_of}mlp.gate_proj.weight": (WIDTH, HIDDEN),
            f"{name_of}mlp.up_proj.weight": (WIDTH, HIDDEN),
            f"{name_of}mlp.down_proj.weight": (HIDDEN, WIDTH),
            **{f"{name_of}self_attn.{part}": shape for part, shape in last.items()},
        }
    state = {n: drawn_weight(n, shape, generator) for n, shape in shapes.items()}
    state["lm_head.weight"][:FIRST] = 0  # a special token is never chosen
    return TinyTarget(name, config, state, sizes_of(config))


def sizes_of(config: dict[str, Any]) -> slow.Sizes:
    """Return the sizes of a layer for the references, by a config.json."""
    rope = config["rope_parameters"]
    rotary = config.get("qk_rope_head_dim") or HEAD_DIM * rope.get("partial_rotary_factor", 1.0)
    return slow.Sizes(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("qk_head_dim") or config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_inv_freq=inv_freq(rope["rope_theta"], int(rotary)),
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
