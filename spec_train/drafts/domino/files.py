"""The files of a Domino draft, which have the class of DFlash and a table that names the head."""

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    DFLASH,
    BlockFiles,
    block_keys,
    read_block,
    stage_of,
    stated_block,
)

FILES = BlockFiles(
    title="Domino",
    what="a Domino draft",
    classes=("DominoDraftModel",),
    written=DFLASH,
    claims_config=lambda raw: stage_of(raw) == "domino",
    own_keys=block_keys,
    stated=stated_block("domino"),
    read=read_block,
    forms={form: BLOCK_FORMS[form] for form in ("hf", "sglang")},
    keys=("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
    neutral={"pure_draft_prefix_len": (0, 1)},
    token_rows=("embed_proj.2.weight",),
    any_slot=True,
)
