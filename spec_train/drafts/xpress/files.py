"""The files of an XPress draft, as vLLM reads them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    BlockFiles,
    block_facts,
    block_keys,
    foreign_stage,
    read_block,
    stage_of,
    stated_block,
    to_engines,
)
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.names import TYPE
from spec_train.formats.target_facts import TargetFacts

CLASS = "Qwen3XPressModel"
_DEFAULTS = {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_num_passes": 6}  # vLLM's
_WRAPPED = "XPress's refining head in the form of speculators"


def _foreign(files: DraftFiles) -> Iterator[tuple[str, str]]:
    if files.config.get(TYPE) == "xpress":
        yield f"{TYPE} = xpress", _WRAPPED
    yield from foreign_stage("xpress", "XPress's refining head")(files)


def _to_vllm(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for vLLM, which without a key refines the logits of 512 tokens per slot alone."""
    written = to_engines(ours, target)
    return replace(written, config=written.config | {"xpress_topc": 0})


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return block_facts(config) | {"refiner_rest": config.get("xpress_mlp_hidden", 0) % 64}


FILES = BlockFiles(
    title="XPress",
    what="an XPress draft",
    classes=(CLASS,),
    written=CLASS,
    claims_config=lambda raw: stage_of(raw) == "xpress",
    own_keys=block_keys,
    stated=stated_block("xpress"),
    read=read_block,
    forms={"hf": BLOCK_FORMS["hf"], "vllm": _to_vllm},
    keys=tuple(_DEFAULTS),
    aliases={"xpress_block_size": "block_size"},
    harmless="xpress_topc xpress_compile_head",
    defaults=lambda raw: {name: n for name, n in _DEFAULTS.items() if name not in raw},
    others={"XPressDraftModel": _WRAPPED},
    foreign=_foreign,
    token_rows=("xpress_head.w2.weight",),
    facts=_facts,
)
