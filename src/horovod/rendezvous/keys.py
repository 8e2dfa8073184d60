"""Keys and names derived from a job's secret: a key for each purpose; ports and names that only members can compute.

Rank 0 listens on an abstract socket, which has no owner and no permissions: the first process to bind a name has it. So
the name must be secret until it is bound, which the key ensures, and useless once it was seen: it changes every second.
All ranks of a host share its clock; when it is set, they agree again within a second. Source: unix(7).
"""

from __future__ import annotations

import hmac
import time

from horovod.world import World

__all__ = ["SERVICE", "SLOT_S", "address_of", "current_slot", "local_name", "ports_of", "purpose_key"]

SLOT_S = 1.0
"""Time for which a name is in use."""
SERVICE = "service"
"""Purpose of the key of the job service."""

#: These ports lie below the ones that the kernel hands out, and above the ones of services.
_FIRST_PORT, _PORTS = 20_000, 12_000
#: Number of ports to try, as some may be taken.
_TRIES = 4


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """Return the key for one purpose, any text, so that a socket of one kind is never taken for one of another."""
    return hmac.digest(secret, b"horovod purpose " + purpose.encode(), "sha256")


def local_name(secret: bytes, job: str) -> str:
    """Return the endpoint of a job service on one host: an abstract name that only processes with the key can compute.
    ``job`` is the same text on all ranks, another one for any other service.
    """
    return f"ipc://@horovod-{hmac.digest(secret, f'service {job}'.encode(errors='surrogatepass'), 'sha256').hex()[:32]}"


def ports_of(secret: bytes, run: str) -> list[int]:
    """Return ports at which the ranks of a run look for its first host, if nothing else tells them its port. ``run`` is
    the same text on all hosts, another one for another run.
    """
    words = (purpose_key(secret, f"port {run} {i}") for i in range(_TRIES))
    return [_FIRST_PORT + int.from_bytes(word[:4], "big") % _PORTS for word in words]


def current_slot() -> int:
    """Return the number of the present second."""
    return int(time.time() / SLOT_S)


def address_of(world: World, slot: int) -> str:
    """Return the abstract socket name of the job's meeting in a slot of time."""
    text = f"{world.job}/{slot}".encode(errors="surrogatepass")
    return f"\0horovod-{hmac.digest(world.key, b'name' + text, 'sha256').hex()[:32]}"
