"""What an engine must be told so that it serves what a draft was trained on, and what it adds.

The prompts of the training data may hold more than the target's own files: template kwargs, system
messages, tools (`spec_data.shards.serving`). Its target may be one commit of a repository, or come
with code. And an engine applies the sampling that the target's
generation_config.json names, to every request that sets none. The options of engines are columns of
`spec_data/models/engines.toml`.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from spec_data.models.engines import engines
from spec_data.shards.serving import (
    DEFAULT_SYSTEM,
    OTHERS,
    TOOLS,
    mixture,
    percent,
    sampling_text,
    shares,
    shown,
    usual_kwargs,
    usual_system,
)

MOST = 0.9
"""The share of documents from which on the rest needs no warning."""
_COMMON = 0.5
"""The share of documents from which on a system message, or a list of tools, belongs to serving."""
_SHORT_LENGTH = "rope.original_max_position_embeddings"


def kwargs_words(engine: str, origin: Mapping[str, Any]) -> str:
    """Return the option that makes an engine render as most documents were, with a space before it.

    It is "" where these have no template kwargs, or the engine has no such option.
    """
    kwargs, option = usual_kwargs(origin), engines().engine[engine].template_kwargs
    if not kwargs or not option:
        return ""
    return f" {option} {shlex.quote(json.dumps(kwargs, ensure_ascii=False))}"


def target_words(engine: str, origin: Mapping[str, Any], target: str | None) -> str:
    """Return the options that make an engine load the target of the training, each after a space.

    Those are the commit of the Hub that was captured, the code that came with it, and the length
    to which the short factors of longrope hold: an engine with a longer one takes the others.
    """
    row = engines().engine[engine]
    found = loading(origin, target)
    words = [(row.revision, shlex.quote(found["revision"]))] if "revision" in found else []
    words += [(row.trust_code, "")] if "trust_remote_code" in found else []
    if origin.get("rope_factors") == "short" and (length := origin.get(_SHORT_LENGTH)):
        words.append((row.max_length, str(length)))
    return "".join(f" {option} {value}".rstrip() for option, value in words if option)


def loading(origin: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load the target of the training."""
    found: dict[str, Any] = {}
    if (revision := origin.get("target_revision")) and target == origin.get("target_name"):
        found["revision"] = revision
    return found | ({"trust_remote_code": True} if origin.get("code_hash") else {})


def kwargs_note(engine: str, origin: Mapping[str, Any]) -> str:
    """Return how the documents were rendered, for an engine without an option for it; "": plainly.

    In the library transformers, the kwargs are arguments of `apply_chat_template`.
    """
    kwargs = usual_kwargs(origin)
    if not kwargs or engines().engine[engine].template_kwargs:
        return ""
    given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
    return f"Render prompts with tokenizer.apply_chat_template(messages, ..., {given})."


def common_system(origin: Mapping[str, Any]) -> str:
    """Return the system message of most documents, if the template does not add it; else ""."""
    message, share = usual_system(origin)
    added = message.strip() == origin.get(DEFAULT_SYSTEM)
    return message if share >= _COMMON and not added else ""


def warned(origin: Mapping[str, Any], sampling: Mapping[str, float]) -> Iterator[str]:
    """Yield what users of a draft must know: a mixture, a system message, a penalty."""
    parts = shares(origin.get("template_kwargs_used") or {})
    listed = {value: share for value, share in parts.items() if value != OTHERS}
    if listed and max(listed.values()) < MOST:
        yield (
            "the training data was rendered with several chat template kwargs: "
            f"{mixture(origin, 'template_kwargs_used')}. The printed commands set the most "
            "frequent ones; requests for the others name theirs (chat_template_kwargs)"
        )
    if message := common_system(origin):
        begin = f"{percent(usual_system(origin)[1])} of the training documents begin with the "
        yield (
            f"{begin}system message {shown(message, 'system_messages')}: send it with every "
            "request, as no engine adds it"
        )
    if "repetition_penalty" in sampling:
        yield applied(sampling)


def noted(origin: Mapping[str, Any], sampling: Mapping[str, float]) -> Iterator[str]:
    """Yield what is good to know: kwargs that the commands set, and sampling that engines apply."""
    kwargs = usual_kwargs(origin)
    if kwargs:
        yield f"the commands render prompts with the chat template kwargs {json.dumps(kwargs)}"
    if (share := shares(origin.get("tools_used") or {}).get(TOOLS, 0.0)) >= _COMMON:
        yield (
            f"{percent(share)} of the training documents have a list of tools: the chat template "
            "writes it into the prompt, and of requests without one fewer drafted tokens may be "
            "accepted"
        )
    if sampling and "repetition_penalty" not in sampling:
        yield applied(sampling)


def applied(sampling: Mapping[str, float]) -> str:
    """Return what sampling engines apply by default, what it does, and how it is turned off."""
    return (
        f"the target's generation_config.json sets {sampling_text(sampling)}: engines apply it to "
        "requests that set nothing, and acceptance was measured greedily, without it. "
        f"{changed(sampling)}{turned_off()}"
    )


def changed(sampling: Mapping[str, float]) -> str:
    """Return what a penalty does to the target, as a sentence with a space behind it; else ""."""
    if "repetition_penalty" not in sampling:
        return ""
    return (
        "repetition_penalty changes the target's distribution, which the draft has not learned: "
        "fewer drafted tokens are accepted. "
    )


def turned_off() -> str:
    """Return the options that make engines apply no sampling of the target's files."""
    rows = engines().engine.values()
    options = [f"{row.release.split()[0]}: {row.sampling_off}" for row in rows if row.sampling_off]
    return f"Turned off with {'; '.join(dict.fromkeys(options))}"
