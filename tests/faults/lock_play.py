"""Hold a lock for a moment, or die while it is held: for `odd_disk`.

python -m tests.faults.lock_play FILE SECONDS [die]
"""

import os
import signal
import sys
from pathlib import Path

from spec_data.shards.file_system import lock


def main(words: list[str]) -> int:
    """Take the lock FILE, waiting SECONDS for it; 1: another process holds it."""
    file, seconds, *more = words
    try:
        with lock(Path(file), float(seconds)):
            if more:
                os.kill(os.getpid(), signal.SIGKILL)
    except TimeoutError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
