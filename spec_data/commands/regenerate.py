"""`spec-data regenerate`: replace the answers of a corpus by the target's own."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from spec_data.commands.generate import generate
from spec_data.corpus.bad_rows import parse_limit
from spec_data.generation.options import CaptureOptions
from spec_data.models.target_options import RUNNING, LoadOptions
from spec_data.terminal.command import command, words_of
from spec_data.terminal.config import DOCUMENT_LENGTH
from spec_data.terminal.rules import Needs, ruled
from spec_data.terminal.types import (
    Columns,
    Corpus,
    Count,
    File,
    JsonObject,
    Positive,
    Servers,
    Target,
    Text,
    more,
    path_list,
)

if TYPE_CHECKING:
    from spec_data.regeneration.run import RegenerateResult

_ROWS = more("which rows")
_SAMPLING = more("how answers are sampled")


@command
@ruled(
    Needs(
        (), ("target", "server"), "who answers? pass --target MODEL, or --server URL (see --help)"
    ),
    Needs("server_model", "server", "--server-model names a model of --server; add that option"),
    Needs(
        "top_p",
        "temperature",
        "--top-p {top_p:g} changes nothing at --temperature 0, which is greedy; raise that",
        idle=1.0,
    ),
    Needs(
        "top_k",
        "temperature",
        "--top-k {top_k} changes nothing at --temperature 0, which is greedy; raise that",
        idle=0,
    ),
)
def regenerate(
    corpus: Corpus,
    out: File,
    target: Target | None = None,
    *,
    server: Servers = (),
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0,
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0,
    max_new_tokens: Positive = 1024,
    batch_size: Positive = 32,
    top_k: Annotated[Count | None, _SAMPLING] = None,
    seed: Annotated[Count, _SAMPLING] = 0,
    turns: Annotated[Literal["all", "last"], _SAMPLING] = "all",
    chat_template_kwargs: Annotated[JsonObject | None, _SAMPLING] = None,
    limit: Annotated[Count, _ROWS] = 0,
    columns: Annotated[Columns, _ROWS] = "",
    max_bad_rows: Annotated[Text, _ROWS] = "auto",
    server_model: Annotated[str | None, RUNNING] = None,
    loading: LoadOptions = LoadOptions(),
) -> "RegenerateResult":
    """Replace the assistant turns of a corpus by what the target itself writes.

    Drafts learn best from the target's own text. Stop it whenever you like: the same command
    resumes, and answers each turn once. The output is a corpus for `generate --on-policy`;
    FILE.sampling beside it says how it was sampled.

    Examples:
        spec-data regenerate --target Qwen/Qwen3-8B --corpus chats.jsonl --out answers.jsonl
        spec-data regenerate --corpus chats.jsonl --out answers.jsonl --temperature 0.6 \\
            --server http://localhost:8000/v1 http://localhost:8001/v1
            two servers of the target answer, such as vLLM's or SGLang's

    Args:
        corpus: the conversations, as `generate` takes them, and prompts alone.
        out: the JSON-lines file to write; the same command resumes an interrupted run.
        target: the target: a directory or a Hub id. With --server, only its tokenizer is used: the
            prompts of the servers are compared with those of its chat template.
        server: OpenAI-compatible servers that answer instead, such as http://localhost:8000/v1.
            The key is that of OPENAI_API_KEY. Needs: pip install openai.
        temperature: 0, the default, is greedy. Take the one that the target is served with;
            reasoning models often repeat themselves below 0.6.
        top_p: sample from the most likely tokens that have this much probability.
        max_new_tokens: the most tokens of an answer. An answer that reaches it is kept and counted;
            `generate` does not supervise its end-of-turn token.
        batch_size: conversations that are answered at once, here or over all servers. Raise it
            while tokens per second grow, lower it when memory runs out.
        top_k: sample from this many of the most likely tokens; 0 is all of them. Not given: all of
            them, and with --server the server's own default.
        seed: decides the samples.
        turns: assistant turns that are replaced: all, each one before the next is generated, or
            the last one. Answers that stay get weight 0: they are not supervised.
        chat_template_kwargs: arguments for the chat template, such as {"enable_thinking": false};
            pass the same to `generate`.
        limit: read at most this many corpus rows; 0 reads all.
        columns: columns of the corpus under other names, such as prompt=query; see `generate`.
        max_bad_rows: stop if more rows of a --corpus are bad: a count such as 5, or a share such
            as 1%. auto is 1 %; below 1,000 rows it is 10 rows, but not more than 10 %.
        server_model: the model's name on the servers; not given: the first one that they list.
        loading: how the target is loaded. Take the same for `generate`.

    Raises:
        ConfigError: a bad value, or a file with answers that were made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: no server answers, or the memory of the device is full.
    """
    corpora, bad_rows = path_list(corpus), parse_limit(str(max_bad_rows))
    kwargs = chat_template_kwargs or {}
    from spec_data.corpus.record_reader import CorpusReader
    from spec_data.corpus.template_keys import layout_of
    from spec_data.models.accelerate_settings import check_accelerate
    from spec_data.models.devices import usable_device
    from spec_data.regeneration import local, run, servers
    from spec_data.regeneration.conversations import Sampling, parse_question

    run.check_out(Path(out), corpora)
    if not server:
        device = usable_device(loading.device)  # before anything that takes long
        check_accelerate(loading.dtype, device, "--server of an engine")
    sampling = Sampling(temperature, top_p, top_k, max_new_tokens, seed, kwargs)
    chat: local.ChatTarget | None = None
    backend: local.LocalBackend | servers.ServerBackend | None = None
    if target is not None:
        chat = local.ChatTarget(str(target), sampling, loading, weights=not server)
        backend = local.LocalBackend(chat, batch_size, loading)
    if server:
        backend = servers.ServerBackend(server, server_model, sampling, batch_size, chat)
    assert backend is not None
    layout = layout_of(chat.tokenizer if chat else None, columns)
    reader = CorpusReader(
        corpora, limit or None, max_bad_rows=bad_rows, parse=parse_question, layout=layout
    )
    settings = {"turns": turns, **vars(sampling), "limit": limit}
    if layout.columns:
        settings["columns"] = dict(layout.columns)
    result = run.regenerate(Path(out), reader, backend, settings)
    if result.failed:
        return result
    given = loading.given_values()
    if result.longest > DOCUMENT_LENGTH:
        given["max_length"] = result.longest
    capture = CaptureOptions(on_policy=True, chat_template_kwargs=chat_template_kwargs, **given)
    words = words_of(
        generate,
        {
            "target": str(target or result.settings["server_model"]),
            "corpus": str(out),
            "out": str(Path(out).with_suffix("")),
            "options": capture,
        },
    )
    return dataclasses.replace(result, next_command=("spec-data", "generate", *words))
