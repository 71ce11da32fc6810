"""`spec-data select`: some documents or layers of a dataset, with other loss masks if asked.

Conditions are applied in a fixed order, and a document is counted under the first that it does not
meet. Those that read stored columns see only what is left.

Shapes: N documents, n of them that are left.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from spec_data.corpus.facts import parse_columns
from spec_data.shards.errors import ConfigError, CorpusError, MissingError
from spec_data.shards.index import LossMasks, document_digest
from spec_data.shards.layer_ids import chosen_layers
from spec_data.shards.loss_masks import masks_under
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, Manifest, layer_column, predicts_supervised
from spec_data.shards.serving import usual_kwargs
from spec_data.terminal import NOTICE
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.progress import progress
from spec_data.views.derive import DUPLICATE, derived
from spec_data.views.rows import Rows

if TYPE_CHECKING:
    from spec_data.corpus.prompt_overlap import Grams

logger = logging.getLogger(__name__)
_SOURCES = 20  # that a message names


def select_rows(
    dataset: HiddenStatesDataset,
    *,
    where: str = "",
    not_in: Sequence[str] = (),
    decontaminate: Sequence[str] = (),
    columns: str | Mapping[str, str] = "",
    sample: str = "",
    seed: int = 0,
    mask: str = "",
    layers: str = "",
) -> tuple[Rows, Manifest]:
    """Return the rows of a `select` and the draft of its manifest.

    The arguments are those of `spec_data.select`; "" and () ask for nothing.

    Raises:
        ConfigError: an option contradicts the dataset, no document is left, or nothing changes.
        DatasetError: damage, or the mask needs tokens that are not stored.
    """
    mask = "" if mask == dataset.manifest.mask else mask
    if not (where or not_in or decontaminate or sample or mask or layers):
        raise ConfigError(f"{dataset.location}: nothing would change; name what is to be kept")
    every = rows = Rows.of(dataset)
    others = [HiddenStatesDataset(path, ()) for path in not_in]
    benchmarks: list[dict[str, Any]] = []
    masks = None
    conditions: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = []
    if mask:  # as `generate` names documents from which nothing is learned
        bar = partial(progress, desc="masks", unit="docs", leave=False)
        masks = masks_under(dataset, mask, bar)
        rows = rows.with_masks(masks)
        learned = masks.supervised - (masks.first_supervised == 0) > 0
        conditions.append(("nothing-supervised", learned.__getitem__))
    if where:
        conditions.append(("select:where", lambda left: _where(dataset, rows, left, where, masks)))
    for other in others:
        conditions.append(("select:not-in", partial(_not_in, dataset, masks, other)))
    if decontaminate:
        conditions.append(
            ("select:overlap", partial(_apart, dataset, benchmarks, decontaminate, columns))
        )
    if sample:
        conditions.append(("select:sample", lambda left: _sampled(dataset, left, sample, seed)))
    keep, dropped = np.arange(len(rows)), Counter[str]()
    for reason, meets in conditions:
        met = meets(keep)
        dropped[reason] += int((~met).sum())
        keep = keep[met]
    if not len(keep):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in (+dropped).items())
        sources = sorted(set(every.texts("source"))) if "source" in where else []
        known = ", ".join(map(repr, sources[:_SOURCES])) + ", ..." * (len(sources) > _SOURCES)
        raise ConfigError(
            f"{dataset.location}: no document is left ({reasons}); relax the options"
            + (f". Its sources: {known}" if sources else "")
        )
    ids = None
    if masks:  # documents with equal tokens and other masks may be equal now
        ids = pa.array(_new_ids(dataset, keep, masks), pa.string())
        first = np.sort(np.unique(ids.to_numpy(False), return_index=True)[1])
        dropped[DUPLICATE] = len(keep) - len(first)
        keep, ids = keep[first], ids.take(pa.array(first))
    dropped, rows = +dropped, rows.take(keep)
    if ids is not None:
        rows = rows.with_values(doc_id=ids)
    stored = dataset.manifest.columns
    if layers:
        chosen = _chosen_layers(layers, dataset.manifest)
        drop = {layer_column(k) for k in dataset.manifest.layers if k not in chosen}
        stored = tuple(column for column in stored if column.name not in drop)
        rows = rows.with_columns([column.name for column in stored])
    options = {  # files by their contents, not by their paths
        "where": where,
        "not_in": [other.manifest.fingerprint for other in others],
        "decontaminate": benchmarks,
        "sample": sample,
        "seed": seed if sample else None,
        "mask": mask,
        "layers": layers,
    } | ({"columns": parse_columns(columns)} if columns else {})
    draft = derived("select", options, [dataset.manifest], stored, dropped)
    gone = set(every.texts("source")) - set(rows.texts("source"))
    draft = draft.changed(corpus=[s for s in draft.corpus if s.source not in gone])
    return rows, draft.changed(mask=mask, agreement=None) if masks else draft


def _not_in(
    dataset: HiddenStatesDataset,
    masks: LossMasks | None,
    other: HiddenStatesDataset,
    left: np.ndarray,
) -> np.ndarray:
    """Return which of the documents `left` another dataset has neither as stored nor as masked."""
    there = np.isin(np.asarray(dataset.doc_ids)[left], other.doc_ids)
    return ~(there | np.isin(_new_ids(dataset, left, masks), other.doc_ids)) if masks else ~there


# -- --where ---------------------------------------------------------------------------------------


def _where(
    dataset: HiddenStatesDataset, rows: Rows, left: np.ndarray, sql: str, masks: LossMasks | None
) -> np.ndarray:
    """Return which of the documents `left` meet a condition; likelihoods only if it names them."""
    table = rows.table.take(pa.array(left)).select(["doc_id", "source", "tokens", "supervised"])
    table = table.rename_columns(["doc_id", "source", "length", "supervised"])
    names = {n for n in ("nll", "first_choice") if re.search(rf"\b{n}\b", sql, re.IGNORECASE)}
    scores = np.full((2, len(left)), np.nan)
    if names:
        scores = np.stack(document_scores(dataset, left, "nll" in names, masks))
    for name, values in zip(("first_choice", "nll"), scores, strict=True):
        table = table.append_column(name, pa.array(values, from_pandas=True))
    return matching(table.add_column(0, "number", pa.array(left)), sql)


def matching(table: pa.Table, condition: str) -> np.ndarray:
    """Return which rows of a table meet an SQL condition, bool [N].

    `table` has the column `number`. The condition sees this table alone: no file, no URL, no
    variable, no setting.

    Raises:
        ConfigError: it is no SQL, or names a column that the table does not have.
    """
    import duckdb  # here: 60 ms, which only --where needs

    closed: dict[str, Any] = {
        "enable_external_access": False,
        "python_enable_replacements": False,
        "lock_configuration": True,
    }
    with duckdb.connect(config=closed) as connection:
        try:
            rows = connection.from_arrow(table).filter(condition).fetchnumpy()
        except duckdb.Error as error:
            unknown = re.search(r'Referenced column "([^"]+)" not found', str(error))
            reason = str(error).splitlines()[0]
            if unknown:
                reason = f"no column {unknown[1]}{did_you_mean(unknown[1], table.column_names)}"
            raise ConfigError(
                f'--where "{condition}": {reason}; columns: {", ".join(table.column_names)}'
            ) from None
    return np.isin(table.column("number").to_numpy(), rows["number"])


def document_scores(
    dataset: HiddenStatesDataset, documents: np.ndarray, nll: bool, masks: LossMasks | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return share of first choices and mean NLL (nats) of `documents` int64 [n], float64 [n] each.

    The NLL of token t+1 is logsumexp_t - z_t[x_{t+1}]; the logit z is computed from `hidden.final`
    and the stored head, or read from `logits`. With a lossy codec of `hidden.final` it has the
    error of the codec. Without `masks` they are the stored ones. A document without a supervised
    token has nan, as has every NLL where `nll` does not ask for them.

    Raises:
        ConfigError: an NLL is asked for, and the dataset stores only some of the logits.
        DatasetError: damage.
    """
    manifest, columns = dataset.manifest, ["input_ids", "loss_mask", "target_argmax"]
    if nll and manifest.supervision.startswith("topk"):
        raise ConfigError(
            f"nll: {dataset.location} stores {manifest.supervision}, and the other logits "
            "cannot be computed from them; use first_choice"
        )
    if nll:
        columns += ["target_logsumexp", *({FINAL, "logits"} & set(dataset.columns))]
    reader = HiddenStatesDataset(dataset.location, columns)
    head = load_head_tensors(dataset) if FINAL in columns else {}
    shares, means = (np.full(len(documents), np.nan) for _ in range(2))
    bar = progress(documents.tolist(), desc="scores", unit="docs", leave=False)
    for number, document in enumerate(bar):
        row = reader[document]
        mask = row["loss_mask"].numpy()
        mask = mask if masks is None else masks.mask(document, len(mask))
        asked = torch.from_numpy(predicts_supervised(mask))  # [T]
        following = row["input_ids"].roll(-1)[asked]  # [m]
        if not len(following):
            continue
        shares[number] = float((row["target_argmax"][asked] == following).double().mean())
        if not nll:
            continue
        if head:
            z = (row[FINAL][asked].double() * head["lm_head"][following].double()).sum(-1)  # [m]
            if "lm_head_bias" in head:
                z = z + head["lm_head_bias"][following].double()
            z = z * manifest.head.scale
            if (softcap := manifest.head.softcap) is not None:
                z = softcap * torch.tanh(z / softcap)
        else:
            z = row["logits"][asked].gather(-1, following[:, None])[:, 0].double()
        means[number] = float((row["target_logsumexp"][asked].double() - z).mean())
    return shares, means


# -- --decontaminate -------------------------------------------------------------------------------


@dataclass
class Benchmark:
    """The prompts of a file, directory or dataset, and what was read.

    Attributes:
        grams: n-grams of the prompts.
        files: name and hash of each file or dataset that was read.
        of: the name of the file of each prompt.
    """

    grams: "Grams"
    files: list[dict[str, Any]]
    of: list[str]


def _apart(
    dataset: HiddenStatesDataset,
    read: list[dict[str, Any]],
    names: Sequence[str],
    columns: str | Mapping[str, str],
    left: np.ndarray,
) -> np.ndarray:
    """Return which of the documents `left` share no part with a benchmark, bool [n].

    Each file of the benchmarks is added to `read`, with its prompts, those of them that were found,
    and the documents in which they were found: also documents that overlap another file too.
    """
    kwargs = usual_kwargs(dataset.manifest.identity)
    benchmarks = [read_benchmark(name, dataset.target_dir, kwargs, columns) for name in names]
    reader = HiddenStatesDataset(dataset.location, ["input_ids"])
    found: list[set[int]] = [set() for _ in benchmarks]  # prompts
    overlapping = [Counter[str]() for _ in benchmarks]  # documents of each file
    apart = np.ones(len(left), bool)
    for number, document in enumerate(
        progress(left.tolist(), desc="overlap", unit="docs", leave=False)
    ):
        ids = reader[document]["input_ids"].numpy().astype(np.int32)
        for benchmark, prompts, documents in zip(benchmarks, found, overlapping, strict=True):
            matches = benchmark.grams.matches(ids)
            prompts |= matches
            documents.update({benchmark.of[prompt] for prompt in matches})
            apart[number] &= not matches
    for benchmark, prompts, documents in zip(benchmarks, found, overlapping, strict=True):
        every = Counter(benchmark.of)
        shared = Counter(benchmark.of[prompt] for prompt in prompts)
        for file in benchmark.files:
            name = file["source"]
            counts = {"prompts": every[name], "found": shared[name], "documents": documents[name]}
            read.append(file | counts)
            logger.log(
                NOTICE,
                "overlap with %s: %d of %d documents, with %d of its %d prompts",
                *(name, counts["documents"], len(left), counts["found"], counts["prompts"]),
            )
    return apart


def read_benchmark(
    name: str,
    tokenizer_dir: Path,
    kwargs: Mapping[str, Any] | None = None,
    columns: str | Mapping[str, str] = "",
) -> Benchmark:
    """Return the prompts of a file, directory or dataset.

    Rows are read as `spec-train eval --prompts` reads them, and tokenised as in a dataset whose
    template kwargs are `kwargs`. `columns` are those of --columns.

    Raises:
        MissingError: no such file. ConfigError: as `parse_columns`, or no row has such a column.
        CorpusError: it cannot be read, or nothing in it can be compared.
        TargetError: no usable tokenizer.
    """
    from spec_data.corpus.in_order import in_time
    from spec_data.corpus.prompt_overlap import LEAST_TOKENS, Grams, add_prompt
    from spec_data.corpus.record_reader import CorpusReader  # two seconds of imports
    from spec_data.corpus.records import parse_prompt
    from spec_data.corpus.template import Template
    from spec_data.corpus.template_keys import layout_of
    from spec_data.models.tokenizer import load_tokenizer

    template = Template(load_tokenizer(tokenizer_dir), kwargs)
    grams, of = Grams(), list[str]()
    try:
        layout = layout_of(template.tokenizer, columns)
        reader = CorpusReader([name], split="test", parse=parse_prompt, layout=layout)
        for record in reader:
            in_time(record.where, add_prompt, grams, record, template)
            of.append(record.source)
    except (MissingError, CorpusError) as error:
        raise type(error)(f"--decontaminate {str(error).removeprefix('corpus ')}") from error
    if grams.short == grams.prompts:
        raise CorpusError(
            f"--decontaminate {name}: none of its {grams.prompts} prompts has {LEAST_TOKENS} "
            "tokens, so nothing can be compared; drop this source"
        )
    files = [{"source": r.source, "sha256": r.sha256} for r in reader.reports]
    return Benchmark(grams, files, of)


# -- --sample, --mask, --layers --------------------------------------------------------------------


def _sampled(dataset: HiddenStatesDataset, left: np.ndarray, amount: str, seed: int) -> np.ndarray:
    """Return which of the documents `left` are in a random sample, bool [n].

    The documents with the lowest hashes of (seed, id) are taken. So the order of a dataset does not
    matter, and a larger sample contains a smaller one of the same seed.
    """
    ids = dataset.id_array.take(pa.array(left)).to_pylist()
    keys = [hashlib.sha256(f"{seed} {name}".encode()).digest() for name in ids]
    sampled = np.zeros(len(ids), bool)
    sampled[sorted(range(len(keys)), key=keys.__getitem__)[: sample_size(amount, len(ids))]] = True
    return sampled


def sample_size(amount: str, count: int) -> int:
    """Return the documents of a sample of `count`: a number, or a share rounded to the nearest.

    Raises:
        ConfigError: `amount` is no number above 0, or a share above 1.
    """
    text = amount.strip()
    if text.isascii() and text.isdigit() and int(text):
        return min(int(text), count)
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--sample {amount}: expected a number of documents such as 500, or a share such as "
            "10% or 0.1"
        )
    return round(share * count)


def _chosen_layers(layers: str, manifest: Manifest) -> tuple[int, ...]:
    """Return the layers to keep: ids, or those that were captured for a draft."""
    if not layers[:1].isalpha():
        return chosen_layers(layers, manifest.layers)
    recorded = manifest.draft_layers
    if layers not in recorded:
        raise ConfigError(
            f"--layers {layers}: the dataset records no layers of this draft (recorded: "
            f"{', '.join(recorded) or 'none'}); name their ids"
        )
    return recorded[layers]


def _new_ids(dataset: HiddenStatesDataset, keep: np.ndarray, masks: LossMasks) -> list[str]:
    """Return the ids that documents have under new masks."""
    reader = HiddenStatesDataset(dataset.location, ["input_ids"])
    ids = []
    for document in progress(keep.tolist(), desc="ids", unit="docs", leave=False):
        tokens = reader[document]["input_ids"].numpy()
        ids.append(document_id(tokens, masks.mask(document, len(tokens))))
    return ids


def document_id(input_ids: np.ndarray, mask: np.ndarray) -> str:
    """Return the id of a document with tokens and a loss mask, [T] each."""
    ids, supervised = input_ids.astype(np.int32), mask.astype(np.uint8)
    return document_digest(ids.tobytes(), supervised.tobytes()).hex()
