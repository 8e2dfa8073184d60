"""Under which name rank 0 listens: made of the job's key, another one every second.

An abstract socket has no owner and no permissions: whoever is first has the name. So a name must not be known before
it is taken, which the key sees to, nor be of use once it has been seen, which the clock sees to. All ranks of a host
share its clock; where it is set, they agree again within a second. Source: unix(7).
"""

from __future__ import annotations

import hmac
import time

from horovod.world import World

__all__ = ["SLOT_S", "address_of", "current_slot"]

SLOT_S = 1.0
"""How long a name is the one to try."""


def current_slot() -> int:
    """Return the number of the present second."""
    return int(time.time() / SLOT_S)


def address_of(world: World, slot: int) -> str:
    """Return the abstract socket name of the job's meeting in a slot of time."""
    text = f"{world.job}/{slot}".encode(errors="surrogatepass")
    return f"\0horovod-{hmac.digest(world.key, b'name' + text, 'sha256').hex()[:32]}"
