"""The options of `spec-data generate` and `estimate`, as frozen dataclasses (see config.py)."""

import re
from dataclasses import dataclass
from typing import Any

from spec_data.corpus.bad_rows import BadRowLimit, parse_limit
from spec_data.options.option_values import (
    CAPTURE,
    DEFAULT_CODEC,
    DOCUMENTS,
    REQUIRED,
    RUNNING,
    SHARDS,
    at_least,
    check_drafts,
    parse_batch_tokens,
    parse_codecs,
    parse_drafts,
    parse_object,
    parse_size,
)
from spec_data.options.placement_options import (
    Spread,
    backend_option,
    device_map_option,
    max_memory_option,
    offload_dir_option,
    spread_of,
    tp_plan_option,
    vllm_memory_option,
    vllm_tensor_parallel_option,
)
from spec_data.options.row_options import max_bad_rows_option
from spec_data.options.worker_options import (
    check_workers,
    engine_option,
    names_no_worker,
    parse_worker,
    replicas_option,
    workers_option,
)
from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import DOCUMENT_LENGTH, option


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `generate` and `estimate`."""

    target: str = option(
        help="the target model: a local directory or a Hugging Face Hub id",
        group=REQUIRED,
        metavar="MODEL",
        holds=Kind.TARGET,
    )
    corpus: tuple[str, ...] = option(
        help="the conversations: a JSONL, JSON, CSV, Parquet or text file, a directory of them, a "
        "directory saved by `datasets`, or a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT); several "
        "are read in the order given",
        group=REQUIRED,
        metavar="SRC",
        holds=Kind.CORPUS,
    )
    out: str = option(
        help="the dataset to write: a directory, or a URL such as s3://bucket/data "
        "(docs/remote.md); the same command resumes an interrupted run",
        group=REQUIRED,
        metavar="DIR",
        dataset="write",
    )
    layers: str = option(
        "auto",
        help="layer ids to capture, such as 1,3,5. Id k is the output of decoder block k, counted "
        "from 0; -1 is the embedding output. auto takes the EAGLE-3 recipe 1, L/2-1, L-4 of L "
        "blocks; spread:N takes N evenly spaced blocks from 1 to L-2",
        group=CAPTURE,
        metavar="IDS",
    )
    for_drafts: str | None = option(
        None,
        flag="for",
        help="drafts to capture for, such as eagle3,dspark or all, instead of --layers: the layers "
        "that any of their recipes reads. eagle3 and peagle read 1, L/2-1, L-4; dspark and "
        "dflash 5 evenly spaced blocks from 1 to L-2; eagle only hidden.final. `spec-train fit` "
        "then takes those of its draft",
        group=CAPTURE,
        metavar="DRAFTS",
    )
    max_length: int = option(
        DOCUMENT_LENGTH,
        help="cut documents to this many tokens, or to the target's context where that is shorter; "
        "cut documents are counted. Raise it for long conversations: memory grows with it",
        group=DOCUMENTS,
        metavar="N",
    )
    batch_tokens: str = option(
        "auto",
        help="tokens per forward of the target. auto tries the longest documents on a GPU before "
        "the first shard, and takes the largest number that is safe; on a CPU it is 8192",
        group=RUNNING,
        metavar="N",
        numbers=True,
    )
    limit: int = option(
        0,
        help="read at most this many corpus rows; 0 reads all. Use a small one for a first try",
        group=DOCUMENTS,
        metavar="N",
    )
    supervision: str = option(
        "final-hidden",
        help="what the teacher's distribution is rebuilt from: final-hidden (exact and small), "
        "topk:K (K exact logits and the logsumexp) or logits (all of them, very large). Change it "
        "only where the target's head cannot be rebuilt, or for another trainer",
        group=CAPTURE,
        metavar="KIND",
    )
    codec: str = option(
        DEFAULT_CODEC,
        help="how states are stored: bf16 (exact), int8c or fp8 (half of its bytes), lm6c (0.38), "
        "lm4c (0.25); or per kind, such as aux=lm4c,final=int8c. What is not named keeps the "
        "default. The error is measured before the first shard; a codec that loses too much gives "
        "way to the next finer one",
        group=CAPTURE,
        metavar="NAME",
    )
    final: str = option(
        "all",
        help="tokens at which hidden.final is stored. supervised stores it only where the next "
        "token is supervised: smaller, and enough for EAGLE-3 as it is served, but not for drafts "
        "that learn the states themselves (EAGLE-1/2)",
        group=CAPTURE,
        choices=("all", "supervised"),
    )
    teacher: str = option(
        "supervised",
        help="tokens at which the head runs (the target's choice, logsumexp, stored logits): those "
        "whose next token is supervised, which is all that served drafts learn from; or all. Take "
        "all for a wider `fit --mask` later, or for --slots shifted",
        group=CAPTURE,
        choices=("supervised", "all"),
    )
    mask: str = option(
        "assistant",
        help="supervised tokens: those of every assistant turn, of the last one, or all tokens "
        "(for plain text)",
        group=DOCUMENTS,
        choices=("assistant", "last-turn", "all"),
    )
    packing: str = option(
        "auto",
        help="how documents share a row. auto proves that packed states equal unpacked ones, and "
        "uses one document per row where no mask passes; rows skips packing (slower); the other "
        "names ask for one mask and stop the run if it fails the proof",
        group=RUNNING,
        choices=(
            "auto",
            "rows",
            "per-document",
            "mask-per-layer-type",
            "block-causal-window",
            "block-causal",
            "position-ids",
            "requests",
        ),
    )
    dtype: str = option(
        "auto",
        help="dtype in which the target runs; auto is the checkpoint's own. Take the one that "
        "the target is served in",
        group=RUNNING,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    backend: str = backend_option()
    device: str = option(
        "auto",
        help="device of the target: auto (a GPU where there is one), cpu, cuda, cuda:1, ...",
        group=RUNNING,
    )
    device_map: str | None = device_map_option()
    max_memory: str | None = max_memory_option()
    offload_dir: str | None = offload_dir_option()
    tp_plan: str | None = tp_plan_option()
    vllm_tensor_parallel: int = vllm_tensor_parallel_option()
    vllm_memory: float = vllm_memory_option()
    attn: str = option(
        "auto",
        help="attention implementation of transformers: auto, sdpa, eager, flash_attention_2",
        group=RUNNING,
        metavar="NAME",
    )
    rope_factors: str = option(
        "auto",
        help="factors of a longrope target (Phi-3, Phi-4): short or long for every document, or "
        "auto, which takes the long ones if a document is longer than the short ones cover. "
        "Engines may use the long ones for every prompt, so take long for serving long contexts",
        group=RUNNING,
        choices=("auto", "short", "long"),
    )
    revision: str | None = option(
        None,
        help="branch, tag or commit of a target on the Hub; not given: its main branch",
        group=RUNNING,
        metavar="REV",
    )
    workers: str = workers_option()
    engine: str = engine_option()
    replicas: int = replicas_option()
    max_bad_rows: str = max_bad_rows_option()
    max_row_bytes: str = option(
        "8MB",
        help="a corpus row of more bytes (a JSON line or element, a paragraph, a Parquet row; "
        "decompressed) is a bad row, skipped without being held in memory. Tokenising a row takes "
        "up to 250 times its bytes: raise it with care",
        group=DOCUMENTS,
        metavar="SIZE",
        numbers=True,
    )
    max_shard_size: str = option(
        "auto",
        help="size of one shard. A shard is also what a resumed run repeats at most, and what "
        "workers share out. auto is 500MB, but at most 262,144 tokens and a sixteenth of the "
        "corpus; a directory that has a plan keeps the size of that plan",
        group=SHARDS,
        metavar="SIZE",
    )
    num_proc: int = option(
        0,
        help="processes that render and tokenise the corpus; 0 takes one per core, at most 16. The "
        "result does not depend on it. Each needs about as much memory as its largest row",
        group=DOCUMENTS,
        metavar="N",
    )
    chat_template_kwargs: str = option(
        "{}",
        help='JSON object of arguments for the chat template, such as {"enable_thinking": false}',
        group=DOCUMENTS,
        metavar="JSON",
    )
    on_policy: bool = option(
        False,
        help="state that this very target wrote the responses. It is measured: the run stops early "
        "if a sample contradicts it, and the dataset is recorded as off-policy if all of it does",
        group=DOCUMENTS,
    )
    sampling_temperature: float | None = option(
        None,
        help="temperature at which the target wrote the responses of --on-policy, 0 for greedy. "
        "Not given: at most 1, and three of four tokens must be the target's first choice",
        group=DOCUMENTS,
        metavar="T",
    )
    allow_high_nll: bool = option(
        False,
        help="capture a corpus that the target finds less likely than random tokens. Without it, "
        "the run stops: such token ids are those of another tokenizer",
        group=DOCUMENTS,
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code that comes with the model; only for authors you trust",
        group=RUNNING,
    )
    dry_run: bool = option(
        False, help="plan and print sizes, then stop, as `estimate` does", group=SHARDS
    )

    def __post_init__(self) -> None:
        at_least(0, limit=self.limit, num_proc=self.num_proc)
        if self.max_length < 2:
            raise ConfigError(f"--max-length {self.max_length}: documents need two tokens or more")
        if not re.fullmatch(r"final-hidden|logits|topk:[1-9]\d*", self.supervision):
            raise ConfigError(
                f"--supervision {self.supervision!r}: final-hidden, topk:K (e.g. topk:64) or logits"
            )
        if self.max_shard_size != "auto" and parse_size(self.max_shard_size) < 1:
            raise ConfigError(f"--max-shard-size {self.max_shard_size}: a shard needs some bytes")
        if parse_size(self.max_row_bytes) < 1:
            raise ConfigError(f"--max-row-bytes {self.max_row_bytes}: a row needs some bytes")
        temperature = self.sampling_temperature
        if temperature is not None and not 0 <= temperature <= 10:
            raise ConfigError(f"--sampling-temperature {temperature}: expected 0 to 10")
        if temperature is not None and not self.on_policy:
            raise ConfigError(
                "--sampling-temperature describes --on-policy responses; add that flag"
            )
        check_workers(self)
        _ = self.forward_tokens, self.spread, self.template_kwargs, self.codecs, self.bad_row_limit
        check_drafts(self.drafts, self.layers, self.supervision, self.final)
        if self.final != "all" and self.supervision != "final-hidden":
            raise ConfigError(
                f"--final {self.final} is about hidden.final, which --supervision "
                f"{self.supervision} does not store"
            )

    @property
    def forward_tokens(self) -> int | None:
        """The tokens per forward of --batch-tokens; None for auto."""
        return parse_batch_tokens(self.batch_tokens)

    @property
    def spread(self) -> Spread:
        """How the target is spread over devices."""
        return spread_of(self)

    @property
    def worker(self) -> tuple[int, int]:
        """(i, n) of --workers i/n."""
        return parse_worker(self.workers)

    @property
    def places_itself(self) -> bool:
        """Whether the environment says which worker this is."""
        return names_no_worker(self.workers) or self.engine == "torchrun"

    @property
    def bad_row_limit(self) -> BadRowLimit:
        """How many bad rows --max-bad-rows allows."""
        return parse_limit(self.max_bad_rows)

    @property
    def own_temperature(self) -> float:
        """The temperature at which the target's own samples are imagined."""
        return 1.0 if self.sampling_temperature is None else self.sampling_temperature

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of the aux states and of hidden.final (bf16 where there is none)."""
        return parse_codecs(self.codec, self.supervision)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's keyword arguments."""
        return parse_object("--chat-template-kwargs", self.chat_template_kwargs)

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts of --for, in the order given; empty without it."""
        return parse_drafts(self.for_drafts) if self.for_drafts else ()


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(GenerateConfig):
    """Options of `estimate`: those of `generate`, and what only an estimate can do."""

    probe: bool = option(
        False,
        help="also load the target and run a few batches: tokens per second, projected time, "
        "memory. The only part of estimate that needs the weights",
        group=RUNNING,
    )
    page: str | None = option(
        None,
        help="also write an HTML page of what would be captured: documents token by token, with "
        "the supervised ones marked, and what is left out, by reason",
        group=RUNNING,
        metavar="FILE",
    )
