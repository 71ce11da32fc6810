"""A tiny target, drafts for it, one that is sometimes right, and both as files with prompts.

All modules of a process share the target, its answers and the training of the draft.
"""

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import spec_train
from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import row_layout
from spec_data.shards.schema import layer_column
from spec_train.decoding.chains import Request, decode_plain
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.options.kinds import DRAFT_OPTIONS
from tests.factory import states_of, tiny_llama
from tests.tolerance import decided, network

VOCAB, LAYERS, STEPS, LIMIT = 64, (0, 2), 4, 32
COLUMNS = tuple(layer_column(k) for k in LAYERS)
STOP = 5
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def batch_of(model: Any, documents: list[tuple[list[int], list[int]]]) -> DraftBatch:
    """A pack of documents in float32, straight from ordinary forwards."""
    parts: dict[str, list[torch.Tensor]] = {}
    for ids, mask in documents:
        columns = states_of(model, ids, LAYERS)
        columns |= {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask).bool()}
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    joined = {name: torch.cat(values)[None] for name, values in parts.items()}
    lengths = [[len(ids) for ids, _ in documents]]
    document_ids, position_ids = row_layout(lengths, sum(lengths[0]))
    hidden = {name: joined.pop(name) for name in list(joined) if name.startswith("hidden.")}
    return DraftBatch(
        **joined,
        position_ids=position_ids,
        document_ids=document_ids,
        hidden=hidden,
        rows=[list(range(len(documents)))],
    )


head_of = TargetHead.from_model


def draft_for(
    kind: str,
    model: Any,
    *,
    vocab: int = VOCAB,
    draft_vocab: int | None = None,
    layers: tuple[int, ...] = LAYERS,
    **options: Any,
) -> Any:
    """Return a random float32 draft for a target, without a dataset.

    With `draft_vocab` it can propose the first odd ids, or, if these do not suffice, the first ids.
    """
    torch.manual_seed(1)
    chosen = DRAFT_OPTIONS[kind](**options)
    own: dict[str, Any] = {} if kind in ("eagle", "mtp") else {"layers": layers}
    if kind not in ("eagle", "eagle3", "mtp"):
        own["mask_token_id"] = 3
    config = DRAFTS[kind].config_class.from_target(
        model.config.to_dict(),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        options=chosen,
        dtype="float32",
        origin={"chat_template_kwargs": {}},
        **own,
    )
    draft: Any = DRAFTS[kind](config, chosen)
    if draft_vocab is not None:
        step = 2 if 2 * draft_vocab <= vocab else 1
        draft.set_vocabulary(torch.arange(draft_vocab) * step + (step - 1))
    draft.adopt(TargetHead.from_model(model))
    return draft.eval()


_answers: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()


def respond(model: Any, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return a prompt with the answer of a model whose weights do not change, and its mask."""
    known, key = _answers.setdefault(model, {}), tuple(prompt)
    if key not in known:
        known[key] = decode_plain(model, Request(prompt, Greedy(), LIMIT, {STOP})).tokens
    return prompt + known[key], [0] * len(prompt) + [1] * len(known[key])


def teach(
    draft: Any, model: Any, prompts: Sequence[list[int]], steps: int = 40, lr: float = 6e-3
) -> Any:
    """Train a draft on the target's own responses, so that it is sometimes right."""
    head = head_of(model)
    batch = batch_of(model, [respond(model, prompt) for prompt in prompts])
    optimizer = torch.optim.AdamW(draft.train().trainable_parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        draft.loss(batch, head, draft.slot_counts(batch)).loss.backward()
        optimizer.step()
    return draft.eval()


def decode_without_ties(model: Any, prompt: list[int], limit: int) -> list[int] | None:
    """Return the greedy response, which is then the same on every machine; None with a tie."""
    tokens = decode_plain(model, Request(prompt, Greedy(), limit)).tokens
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    layers = model.config.num_hidden_layers
    return tokens if decided(logits, network(layers), torch.float32) else None


@functools.cache
def _target() -> Any:
    return tiny_llama(VOCAB).requires_grad_(False)


@functools.cache
def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    while len(found) < 16:
        prompt = [1, *rng.integers(8, VOCAB, int(rng.integers(2, 9))).tolist(), 2]
        if decode_without_ties(_target(), prompt, LIMIT):
            found.append(prompt)
    return found


@functools.cache
def _trained() -> Any:
    draft = draft_for("eagle3", _target(), ttt_steps=STEPS, draft_vocab_size=VOCAB)
    return teach(draft, _target(), _prompts()[:8], lr=5e-3)


@pytest.fixture(scope="module")
def target() -> Any:
    """The target; do not change it."""
    return _target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """User messages of random words, as the template renders them: <user> ... <assistant>."""
    return copy.deepcopy(_prompts())


@pytest.fixture(scope="module")
def trained() -> Any:
    """A draft that is sometimes right: a few dozen steps on the target's own responses."""
    return copy.deepcopy(_trained())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, target, trained, prompts) -> Path:
    """A target with a tokenizer, a draft and prompts, as files."""
    folder = tmp_path_factory.mktemp("eval")
    words = ["<unk>", "<user>", "<assistant>", *(f"w{i}" for i in range(3, VOCAB))]
    words[STOP] = "<end>"  # a special token is found inside words too: it must be none's beginning
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<end>", chat_template=TEMPLATE
    )
    target.generation_config.eos_token_id = STOP
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    trained.save_pretrained(folder / "draft", torch.float32)
    rows: list[dict] = [{"prompt": " ".join(f"w{i}" for i in p[1:-1])} for p in prompts[:6]]
    rows.append({"turns": ["w9 w10", "w11"]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    return folder


def run_eval(options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate with the options of `eval`, print the table, and return all metrics."""
    result = spec_train.evaluate(**options)
    print(result)
    return result.figures


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "draft": str(folder / "draft"),
        "target": str(folder / "target"),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": LIMIT,
        "device": "cpu",
    }
    return options | changes
