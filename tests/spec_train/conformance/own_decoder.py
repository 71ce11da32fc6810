"""Our own decoder as an engine: it runs a vector and writes its log."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from spec_data.models.families import block_count
from spec_data.models.mtp import mtp_tensors, own_tensors
from spec_train.decoding.chains import Request, decode_speculative
from spec_train.drafts import load_draft
from spec_train.drafts.mtp.draft import MtpConfig, MtpDraft
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.formats.target_facts import read_target
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy, Sampler


class Recorder:
    """A drafter that notes what it proposed."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, []

    @property
    def passes(self) -> int:
        return self.inner.passes

    def propose(
        self, tokens: Sequence[int], states: torch.Tensor, count: int, sampler: Sampler
    ) -> Any:
        drafted, distributions = self.inner.propose(tokens, states, count, sampler)
        self.seen.append(drafted.tolist())
        return drafted, distributions


def expected(root: Path, vector: str) -> dict[str, Any]:
    """The numbers of a vector."""
    return json.loads((root / vector / "expected.json").read_text())


def block_of(folder: Path) -> MtpDraft:
    """The MTP block in the files of a target, as `generate` copies it and `fit mtp` takes it."""
    table, options = json.loads((folder / "config.json").read_text()), MtpOptions()
    config = MtpConfig.from_target(table, options=options, vocab_size=table["vocab_size"])
    blocks = block_count(table)
    tensors, layout = own_tensors(mtp_tensors(folder, blocks), blocks)
    draft = MtpDraft(dataclasses.replace(config, states_first=layout.states_first), options)
    missing, unknown = draft.load_state_dict(tensors, strict=False)
    assert missing == ["embed_tokens.weight"] and not unknown
    return draft


def log_of(root: Path, vector: str, draft: str) -> list[dict[str, Any]]:
    """Decode the prompts of a vector with a draft directory: the lines of a log."""
    numbers, target = expected(root, vector), root / expected(root, vector)["target"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    head = TargetHead.from_model(model)
    if "target" in numbers["drafts"]:  # its own block; a mistake's is in a copy of the target
        loaded: Any = block_of(root / draft).float()
        loaded.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
    else:
        loaded = load_draft(root / draft, read_target(target)).float()
    loaded.eval()
    depth, count, lines = numbers["draft_tokens"], numbers["output_tokens"], []
    for i, given in enumerate(numbers["prompts"]):
        drafter = Recorder(loaded.drafter(head))
        request = Request(given["prompt"], Greedy(), count + 2 * depth + 2, ())
        done = decode_speculative(model, drafter, loaded.state_columns, request, depth)
        total, steps = 1, 0
        while total < count:
            total, steps = total + done.steps[steps].emitted, steps + 1
        line = {"vector": vector, "prompt": i, "output": done.tokens[:count]}
        line["drafted"] = drafter.seen[:steps]
        line["accepted"] = [one.accepted for one in done.steps[:steps]]
        lines.append(line)
    return lines


def write_log(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write the lines of a log."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
