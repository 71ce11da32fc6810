"""Compare the target and the prompts of an evaluation with those that a draft was fitted to.

A draft runs with any target of its shape. With another version of the target, other rope settings,
another tokenizer or prompts rendered otherwise, it is only accepted less often, so each difference
is a warning that names the fact.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_data.corpus.template import names_read
from spec_data.models.identify import identify
from spec_data.models.reading import load_config
from spec_data.shards.identity import Comparison, compare, kwargs_text, usual_kwargs

log = logging.getLogger(__name__)

UNKNOWN_KWARGS = (
    "neither the draft nor its training data records the chat template kwargs of the rendering, so "
    "prompts are rendered without any; if there were some, pass --chat-template-kwargs"
)


def trained_identity(origin: Mapping[str, Any], run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the identity that a draft was fitted to: its origin, then what its data records.

    `run` holds the facts of the draft's run (see run_record.py).
    """
    return {**((run or {}).get("identity") or {}), **origin}


def prompt_kwargs(trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the template kwargs of most documents of the training data; None: not recorded."""
    used = trained.get("template_kwargs_used") or {}
    if len(used) > 1:
        log.info("the training data has several chat template kwargs: %s", "; ".join(used))
    return usual_kwargs(trained)


def kwargs_for(
    given: dict[str, Any] | None, usual: dict[str, Any] | None, tokenizer: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the template kwargs for the prompts, and warnings about them.

    Args:
        given: --chat-template-kwargs, None if not given.
        usual: those of the training data, None if not known.
        tokenizer: that of the target.
    """
    if given is not None:
        return given, []
    if usual is None:
        return {}, [UNKNOWN_KWARGS] if tokenizer.chat_template else []
    names = names_read(tokenizer)
    unread = sorted(set(usual) - names) if names is not None else []
    kept = {name: value for name, value in usual.items() if name not in unread}
    return kept, [
        f"the training data was rendered with {name} = {usual[name]!r}, which this target's chat "
        "template does not read"
        for name in unread
    ]


def system_warnings(
    trained: Mapping[str, Any], prompts: Iterable[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Return a warning if most prompts have a system message and most training rows none, or the
    other way round.

    Args:
        trained: the identity that a draft was fitted to.
        prompts: the messages of every prompt that is a chat.
    """
    known = trained.get("system_messages") or {}
    rows = sum(known.values())
    asked = [any(m["role"] in ("system", "developer") for m in messages) for messages in prompts]
    if not rows or not asked:
        return []
    before, now = known.get("with", 0) / rows, sum(asked) / len(asked)
    if (before < 0.5) == (now < 0.5):
        return []
    return [
        f"{now:.0%} of the prompts and {before:.0%} of the conversations of the training data have "
        "a system message; expect lower acceptance than with prompts like the training data"
    ]


def identity_of(
    directory: Path, tokenizer: Any, dtype: torch.dtype, trust: bool = False
) -> dict[str, Any]:
    """Return the identity of the target in `directory` that runs in `dtype`.

    `trust` runs the code that comes with the target.
    """
    config = load_config(directory, trust)
    name = str(dtype).removeprefix("torch.")
    return identify(directory, config=config, tokenizer=tokenizer, dtype=name)


def compare_with_trained(
    trained: Mapping[str, Any],
    identity: Mapping[str, Any],
    tokenizer: Any,
    *,
    kwargs: Sequence[Mapping[str, Any]],
) -> Comparison:
    """Compare a target with the identity that a draft was fitted to.

    Args:
        trained: that identity, as far as it is known.
        identity: that of the target (see `identity_of`).
        tokenizer: that of the target.
        kwargs: the template kwargs of every prompt that was rendered with the chat template.
    """
    found = dict(identity)
    if kwargs and tokenizer.chat_template:
        found["template_kwargs_used"] = dict.fromkeys(map(kwargs_text, kwargs), 1)
    return compare(
        trained, found, of_recorded="the draft was fitted with", of_found="this target has"
    )
