"""What a fork that is killed must not do to the process that started it."""

import os
import signal
import threading

from transformers.utils import logging

from tests.forked import Forked


def die_inside_a_bar() -> int:
    logging.tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_bars_of_libraries_go_on_after_a_fork_died_inside_one():
    logging.tqdm(range(1)).close()
    assert Forked(die_inside_a_bar).wait(60) == -signal.SIGKILL
    bar = threading.Thread(target=lambda: logging.tqdm(range(1)).close(), daemon=True)
    bar.start()
    bar.join(60)
    assert not bar.is_alive()
