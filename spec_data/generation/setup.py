"""What a dataset is made of: the target and tokenizer on disk, its columns, and the options.

`set_up` identifies target and tokenizer; no weights are loaded. `settings` is the table of
everything that decides the bytes of the dataset: two runs with equal tables may share a directory;
otherwise every field that differs is named in the error. `Fitting` says which drafts can be fitted.
"""

import json
import logging
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import spec_data
from spec_data.capture.backend import BackendOptions, TargetBackend
from spec_data.capture.vllm_engine import vllm_version
from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.record_reader import CorpusReader, SourceReport
from spec_data.corpus.sampling_record import read_record
from spec_data.corpus.sources import Source, corpus_directory, resolve
from spec_data.corpus.template import Template
from spec_data.generation.plan import (
    AUTO,
    BATCH_TOKENS,
    Plan,
    RowSettings,
    cut_into_units,
    end_token_ids,
    find_plan,
    render_corpus,
    unit_tokens,
)
from spec_data.models.devices import device_type
from spec_data.models.engines import engine_warnings
from spec_data.models.families import derived_spec, find_spec
from spec_data.models.fitted_shape import fitted_shape, sizes_of
from spec_data.models.identify import identify, target_table, tokenizer_table
from spec_data.models.quantisation import check_quantisation
from spec_data.models.reading import load_config, load_tokenizer, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.rope_factors import check_choice, chosen_factors
from spec_data.models.spread import Spread
from spec_data.shards.errors import ConfigError, DraftError, TargetError
from spec_data.shards.files import dump_json, sha256_file
from spec_data.shards.layer_ids import AUTO_DRAFTS, RECIPES, choose_layers, recipe_layers
from spec_data.shards.position_data import ROPE, Positions
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import FORMAT_VERSION, Column, data_problem, token_columns
from spec_data.terminal.option_values import check_drafts, parse_codecs, parse_size
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)

# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorpusRows:
    """Which rows are read: of these sources, at most `limit` (0: all) and not too many bad ones.

    `max_bad_rows` is a count, a share or "auto"; a row of more than `max_row_bytes` is a bad one.
    """

    sources: tuple[str, ...]
    limit: int = 0
    max_bad_rows: str = "auto"
    max_row_bytes: str = "8MB"

    def __post_init__(self) -> None:
        parse_limit(self.max_bad_rows)
        if parse_size(self.max_row_bytes) < 1:
            raise ConfigError(f"--max-row-bytes {self.max_row_bytes}: a row needs some bytes")

    def reader(self, find: Callable[..., list[Source]] = resolve) -> CorpusReader:
        """Return a reader of these rows; `find` finds the sources."""
        return CorpusReader(
            list(self.sources),
            limit=self.limit or None,
            max_bad_rows=parse_limit(self.max_bad_rows),
            max_row_bytes=parse_size(self.max_row_bytes),
            find=find,
        )


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """How rows become documents: supervised tokens, largest length, arguments of the template."""

    mask: str = "assistant"
    max_length: int = 2048
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"--max-length {self.max_length}: documents need two tokens or more")


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What is stored of each token, and the size of a shard; see the options of `generate`."""

    layers: str = "auto"
    drafts: tuple[str, ...] = ()
    supervision: str = "final-hidden"
    codec: str = "lm4c"
    final: str = "all"
    teacher: str = "supervised"
    max_shard_size: str = AUTO

    def __post_init__(self) -> None:
        if not re.fullmatch(r"final-hidden|logits|topk:[1-9]\d*", self.supervision):
            raise ConfigError(
                f"--supervision {self.supervision!r}: final-hidden, topk:K (e.g. topk:64) or logits"
            )
        if self.max_shard_size != AUTO and parse_size(self.max_shard_size) < 1:
            raise ConfigError(f"--max-shard-size {self.max_shard_size}: a shard needs some bytes")
        if self.final != "all" and self.supervision != "final-hidden":
            raise ConfigError(
                f"--final {self.final} is about hidden.final, which --supervision "
                f"{self.supervision} does not store"
            )
        check_drafts(self.drafts, self.layers, self.supervision, self.final)
        _ = self.codecs

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of the aux states and of hidden.final (bf16 where there is none)."""
        return parse_codecs(self.codec, self.supervision)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the target runs; see the options of `generate`. `batch_tokens` is None for auto."""

    backend: str = "hf"
    dtype: str = "auto"
    device: str = "auto"
    spread: Spread = field(default_factory=Spread)
    attn: str = "auto"
    rope_factors: str = "auto"
    packing: str = "auto"
    batch_tokens: int | None = None
    vllm_tensor_parallel: int = 1
    vllm_memory: float = 0.8
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.spread.is_one_device and self.device != "auto":
            name = "--tp-plan" if self.spread.tensor_parallel else "--device-map"
            raise ConfigError(f"{name} chooses the devices; leave --device {self.device} out")
        if self.backend != "vllm":
            if self.vllm_tensor_parallel > 1 or self.packing == "requests":
                raise ConfigError(
                    "--vllm-tensor-parallel and --packing requests go with --backend vllm; add it"
                )
            return
        if not self.spread.is_one_device:
            raise ConfigError(
                "--device-map and --tp-plan are for --backend hf; vLLM spreads a target over GPUs "
                "with --vllm-tensor-parallel N"
            )
        if self.attn != "auto" or self.packing not in ("auto", "rows", "requests"):
            raise ConfigError(
                f"--attn {self.attn}, --packing {self.packing}: vLLM has attention of its own and "
                "packs requests itself; leave both auto"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is stated about the answers: the target wrote them (at this temperature); or that they
    may be less likely than random tokens."""

    on_policy: bool = False
    temperature: float | None = None
    allow_high_nll: bool = False

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.on_policy:
            raise ConfigError(
                "--sampling-temperature describes --on-policy responses; add that flag"
            )

    @property
    def own_temperature(self) -> float:
        """The temperature at which the target's own samples are imagined."""
        return 1.0 if self.temperature is None else self.temperature


# -- recorded sampling -----------------------------------------------------------------------------
# A corpus that `regenerate` wrote says which model sampled its answers, and how
# (`corpus/sampling_record.py`). --on-policy is checked against it before the corpus is read, and
# takes its temperature from it. The measurement of every token follows all the same.

_FACTS = {  # of the identity of a target, by where a record has them
    "weights": (("target", "weights_hash"), "weights_hash"),
    "tokenizer": (("tokenizer", "hash"), "tokenizer_hash"),
    "chat template": (("tokenizer", "chat_template_hash"), "chat_template_hash"),
    "chat template kwargs": (("tokenizer", "chat_template_kwargs"), "chat_template_kwargs"),
}


def with_recorded_sampling(
    answers: AnswerOptions, sources: Sequence[str], identity: Mapping[str, Any]
) -> AnswerOptions:
    """Return the options with the temperature that the records of the corpora have.

    Without --on-policy nothing is changed; a corpus that could have it is named. `identity` is the
    target's, as `identify` makes it; facts that are None are not compared.

    Raises:
        ConfigError: --on-policy, and a record has another target, template or temperature.
        CorpusError: a record is damaged.
    """
    files = [path for path in map(Path, sources) if path.is_file()]
    records = {path: record for path in files if (record := read_record(path)) is not None}
    for corpus, record in records.items():
        differences = _differing_facts(record, identity)
        if answers.on_policy:
            _check_record(corpus, record, differences, answers.temperature)
        elif not differences:
            logger.info(
                "%s: this target wrote its answers (%s.sampling); --on-policy states and measures "
                "it",
                *(corpus, corpus.name),
            )
    temperatures = {float(r["settings"]["temperature"]) for r in records.values()}
    every = len(records) == len(sources) and len(temperatures) == 1
    if not answers.on_policy or answers.temperature is not None or not every:
        return answers
    (temperature,) = temperatures
    logger.info("--sampling-temperature %g, from the records of the corpus", temperature)
    return replace(answers, temperature=temperature)


def _differing_facts(record: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return, in words, the facts of the target that differ from a record, where both have them."""
    lines = []
    for words, ((table, name), fact) in _FACTS.items():
        recorded = (record["settings"].get(table) or {}).get(name)
        here = identity.get(fact)
        if recorded is not None and here is not None and recorded != here:
            lines.append(f"{words}: {recorded} there, {here} here")
    return lines


def _check_record(
    corpus: Path, record: Mapping[str, Any], differences: list[str], stated: float | None
) -> None:
    """Refuse --on-policy where a record contradicts it; warn if the corpus was changed since."""
    if differences:
        raise ConfigError(
            f"--on-policy: {corpus} was not written by this target with this template "
            f"({corpus.name}.sampling):\n  " + "\n  ".join(differences) + "\nPass the target, and "
            "the --chat-template-kwargs, that `spec-data regenerate` had, or leave --on-policy out"
        )
    temperature = record["settings"]["temperature"]
    if stated is not None and stated != temperature:
        raise ConfigError(
            f"--sampling-temperature {stated:g}: the answers of {corpus} were sampled at "
            f"{temperature:g} ({corpus.name}.sampling); leave the option out"
        )
    if sha256_file(corpus) != record["sha256"]:
        logger.warning(
            "warning: %s was changed after `regenerate` wrote it; its sampling record may not hold "
            "for every answer",
            corpus,
        )


# -- setup -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredStates:
    """What stands for corpus and target where another tool stored the states (`convert`).

    Attributes:
        find: returns the stored samples as sources of a corpus, as `corpus.sources.resolve` does.
        load: returns the backend that reads their states, of a setup and a plan.
        settings: how they are read.
    """

    find: Callable[..., list[Source]]
    load: Callable[..., TargetBackend]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The target and tokenizer on disk, the columns of the dataset, and the options.

    Attributes:
        target, tokenizer_id: the manifest's `target` and `tokenizer`.
        identity: the manifest's `identity`, without what is known after rendering and loading.
        layers: layer ids, ascending.
        draft_layers: those that each draft of --for reads.
        rendering: with --max-length limited to the context of the target.
        answers: with the temperature that the corpus records.
        stored: the states that are read instead of captured; None: none.
    """

    model_dir: Path
    model_config: Any
    tokenizer: PreTrainedTokenizerBase
    target: dict[str, Any]
    tokenizer_id: dict[str, Any]
    identity: dict[str, Any]
    layers: tuple[int, ...]
    draft_layers: dict[str, tuple[int, ...]]
    columns: tuple[Column, ...]
    vocab_size: int
    rows: CorpusRows
    rendering: RenderOptions
    capture: CaptureOptions
    run: RunOptions
    answers: AnswerOptions
    stored: StoredStates | None = None

    def reader(self) -> CorpusReader:
        """Return a reader of the corpus, or of the samples that were stored."""
        return self.rows.reader(self.stored.find if self.stored else resolve)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of a stored token."""
        return sum(c.bytes_per_token for c in self.columns)


def set_up(
    target: str,
    rows: CorpusRows,
    rendering: RenderOptions,
    capture: CaptureOptions,
    run: RunOptions,
    answers: AnswerOptions,
    *,
    revision: str | None = None,
    weights: bool = True,
) -> Setup:
    """Resolve a target and tokenizer without loading any weights.

    Without `weights` (for `estimate`) they need not be there: they are neither downloaded nor
    hashed, and nothing can be captured with the result.

    Raises:
        ConfigError: options that this target cannot have, such as more logits than it has.
        MissingError, TargetError: the model does not exist, or does not have these layers.
    """
    if run.backend == "vllm" and weights:
        vllm_version()  # it is missing: say so before anything is read
    model_dir, commit = resolve_model(target, revision, weights)
    model_config = load_config(model_dir, run.trust_remote_code)
    if weights:
        check_quantisation(target, model_config)  # before the corpus is read
    text = text_config(model_config)
    layers, draft_layers = choose_layers(capture.layers, capture.drafts, text.num_hidden_layers)
    tokenizer = load_tokenizer(model_dir, run.trust_remote_code)
    identity = identify(
        model_dir,
        config=model_config,
        tokenizer=tokenizer,
        template_kwargs=rendering.template_kwargs,
        weights=weights,
    )
    table = target_table(target, model_dir, commit, model_config, identity)
    _check_supervision(capture.supervision, text.vocab_size)
    check_choice(run.rope_factors, model_config)
    return Setup(
        model_dir=model_dir,
        model_config=model_config,
        tokenizer=tokenizer,
        target=table,
        tokenizer_id=tokenizer_table(tokenizer, identity),
        identity=identity,
        layers=layers,
        draft_layers=draft_layers,
        columns=columns_of(capture, layers, table["hidden_size"], text.vocab_size),
        vocab_size=text.vocab_size,
        rows=rows,
        rendering=within_context(rendering, model_config),
        capture=capture,
        run=run,
        answers=with_recorded_sampling(answers, rows.sources, identity),
    )


def columns_of(
    capture: CaptureOptions, layers: Sequence[int], hidden_size: int, vocab_size: int
) -> tuple[Column, ...]:
    """Return the columns of a capture of these layers."""
    return token_columns(
        tuple(layers),
        hidden_size,
        capture.supervision,
        vocab_size,
        aux_codec=capture.codecs["aux"],
        final_codec=capture.codecs["final"],
        final_tokens=capture.final,
        teacher_tokens=capture.teacher,
    )


def check_outside_corpus(out: str, sources: Iterable[str]) -> None:
    """Check that --out lies outside the corpus, which would include its files.

    Raises:
        ConfigError: it is inside the corpus.
    """
    for directory in filter(None, map(corpus_directory, sources)):
        if Path(out).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"--out {out} lies in the corpus directory {directory}, so its files would "
                "be read as corpus; choose an --out outside it"
            )


def _check_supervision(supervision: str, vocab_size: int) -> None:
    count = supervision.partition(":")[2]
    if count and int(count) > vocab_size:
        raise ConfigError(
            f"--supervision {supervision}: the target has {vocab_size} logits per token; ask for "
            "fewer"
        )


def within_context(rendering: RenderOptions, model_config: Any) -> RenderOptions:
    """Return the options with --max-length lowered to the context of the target, if it is shorter.

    Serving never uses positions beyond the context, so states there are of no use. `model_config`
    is the transformers configuration.
    """
    context = context_length(text_config(model_config))
    if not 2 <= context < rendering.max_length:
        return rendering
    logger.info(
        "documents are cut to %d tokens, not %d (--max-length), because the context of the target "
        "ends there (max_position_embeddings)",
        context,
        rendering.max_length,
    )
    return replace(rendering, max_length=context)


def context_length(text: Any) -> int:
    """Return the number of positions of a decoder, 0 if its config has none.

    With scaled RoPE, `max_position_embeddings` is usually the scaled context. In configs to which
    YaRN was added later, the scaled context is the original length times the factor.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(getattr(text, "max_position_embeddings", None) or 0, int(scaled))


def make_plan(setup: Setup, processes: int = 0, scratch: Path | None = None) -> Plan:
    """Read, render and cut the corpus, and return the plan.

    Its documents are in a temporary file, which is removed with the plan, in the directory
    `scratch`, or where the system puts temporary files; `save_plan` keeps them.

    Raises:
        CorpusError: the corpus cannot be read, or no document is left.
        RunError: a process that rendered documents ended.
    """
    reader = setup.reader()
    Template(setup.tokenizer, setup.rendering.template_kwargs).warn_of_the_date()
    rendered = render_corpus(reader, row_settings(setup), processes, scratch)
    return cut_into_units(rendered, settings(setup, reader.reports), partial(unit_limit, setup))


def find_or_make_plan(setup: Setup, out: Path, processes: int = 0) -> Plan:
    """Return the plan of `out`, see `find_plan`."""
    make = partial(make_plan, setup, processes)
    return find_plan(out, partial(changed_settings, setup), make, refuse_changes)


def row_settings(setup: Setup) -> RowSettings:
    """Return how the rows of the corpus of `setup` become documents."""
    return RowSettings(
        tokenizer=setup.tokenizer,
        mask=setup.rendering.mask,
        template_kwargs=setup.rendering.template_kwargs,
        eot_token_ids=tuple(end_token_ids(setup.model_dir)),
        vocab_size=setup.vocab_size,
        max_length=setup.rendering.max_length,
    )


def unit_limit(setup: Setup, tokens: int) -> int:
    """Return the most tokens of a unit of a plan with so many tokens, see `unit_tokens`."""
    batch_tokens = setup.run.batch_tokens or BATCH_TOKENS
    return unit_tokens(setup.capture.max_shard_size, setup.bytes_per_token, tokens, batch_tokens)


def backend_options(setup: Setup, plan: Plan) -> BackendOptions:
    """Return which target a backend loads, and how."""
    run, longest = setup.run, int(plan.lengths.max())
    return BackendOptions(
        path=setup.model_dir,
        layers=setup.layers,
        dtype=run.dtype,
        device=run.device,
        attn=run.attn,
        trust_remote_code=run.trust_remote_code,
        rope_factors=chosen_factors(run.rope_factors, setup.model_config, longest),
        spread=run.spread,
        longest=longest,
        batch_tokens=run.batch_tokens or BATCH_TOKENS,
        tensor_parallel=run.vllm_tensor_parallel,
        engine_memory=run.vllm_memory,
    )


def config_json(setup: Setup, dtype: torch.dtype, architecture: str = "") -> str:
    """Return the text of target/config.json; `architecture` is used where the config has none."""
    # All defaults are written: a draft takes its shape from this file, without the family's code.
    full = setup.model_config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    full["architectures"] = full.get("architectures") or [architecture]
    for table in (full, *(v for v in full.values() if isinstance(v, dict))):
        table.pop("_name_or_path", None)  # a path of this machine
    return dump_json(full)


# -- settings --------------------------------------------------------------------------------------

# What changes states by rounding at most. A run with others is compared with the one that proved
# the target, see `generation.replica`.
_OF_RUNNING = ("device", "device_map", "tp_plan", "tensor_parallel", "batch_tokens")


def settings(setup: Setup, reports: Iterable[SourceReport]) -> dict[str, Any]:
    """Return everything that decides the bytes of a dataset, flat enough to name differences."""
    rows, capture, run = setup.rows, setup.capture, setup.run
    table: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": {k: v for k, v in setup.target.items() if k != "name"},
        "target_name": setup.target["name"],
        "tokenizer": setup.tokenizer_id,
        "corpus": [{"source": r.source, "sha256": r.sha256} for r in reports],
        "limit": rows.limit,
        "max_row_bytes": parse_size(rows.max_row_bytes),
        "mask": setup.rendering.mask,
        "max_length": setup.rendering.max_length,
        "layers": list(setup.layers),
        "draft_layers": {draft: list(layers) for draft, layers in setup.draft_layers.items()},
        "supervision": capture.supervision,
        "codec": capture.codecs,
        "final": capture.final,
        "teacher": capture.teacher,
        "max_shard_size": capture.max_shard_size,
        "backend": run.backend,
        "vllm": vllm_version() if run.backend == "vllm" else None,
        "dtype": run.dtype,
        "attn": run.attn,
        "rope_factors": run.rope_factors,
        "packing": run.packing,
        "batch_tokens": run.batch_tokens or "auto",
        "device": device_type(run.device),
        "device_map": run.spread.device_map,
        "tp_plan": "auto" if run.spread.tensor_parallel else None,
        "tensor_parallel": run.vllm_tensor_parallel,
        "on_policy": setup.answers.on_policy,
        "sampling_temperature": setup.answers.temperature,
        "converted": setup.stored.settings if setup.stored else None,
        "versions": {
            "spec_data": spec_data.__version__,
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "machine": platform.machine(),
        },
    }
    return {name: value for name, value in table.items() if value is not None}


def data_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the data; of releases of libraries, all but the patch."""
    versions = {
        name: ".".join(version.split(".")[:2]) if name in ("torch", "transformers") else version
        for name, version in table["versions"].items()
        if name != "machine"
    }
    data = {name: value for name, value in table.items() if name not in _OF_RUNNING}
    return data | {"versions": versions}


def changed_settings(setup: Setup, saved: dict[str, Any]) -> list[str]:
    """Return one line per field in which a setup differs from saved settings.

    The files of the corpus are hashed, but not parsed. With --limit, those that the plan read.
    """
    reader = setup.reader()
    sources = reader.sources[: len(saved["corpus"]) if reader.limit else None]
    reports = [
        SourceReport(source=s.name, path=s.path, kind=s.kind, sha256=s.digest())
        for s in progress(sources, desc="compare the corpus", unit="files", leave=False)
    ]
    return differences(settings(setup, reports), saved)


def differences(new: dict[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return one line per setting in which new ones and saved ones decide other data."""
    if [s["sha256"] for s in saved["corpus"]] == [s["sha256"] for s in new["corpus"]]:
        new = new | {"corpus": saved["corpus"]}  # the same bytes under other names
    if new["max_shard_size"] == AUTO:  # the user asks for no size: the units stay as planned
        new = new | {"max_shard_size": saved["max_shard_size"]}
    return differing_settings(data_settings(saved), data_settings(new))


def refuse_changes(changed: list[str], where: Path | str) -> None:
    """Refuse to resume, or to mix with, data made with other settings.

    Raises:
        ConfigError: `changed` is not empty; it names every field that differs.
    """
    if changed:
        raise ConfigError(
            f"{where} holds data made with other settings, which must not be mixed:\n  "
            + "\n  ".join(changed)
            + "\nUse the old settings, another --out, or delete the directory."
        )


# -- which drafts can be fitted --------------------------------------------------------------------
# Known before the capture, and proven when it begins. A draft needs the target's sizes and its
# rotary frequencies. Families of the registry have both from their config.json. Those of other
# families are derived: sizes from config.json, frequencies from the loaded target.


@dataclass(frozen=True)
class Fitting:
    """Which drafts can be fitted on a dataset.

    Attributes:
        family: the target's family, and how its shape is known.
        problems: by draft, why it cannot be fitted; None if it can.
    """

    family: str
    problems: dict[str, str | None]

    @property
    def possible(self) -> list[str]:
        """The drafts that can be fitted."""
        return [draft for draft, problem in self.problems.items() if problem is None]

    @property
    def lines(self) -> list[str]:
        """What can be fitted, then a line for each reason why others cannot."""
        lines = [f"{', '.join(self.possible) or 'none'} ({self.family})"]
        for reason in dict.fromkeys(p for p in self.problems.values() if p):
            drafts = [draft for draft, problem in self.problems.items() if problem == reason]
            lines.append(f"not {', '.join(drafts)}: {reason}")
        return lines


def fitting(setup: Setup) -> Fitting:
    """Return which drafts can be fitted on the dataset of a setup; no weights are needed."""
    names = setup.target["architectures"]
    spec = find_spec(names)
    family = f"the target is registered as {spec.family}" if spec is not None else ""
    if spec is None:
        model = ", ".join(names) or setup.target["model_type"]
        family = (
            f"{model} is not registered: its shape is derived, and proven or refused before the "
            "capture"
        )
    shape_problem = None
    try:
        sizes_of(json.loads(config_json(setup, torch.float32)), spec or derived_spec(names))
    except DraftError as error:
        shape_problem = str(error)
    problems = {}
    for draft in RECIPES:
        problem = data_problem(draft, setup.capture.supervision, setup.capture.final)
        if draft != "eagle" and not setup.layers:
            problem = "no layer is captured"
        problems[draft] = shape_problem or problem
    return Fitting(family, problems)


def announce_drafts(setup: Setup, *, captures: bool = True) -> Fitting:
    """Log which drafts can be fitted on a dataset; refuse a capture that no draft can use.

    With `captures`, say also which layers are chosen, and what those of all drafts would cost.

    Raises:
        TargetError: there is none, and --layers names no layers.
    """
    drafts = fitting(setup)
    for line in drafts.lines:
        logger.info("drafts: %s", line)
    if not drafts.possible:
        reasons = "\n  ".join(drafts.lines[1:])
        problem = "no draft of spec-train can be fitted on this dataset"
        _refuse_unless_asked(setup, f"{problem} ({drafts.family}):\n  {reasons}\n")
    if captures:
        logger.info("layers: %s", layers_text(setup))
    for line in engine_warnings(setup.capture.drafts or AUTO_DRAFTS, setup.target["architectures"]):
        logger.warning("warning: %s", line)
    return drafts


def _refuse_unless_asked(setup: Setup, problem: str) -> None:
    """Raise TargetError, or warn if the layers were named: the states have another use then."""
    if setup.capture.layers.startswith(("auto", "spread")):
        raise TargetError(f"{problem}Give --layers IDS to capture the states for another use")
    logger.warning("warning: %s", problem.strip())


def layers_text(setup: Setup) -> str:
    """Say which layers are captured, for which drafts, and what `--for all` would cost instead."""
    count = setup.target["num_layers"]
    recipes = {d: layers for d in RECIPES if (layers := recipe_layers(d, count)) is not None}
    served = [draft for draft, layers in recipes.items() if {*layers} <= {*setup.layers}]
    text = f"{_with_cost(setup, setup.layers)}, the recipe of {', '.join(served) or 'no draft'}"
    others = [draft for draft in recipes if draft not in served]
    if not others:
        return text
    every = sorted({k for layers in recipes.values() for k in layers})
    return (
        f"{text}. {', '.join(others)} read others by their recipes; --for all captures "
        f"{_with_cost(setup, every)}"
    )


def _with_cost(setup: Setup, layers: Sequence[int]) -> str:
    """Return layers and the bytes per token of their capture; some columns have fewer tokens."""
    columns = columns_of(setup.capture, layers, setup.target["hidden_size"], setup.vocab_size)
    total = sum(c.bytes_per_token for c in columns)
    return f"{', '.join(map(str, layers)) or 'none'} (up to {total:,.0f} bytes per token)"


def find_positions(setup: Setup, plan: Plan, target: TargetBackend) -> Positions:
    """Read and prove the positions of a loaded target; log what was found.

    A difference between the target's modules and its config.json is logged as a warning.

    Raises:
        TargetError: no draft can be fitted, because the family is not registered and nothing was
            proven; --layers names no layers.
    """
    positions = target.positions(int(plan.lengths.max()))
    names = setup.target["architectures"] or [target.architecture]
    spec = find_spec(names)
    if positions.proven and positions.kind == ROPE:
        dimensions = {table.size for table in positions.tables.values()}
        logger.info(
            "positions: rotary frequencies of %s dimensions, proven up to position %s",
            *(" and ".join(map(str, sorted(dimensions))), f"{positions.proven_to - 1:,}"),
        )
    elif positions.proven:
        logger.info("positions: learned; a draft uses rotary positions instead")
    elif positions.kind != ROPE and spec is not None:
        logger.warning(
            "warning: positions: not found in the target (%s); a draft uses its config's rope",
            positions.reason,
        )
    if spec is None and not positions.proven:
        _refuse_unless_asked(
            setup,
            f"no draft of spec-train can be fitted on this dataset: {', '.join(names)} is not "
            "registered, and the positions of the target are not proven "
            f"({positions.reason}). Add the family to TARGETS in spec_data/models/families.py. ",
        )
    try:
        config = json.loads(config_json(setup, target.dtype, target.architecture))
        fitted_shape(config, spec or derived_spec(names), positions)
    except DraftError as error:
        logger.warning("warning: %s", error)
    return positions
