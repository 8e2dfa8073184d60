"""Keys and names derived from a job's secret: a key for each purpose; ports and names that only members can compute."""

from __future__ import annotations

import hmac

__all__ = ["SERVICE", "local_name", "ports_of", "purpose_key"]

SERVICE = "service"
"""Purpose of the key of the job service."""

#: These ports lie below the ones that the kernel hands out, and above the ones of services.
_FIRST_PORT, _PORTS = 20_000, 12_000


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """Return the key for one purpose, so that a socket of one kind is never taken for one of another.

    Args:
        secret: the job's secret.
        purpose: any text.
    """
    return hmac.digest(secret, b"horovod purpose " + purpose.encode(), "sha256")


def local_name(secret: bytes, job: str) -> str:
    """Return the endpoint of a job service on one host: an abstract name that only processes with the key can compute.

    Args:
        secret: the job's secret.
        job: the same text on all ranks, another one for any other service.
    """
    return f"ipc://@horovod-{hmac.digest(secret, f'service {job}'.encode(errors='surrogatepass'), 'sha256').hex()[:32]}"


def ports_of(secret: bytes, run: str, count: int) -> list[int]:
    """Return ports at which the ranks of a run look for its first host, if nothing else tells them its port.

    Args:
        secret: the job's secret.
        run: the same text on all hosts, another one for another run.
        count: number of ports; several, because one may be taken.
    """
    words = (purpose_key(secret, f"port {run} {i}") for i in range(count))
    return [_FIRST_PORT + int.from_bytes(word[:4], "big") % _PORTS for word in words]
