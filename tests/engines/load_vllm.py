"""Load a draft's weights into vLLM's own class, without an engine around it, and say what is there.

vLLM's DSpark runs on GPUs alone, but its class and its weight loader do not need one.
    python load_vllm.py '{"model": TARGET, "speculative_config": {...}}'
Prints, as JSON, the names of the class's parameters with a sum of each, and its configuration.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # the one that knows DSpark
}

import torch
import vllm.config.vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model

CONFIG = ("target_layer_ids", "sample_from_anchor", "dspark_bonus_anchor", "mask_token_id")


def main(task: dict[str, Any]) -> None:
    """Load, and print what was loaded."""
    arguments = EngineArgs(
        model=task["model"],
        speculative_config=task["speculative_config"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
    )
    vllm.config.vllm.HAS_TRITON = True  # what runs the class needs Triton; loading it does not
    torch.accelerator.empty_cache = lambda: None  # there is none
    base_loader.process_weights_after_loading = lambda *_: None  # would repack what is compared
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
        draft_config = config.speculative_config.draft_model_config
        model = get_model(vllm_config=config, model_config=draft_config, prefix="draft")
    found = {
        name: float(value.detach().double().sum())
        for name, value in model.named_parameters()
        if value.dtype != torch.int64
    }
    read = {key: getattr(draft_config.hf_config, key, None) for key in CONFIG}
    result = {"class": type(model).__name__, "sums": found, "config": read}
    print("\nRESULT " + json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
