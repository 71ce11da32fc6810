"""Runs of regenerate, and the slow way to the same answers."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_data.commands.regenerate import regenerate
from spec_data.corpus.sampling_record import read_record
from spec_data.models.target_options import LoadOptions
from spec_data.terminal.command import words_of


def given(corpus: Path | list[Path], out: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a small run."""
    corpora = [str(path) for path in (corpus if isinstance(corpus, list) else [corpus])]
    loading = {name: changes.pop(name) for name in ("device", "dtype") if name in changes}
    small: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 4}
    small["loading"] = LoadOptions(**({"device": "cpu"} | loading))
    return {"corpus": corpora, "out": str(out), **small, **changes}


def words(corpus: Path, out: Path, **changes: Any) -> list[str]:
    """Return the command line of a small run."""
    return ["regenerate", *words_of(inspect.unwrap(regenerate), given(corpus, out, **changes))]


def answered(corpus: Path | list[Path], out: Path, **changes: Any) -> dict[str, Any]:
    """Regenerate in this process and return the record."""
    regenerate(**given(corpus, out, **changes))
    record = read_record(Path(out))
    assert record is not None
    return record


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, found: list[Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return path


def contents(row: dict[str, Any], role: str = "assistant") -> list[str]:
    """Return the texts of the messages of a role."""
    return [m["content"] for m in row["messages"] if m["role"] == role]


@torch.no_grad()
def slow_answers(
    target: Path, messages: list[dict[str, Any]], limit: int, stops: set[int]
) -> list[tuple[str, str]]:
    """Return (text, finish reason) of every assistant turn: no batch, no cache, float64.

    Each turn is answered with the answers to the turns before it in its prompt.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    tok = AutoTokenizer.from_pretrained(target)
    so_far: list[dict[str, Any]] = []
    found = []
    for message in messages:
        if message["role"] != "assistant" or not so_far:
            so_far.append(message)
            continue
        prompt = tok.apply_chat_template(so_far, add_generation_prompt=True, return_dict=True)
        ids, own = list(prompt["input_ids"]), []
        finish = "length"
        for _ in range(limit):
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            if token in stops:
                finish = "stop"
                break
            ids.append(token)
            own.append(token)
        for _ in range(3):  # a character that the limit cut in two is left out
            if finish == "length" and own and tok.decode(own).endswith("\ufffd"):
                own.pop()
        text = tok.decode(own)
        found.append((text, finish))
        so_far.append({"role": "assistant", "content": text})
    return found
