"""What is proven about a loaded target before the first shard, once per directory.

It is stored in OUT/.generate/target.json, so that every worker, every replica of Ray and every
resumed run captures in the same way. Hours of capture must not pass before a wrong head, a leaking
mask, too large a batch or token ids of another tokenizer are noticed.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from safetensors.torch import load_file, save
from torch import Tensor

from spec_data.capture.backend import BackendOptions, TargetBackend, open_backend
from spec_data.capture.mask_forms import VARLEN
from spec_data.capture.model import Target as CausalTarget
from spec_data.capture.proofs import (
    largest_difference,
    proof_documents,
    proof_length,
    proof_text,
)
from spec_data.generation.batch_size import choose_batch_tokens, in_memory
from spec_data.generation.calibrate import calibrate
from spec_data.generation.capture import (
    CaptureSettings,
    add_figures,
    forward_batches,
    forward_columns,
    supervised_next,
)
from spec_data.generation.plan import ALSO, BATCH_TOKENS, PROOF, WITNESS, Plan
from spec_data.generation.setup import Setup, config_json, find_positions
from spec_data.generation.transfers import copy_stream
from spec_data.models.identify import versions
from spec_data.models.loading import chosen_factors
from spec_data.models.mtp import MTP, mtp_tensors
from spec_data.models.reading import text_config
from spec_data.models.vision import Vision
from spec_data.shards.codecs import TABLES, load_tables
from spec_data.shards.errors import ConfigError, CorpusError, RunError
from spec_data.shards.files import dump_json, write_atomically, write_once, writing
from spec_data.shards.follow import WORK
from spec_data.shards.likelihood import SUMS, above_random_text, indices_by_name, summarise
from spec_data.shards.packing import even_sample
from spec_data.shards.position_data import POSITIONS, Positions
from spec_data.shards.records import read_json
from spec_data.shards.schema import (
    CodecTables,
    Column,
    Manifest,
    PackingRecord,
    TargetRecord,
    predicts_supervised,
)
from spec_data.shards.seal import file_records, target_file_names
from spec_data.terminal.parts import part

logger = logging.getLogger(__name__)

_REFERENCE_DOCUMENTS, _REFERENCE_TOKENS = 8, 256  # and tokens of each of them
_FEWEST, _PER_SOURCE, _OF_ALL_SOURCES = 2, 16, 256  # documents
LONGEST = 2048  # tokens of a document whose likelihood is measured
GENERATION_CONFIG = "generation_config.json"


def load_target(setup: Setup, plan: Plan) -> TargetBackend:
    """Load the target with the backend and the options of the run.

    Raises:
        TargetError: the target cannot be loaded.
    """
    options, longest = setup.options, int(plan.lengths.max())
    given = BackendOptions(
        path=setup.model_dir,
        layers=setup.layers,
        dtype=options.dtype,
        device=options.device,
        attn=options.attn,
        trust_remote_code=options.trust_remote_code,
        rope_factors=chosen_factors(options.rope_factors, setup.model_config, longest),
        spread=options.spread,
        longest=longest,
        batch_tokens=options.tokens_per_forward or BATCH_TOKENS,
        tensor_parallel=options.vllm_tensor_parallel,
        engine_memory=options.vllm_memory,
        server=options.server,
        states_dir=options.states_dir,
    )
    return open_backend(options.backend, given)


def prepare_capture(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    out: Path,
    share: Callable[[], bool] = lambda: True,
) -> CaptureSettings:
    """Prove a loaded target, or read what was proven in `out`; return how units are captured.

    `share` publishes the proof; it returns False if that of another worker has replaced it.

    Raises:
        TargetError, RunError: a proof fails, or this run captures other states than the one that
            proved the target.
        CorpusError, ConfigError: the target could not have written the corpus.
    """
    resumed = (out / WORK / PROOF).is_file()
    draft = prove_target(setup, plan, target, out)
    if not share():
        draft = prove_target(setup, plan, target, out)
    columns, codec, form = draft.columns, draft.codec, draft.packing.form
    if form == VARLEN and target.device.type == "cpu":
        raise RunError(
            f"{out} was begun on a GPU, with a kernel ({form}) that no CPU has: resume it on a "
            "GPU, or choose another --out"
        )
    widths = {c.name: c.width or 1 for c in columns if c.lossy}
    proven, batch_tokens = draft.captured_with, setup.options.tokens_per_forward
    if proven != running_facts(target, proven["batch_tokens"]):  # other devices
        batch_tokens = choose_batch_tokens(target, plan, form, columns, batch_tokens)
    elif not resumed:  # as many as the proof took, which may have been out of memory with more
        batch_tokens = None
    settings = CaptureSettings(
        columns=columns,
        form=form,
        batch_tokens=batch_tokens or proven["batch_tokens"],
        tables=load_tables(out / TABLES, widths, codec.sha256 if codec else None) if widths else {},
        temperature=setup.options.temperature,
        stream=copy_stream(target.device, [c.name for c in columns]),
    )
    # States that another tool stored may have been written again, under equal names and sizes.
    stored_again = resumed and draft.captured_with["backend"] == "stored"

    def check(size: int) -> None:
        check_running(setup, plan, target, out, size, stored_again)

    _, size = in_memory(check, target, plan, form, columns, settings.batch_tokens)
    return replace(settings, batch_tokens=size)


def documents_to_prove(
    setup: Setup, plan: Plan, ready: int | None = None
) -> tuple[list[int], list[Tensor]]:
    """Return the numbers in the plan of the documents of the proofs, and their ids int64 [T_d].

    They are among the first `ready` ones, or all.
    """
    limit = proof_length(setup.model_config, plan.pack_length)
    chosen = proof_documents(plan.lengths[:ready].tolist(), plan.pack_length, limit=limit)
    offsets, tokens = plan.documents.beginnings(chosen)
    ids = torch.from_numpy(tokens["input_ids"]).long()
    documents = list(ids.split(np.diff(offsets).tolist()))
    for place, document in enumerate(chosen):  # as texts: images have forwards of their own
        keep = torch.ones(len(documents[place]), dtype=torch.bool)
        for image in plan.documents.images.get(document, ()):
            keep[image.start : image.end] = False
        documents[place] = documents[place][keep]
    return chosen, documents


def prove_target(setup: Setup, plan: Plan, target: TargetBackend, out: Path) -> Manifest:
    """Return what was proven about a target in `out`, a manifest without shards; else prove it."""
    file = out / WORK / PROOF
    if file.is_file():
        return Manifest.of(read_json(file), str(file))
    positions = find_positions(setup, plan, target)
    chosen, documents = documents_to_prove(setup, plan, target.ready)
    prove_images(setup, plan, target)
    head_error = None
    if not setup.options.supervision.startswith("logits"):
        head_error = target.prove_head(documents)
    proof = target.prove(documents, plan.pack_length, setup.options.packing)
    shortest = sorted(plan.lengths[: target.ready].tolist())[:2]
    if len(shortest) < 2 or sum(shortest) > plan.pack_length:
        logger.info("packing: %s; no two documents fit into one row", proof.form)
    elif "rows" in proof.form and setup.options.packing != "rows":  # slower, and nobody asked
        logger.warning("warning[packing]: %s", proof_text(proof))
    else:
        logger.info("packing: %s", proof_text(proof))
    asked = setup.options.tokens_per_forward
    batch_tokens = choose_batch_tokens(target, plan, proof.form, setup.columns, asked)
    given = target, plan, proof.form, setup.columns

    def check(size: int) -> None:
        check_agreement(setup, plan, target, proof.form, size, chosen)

    _, batch_tokens = in_memory(check, *given, batch_tokens)
    if file.is_file():  # of another worker, whose checksums are of the files that it wrote
        return Manifest.of(read_json(file), str(file))
    save_target_files(setup, target, positions, out / "target")
    (columns, codec), batch_tokens = in_memory(
        lambda size: calibrate(setup, plan, target, proof.form, size, out), *given, batch_tokens
    )
    reference, batch_tokens = in_memory(
        lambda size: reference_states(documents, target, proof.form, plan.pack_length, size),
        *given,
        batch_tokens,
    )
    write_once(out / WORK / WITNESS, save(reference))
    draft = manifest_draft(
        setup, plan, target, proof, head_error, positions, columns, codec
    ).changed(
        captured_with=running_facts(target, batch_tokens),
        files=file_records(out, target_file_names(out)),
    )
    write_once(file, dump_json(draft.to_json()))
    return Manifest.of(read_json(file), str(file))


def prove_images(setup: Setup, plan: Plan, target: TargetBackend) -> None:
    """Prove that the target reads the images of a plan, with the processor that rendered it.

    Raises:
        TargetError: it reads none. RunError: the processor is another one.
    """
    if not plan.documents.images:
        return
    here = Vision(setup.model_dir, setup.options.trust_remote_code).digest
    if not isinstance(target, CausalTarget) or here != plan.documents.processor:
        raise RunError(
            f"{setup.model_dir}: the image processor (preprocessor_config.json, "
            "processor_config.json) is not the one that the plan was made with; restore it, or "
            "choose another --out"
        )
    first = min(plan.documents.images, key=lambda d: int(plan.lengths[d]))
    ids = torch.from_numpy(plan.documents.tokens(first, first + 1)["input_ids"]).long()
    target.prove_images(ids, plan.documents.image_files(first))


# -- could the target have written the corpus? -----------------------------------------------------


def check_agreement(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    form: str,
    batch_tokens: int,
    proven: Iterable[int],
) -> None:
    """Measure a sample of every source and refuse what cannot be right; log what is suspicious.

    The documents `proven` join the sample.

    Raises:
        CorpusError: the NLL of a source is clearly above ln V, and --allow-high-nll is not set.
        ConfigError: --on-policy, and a source that the target did not write.
    """
    options, vocabulary = setup.options, setup.vocab_size
    temperature = options.sampling_temperature
    chosen = sample_of_sources(plan.documents.sources[: target.ready], proven)
    figures = measure_documents(plan, target, form, chosen, batch_tokens, options.temperature)
    finite = np.isfinite(figures).all(1)  # of others, which capture leaves out, nothing is known
    known = [plan.documents.sources[d] for d, sound in zip(chosen, finite, strict=True) if sound]
    measured = summarise(figures[finite], known)
    for name, agreement in measured.judged().items():
        if agreement.above_random(vocabulary) and not options.allow_high_nll:
            raise CorpusError(
                f"{name}: on a sample, {agreement}. {above_random_text(vocabulary)}. "
                "Give the target that these ids or this text were made for; pass --allow-high-nll "
                "to capture them all the same"
            )
    if options.on_policy and (wrong := measured.contradictions(temperature)):
        at_known = "; for samples at a known temperature, pass --sampling-temperature T"
        raise ConfigError(
            "--on-policy: this target did not write these answers. On a sample:\n  "
            + "\n  ".join(wrong)
            + "\nCheck the template, BOS and order of the answers, and that this is the target "
            "that wrote them. Otherwise leave --on-policy out"
            + (at_known if temperature is None else "")
        )
    for message in measured.suspicions(vocabulary, temperature, options.on_policy, False):
        sampled = f"on a sample of {len(known)} documents, {message}"  # its names tell it apart
        logger.warning("warning[answers]: %s", sampled)
        setup.said.update(name for name in measured.judged() if message.startswith(f"{name}: "))


def sample_of_sources(sources: Sequence[str], proven: Iterable[int]) -> list[int]:
    """Return indices of documents, ascending: `proven`, and some spread evenly over each source.

    Of more sources than the sample may have pairs of documents, some are chosen, evenly as well.
    """
    by_source = list(indices_by_name(sources).values())
    most = max(_FEWEST, min(_PER_SOURCE, _OF_ALL_SOURCES // len(by_source)))
    chosen = set(proven)
    for documents in even_sample(by_source, _OF_ALL_SOURCES // _FEWEST):
        chosen |= set(even_sample(documents.tolist(), most))
    return sorted(chosen)


def measure_documents(
    plan: Plan,
    target: TargetBackend,
    form: str,
    chosen: list[int],
    batch_tokens: int,
    temperature: float,
    columns: tuple[Column, ...] = (),
) -> np.ndarray:
    """Measure the first tokens of the documents `chosen`, indices into the plan.

    `columns` are computed as well, so that it takes as long as their capture.
    """
    offsets, tokens = plan.documents.beginnings(chosen, LONGEST)
    following = supervised_next(
        tokens["input_ids"], predicts_supervised(tokens["loss_mask"], offsets)
    )
    part("likelihood of a sample of the answers")
    figures = np.zeros((len(chosen), SUMS))
    images = plan.documents.images_of(chosen)
    given = (form, plan.pack_length, batch_tokens, images)
    for batch in forward_batches(offsets, tokens["input_ids"], *given):
        asked = following[batch.token_index(offsets)]
        _, measured = forward_columns(target, batch, form, columns, asked, temperature)
        add_figures(measured.cpu().numpy(), asked, batch, figures)
    return figures


# -- files of the target ---------------------------------------------------------------------------


def save_target_files(
    setup: Setup, target: TargetBackend, positions: Positions, folder: Path
) -> None:
    """Write the files of a target, each atomically."""
    for name, content in target_file_contents(setup, target, positions).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)


def target_file_contents(
    setup: Setup, target: TargetBackend, positions: Positions
) -> dict[str, bytes]:
    """Return config, tokenizer, head, MTP block and positions, by their names in target/."""
    generation = setup.model_dir / GENERATION_CONFIG
    mtp = mtp_tensors(setup.model_dir, text_config(setup.model_config).num_hidden_layers)
    return {
        "config.json": config_json(setup, target.dtype, target.architecture).encode(),
        **({GENERATION_CONFIG: generation.read_bytes()} if generation.is_file() else {}),
        **tokenizer_files(setup),
        "head.safetensors": save(target.head_tensors()),
        **({Path(MTP).name: save(mtp)} if mtp else {}),
        **({Path(POSITIONS).name: save(positions.tensors())} if positions.tables else {}),
    }


def tokenizer_files(setup: Setup) -> dict[str, bytes]:
    """Return the files of the tokenizer as they are saved."""
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        files = sorted(p for p in Path(scratch).rglob("*") if p.is_file())
        return {str(file.relative_to(scratch)): file.read_bytes() for file in files}


def manifest_draft(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    proof: PackingRecord,
    head_error: float | None,
    positions: Positions,
    columns: tuple[Column, ...],
    codec: CodecTables | None,
) -> Manifest:
    """Return the manifest without shards and totals; its arguments are what was proven."""
    about, options = target.describe(), setup.options
    facts = {k: about[k] for k in ("dtype", "rope_factors") if k in about}
    described = {
        k: v for k, v in setup.target.items() if k not in setup.identity or k == "architectures"
    }
    return Manifest(
        settings=plan.settings,
        target=msgspec.convert(described | about, TargetRecord),
        identity=setup.identity | facts | plan.prompts,
        corpus=plan.corpus,
        mask=options.mask,
        layers=tuple(setup.layers),
        draft_layers=setup.draft_layers,
        supervision=options.supervision,
        final=options.final,
        teacher=options.teacher,
        codec=codec,
        columns=tuple(
            structs.replace(
                c, exact=not c.lossy and (c.codec != "bf16" or target.dtype == torch.bfloat16)
            )
            for c in columns
        ),
        head=target.head,
        head_error=head_error,
        positions=positions.record(),
        packing=structs.replace(
            proof, pack_length=plan.pack_length, utilisation=round(plan.utilisation(), 4)
        ),
        policy="on-policy" if options.on_policy else "off-policy",
        documents=plan.counts,
    )


# -- runs with other settings ----------------------------------------------------------------------
# Device, batch size and releases change states by rounding at most, so a directory may be resumed
# with others. That is measured: the run that proved the target keeps the states of a few documents,
# and one with other settings captures them again before its first unit. The manifest has both
# settings and the difference.


def check_running(
    setup: Setup,
    plan: Plan,
    target: TargetBackend,
    out: Path,
    batch_tokens: int,
    always: bool = False,
) -> None:
    """Prove, and record, that this run captures what the proven one did.

    Nothing is captured for it if the settings are equal, but with `always`.

    Raises:
        RunError: the states differ by more than rounding.
    """
    draft = prove_target(setup, plan, target, out)  # as it was stored
    proven, here = draft.captured_with, running_facts(target, batch_tokens)
    if here == proven and not always:
        return
    changes = "; ".join(f"{k} {proven[k]}, now {v}" for k, v in here.items() if proven[k] != v)
    packing, documents = draft.packing, documents_to_prove(setup, plan, target.ready)[1]
    states = reference_states(documents, target, packing.form, plan.pack_length, batch_tokens)
    before = load_file(out / WORK / WITNESS)
    difference = 0.0
    for name, value in before.items():
        finite = value.isfinite()  # documents with other states are left out of the capture
        pair = (x.float().where(finite, 0.0) for x in (value, states[name]))
        difference = max(difference, largest_difference(*pair))
    if not difference <= packing.tolerance:
        begun = f"settings ({changes}); with the present ones" if changes else "stored states, and"
        raise RunError(
            f"{out} was begun with other {begun} the states differ by {difference:.1e}, more than "
            f"rounding (allowed {packing.tolerance:.1e}). Restore the old ones, or use another "
            "--out"
        )
    if not changes:
        return
    noise = float(f"{max(difference, packing.noise or 0.0):.2g}")
    logger.warning(
        "warning[mixed-capture]: finished units were captured with other settings (%s). The states "
        "are equal up to rounding of %.1e, and the manifest records both",
        *(changes, noise),
    )
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
    write_once(out / WORK / ALSO.replace("*", digest), dump_json(here | {"difference": noise}))


def running_facts(target: TargetBackend, batch_tokens: int) -> dict[str, Any]:
    """Return what a run captures with, as the manifest records it."""
    about, here = target.describe(), versions()
    return {
        "device": about["devices"],
        "batch_tokens": batch_tokens,
        "backend": about["backend"],
        "backend_version": about["backend_version"],
        "torch": here["torch"],
        "machine": here["machine"],
    }


def reference_states(
    documents: Sequence[Tensor],
    target: TargetBackend,
    form: str,
    pack_length: int,
    batch_tokens: int,
) -> dict[str, Tensor]:
    """Return the states [N, H] per column of the beginnings of the first documents, int64 [T_d]."""
    part("states to compare a resumed run with")
    documents = [ids[:_REFERENCE_TOKENS] for ids in documents[:_REFERENCE_DOCUMENTS]]
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
    parts: dict[str, list[Tensor]] = {}
    ids = torch.cat(documents).numpy()
    for batch in forward_batches(offsets, ids, form, pack_length, batch_tokens):
        states = target.capture(batch, form)
        for name, value in states.columns.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat(values) for name, values in parts.items()}
