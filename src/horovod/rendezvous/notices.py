"""What a host says whose ranks did not even find each other, so that the other hosts do not wait for them.

Its leader will not come to the meeting of the hosts. So whoever is left there tells the place where they meet; if that
is this host, it makes one, just for this. Where horovodrun is the place, its agents tell it themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import zmq

from horovod.errors import HorovodInternalError, InitError, PeerLostError
from horovod.rendezvous import curve
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.keys import ports_of, purpose_key
from horovod.rendezvous.meeting_point import MeetingPoint
from horovod.rendezvous.offers import Failed, pack
from horovod.rendezvous.probes import Patience, candidates_of, connect_first
from horovod.world import World

__all__ = ["TELL_S", "ports", "secret_of", "tell_hosts"]

TELL_S = 3.0
"""For how long, at most, who has something to say waits for those who have not come yet."""
#: How many ports of a host are tried, as some may be taken.
_PORTS = 4


class _Told(Exception):
    """All other hosts know."""


def secret_of(world: World) -> bytes:
    """Return the secret of this run of a job."""
    return purpose_key(world.key, f"run {world.meeting.run}") if world.meeting.run else world.key


def ports(world: World) -> list[int]:
    """Return the ports at which rank 0's host listens; none where another place is known."""
    meeting = world.meeting
    return ports_of(secret_of(world), meeting.run, _PORTS) if meeting.kind == "hosts" else []


def tell_hosts(world: World, number: int, error: HorovodInternalError) -> None:
    """Let the other hosts know that nobody of this one will come.

    Args:
        world: who this process is.
        number: of the meeting.
        error: why.

    Blocks until it is known at the place where they meet, or ``TELL_S``; there, until all others know.
    """
    if world.meeting.kind != "hosts":
        return
    news = Failed(number, world.size, world.local_size, str(error), isinstance(error, PeerLostError))
    own = [*own_addresses(), "127.0.0.1"]
    point = _own_point(world, own)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        if point is not None:
            point.failed(news)
        _tell_elsewhere(context, world, news, point, own)
    except (InitError, OSError, zmq.ZMQError, _Told):
        pass
    finally:
        curve.terminate(context)
        if point is not None:
            point.close()


def _own_point(world: World, own: Sequence[str]) -> MeetingPoint | None:
    """Listen, if it is here that the others look, and nobody else of this host does so already.

    Several hosts of a job may be one machine; there, only rank 0's may take the ports that rank 0's leader needs.
    """
    here = (where for where in candidates_of(world.meeting.places, [0]) if _is_here(where, own))
    if world.cross_rank == 0 and any(here):
        with contextlib.suppress(OSError):
            return MeetingPoint(secret_of(world), own, ports(world))
    return None


def _is_here(where: str, own: Sequence[str]) -> bool:
    host = where.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in own or host.startswith("127.") or host == "::1"


def _tell_elsewhere(
    context: zmq.Context[zmq.Socket[bytes]], world: World, news: Failed, point: MeetingPoint | None, own: Sequence[str]
) -> None:
    def check() -> None:
        if point is not None and point.await_told(0):
            raise _Told

    def elsewhere() -> list[str]:
        found = candidates_of(world.meeting.places, ports(world))
        return [where for where in found if point is None or not _is_here(where, own)]

    patience = Patience(time.monotonic() + TELL_S, TELL_S, check)
    key = purpose_key(secret_of(world), "meeting")
    socket, _ = connect_first(context, key, elsewhere, patience, "nobody listens")
    with socket:
        socket.send(pack(news))
        while patience.poll(socket):
            if socket.poll(0):
                return
