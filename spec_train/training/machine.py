"""On what something ran: the device, its threads, the versions of the libraries."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from spec_data import __version__


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts of this machine that figures depend on, as JSON holds them."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor()
    return {
        "device": f"{device} {name}".strip(),
        "threads": torch.get_num_threads(),
        "versions": {
            "spec-data": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),  # its import takes seconds
            "python": platform.python_version(),
        },
    }


def machine_text(sittings: Sequence[dict[str, Any]]) -> str | None:
    """Say on what a run trained, by what `RunDirectory.write_machine` kept; None: it is unknown."""
    texts = []
    for sitting in sittings:
        versions = ", ".join(f"{name} {version}" for name, version in sitting["versions"].items())
        start = f"from step {sitting['step']:,}: " if len(sittings) > 1 else ""
        threads = f"{sitting['threads']:,} thread{'s' * (sitting['threads'] != 1)}"
        texts.append(f"{start}{sitting['device']}, {threads}; {versions}")
    return ". ".join(texts) or None
