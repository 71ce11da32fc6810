"""The options of `spec-data regenerate`, as a frozen dataclass (see config.py)."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spec_data.corpus.bad_rows import BadRowLimit, parse_limit
from spec_data.options.option_values import (
    DOCUMENTS,
    REQUIRED,
    RUNNING,
    at_least,
    parse_object,
    parse_size,
)
from spec_data.options.row_options import max_bad_rows_option, on_bad_row_option
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option

SAMPLING = "how answers are sampled"
SERVERS = "servers"


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Options of `regenerate`."""

    corpus: tuple[str, ...] = option(
        help="the conversations, as `generate` takes them, and prompts alone (a `prompt` or "
        "`turns` column, or messages that end with a question); several are read in order",
        group=REQUIRED,
        metavar="SRC",
        holds=Kind.CORPUS,
    )
    out: str = option(
        help="the JSON-lines file to write, with its sampling record beside it (FILE.sampling); "
        "the same command resumes an interrupted run",
        group=REQUIRED,
        metavar="FILE",
    )
    target: str | None = option(
        None,
        help="the target model: a local directory or a Hugging Face Hub id. It writes the answers. "
        "With --server, only its tokenizer is used: the prompts of the servers are compared with "
        "those of its chat template",
        group=REQUIRED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    turns: str = option(
        "all",
        help="assistant turns that are replaced: all of them, each one before the next is "
        "generated, or the last one. Answers that stay get weight 0, so that they are not "
        "supervised. A question at the end is answered",
        group=SAMPLING,
        choices=("all", "last"),
    )
    temperature: float = option(
        0.0,
        help="temperature of the answers, 0 for greedy. Take the one that the target is served "
        "with; reasoning models often repeat themselves below 0.6",
        group=SAMPLING,
        metavar="T",
    )
    top_p: float = option(
        1.0,
        help="sample from the most likely tokens that have this much probability; 1 is all of them",
        group=SAMPLING,
        metavar="P",
    )
    top_k: int | None = option(
        None,
        help="sample from this many of the most likely tokens; 0 is all of them. Not given: all of "
        "them, and with --server the server's own default",
        group=SAMPLING,
        metavar="K",
    )
    max_new_tokens: int = option(
        1024,
        help="the most tokens of an answer. An answer that reaches it is kept, marked and counted; "
        "`generate` does not supervise its end-of-turn token",
        group=SAMPLING,
        metavar="N",
    )
    drop_truncated: bool = option(
        False,
        help="leave out conversations with an answer that reached --max-new-tokens",
        group=SAMPLING,
    )
    seed: int = option(0, help="decides the samples", group=SAMPLING, metavar="N")
    chat_template_kwargs: str = option(
        "{}",
        help="JSON object of arguments for the chat template, such as "
        '{"enable_thinking": false}; pass the same to `generate`',
        group=SAMPLING,
        metavar="JSON",
    )
    limit: int = option(
        0,
        help="read at most this many corpus rows; 0 reads all. Use a small one for a first try",
        group=DOCUMENTS,
        metavar="N",
    )
    on_bad_row: str = on_bad_row_option()
    max_bad_rows: str = max_bad_rows_option()
    max_row_bytes: str = option(
        "8MB",
        help="a corpus row of more bytes is a bad row, skipped without being held in memory",
        group=DOCUMENTS,
        metavar="SIZE",
        numbers=True,
    )
    batch_size: int = option(
        32,
        help="conversations that the local target answers at once. Raise it on a GPU with free "
        "memory for more speed, lower it when memory runs out",
        group=RUNNING,
        metavar="N",
    )
    batching: str = option(
        "auto",
        help="continuous: an answer that ends makes room for the next one at once. padded: batches "
        "of prompts of similar length. auto takes continuous on a GPU, and padded elsewhere",
        group=RUNNING,
        choices=("auto", "continuous", "padded"),
    )
    dtype: str = option(
        "auto",
        help="dtype in which the target runs; auto is the checkpoint's own. Take the same for "
        "`generate`",
        group=RUNNING,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = option(
        "auto",
        help="device of the target: auto (a GPU where there is one), cpu, cuda, cuda:1, ...",
        group=RUNNING,
    )
    attn: str = option(
        "auto",
        help="attention implementation of transformers: auto, sdpa, eager, flash_attention_2",
        group=RUNNING,
        metavar="NAME",
    )
    revision: str | None = option(
        None,
        help="branch, tag or commit of a target on the Hub; not given: its main branch",
        group=RUNNING,
        metavar="REV",
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the model; only for authors you trust",
        group=RUNNING,
    )
    server: tuple[str, ...] = option(
        (),
        help="OpenAI-compatible servers that answer instead of a local target, such as "
        "http://localhost:8000/v1; requests are spread over several. The key is that of "
        "OPENAI_API_KEY. Needs: pip install openai",
        group=SERVERS,
        metavar="URL",
        urls=True,
    )
    server_model: str | None = option(
        None,
        help="the model's name on the servers; not given: the first one that they list",
        group=SERVERS,
        metavar="NAME",
    )
    concurrency: int = option(
        64,
        help="conversations in flight over all servers. Raise it while tokens per second grow",
        group=SERVERS,
        metavar="N",
    )
    timeout: float = option(
        600.0,
        help="seconds that one answer may take before it is asked for again",
        group=SERVERS,
        metavar="S",
    )
    retries: int = option(
        8,
        help="how often an answer is asked for again after a timeout, a dropped connection, a 429, "
        "a 5xx or a malformed body; then the conversation is listed as failed, and the same "
        "command tries it again",
        group=SERVERS,
        metavar="N",
    )
    backoff: float = option(
        1.0,
        help="seconds before the first retry; doubled for each further one, up to a minute",
        group=SERVERS,
        metavar="S",
    )

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        at_least(1, concurrency=self.concurrency)
        at_least(0, limit=self.limit, seed=self.seed, retries=self.retries, top_k=self.top_k or 0)
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--temperature {self.temperature}: expected 0 to 10")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: expected more than 0, and at most 1")
        if self.timeout <= 0 or self.backoff < 0:
            raise ConfigError("--timeout must be above 0, and --backoff not below")
        if self.target is None and not self.server:
            raise ConfigError("who answers? pass --target MODEL, or --server URL (see --help)")
        if self.server_model is not None and not self.server:
            raise ConfigError("--server-model names a model of --server; add that option")
        for url in self.server:
            _check_url(url)
        if parse_size(self.max_row_bytes) < 1:
            raise ConfigError(f"--max-row-bytes {self.max_row_bytes}: a row needs some bytes")
        _ = self.template_kwargs, self.bad_row_limit

    @property
    def bad_row_limit(self) -> BadRowLimit:
        """How many bad rows --max-bad-rows allows."""
        return parse_limit(self.max_bad_rows)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's keyword arguments."""
        return parse_object("--chat-template-kwargs", self.chat_template_kwargs)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--server {url}: expected a URL such as http://localhost:8000/v1")
