"""A test that hangs fails and shows where it stood, also in a worker of a parallel run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

HANGS = """
import signal, threading

def test_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_where_no_signal_is_handled():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

def test_after_them():
    pass
"""


def test_hanging_tests_fail_with_their_stacks_and_the_others_run(pytestconfig, tmp_path):
    limits = [float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")]
    assert limits[1] > limits[0] > 0
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-n", "1"]
    short = ["-o", "timeout=1", "-o", "faulthandler_timeout=4", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *short, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout (>1.0s)" in done.stdout and "test_hangs.py:7: Failed" in done.stdout
    assert "in test_where_no_signal_is_handled" in done.stderr  # of the worker that ended
