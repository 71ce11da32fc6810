"""Shared pytest set-up: no hub, quiet libraries, one thread.

One thread, because parallel test workers must not fight over cores, and because the number of
threads decides the order of sums, so that bytes could not be compared.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
