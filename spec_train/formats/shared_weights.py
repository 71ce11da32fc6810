"""The weights that a draft shares with its target: which files hold them, what supplies them."""

import logging

import torch
from torch import Tensor

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import EMBEDDING, HEAD
from spec_train.formats.target_facts import TargetFacts

log = logging.getLogger(__name__)

_COMPARED, _NEAR = 4096, 0.5
"""Rows of two embeddings that are compared, and the mean cosine from which one is the other's."""


def has_own_embedding(tensors: dict[str, Tensor], files: DraftFiles, target: TargetFacts) -> bool:
    """Return whether the embedding is the draft's own, and not the target's.

    Not all trainers that train it write a key for it, so the target's decides if it is given. A
    trained embedding stays near the target's. One that has nothing to do with it belongs to another
    target: it is not the draft's own here, and is refused where the two are joined.
    """
    raw, stored = files.config, tensors.get(EMBEDDING)
    stated = bool(raw.get("train_embeddings", raw.get("embed_requires_grad")))
    if stored is None or SECTION in raw:
        return stated and stored is not None
    if target.embedding is None or stored.shape != target.embedding.shape:
        return stated
    theirs = target.embedding.detach().to("cpu", stored.dtype)
    if torch.equal(stored, theirs):
        return False
    pairs = stored[:_COMPARED].float(), theirs[:_COMPARED].float()
    return stated or float(torch.cosine_similarity(*pairs, dim=-1).mean()) > _NEAR


def own_tensors(
    tensors: dict[str, Tensor],
    files: DraftFiles,
    target: TargetFacts,
    dtype: str,
    *,
    target_head: bool = False,
    own_head: bool = False,
) -> dict[str, Tensor]:
    """Return tensors, under our names, with the target's weights that the file does not contain.

    Drafts that use the target's head (`target_head`) have no copy of it; `own_head`: a draft has a
    full head of its own, at the start the target's.
    """
    result = dict(tensors)
    head = result.pop(HEAD, None) if target_head else None
    if head is not None:
        _require_target_head(head, files, target)
    supply = {EMBEDDING: target.embedding} | ({HEAD: target.head} if own_head else {})
    for name, value in supply.items():
        if name in result:
            continue
        if value is None and target.name:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's, and {target.name} has no readable "
                "weights here: download them, as safetensors"
            )
        if value is None:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's; run `spec-train export --draft "
                "... --target DIR --format hf --out NEW` and use NEW"
            )
        size = [files.config["vocab_size"], files.config["hidden_size"]]
        if list(value.shape) != size:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's, and that of "
                f"{target.name or 'the target'} has shape {list(value.shape)}, expected {size}: "
                "the draft was fitted to another target"
            )
        result[name] = value.detach().to("cpu", getattr(torch, dtype), copy=True)
    return result


def _require_target_head(head: Tensor, files: DraftFiles, target: TargetFacts) -> None:
    """Refuse an LM head in the file that is not the target's."""
    if target.head is None:
        log.warning(
            "warning[assumed]: %s: lm_head is assumed to be a copy of the target's; pass "
            "--target to check",
            files.weights_path,
        )
    elif not torch.equal(head, target.head.detach().to("cpu", head.dtype)):
        raise files.bad_weights(
            "its lm_head is not the target's; drafts of this kind use the target's head, so this "
            "one cannot be represented"
        )
