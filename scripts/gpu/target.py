"""A random target of Qwen3's shape, its tokenizer and a corpus; nothing is downloaded."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from make_target import CHAT_TEMPLATE, END, PAD, START
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import spec_data
from gpu.bench import Bench

SIZES = {
    "0.5B": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3072},
    "2B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 9, "intermediate_size": 64},
}
ROOM_FOR_2B = 30 << 30  # bytes of free memory


def size_of(bench: Bench) -> str:
    """Return the name of the target's size, by the free memory."""
    if bench.tiny or not bench.on_gpu:
        return "tiny"
    return "2B" if torch.cuda.mem_get_info()[0] >= ROOM_FOR_2B else "0.5B"


def target_of(bench: Bench) -> Path:
    """Return the directory of the random target; made once."""
    path = bench.out / "target"
    if "target" in bench.facts and path.is_dir():  # rows.json alone may come from elsewhere
        return path
    name = size_of(bench)
    small = name == "tiny"
    config = Qwen3Config(
        **SIZES[name],
        vocab_size=512 if small else 32768,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if bench.on_gpu else torch.float32)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    bench.facts["target"] = name
    bench.facts["parameters"] = sum(p.numel() for p in model.parameters())
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a ChatML template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, END, START, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, START])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def corpus_of(bench: Bench) -> Path:
    """Return a file of chats of many lengths; the first ones also serve as prompts."""
    path = bench.out / "chats.jsonl"
    draw = random.Random(0)
    words = "the", "of", "a", "model", "draft", "token", "state", "layer", "head", "loss"

    def text(longest: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(2, longest)))

    rows, longest = (24, 12) if bench.tiny else (400, 150)
    with path.open("w") as file:
        for i in range(rows):
            turns = [("user", f"{i} {text(longest)}"), ("assistant", text(longest))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def dataset_of(bench: Bench) -> Path:
    """Return the packed dataset with lossy codecs; captured once."""
    path = bench.out / "data"
    if not (path / "manifest.json").is_file():
        capture(bench, path)
    return path


def capture(bench: Bench, path: Path, **changes: Any) -> Any:
    """Capture the corpus with the random target; return the result."""
    given: dict[str, Any] = {"device": bench.device, "codec": "aux=default,final=fine"}
    options = spec_data.CaptureOptions(**given | changes)
    return spec_data.generate(target_of(bench), corpus_of(bench), path, options)
