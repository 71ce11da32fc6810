"""What is captured of a corpus, and how: options of two commands. No torch: `--help` is instant."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from cyclopts import Parameter
from msgspec import Meta

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.facts import parse_columns
from spec_data.models.target_options import RUNNING, EngineOptions, LoadOptions
from spec_data.shards.draft_kinds import draft_kinds
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import parse_size
from spec_data.shards.layer_ids import FINAL_ALONE, RECIPES, recipe_count
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.rules import Excludes, Needs, OneOf, Rule
from spec_data.terminal.types import (
    JOINED,
    WHOLE,
    Columns,
    Count,
    JsonObject,
    Layers,
    Names,
    Text,
    comma_list,
    more,
)

AUTO: Final = "auto"
MTP: Final = "mtp"
STORED, DOCUMENTS = more("what is captured"), more("documents")
WORKERS = more("shards and workers")
QUALITIES = {"bf16": 0.0, "fine": 0.01, "default": 0.02, "small": 0.05}
"""Values of --codec by name: the error that a column may have, see `calibrate`."""

Packing = Literal[
    "auto", "rows", "per-document", "varlen", "flex", "mask-per-layer-type", "block-causal-window",
    "block-causal", "position-ids", "requests",
]  # fmt: skip


MOST_PIXELS = 1 << 25


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptureOptions(LoadOptions, EngineOptions):
    """What is captured of a corpus, and how: the options that `generate` and `estimate` share."""

    layers: Layers = AUTO
    """Layer ids to capture, such as 1,3,5. Id k is the output of decoder block k, counted from 0;
    -1 is the embedding output. auto takes the EAGLE-3 recipe 1, L/2-1, L-4 of L blocks; spread:N
    takes N evenly spaced blocks from 1 to L-2; search takes nine of these and the layers of every
    recipe, so that `spec-train search` can choose, and says what that costs."""
    for_: Names = ""
    """Drafts to capture for, such as eagle3,dspark or all, instead of --layers: the layers that any
    of their recipes reads. eagle3 and peagle read 1, L/2-1, L-4; block drafts 5 evenly spaced
    blocks from 1 to L-2; eagle and mtp only hidden.final. A draft of your own is FILE.py:NAME,
    MODULE:NAME, or the name by which an installed package declares it (docs/own-draft.md)."""
    codec: Annotated[str, JOINED] = "default"
    """How states are stored: bf16 (exact), or as coarsely as an error allows: fine (0.01 of the
    variance, about 0.16 of the bytes of bf16), default (0.02, 0.13), small (0.05, 0.09), or a
    number; or per column, such as fine,final=bf16,L3=0.03. What cannot be stored so is stored in
    bf16, with a warning."""
    supervision: Annotated[str, STORED] = "final-hidden"
    """What the teacher's distribution is rebuilt from: final-hidden (exact and small), topk:K (K
    exact logits and the logsumexp) or logits (all of them, very large)."""
    final: Annotated[Literal["all", "supervised"], STORED] = "all"
    """Tokens at which hidden.final is stored. supervised stores it only where the next token is
    supervised: enough for EAGLE-3, not for EAGLE-1/2 and MTP."""
    teacher: Annotated[Literal["supervised", "all"], STORED] = "supervised"
    """Tokens at which the head runs: those whose next token is supervised, which is all that served
    drafts learn from; or all, for a wider `fit --mask` later."""
    max_length: Annotated[int, Meta(ge=2), WHOLE] = 2048
    """Cut documents to this many tokens, or to the target's context where that is shorter; cut
    documents are counted. Memory grows with it."""
    limit: Count = 0
    """Read at most this many corpus rows; 0 reads all."""
    columns: Annotated[Columns, DOCUMENTS] = ""
    """Columns of the corpus under other names, such as prompt=question,answer=reply; of messages,
    prompt, answer, text, input_ids, loss_mask, system, tools, reasoning and chat_template_kwargs.
    Joined by a blank line: prompt=question+context."""
    mask: Literal["assistant", "last-turn", "without-reasoning", "all"] = "assistant"
    """Supervised tokens: those of every assistant turn, of the last one, of every one without its
    reasoning, or all tokens (for plain text)."""
    on_policy: bool = False
    """State that this very target wrote the responses. It is measured: the run stops early if a
    sample contradicts it, and the dataset is recorded as off-policy if all does."""
    sampling_temperature: Annotated[Annotated[float, Meta(ge=0, le=10)] | None, DOCUMENTS] = None
    """Temperature at which the target wrote the responses of --on-policy, 0 for greedy. Not given:
    at most 1, and three of four tokens must be the target's first choice."""
    allow_high_nll: Annotated[bool, DOCUMENTS] = False
    """Capture a corpus that the target finds less likely than random tokens, as token ids of
    another tokenizer are."""
    chat_template_kwargs: Annotated[JsonObject | None, DOCUMENTS] = None
    """JSON object of arguments for the chat template, such as {"enable_thinking": false}."""
    max_bad_rows: Annotated[Text, DOCUMENTS] = AUTO
    """Stop if more rows of the corpus are bad: a count such as 5, or a share such as 1% or 0.01.
    auto is 1 %; below 1,000 rows it is 10 rows, but not more than 10 %."""
    max_row_bytes: Annotated[Text, DOCUMENTS] = "8MB"
    """A row of more bytes is a bad row, skipped without being held in memory. Tokenising a row
    takes up to 250 times its bytes."""
    image_folder: Annotated[str | None, DOCUMENTS] = None
    """Folder of the images that rows name by path; nothing outside it is read. Not given: the
    folder of the corpus file."""
    max_image_pixels: Annotated[Annotated[int, Meta(ge=1)], DOCUMENTS] = MOST_PIXELS
    """Width times height of an image at most; a row with a larger one is a bad row."""
    num_proc: Annotated[Count, DOCUMENTS] = 0
    """Processes that render the corpus; 0 takes one per core, at most 16. The result does not
    depend on it."""
    attn: Annotated[str, RUNNING] = AUTO
    """Attention implementation of transformers: auto, sdpa, eager, flash_attention_2."""
    rope_factors: Annotated[Literal["auto", "short", "long"], RUNNING] = AUTO
    """Factors of a longrope target (Phi-3, Phi-4) for every document; auto takes the long ones if a
    document is longer than the short ones cover."""
    packing: Annotated[Packing, RUNNING] = AUTO
    """How documents share a row. auto proves that packed states equal unpacked ones, and uses one
    document per row where no mask passes; rows skips packing (slower); the other names ask for one
    mask and stop the run if it fails the proof."""
    batch_tokens: Annotated[Text, RUNNING] = AUTO
    """Tokens per forward of the target. auto tries the longest documents on a GPU before the first
    shard, and takes the largest number that is safe; on a CPU it is 8192."""
    max_shard_size: Annotated[Text, WORKERS] = AUTO
    """Size of one shard: what a resumed run repeats at most, and what workers share out. auto is
    500MB, but at most 262,144 tokens and a sixteenth of the corpus."""
    pass_on: Annotated[Text | None, WORKERS] = None
    """Hold at most so many bytes of shards, such as 200GB: capture waits until one `fit --follow`
    has trained on shards, saved a checkpoint and deleted them. The dataset is never complete."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Needs(
            "final",
            "supervision=final-hidden",
            "--final {final} is about hidden.final, which --supervision {supervision} does not "
            "store",
            idle="all",
        ),
        Needs(
            "sampling_temperature",
            "on_policy",
            "--sampling-temperature describes --on-policy responses; add that flag",
        ),
        *EngineOptions.rules,
        Needs(
            "packing=requests",
            "backend=vllm",
            "--packing requests goes with --backend vllm; add it",
        ),
        Excludes(
            "supervision=logits",
            "backend=served",
            "--supervision logits with --backend served: a server hands over no logits; use "
            "final-hidden or topk:K",
        ),
        *(
            Needs(
                name,
                others,
                "--attn {attn}, --packing {packing}: vLLM has attention of its own and packs "
                "requests itself; leave both auto",
                idle=AUTO,
            )
            for name, others in (
                ("attn", "backend=hf"),
                ("packing", ("backend=hf", "packing=rows", "packing=requests")),
            )
        ),
        OneOf(
            ("layers", "for_"),
            "{given}: --for chooses the layers; give one or the other",
            idle=AUTO,
        ),
    )

    def check(self) -> None:
        """Refuse options that contradict each other; their types are checked by the command.

        Raises:
            ConfigError: see above.
        """
        parse_limit(str(self.max_bad_rows))
        parse_columns(self.columns)
        for name, size in (("row-bytes", self.max_row_bytes), ("shard-size", self.max_shard_size)):
            if size != AUTO and parse_size(str(size)) < 1:
                raise ConfigError(f"--max-{name} {size}: expected some bytes")
        _ = self.ring_bytes
        if not re.fullmatch(r"final-hidden|logits|topk:[1-9]\d*", self.supervision):
            raise ConfigError(
                f"--supervision {self.supervision!r}: final-hidden, topk:K (e.g. topk:64) or logits"
            )
        self._check_drafts()
        _ = self.codecs, self.tokens_per_forward
        EngineOptions.check(self)

    def _check_drafts(self) -> None:
        """Refuse --for beside options without what one of its drafts reads."""
        drafts = self.drafts
        final_states = self.supervision == "final-hidden"
        of_final = next((draft for draft in drafts if recipe_count(draft) == 0), None)
        if of_final and not (final_states and self.final == "all"):
            given = f"--final {self.final}" if final_states else f"--supervision {self.supervision}"
            raise ConfigError(
                f"--for {of_final} with {given}: this draft reads hidden.final at every token; use "
                f"--supervision final-hidden and --final all, or leave {of_final} out"
            )

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts of --for, each once."""
        text = comma_list(self.for_).strip()
        if text in ("", "all"):
            return tuple(RECIPES) if text else ()
        # an MTP block reads what EAGLE-1/2 reads
        named = (FINAL_ALONE if n.strip() == MTP else n.strip() for n in text.split(","))
        names = tuple(dict.fromkeys(named))
        for name in names:
            if recipe_count(name) is None:
                drafts = ", ".join(draft_kinds()) + did_you_mean(name, list(RECIPES))
                raise ConfigError(f"--for {text}: there is no draft {name!r}; drafts are {drafts}")
        return names

    @property
    def for_mtp(self) -> bool:
        """Whether --for names mtp, which needs a target with an MTP block."""
        return MTP in (name.strip() for name in comma_list(self.for_).split(","))

    @property
    def codecs(self) -> dict[str, float]:
        """The quality of the aux states, of hidden.final, and of single layers; 0: bf16."""
        return parse_codecs(self.codec, self.supervision)

    @property
    def tokens_per_forward(self) -> int | None:
        """The number of --batch-tokens; None for auto."""
        text = str(self.batch_tokens)
        if text == AUTO:
            return None
        if not re.fullmatch(r"0*[1-9]\d*", text):
            raise ConfigError(f"--batch-tokens {text}: expected a number of tokens, or auto")
        return int(text)

    @property
    def ring_bytes(self) -> int | None:
        """The most bytes of shards of --pass-on; None: all shards stay."""
        return None if self.pass_on is None else parse_size(str(self.pass_on))

    @property
    def temperature(self) -> float:
        """The temperature at which the target's samples are imagined."""
        return 1.0 if self.sampling_temperature is None else self.sampling_temperature


def parse_codecs(text: str, supervision: str) -> dict[str, float]:
    """Return the qualities (0: bf16) of "aux" and "final", and of layers named like "L3".

    `text` is one value for all, NAME=VALUE, or both, separated by commas: fine,final=bf16. What is
    not named keeps the default; hidden.final is bf16 where `supervision` stores none.

    Raises:
        ConfigError: an unknown value or column, or one of hidden.final where there is none.
    """
    parts = [part.strip().rpartition("=")[::2] for part in text.split(",")]
    named = {name.strip().removeprefix("hidden."): _quality(value, text) for name, value in parts}
    if len(named) < len(parts) or not all(re.fullmatch(r"|aux|final|L-?\d+", n) for n in named):
        raise ConfigError(
            f"--codec {text!r}: expected one of {', '.join(QUALITIES)}, a number, or such values "
            "per column, as in fine,final=bf16,L3=0.03"
        )
    base = named.pop("", QUALITIES["default"])
    if supervision != "final-hidden":
        if "final" in named:
            raise ConfigError(f"--codec {text}: --supervision {supervision} stores no hidden.final")
        named["final"] = 0.0
    return {"aux": base, "final": base} | named


def _quality(value: str, text: str) -> float:
    number = QUALITIES.get(value)
    if number is None:
        with suppress(ValueError):
            number = float(value)
        if number is None or not 1e-5 <= number <= 0.5:
            raise ConfigError(
                f"--codec {text!r}: {value!r} is none of {', '.join(QUALITIES)}, and no error "
                "between 0.00001 and 0.5"
            )
    return number


def column_qualities(codecs: Mapping[str, float], layers: Sequence[int]) -> dict[str, float]:
    """Return the quality of each column of hidden states by its name, of `parse_codecs`.

    Raises:
        ConfigError: a layer is named that is not captured.
    """
    names = sorted(f"L{layer}" for layer in layers)
    if unknown := sorted(codecs.keys() - {*names, "aux", "final"}):
        raise ConfigError(
            f"--codec: {', '.join(unknown)} is not captured; the layers are "
            f"{', '.join(map(str, layers))}"
        )
    qualities = {f"hidden.{name}": codecs.get(name, codecs["aux"]) for name in names}
    return qualities | {"hidden.final": codecs["final"]}
