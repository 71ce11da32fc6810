"""The target of a plan: load it as the plan asks, and choose the documents that prove its masks."""

import torch
from torch import Tensor

from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import rope_factors
from spec_data.generation.unit_size import BATCH_TOKENS
from spec_data.target.backend import BackendOptions, TargetBackend, open_backend
from spec_data.target.proofs import proof_documents, proof_length


def load_target(setup: Setup, plan: Plan) -> TargetBackend:
    """Load the target with the backend and the options of the run.

    Raises:
        TargetError: the target cannot be loaded.
    """
    return open_backend(setup.config.backend, backend_options(setup, plan))


def backend_options(setup: Setup, plan: Plan) -> BackendOptions:
    """Return which target a backend loads, and how."""
    config = setup.config
    return BackendOptions(
        path=setup.model_dir,
        layers=setup.layers,
        dtype=config.dtype,
        device=config.device,
        attn=config.attn,
        trust_remote_code=config.trust_remote_code,
        rope_factors=rope_factors(setup, plan),
        spread=config.spread,
        longest=int(plan.lengths.max()),
        batch_tokens=config.forward_tokens or BATCH_TOKENS,
        tensor_parallel=config.vllm_tensor_parallel,
        engine_memory=config.vllm_memory,
    )


def documents_to_prove(setup: Setup, plan: Plan) -> tuple[list[int], list[Tensor]]:
    """Return the documents of the proofs: their numbers in the plan, and their ids int64 [T_d]."""
    offsets, ids = plan.documents.offsets, plan.documents.tokens["input_ids"]
    limit = proof_length(setup.model_config, plan.pack_length)
    chosen = proof_documents(plan.lengths.tolist(), plan.pack_length, limit=limit)
    return chosen, [torch.from_numpy(ids[offsets[d] : offsets[d + 1]]).long() for d in chosen]
