"""What other trainers store, made from the facts of their formats: samples, and a writer of each.

Samples take the slow, obvious route: one forward of transformers per document, with a hook on the
last block, because `hidden_states[-1]` is the state after the final norm.
"""

import gzip
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_data.capture.hooks import decoder_layers
from tests.spec_data.runs import save_target

PAD = 0  # the id that rows are filled with


@dataclass
class Sample:
    """Ids and mask [T], outputs of blocks (-1: the embedding) and final state [T, H], bf16."""

    ids: Tensor
    mask: Tensor
    layers: dict[int, Tensor]
    final: Tensor

    def aux(self, layers) -> Tensor:
        """The states of some layers, [T, n * H]."""
        return torch.cat([self.layers[k] for k in layers], -1)


@torch.no_grad()
def make_samples(target: Path, count: int = 12) -> list[Sample]:
    """Conversations of one answer, each run through the target."""
    tok = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    raw: list[Tensor] = []
    decoder_layers(model)[-1].register_forward_hook(
        lambda _m, _a, out: raw.append(out[0] if isinstance(out, tuple) else out)
    )
    found = []
    for i in range(count):
        question = [{"role": "user", "content": f"what is {i} and {i * 7}?" + " please" * (i % 3)}]
        prompt = tok.apply_chat_template(
            question, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tok(f"it is {i * 8}, I think" + " so" * (i % 4) + tok.eos_token)["input_ids"]
        ids = torch.tensor(list(prompt) + answer)
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer))
        out = model(ids[None], output_hidden_states=True, use_cache=False)
        hidden = [h[0].bfloat16() for h in out.hidden_states]
        layers = {k - 1: h for k, h in enumerate(hidden[:-1])}
        layers[len(hidden) - 2] = raw[-1][0].bfloat16()
        found.append(Sample(ids, mask, layers, hidden[-1]))
    return found


def tiny_target(path: Path) -> Path:
    """A random Llama of six blocks, with weights of the final norm that are not 1."""
    save_target(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(1)
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.rand_like(model.model.norm.weight) + 0.5)
    model.save_pretrained(path)
    return path


def speculators(root: Path, samples, layers=(1, 2, 4), last: str = "before", fp8=False) -> Path:
    """A token dataset and one safetensors file per row; last, the output of the last block."""
    rows = [
        {"input_ids": s.ids.tolist(), "loss_mask": s.mask.tolist(), "seq_len": len(s.ids)}
        for s in samples
    ]
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(str(root))
    (root / "hidden_states").mkdir()
    for i, s in enumerate(samples):
        end = s.layers[max(s.layers)] if last == "before" else s.final
        states = torch.stack([*(s.layers[k] for k in layers), end], 1)
        table = {"hidden_states": states, "token_ids": s.ids}
        if fp8:
            scale = (states.float().abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
            table["hidden_states"] = (states.float() / scale).to(torch.float8_e4m3fn)
            table["hidden_states_scales"] = scale
        save_file(table, root / "hidden_states" / f"hs_{i}.safetensors")
    return root


def specforge(root: Path, samples, layers=(1, 2, 4), last: str = "after", packed=False) -> Path:
    """One .ckpt (or .ckpt.gz) per sample in groups of files, states with a batch axis."""
    for i, s in enumerate(samples):
        end = s.final if last == "after" else s.layers[max(s.layers)]
        table = {
            "input_ids": s.ids,
            "loss_mask": s.mask,
            "hidden_state": end[None],
            "aux_hidden_state": s.aux(layers)[None],
        }
        file = root / "rows_0-2000" / f"data_{i}.ckpt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if packed:
            buffer = io.BytesIO()
            torch.save(table, buffer)
            file.with_suffix(".ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(table, file)
    return root


def modelopt(root: Path, samples, layers=(1, 2, 2), masks=True) -> Path:
    """One .pt per conversation; the mask is there only for answer-only losses."""
    root.mkdir()
    for i, s in enumerate(samples):
        table = {
            "input_ids": s.ids,
            "hidden_states": s.final,
            "aux_hidden_states": s.aux(layers),
            "conversation_id": f"chat-{i}",
        }
        torch.save(table | ({"loss_mask": s.mask} if masks else {}), root / f"chat-{i}.pt")
    return root


def torchspec(root: Path, samples, layers=(1, 2, 2), before=False) -> Path:
    """dataset.json, manifest.jsonl and samples; masks as run lengths."""
    (root / "samples").mkdir(parents=True)
    about = {"version": 1, "last_hidden_states_prenorm": before}
    (root / "dataset.json").write_text(json.dumps(about))
    with (root / "manifest.jsonl").open("w") as manifest:
        for i, s in enumerate(samples):
            ones = int(s.mask.sum())
            last = s.layers[max(s.layers)] if before else s.final
            table = {
                "input_ids": s.ids[None],
                "hidden_states": s.aux(layers)[None],
                "last_hidden_states": last[None],
                "data_id": f"id-{i}",
                "packed_loss_mask": f"{len(s.ids) - ones},{ones}",
                "metadata": {},
            }
            torch.save(table, root / "samples" / f"{i}.pt")
            row = {"split": "train", "data_id": f"id-{i}", "file": f"samples/{i}.pt"}
            manifest.write(json.dumps(row | {"seq_len": len(s.ids)}) + "\n")
    return root


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def deepspec(root: Path, samples, layers=(1, 2, 4), dtype="bfloat16", per_shard=5) -> Path:
    """Raw shards, an index of offsets, and a manifest."""
    root.mkdir()
    kind, index, names = getattr(torch, dtype), b"", []
    for first in range(0, len(samples), per_shard):
        blob = b""
        names.append(f"shard-{len(names):05d}.bin")
        for i, s in enumerate(samples[first : first + per_shard], first):
            parts = [s.ids.int(), torch.ones_like(s.ids).to(torch.uint8), s.mask.to(torch.uint8)]
            parts += [s.aux(layers).to(kind), s.final.to(kind)]
            offsets = []
            for part in parts:
                offsets.append(len(blob))
                blob += _bytes(part)
            index += struct.pack("<QIIQQQQQ", i, len(names) - 1, len(s.ids), *offsets)
        (root / names[-1]).write_bytes(blob)
    (root / "samples.idx").write_bytes(index)
    about = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": len(names),
        "target_layer_ids": list(layers),
        "hidden_dtype": dtype,
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": samples[0].final.shape[1],
        "shards": [{"shard_id": i, "file_name": name} for i, name in enumerate(names)],
    }
    (root / "manifest.json").write_text(json.dumps(about))
    return root


def automodel(root: Path, samples, layers=(1, 2, 4), per_shard=5, left=0) -> Path:
    """Shards of samples that are padded to one length, as its `precompute_dspark.py` writes them.

    There is no attention mask, and the states of the padding are what the target computed there.
    `left` tokens of padding come first, as from a tokenizer that pads on the left.
    """
    root.mkdir()
    width = max(len(s.ids) for s in samples) + 3 + left
    torch.manual_seed(0)

    def padded(value: Tensor, fill: Tensor) -> Tensor:
        out = fill.to(value.dtype).expand(width, *value.shape[1:]).clone()
        out[left : left + len(value)] = value
        return out

    for number, first in enumerate(range(0, len(samples), per_shard)):
        rows = [
            {
                "input_ids": padded(s.ids, torch.tensor(PAD)),
                "loss_mask": padded(s.mask, torch.tensor(0)),
                "target_hidden_states": padded(
                    s.aux(layers), torch.randn(width, s.aux(layers).shape[1])
                ),
                "target_last_hidden_states": padded(s.final, torch.randn(width, s.final.shape[1])),
            }
            for s in samples[first : first + per_shard]
        ]
        table = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        save_file(table, root / f"shard-{number:06d}.safetensors")
    about = {
        "format_version": 1,
        "num_samples": len(samples),
        "shard_size": per_shard,
        "target_layer_ids": list(layers),
        "dtype": "bf16",
        "complete": True,
    }
    (root / "manifest.json").write_text(json.dumps(about))
    return root
