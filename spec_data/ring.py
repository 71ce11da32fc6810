"""Generation that waits for its only reader: see `spec_data.shards.ring`."""

import logging
import time
from pathlib import Path

from spec_data.shards.follow import WORK
from spec_data.shards.ring import RING, ring_size, units_used

logger = logging.getLogger(__name__)

_POLL, _SAY_AGAIN = 0.2, 60.0


def wait_for_room(out: Path, unit: int) -> None:
    """Return when `unit` may be written; at once where units are not given away.

    That is a rule on its number, not on how many units there are: whoever makes the one that is
    needed next must never wait for those that made later ones.
    """
    said = -_SAY_AGAIN
    while (ring := ring_size(out)) and unit >= units_used(out) + ring:
        if time.monotonic() - said > _SAY_AGAIN:
            said = time.monotonic()
            logger.info(
                "%s: %d units wait for `spec-train fit --follow-keep`; going on when it has used "
                "one (delete %s/%s to keep all units instead)",
                *(out, ring, WORK, RING),
            )
        time.sleep(_POLL)
