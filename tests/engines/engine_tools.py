"""A random target, a draft that learned a little of it, and what our own decoder makes of both.

The draft must be right sometimes and wrong sometimes, or equal counts would say nothing: it learns
the target's greedy answers to some of the prompts for a few steps.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts import load_draft
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset


def needs(library: str) -> list[pytest.MarkDecorator]:
    """The marks of a file of tests that an installed library runs; its warnings are its own."""
    missing = importlib.util.find_spec(library) is None
    reason = f"{library} is not installed: bash scripts/engines_env.sh"
    marks = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
    return [*marks, pytest.mark.skipif(missing, reason=reason)]


TOKENS, VOCAB, LAYERS = 48, 192, (1, 2, 4)
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_theta=5e5),
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=True),
}


def make_target(family: str, folder: Path) -> Any:
    """Save a random target; gives the model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval().float()
    model.save_pretrained(folder)
    return model


def make_prompts(count: int = 24) -> list[list[int]]:
    """Random prompts of 5 to 12 tokens."""
    rng = torch.Generator().manual_seed(1)
    sizes = torch.randint(5, 13, (count,), generator=rng).tolist()
    return [torch.randint(3, VOCAB, (size,), generator=rng).tolist() for size in sizes]


def make_dataset(model: Any, prompts: list[list[int]], folder: Path, **changes: Any) -> Path:
    """A dataset of the target's greedy answers."""
    documents = []
    for prompt in prompts:
        answer = decode_plain(model, Request(prompt, Greedy(), TOKENS)).tokens
        mask = [0] * len(prompt) + [1] * len(answer)
        turns = [("user", 0, len(prompt)), ("assistant", len(prompt), len(mask))]
        documents.append(([*prompt, *answer], mask, turns))
    return tiny_dataset(folder, model=model, documents=documents, layers=LAYERS, **changes)


def fitted(kind: str, data: Path, out: Path, steps: int = 120, **options: Any) -> Path:
    """Fit a draft; gives its directory."""
    config = Training(
        data=str(data),
        out=str(out),
        steps=steps,
        seq_len=128,
        batch_size=4,
        lr=4e-3,
        device="cpu",
        validation=0.0,
        eval_every=10_000,
        save_every=10_000,
    )
    fit(kind, config, DRAFT_OPTIONS[kind](**options))
    return out / "last"


def our_counts(model: Any, draft: Path, prompt: list[int], depth: int) -> dict[str, Any]:
    """What our decoder counts until `TOKENS` are answered, every round drafting `depth`.

    Engines draft the full depth to the end and count what the limit cuts off: decode past it, and
    stop counting with the round that reaches it.
    """
    loaded = load_draft(draft).eval().float()
    drafter = loaded.drafter(TargetHead.from_model(model))
    past = TOKENS + 2 * depth + 2
    request = Request(prompt, Greedy(), past)
    done = decode_speculative(model, drafter, loaded.state_columns, request, depth)
    total, rounds = 1, []
    for one in done.steps:
        if total >= TOKENS:
            break
        rounds.append(one)
        total += one.emitted
    return {
        "rounds": len(rounds),
        "drafted": sum(one.drafted for one in rounds),
        "accepted": sum(one.accepted for one in rounds),
        "tokens": done.tokens[:TOKENS],
    }


def serve(model: str, speculative_config: dict[str, Any] | None, prompts: Any) -> Any:
    """Answers and counts of real vLLM, in a process of its own."""
    return run_program(
        "serve_vllm.py",
        {
            "model": model,
            "speculative_config": speculative_config,
            "prompts": prompts,
            "tokens": TOKENS,
        },
    )


def load_speculators(out: Path, shared: frozenset[str] = frozenset()) -> Any:
    """The speculators library's model of a directory; every tensor has its place, and the reverse.

    `shared` are weights that the file leaves to the target.
    """
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(str(out))
    own = {"verifier_lm_head.weight", "verifier_norm.weight"}  # of training; never saved
    state, file = model.state_dict(), load_file(out / "model.safetensors")
    assert state.keys() - file.keys() - own == shared
    assert not file.keys() - state.keys()
    for name, value in file.items():
        assert torch.equal(state[name].to(value.dtype), value), name
    return model.eval().float()


def run_program(name: str, task: dict[str, Any]) -> Any:
    """What a program beside this file makes of a task; AssertionError with its last words."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), json.dumps(task)],
        capture_output=True,
        text=True,
        errors="replace",  # of the engine's log
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads(lines[-1].removeprefix("RESULT "))
