"""Make a small trained target from the text of this Python installation.

The text is the standard library. The chats ask how its functions are declared and what they do; the
answers are signatures and the first sentences of docstrings. The script trains a byte-level
BPE tokenizer with a ChatML template, and a Llama of about one million parameters, for about a
minute on two CPU cores. The target knows little, but it is trained: its hidden states have
structure and its answers can be predicted. A draft cannot learn anything from random weights.

Written to --out: the model (bfloat16) and the tokenizer, as `from_pretrained` reads them;
`corpus.jsonl`, the training chats; `prompts.jsonl`, chats about functions that are not trained on,
without text of these.
The same Python version, seed and steps produce the same corpus and tokenizer, and the same weights
on the same machine.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from spec_data.corpus.prompt_overlap import Grams
from spec_data.shards.packing import block_causal_mask, pack_documents, row_layout, shift_left
from spec_data.terminal.progress import progress

Chat = list[dict[str, str]]

VOCABULARY = 3072
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROW = 256  # tokens of a training row; longer chats are left out
ROWS_PER_STEP = 3
PEAK_LEARNING_RATE = 4e-3
HELD_OUT = 0.04  # share of the functions whose chats are not trained on
# Tests, generated tables and similar folders: not what people ask about.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "site-packages")
)


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A function or class of the standard library."""

    name: str  # dotted, beginning with the module
    module: str
    signature: str
    summary: str  # the first sentence of its docstring; empty if there is none, or a long one
    source: str  # empty if the code is too short or too long for a chat


def read_symbols(root: Path) -> Iterator[Symbol]:
    """Yield the functions and classes of every module below `root`."""
    modules = {path: path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")}
    chosen = sorted(
        path
        for path, parts in modules.items()
        if not SKIPPED_FOLDERS.intersection(parts) and not parts[0].startswith("_")
    )
    for path in progress(chosen, desc="read", unit="file"):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue  # some distributions contain templates and deliberately broken files
        module = ".".join(part for part in modules[path] if part != "__init__")
        yield from _symbols_of(tree, module, module, text.splitlines())


def library_symbols() -> list[Symbol]:
    """Return the functions and classes of this Python's standard library; end without them."""
    symbols = list(read_symbols(Path(sysconfig.get_path("stdlib"))))
    if not symbols:
        sys.exit(
            "error: this Python has no sources of its standard library (.py files) to train on; "
            "install them, or use another Python"
        )
    return symbols


def _symbols_of(node: ast.AST, module: str, prefix: str, lines: list[str]) -> Iterator[Symbol]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield Symbol(
                name=name,
                module=module,
                signature=_signature(child),
                summary=_first_sentence(ast.get_docstring(child) or ""),
                source=_source(child, lines),
            )
            if isinstance(child, ast.ClassDef):
                yield from _symbols_of(child, module, name, lines)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"def {node.name}({ast.unparse(node.args)})"


def _first_sentence(text: str) -> str:
    sentence = " ".join(re.split(r"(?<=[.!?])\s|\n\n", text, maxsplit=1)[0].split())
    return sentence if len(sentence) <= 200 else ""


def _source(node: ast.AST, lines: list[str]) -> str:
    if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
        return ""
    if not 4 <= node.end_lineno - node.lineno <= 14:
        return ""
    block = lines[node.lineno - 1 : node.end_lineno]
    text = "\n".join(line[node.col_offset :] for line in block)
    return text if len(text) <= 500 else ""


def chats_about(symbol: Symbol) -> Iterator[Chat]:
    """Yield a chat of one turn about the symbol's declaration and meaning, if that is told.

    One turn and a short answer: a model of this size repeats itself in long ones, and repetition is
    what any draft predicts.
    """
    if symbol.summary:
        answer = f"```python\n{symbol.signature}\n```\n{symbol.summary}"
        yield [
            {"role": "user", "content": f"How is `{symbol.name}` declared, and what does it do?"},
            {"role": "assistant", "content": answer},
        ]


def split_chats(
    symbols: Iterable[Symbol], about: Callable[[Symbol], Iterator[Chat]] = chats_about
) -> tuple[list[Chat], list[Chat]]:
    """Split the chats `about` symbols by symbol: (trained, held out), in a fixed shuffled order.

    Every last message occurs once, so that no held-out one is also trained on under another name.
    """
    trained: list[Chat] = []
    held_out: list[Chat] = []
    answers: set[str] = set()
    for symbol in symbols:
        digest = hashlib.sha256(symbol.name.encode()).digest()
        side = held_out if digest[0] / 256 < HELD_OUT else trained
        for chat in about(symbol):
            if chat[-1]["content"] not in answers:
                answers.add(chat[-1]["content"])
                side.append(chat)
    for side in (trained, held_out):
        random.Random(0).shuffle(side)  # so that the first n are a mixture of all modules
    return trained, held_out


def train_tokenizer(chats: list[Chat]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer. Its end-of-sequence token is the end-of-turn token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for chat in chats for message in chat)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def render(tokenizer: PreTrainedTokenizerFast, chats: list[Chat]) -> list[list[int]]:
    """Return the token ids of every chat that fits into a row, in order."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [ids for ids in encoded if len(ids) <= ROW]


def build_model(seed: int) -> LlamaForCausalLM:
    """Build a Llama of eight blocks: enough that early, middle and late layers differ."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def pack(documents: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pack whole documents: `(input_ids, document_ids, position_ids)`, each int64 [N, ROW]."""
    rows = pack_documents([len(ids) for ids in documents], ROW)
    layout = row_layout([[len(documents[i]) for i in row] for row in rows], ROW)
    input_ids = torch.zeros(len(rows), ROW, dtype=torch.long)
    for b, row in enumerate(rows):
        ids = [token for i in row for token in documents[i]]
        input_ids[b, : len(ids)] = torch.tensor(ids)
    return input_ids, *layout


def rows_loss(model: LlamaForCausalLM, rows: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy of next tokens within documents. `rows` is as from `pack`."""
    input_ids, document_ids, position_ids = rows
    labels = shift_left(input_ids + 1, document_ids) - 1  # -1 at the last token of a document
    output = model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=block_causal_mask(document_ids),
        use_cache=False,
    )
    return torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), labels.flatten(), ignore_index=-1
    )


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: tuple[Tensor, ...]) -> float:
    """Return the mean loss per token over the first 32 held-out rows."""
    return rows_loss(model, tuple(part[:32] for part in rows)).item()


def train(model: LlamaForCausalLM, documents: list[list[int]], steps: int, seed: int) -> None:
    """Train on shuffled packed rows, with AdamW, warm-up and cosine decay."""
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1, (k + 1) / warmup) * (0.05 + 0.475 * (1 + math.cos(math.pi * k / steps))),
    )
    input_ids, document_ids, position_ids = pack(documents)
    queue: list[int] = []
    with progress(total=steps * ROWS_PER_STEP * ROW, desc="train", unit="token") as bar:
        for _ in range(steps):
            if len(queue) < ROWS_PER_STEP:
                queue = list(range(len(input_ids)))
                order.shuffle(queue)
            chosen = [queue.pop() for _ in range(ROWS_PER_STEP)]
            loss = rows_loss(model, (input_ids[chosen], document_ids[chosen], position_ids[chosen]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update(ROWS_PER_STEP * ROW)


def write_chats(
    out: Path, trained: list[Chat], held_out: list[Chat], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write corpus.jsonl, and prompts.jsonl with the held-out chats that share no text with it.

    `spec-train eval` counts a prompt as trained on by the same rule.
    """
    grams, overlapping = Grams(), set()
    for chat in held_out:
        texts = [message["content"] for message in chat if message["role"] == "user"]
        grams.add(tokenizer(text.strip(), add_special_tokens=False).input_ids for text in texts)
    for chat in trained:
        ids = tokenizer("\n".join(message["content"] for message in chat)).input_ids
        overlapping |= grams.matches(np.asarray(ids, np.int32))
    prompts = [chat for number, chat in enumerate(held_out) if number not in overlapping]
    for name, chats in (("corpus", trained), ("prompts", prompts)):
        lines = (json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Parse the command line, make the target and print its held-out loss."""
    parser = argparse.ArgumentParser(
        description="Make a small trained target from the text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the order of rows"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    trained, held_out = split_chats(library_symbols())
    tokenizer = train_tokenizer(trained)
    documents, held_out_rows = render(tokenizer, trained), pack(render(tokenizer, held_out))
    model = build_model(options.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(trained)} chats to train on ({sum(map(len, documents)):,} tokens), "
        f"{len(held_out)} held out; {parameters / 1e6:.1f} M parameters"
    )
    before = held_out_loss(model, held_out_rows)
    train(model, documents, options.steps, options.seed)
    after = held_out_loss(model, held_out_rows)
    print(f"held-out loss per token: {before:.2f} before training, {after:.2f} after")

    options.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    write_chats(options.out, trained, held_out, tokenizer)
    print(f"\ntarget, corpus.jsonl and prompts.jsonl are in {options.out}")


if __name__ == "__main__":
    main()
