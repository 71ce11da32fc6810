"""The target of a plan: load it as the plan asks, and choose the documents that prove its masks."""

import torch
from torch import Tensor

from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import rope_factors
from spec_data.target.model import Target
from spec_data.target.proofs import proof_documents, proof_length


def load_target(setup: Setup, plan: Plan) -> Target:
    """Load the target with the options of the run.

    Raises:
        TargetError: the target cannot be loaded.
    """
    config = setup.config
    return Target.from_pretrained(
        str(setup.model_dir),
        setup.layers,
        dtype=config.dtype,
        device=config.device,
        attn=config.attn,
        trust_remote_code=config.trust_remote_code,
        rope_factors=rope_factors(setup, plan),
    )


def documents_to_prove(plan: Plan, target: Target) -> tuple[list[int], list[Tensor]]:
    """Return the documents of the proofs: their numbers in the plan, and their ids int64 [T_d]."""
    offsets, ids = plan.documents.offsets, plan.documents.tokens["input_ids"]
    limit = proof_length(target.config, plan.pack_length)
    chosen = proof_documents(plan.lengths.tolist(), plan.pack_length, limit=limit)
    return chosen, [torch.from_numpy(ids[offsets[d] : offsets[d + 1]]).long() for d in chosen]
