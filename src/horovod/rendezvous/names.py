"""The name under which rank 0 listens: derived from the job's key, and new every second.

An abstract socket has no owner and no permissions: the first process to bind a name has it. So a name must be secret
until it is bound, which the key ensures, and useless once it was seen, which the clock ensures. All ranks of a host
share its clock; when it is set, they agree again within a second. Source: unix(7).
"""

from __future__ import annotations

import hmac
import time

from horovod.world import World

__all__ = ["SLOT_S", "address_of", "current_slot"]

SLOT_S = 1.0
"""Time for which a name is in use."""


def current_slot() -> int:
    """Return the number of the present second."""
    return int(time.time() / SLOT_S)


def address_of(world: World, slot: int) -> str:
    """Return the abstract socket name of the job's meeting in a slot of time."""
    text = f"{world.job}/{slot}".encode(errors="surrogatepass")
    return f"\0horovod-{hmac.digest(world.key, b'name' + text, 'sha256').hex()[:32]}"
