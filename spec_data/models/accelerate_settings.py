"""What a configuration of `accelerate launch` asks for, by the variables that it sets."""

import os

from spec_data.shards.errors import ConfigError

_ACCELERATE = "ACCELERATE_"
_DTYPES = {"bf16": "bfloat16"}
"""Values of accelerate's mixed_precision that this project has, and the --dtype that they are."""


def check_accelerate(dtype: str, device: object, spread: str, accumulation: int = 1) -> None:
    """Refuse what a configuration of `accelerate launch` asks for and this run does not do.

    `spread` are the options that split weights over devices instead.

    Raises:
        ConfigError: there is such a setting.
    """

    def said(name: str) -> str:
        return os.environ.get(_ACCELERATE + name, "").lower()

    for other in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if said(f"USE_{other}") in ("true", "1"):
            raise ConfigError(
                f"accelerate's configuration enables {other}, which is not used here; launch "
                f"with a plain multi-process configuration, and pass {spread} to split weights"
            )
    precision = said("MIXED_PRECISION")
    if precision not in ("", "no") and _DTYPES.get(precision) != dtype:
        fits = _DTYPES.get(precision)
        own = "the dtype of the target's files" if dtype == "auto" else dtype
        advice = f"pass --dtype {fits}, or launch" if fits else "launch"
        raise ConfigError(
            f"accelerate's mixed_precision is {precision}, and this run computes in {own}; "
            f"{advice} with --mixed_precision no"
        )
    steps = said("GRADIENT_ACCUMULATION_STEPS")
    if steps not in ("", "1", str(accumulation)):
        raise ConfigError(
            f"accelerate's gradient_accumulation_steps is {steps}, and this run has --accumulation "
            f"{accumulation}; pass --accumulation {steps}, or leave it out of accelerate's "
            "configuration"
        )
    if (backend := said("DYNAMO_BACKEND")) not in ("", "no"):
        raise ConfigError(
            f"accelerate's dynamo_backend is {backend}; this program compiles by itself: launch "
            " with --dynamo_backend no"
        )
    if said("USE_CPU") in ("true", "1") and not str(device).startswith("cpu"):
        raise ConfigError(
            f"accelerate's configuration asks for CPUs, and this run uses {device}; pass --device "
            "cpu, or launch without --cpu"
        )
