"""Shared pytest set-up: no hub, quiet libraries, a fixed number of threads.

One thread by default, because parallel test workers must not fight over cores. SPEC_TEST_THREADS
sets another number, also for the processes that tests start; only forked ranks keep one thread. The
number of threads decides the order of sums: where a test compares bytes, both sides must run with
the same number.
"""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("SPEC_DATA_CACHE_SIZE", "0")  # tests of the cache switch it on
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# inherited by the processes that tests start
os.environ["OMP_NUM_THREADS"] = os.environ.get("SPEC_TEST_THREADS", "1")

import torch

_cache = tempfile.TemporaryDirectory(prefix="spec-data-cache-")  # never the user's
os.environ["SPEC_DATA_CACHE"] = _cache.name
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
