"""What is captured: the target and tokenizer on disk, the columns, the settings, the plan.

`settings` is the table of everything that decides the bytes of a dataset: two runs with equal
tables may share a directory; otherwise the error names every field that differs.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spec_data.capture.backend import TargetBackend, vllm_version
from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.documents import UNSUPERVISED
from spec_data.corpus.facts import parse_columns
from spec_data.corpus.images import NO_IMAGES, ImageFiles
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.sampling_record import read_record
from spec_data.corpus.sources import Source, corpus_directory, corpus_files, resolve
from spec_data.corpus.template_keys import layout_of
from spec_data.corpus.template_probes import default_system, unstopped_end
from spec_data.generation.options import AUTO, MOST_PIXELS, CaptureOptions, column_qualities
from spec_data.generation.plan import (
    ALSO,
    BATCH_TOKENS,
    DOCUMENTS,
    PLAN,
    PROOF,
    WITNESS,
    Plan,
    load_plan,
    read_plan_record,
    render_corpus,
    save_plan,
    unit_tokens,
)
from spec_data.generation.workers import planning_lock, running_workers
from spec_data.models.devices import device_type
from spec_data.models.engines import engine_warnings
from spec_data.models.families import NOTES, config_shape, fitted_shape, registered
from spec_data.models.identify import TargetFiles, read_target, versions
from spec_data.models.loading import check_choice
from spec_data.models.mtp import check_block
from spec_data.models.reading import end_token_ids, text_config
from spec_data.models.vision import WITH_IMAGES, Vision, takes_images
from spec_data.shards.codecs import TABLES
from spec_data.shards.draft_kinds import draft_kinds
from spec_data.shards.errors import (
    ConfigError,
    CorpusError,
    DatasetError,
    DraftError,
    RunError,
    TargetError,
)
from spec_data.shards.files import dump_json, parse_size, remove, remove_left_of, sha256_file
from spec_data.shards.follow import WORK
from spec_data.shards.layer_ids import (
    AUTO_DRAFTS,
    RECIPES,
    SEARCH,
    choose_layers,
    recipe_count,
)
from spec_data.shards.packing import cut_units
from spec_data.shards.path_kinds import WITHOUT_MANIFEST, shards_alone
from spec_data.shards.pictures import FOLDER, IMAGES
from spec_data.shards.position_data import ROPE, Positions
from spec_data.shards.resumable import differing_settings, refuse_changes
from spec_data.shards.schema import (
    FORMAT_VERSION,
    Column,
    SourceRecord,
    data_problem,
    token_columns,
)
from spec_data.shards.serving import DEFAULT_SYSTEM, GENERATION, read_sampling
from spec_data.terminal import NOTICE
from spec_data.terminal.config import flag
from spec_data.terminal.parts import part
from spec_data.terminal.progress import progress
from spec_data.terminal.types import comma_list

logger = logging.getLogger(__name__)

_SAMPLING_FACTS = {  # of the identity of a target, by where a record of sampling has them
    "weights": ("target", "weights_hash", "weights_hash"),
    "tokenizer": ("tokenizer", "hash", "tokenizer_hash"),
    "chat template": ("tokenizer", "chat_template_hash", "chat_template_hash"),
}


def with_recorded_sampling(
    options: CaptureOptions, sources: Sequence[str], identity: Mapping[str, Any]
) -> CaptureOptions:
    """Return the options of --on-policy with the temperature that the records of the corpora have.

    `regenerate` writes beside a corpus which target sampled its answers, and how. `identity` is the
    target's, as `identify` makes it; facts that are None are not compared.

    Raises:
        ConfigError: a record has another target, template or temperature.
        CorpusError: a record is damaged.
    """
    stated, temperatures = options.sampling_temperature, list[float]()
    files = [file for name in sources if options.on_policy for file in corpus_files(name)]
    for corpus in files:
        record = read_record(corpus) if corpus.is_file() else None
        if record is None:
            continue
        made, beside = record["settings"], f"{corpus} ({corpus.name}.sampling)"
        pairs = {
            words: ((made.get(table) or {}).get(name), identity.get(fact))
            for words, (table, name, fact) in _SAMPLING_FACTS.items()
        }
        kwargs = "chat_template_kwargs"
        pairs["chat template kwargs"] = made.get(kwargs), identity.get(kwargs)
        differences = [
            f"{words}: {there} there, {here} here"
            for words, (there, here) in pairs.items()
            if there is not None and here is not None and there != here
        ]
        if differences:
            raise ConfigError(
                f"--on-policy: {beside} was not written by this target with this template:\n  "
                + "\n  ".join(differences)
                + "\nPass the target, and the --chat-template-kwargs, that `spec-data regenerate` "
                "had, or leave --on-policy out"
            )
        if stated is not None and stated != made["temperature"]:
            raise ConfigError(
                f"--sampling-temperature {stated:g}: the answers of {beside} were sampled at "
                f"{made['temperature']:g}; leave the option out"
            )
        if sha256_file(corpus) != record.get("sha256"):
            logger.warning(
                "warning[sampling-record]: %s was changed after `regenerate` wrote it. Edited "
                "answers are found by the digests of their rows; that added rows are the target's "
                "own is not known",
                corpus,
            )
        temperatures.append(float(made["temperature"]))
    if stated is None and len(temperatures) == len(files) and len(set(temperatures)) == 1:
        logger.info("--sampling-temperature %g, from the records of the corpus", temperatures[0])
        return replace(options, sampling_temperature=temperatures[0])
    return options


@dataclass(frozen=True, kw_only=True)
class Setup(TargetFiles):
    """The target and tokenizer on disk, the columns of the dataset, and the options.

    Attributes:
        layers: layer ids, ascending.
        draft_layers: those that each draft of --for reads.
        options: with --max-length limited to the context of the target, and the temperature that
            the corpus records.
        converted: how states that another tool stored are read; None: they are captured.
        said: the sources whose answers this process has called suspicious, on a sample.
    """

    layers: tuple[int, ...]
    draft_layers: dict[str, tuple[int, ...]]
    columns: tuple[Column, ...]
    vocab_size: int
    options: CaptureOptions
    converted: dict[str, Any] | None = None
    said: set[str] = field(default_factory=set, compare=False)


def set_up(
    target: str | TargetFiles,
    sources: Sequence[str],
    options: CaptureOptions,
    *,
    weights: bool = True,
) -> Setup:
    """Find a target and tokenizer for a corpus, without loading any weights.

    Without `weights` (for `estimate`) they need not be there: they are neither downloaded nor
    hashed, and nothing can be captured with the result.

    Raises:
        ConfigError: options that this target cannot have, such as more logits than it has.
        MissingError, TargetError: the model does not exist, or does not have these layers.
    """
    if options.backend == "vllm" and weights:
        vllm_version()  # it is missing: say so before anything is read
    kwargs, trust = options.chat_template_kwargs or {}, options.trust_remote_code
    files = target
    if isinstance(files, str):
        files = read_target(files, options.revision, kwargs, trust, weights=weights)
    text = text_config(files.model_config)
    layers, draft_layers = choose_layers(
        comma_list(options.layers), options.drafts, text.num_hidden_layers
    )
    top = int(options.supervision.partition(":")[2] or 0)
    if top > text.vocab_size:
        raise ConfigError(
            f"--supervision {options.supervision}: the target has {text.vocab_size} logits per "
            "token; ask for fewer"
        )
    check_choice(options.rope_factors, files.model_config)
    if options.context_parallel > 1:
        from spec_data.capture.context_parallel import check_family  # with all of a target

        check_family(files.model_config)
    options = within_context(options, files.model_config)
    return Setup(
        **vars(files),
        layers=layers,
        draft_layers=draft_layers,
        columns=token_columns(
            tuple(layers),
            text.hidden_size,
            options.supervision,
            text.vocab_size,
            qualities=column_qualities(options.codecs, layers),
            final_tokens=options.final,
            teacher_tokens=options.teacher,
        ),
        vocab_size=text.vocab_size,
        options=with_recorded_sampling(options, sources, files.identity),
    )


def open_corpus(
    sources: Sequence[str],
    options: CaptureOptions,
    find: Callable[..., list[Source]] = resolve,
    tokenizer: Any = None,
    images: ImageFiles = NO_IMAGES,
) -> CorpusReader:
    """Return a reader of a corpus; `find` returns what is behind each source, as `resolve` does.

    What neither the reader nor the chat template of `tokenizer` reads is named.

    Raises:
        MissingError, CorpusError: a source does not exist, or cannot be read.
    """
    return CorpusReader(
        sources,
        limit=options.limit or None,
        max_bad_rows=parse_limit(str(options.max_bad_rows)),
        max_row_bytes=parse_size(str(options.max_row_bytes)),
        find=find,
        layout=replace(layout_of(tokenizer, options.columns), images=images),
    )


def image_files(setup: Setup, elsewhere: str = "") -> ImageFiles:
    """Return where the images of rows are read; `elsewhere` is where the states are captured, or
    their dataset written, if that is not one process of this machine.

    Raises:
        ConfigError: an option of images is given where none are read; or no such folder.
    """
    options, refused = setup.options, ""
    kind = str(getattr(setup.model_config, "model_type", ""))
    if not takes_images(setup.model_config):
        refused = "this target takes texts alone"
    elif "mrope_section" in str(getattr(text_config(setup.model_config), "rope_parameters", "")):
        refused = (
            "the positions of this target count images in three ways (M-RoPE), and engines do not "
            "agree on those of a draft"
        )
    elif kind not in WITH_IMAGES:
        known = " and ".join(WITH_IMAGES)
        refused = f"of targets of type {kind} only text is read (images of {known} are)"
    elif options.backend != "hf":
        refused = f"--backend {options.backend} captures texts alone; leave it out"
    elif elsewhere or not options.spread.is_one_device or options.context_parallel > 1:
        what = elsewhere or "several devices"
        refused = f"images are captured on one device into a local --out, not with {what}"
    if refused:
        needless = [f for f in ("image_folder", "max_image_pixels") if f in options.given]
        if needless:
            raise ConfigError(f"{', '.join(map(flag, needless))}: no images are read: {refused}")
    folder = Path(options.image_folder) if options.image_folder else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--image-folder {folder}: there is no such folder")
    return ImageFiles(refused=refused, folder=folder, most_pixels=options.max_image_pixels)


def check_outside_corpus(out: str, sources: Iterable[str]) -> None:
    """Raise ConfigError if --out lies inside the corpus, which would include its files."""
    for directory in filter(None, map(corpus_directory, sources)):
        if Path(out).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"--out {out} lies in the corpus directory {directory}, so its files would "
                "be read as corpus; choose an --out outside it"
            )


def within_context(options: CaptureOptions, model_config: Any) -> CaptureOptions:
    """Return the options with --max-length lowered to the context of the target, if it is shorter.

    Serving never uses positions beyond the context, so states there are of no use. `model_config`
    is the transformers configuration.
    """
    context = context_length(text_config(model_config))
    if not 2 <= context < options.max_length:
        return options
    given = "max_length" in options.given
    logger.log(
        logging.WARNING if given else logging.INFO,
        "%sdocuments are cut to %d tokens, not %d (--max-length), because the context of the "
        "target ends there (max_position_embeddings)",
        *("warning[context]: " if given else "", context, options.max_length),
    )
    return replace(options, max_length=context)


def context_length(text: Any) -> int:
    """Return the number of positions of a decoder, 0 if its config has none.

    With scaled RoPE, `max_position_embeddings` is usually the scaled context. In configs to which
    YaRN was added later, the scaled context is the original length times the factor.
    """
    rope, scaled = getattr(text, "rope_parameters", None) or {}, 0.0
    if rope.get("rope_type") == "yarn":  # Llama 3.2's factor, of another type, is no such thing
        scaled = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(getattr(text, "max_position_embeddings", None) or 0, int(scaled))


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
# the target, see `generation.proof`.
_OF_RUNNING = (
    *("device", "device_map", "tp_plan", "context_parallel", "tensor_parallel", "batch_tokens"),
)


def settings(setup: Setup, reports: Iterable[SourceRecord]) -> dict[str, Any]:
    """Return everything that decides the bytes of a dataset, flat enough to name differences."""
    options = setup.options
    table: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": {k: v for k, v in setup.target.items() if k != "name"},
        "target_name": setup.target["name"],
        "tokenizer": setup.tokenizer_id,
        "corpus": [{"source": r.source, "sha256": r.sha256} for r in reports],
        "limit": options.limit,
        "columns": parse_columns(options.columns) or None,
        "max_row_bytes": parse_size(str(options.max_row_bytes)),
        "max_image_pixels": None
        if options.max_image_pixels == MOST_PIXELS
        else options.max_image_pixels,
        "mask": options.mask,
        "max_length": options.max_length,
        "layers": list(setup.layers),
        "draft_layers": {draft: list(layers) for draft, layers in setup.draft_layers.items()},
        "supervision": options.supervision,
        "codec": options.codecs,
        "final": options.final,
        "teacher": options.teacher,
        "max_shard_size": str(options.max_shard_size),
        "pass_on": None if options.pass_on is None else True,
        "backend": options.backend,
        "vllm": vllm_version() if options.backend == "vllm" else None,
        "dtype": options.dtype,
        "attn": options.attn,
        "rope_factors": options.rope_factors,
        "packing": options.packing,
        "batch_tokens": options.tokens_per_forward or AUTO,
        "device": device_type(options.device),
        "device_map": options.spread.device_map,
        "tp_plan": options.tp_plan,
        "context_parallel": options.context_parallel if options.context_parallel > 1 else None,
        "tensor_parallel": options.vllm_tensor_parallel,
        "on_policy": options.on_policy,
        "sampling_temperature": options.sampling_temperature,
        "converted": setup.converted,
        "versions": versions(),
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


def changed_settings(corpus: CorpusReader, setup: Setup, saved: dict[str, Any]) -> list[str]:
    """Return one line per field in which a corpus and a setup differ from saved settings.

    The files of the corpus are hashed, but not parsed. With --limit, those that the plan read.
    """
    sources = corpus.sources[: len(saved["corpus"]) if corpus.limit else None]
    reports = [
        SourceRecord(source=s.name, path=s.path, kind=s.kind, sha256=s.digest())
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


# -- plan ------------------------------------------------------------------------------------------
# The process that makes the plan holds OUT/.generate/plan.lock; the others wait for it, and then
# read the plan. A run that fails before its first shard (a wrong target, too many top logits)
# leaves a plan, which must not block the directory for other settings: it is replaced if no unit is
# finished and no worker is running. A worker takes its lock while it holds plan.lock, and then
# looks whether its plan is still there, so none is replaced while a worker uses it.


def make_plan(corpus: CorpusReader, setup: Setup, folder: Path | None = None) -> Plan:
    """Read, render and cut a corpus, and return the plan.

    Its documents are in plan.arrow of `folder`, or in a temporary file that is removed with them.

    Raises:
        CorpusError: the corpus cannot be read, or no document is left.
        RunError: a process that rendered documents ended.
    """
    options = setup.options
    renderer = Renderer(
        setup.tokenizer,
        mask=options.mask,
        template_kwargs=options.chat_template_kwargs or {},
        eot_token_ids=tuple(end_token_ids(setup.model_dir)),
        vocab_size=setup.vocab_size,
        longest=options.max_length,
        vision=Vision(setup.model_dir, options.trust_remote_code)
        if takes_images(setup.model_config)
        else None,
    )
    renderer.template.warn_of_the_date()
    context = context_length(text_config(setup.model_config))
    try:
        documents, record = render_corpus(
            corpus, renderer, options.max_length, options.num_proc, folder, options.on_policy
        )
    except CorpusError as error:
        if UNSUPERVISED not in str(error):
            raise
        where = (
            f"the context of the target ends at {context:,} tokens (max_position_embeddings), so a "
            "larger --max-length changes nothing: split the documents"
            if options.max_length == context
            else f"all answers begin after {options.max_length:,} tokens: raise --max-length"
        )
        raise CorpusError(f"{error}; {where}") from None
    if record["prompts"]:  # chats
        record["prompts"] |= _template_facts(renderer)
    if defaults := read_sampling(setup.model_dir):
        record["prompts"][GENERATION] = defaults
    most = unit_tokens(
        str(options.max_shard_size),
        sum(c.bytes_per_token for c in setup.columns),
        int(documents.offsets[-1]),
        options.tokens_per_forward or BATCH_TOKENS,
    )
    # A unit has two documents at least: one whose states are not finite is left out of it.
    units, facts = cut_units(documents.lengths, most, 2), settings(setup, corpus.reports)
    return Plan(documents=documents, units=units, settings=facts, **record)


def _template_facts(renderer: Renderer) -> dict[str, str]:
    """Return what the template writes by itself; warn if generation runs on behind its answers."""
    if end := unstopped_end(renderer.template, renderer.ends):
        logger.warning("warning[stop-token]: %s", end)
    system = default_system(renderer.template)
    return {DEFAULT_SYSTEM: system} if system else {}


def find_plan(corpus: CorpusReader, setup: Setup, out: Path) -> Plan:
    """Load the plan of `out`, or make and save it, or wait for the process that makes it.

    A plan with other settings is replaced if nothing was captured with it.

    Raises:
        ConfigError: `out` holds data made with other settings.
        CorpusError: as `make_plan`.
        DatasetError: `out` holds other files, or a damaged plan.
    """
    work = out / WORK
    saved = read_plan_record(work)
    if saved is not None and not changed_settings(corpus, setup, saved.settings):
        return load_plan(work)
    with planning_lock(out):
        saved = read_plan_record(work)
        if saved is not None:
            changed = changed_settings(corpus, setup, saved.settings)
            if not changed:
                return load_plan(work)
            if any(work.glob("unit-*.json")) or running_workers(work):
                refuse_changes(changed, out)
            logger.warning(
                "warning[replanned]: the settings changed, so the plan is made again (nothing "
                "was captured yet):\n  %s",
                "\n  ".join(changed),
            )
            discard_plan(work)
        refuse_other_files(out)
        remove_left_of(work / DOCUMENTS)
        plan = make_plan(corpus, setup, work)
        save_plan(work, plan)
        return plan


def check_still_planned(out: Path, plan: Plan) -> None:
    """Raise RunError if another command has replaced the plan; the caller holds its lock."""
    saved = read_plan_record(out / WORK)
    if saved is None or saved.settings != plan.settings:
        raise RunError(
            f"{out}: another command is making a plan with other settings in this directory; run "
            "this command again, or choose another --out"
        )


def refuse_other_files(out: Path) -> None:
    """Raise DatasetError if a directory holds other files than an unfinished dataset has."""
    if shards_alone(out):
        raise DatasetError(f"{out}: {WITHOUT_MANIFEST}")
    if out.exists() and any(p.name != WORK for p in out.iterdir()):
        raise DatasetError(
            f"{out} is not empty and not a directory of spec-data; choose another --out (nothing "
            "was changed)"
        )


def discard_plan(work: Path) -> None:
    """Remove the plan in `work` (OUT/.generate) and everything made from it; its lock is held.

    What says that the target is proven goes first and the plan last, so a second call after a crash
    removes the rest, and a run with the old settings proves the target again.
    """
    made = [work.parent / name for name in ("shards", "target", TABLES)]
    made += [work / IMAGES, work / FOLDER]
    for file in (work / PROOF, *work.glob(ALSO), work / WITNESS, *made, work / PLAN):
        remove(file)


# -- which drafts can be fitted --------------------------------------------------------------------
# A draft needs the target's sizes and its rotary frequencies. Families of the registry have both
# from their config.json. Those of other families are derived before the capture, and proven when it
# begins: sizes from config.json, frequencies from the loaded target.


def announce_drafts(setup: Setup) -> tuple[dict[str, str | None], list[str]]:
    """Log which drafts can be fitted on a dataset; refuse a capture that no draft can use.

    Return why each draft cannot be fitted, None if it can; and the lines of the log.

    Raises:
        TargetError: there is none, and --layers names no layers; or there is no MTP block, which
            --for asks for.
    """
    options, names = setup.options, setup.target["architectures"]
    family, shape_problem = registered(names), None
    config = json.loads(config_json(setup, torch.float32))
    if options.for_mtp:
        check_block(setup.model_dir, config)
    try:
        config_shape(config, with_rope=False)
    except DraftError as error:
        shape_problem = str(error)
    problems: dict[str, str | None] = {}
    for draft in dict.fromkeys((*RECIPES, *setup.draft_layers)):
        no_layers = "no layer is captured" if recipe_count(draft) and not setup.layers else None
        unstored = data_problem(draft, options.supervision, options.final)
        problems[draft] = shape_problem or no_layers or unstored
    fitted = ", ".join(draft for draft, problem in problems.items() if problem is None)
    about = (
        f"{family} is registered"
        if family
        else f"{', '.join(names) or setup.target['model_type']} is not registered: its shape is "
        "derived, and proven or refused before the capture"
    )
    lines = [f"{fitted or 'none'} ({about})"]
    for draft, kind in draft_kinds().items():
        needed = kind.only_on.get(options.supervision.partition(":")[0])
        if needed and problems[draft] is None:
            lines.append(f"{draft} only with {needed}")
    if note := NOTES.get(family or ""):
        lines.append(f"of {family}: {note}")
    for problem in dict.fromkeys(filter(None, problems.values())):
        lines.append(f"not {', '.join(d for d in problems if problems[d] == problem)}: {problem}")
    for line in lines:
        logger.info("drafts: %s", line)
    if comma_list(options.layers) == SEARCH:
        logger.log(NOTICE, "layers     %s", _search_price(setup))
    if not fitted:
        problem = "no draft of spec-train can be fitted on this dataset: "
        _refuse_unless_asked(setup, problem + "\n  ".join(lines) + "\n")
    for line in engine_warnings(options.drafts or AUTO_DRAFTS, names):
        logger.warning("warning[engines]: %s", line)
    return problems, lines


def _search_price(setup: Setup) -> str:
    """Say what the layers of --layers search cost, beside those that the recipes read."""
    of_layers = [c.bytes_per_token for c in setup.columns if c.name.startswith("hidden.L")]
    recipes = len(set().union(*setup.draft_layers.values()))
    more = len(of_layers) - recipes
    each = sum(of_layers) / len(of_layers)
    return (
        f"{len(of_layers)} to search among take {sum(of_layers):,.0f} bytes per token, usually at "
        f"most, {more * each:,.0f} more than --for all, whose recipes read {recipes}"
    )


def _refuse_unless_asked(setup: Setup, problem: str) -> None:
    """Raise TargetError, or warn if the layers were named: the states have another use then."""
    if comma_list(setup.options.layers).startswith((AUTO, SEARCH, "spread")):
        raise TargetError(f"{problem}Give --layers IDS to capture the states for another use")
    logger.warning("warning[no-draft]: %s", problem.strip())


def find_positions(setup: Setup, plan: Plan, target: TargetBackend) -> Positions:
    """Read and prove the positions of a loaded target; warn where its config.json differs.

    Raises:
        TargetError: no draft can be fitted, because the family is not registered and nothing was
            proven; --layers names no layers.
    """
    part("positions")
    positions = target.positions(int(plan.lengths.max()))
    names = setup.target["architectures"] or [target.architecture]
    if not positions.proven and positions.kind != ROPE and registered(names):
        logger.warning(
            "warning[positions]: positions: not found in the target (%s); a draft uses its "
            "config's rope",
            positions.reason,
        )
    if not positions.proven and not registered(names):
        _refuse_unless_asked(
            setup,
            f"no draft of spec-train can be fitted on this dataset: {', '.join(names)} is not "
            "registered, and the positions of the target are not proven "
            f"({positions.reason}). Add the family to TARGETS in spec_data/models/families.py. ",
        )
    try:
        config = json.loads(config_json(setup, target.dtype, target.architecture))
        fitted_shape(config, positions)
    except DraftError as error:
        logger.warning("warning[no-draft]: %s", error)
    return positions
