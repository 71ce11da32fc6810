"""The files of an XPress draft, as vLLM reads them."""

from collections.abc import Iterator, Mapping
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
)
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.names import TYPE

CLASS = "Qwen3XPressModel"
_DEFAULTS = {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_num_passes": 6}  # vLLM's
_WRAPPED = "XPress's refining head in the form of speculators"


def _foreign(files: DraftFiles) -> Iterator[tuple[str, str]]:
    if files.config.get(TYPE) == "xpress":
        yield f"{TYPE} = xpress", _WRAPPED
    yield from foreign_stage("xpress", "XPress's refining head")(files)


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
    forms={form: BLOCK_FORMS[form] for form in ("hf", "vllm")},
    keys=tuple(_DEFAULTS),
    aliases={"xpress_block_size": "block_size"},
    harmless="xpress_topc xpress_compile_head",
    defaults=lambda raw: {name: n for name, n in _DEFAULTS.items() if name not in raw},
    others={"XPressDraftModel": _WRAPPED},
    foreign=_foreign,
    token_rows=("xpress_head.w2.weight",),
    facts=_facts,
)
