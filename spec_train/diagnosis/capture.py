"""A few documents of a target, for a draft that comes without a dataset.

The target answers prompts greedily, as `spec-data regenerate` does, and its states on the answers
are captured exactly by `spec-data generate`, into a folder that is deleted afterwards.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import spec_data
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL
from spec_train.drafts import Draft

_NEW_TOKENS = 128
_ASKED = (
    "Explain {} to a beginner.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are common mistakes with {}, and how are they avoided?",
    "Write a Python function that models {}, with a docstring.",
    "Compare {} with something that it is often confused with.",
    "Summarise the history of {} in one paragraph.",
    "Translate into French: I would like to learn more about {} this year.",
)
_SUBJECTS = (
    "sorting algorithms",
    "photosynthesis",
    "compound interest",
    "the French Revolution",
    "baking bread",
    "chess openings",
    "the water cycle",
    "unit tests",
)


def built_in_prompts() -> list[str]:
    """Return 64 prompts; any number of them from the start has tasks of every sort."""
    pairs = itertools.product(range(len(_SUBJECTS)), range(len(_ASKED)))
    return [_ASKED[task].format(_SUBJECTS[(task + n) % len(_SUBJECTS)]) for n, task in pairs]


@contextmanager
def captured(
    draft: Draft,
    target: Path,
    blocks: int,
    *,
    corpus: Sequence[str] = (),
    columns: str | dict[str, str] = "",
    documents: int,
    device: str = "auto",
    trust: bool = False,
) -> Iterator[HiddenStatesDataset]:
    """Capture what the target answers, with the layers of the draft, their neighbours and the last.

    Args:
        blocks: decoder blocks of the target.
        corpus: prompts or conversations, whose answers are replaced; () takes those built in.
        columns: those of --columns of the corpus.
        documents: how many of them are read.

    Raises:
        SpecDataError: of `regenerate` and `generate`.
    """
    names = [name for name in draft.state_columns if name != FINAL]
    layers = {int(name.removeprefix("hidden.L")) + step for name in names for step in (-1, 0, 1)}
    chosen = sorted(k for k in layers | {blocks - 1} if -1 <= k < blocks)
    running: dict[str, Any] = {"device": device, "trust_remote_code": trust}
    with TemporaryDirectory(prefix="spec-train-doctor-") as folder:
        prompts, answers, data = (Path(folder) / name for name in ("p.jsonl", "a.jsonl", "data"))
        rows = [json.dumps({"prompt": prompt}) for prompt in built_in_prompts()]
        prompts.write_text("\n".join(rows), encoding="utf-8")
        loading = spec_data.LoadOptions(**running)
        spec_data.regenerate(
            corpus or str(prompts),
            str(answers),
            str(target),
            max_new_tokens=_NEW_TOKENS,
            limit=documents,
            columns=columns or {},  # "" is what an unset shell variable gives
            loading=loading,
        )
        options = spec_data.CaptureOptions(layers=chosen, codec="bf16", num_proc=1, **running)
        spec_data.generate(str(target), str(answers), str(data), options)
        yield HiddenStatesDataset(data)
