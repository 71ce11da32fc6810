"""Shared pytest set-up: two cores, no hub, quiet libraries."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Parallel test workers must not fight over cores; results must not depend on the count."""
    torch.set_num_threads(1)
