"""A key for ranks whose launcher gives none, if the cluster itself can prove that they belong to one user.

Rank 0 makes the key. With MUNGE, which most clusters of Slurm have, it offers the key at a port derived from the name
of the run, as a credential that only processes of its own user can read. Elsewhere it writes the key to a file that
only this user can read, in ``~/.horovod``, which the hosts of a cluster usually share; rank 0 removes it when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import itertools
import math
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from horovod.errors import InitError
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.keys import ports_of
from horovod.rendezvous.munge import Munge, MungeError
from horovod.rendezvous.waiting import Patience
from horovod.world import World

__all__ = ["Offer", "offer_by_munge", "take_by_munge", "vouch"]

_KEY_BYTES, _MOST = 32, 1 << 16
_LOOK_S, _ANSWER_S = 0.1, 2.0
#: Connections that may be open at once; the oldest ones end first.
_MOST_GUESTS = 256
_found: dict[str, Offer] = {}


class Offer(msgspec.Struct, frozen=True):
    """The key that rank 0 gives to the other ranks."""

    run: str  # name of the run for which it is valid
    key: bytes  # the secret
    places: list[str]  # addresses of rank 0's host


def vouch(world: World, timeout_s: float) -> World:
    """Return the world with a key that all ranks share, and with rank 0's addresses if the launcher names no host.

    Raises:
        InitError: rank 0 has offered no key that this process could read.

    Blocks until rank 0 has called, or ``timeout_s``.
    """
    run = world.meeting.run
    if run not in _found:
        try:
            munge: Munge | None = Munge()
            lack = "this host has MUNGE, and rank 0's offers nothing over it"
        except MungeError as error:
            munge, lack = None, str(error)
        if world.rank == 0:
            _found[run] = _give(world, munge, timeout_s)
        else:
            _found[run] = _take(world, munge, Patience(timeout_s), lack)
    offer = _found[run]
    places = world.meeting.places or tuple(offer.places)
    return replace(world, key=offer.key, meeting=replace(world.meeting, kind="hosts", places=places, has_key=True))


def _give(world: World, munge: Munge | None, timeout_s: float) -> Offer:
    offer = Offer(world.meeting.run, secrets.token_bytes(_KEY_BYTES), own_addresses())
    if munge is not None and world.meeting.places:
        offer_by_munge(munge, offer, world.size - 1, timeout_s)
        return offer
    path = _path(world.meeting.run)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(f".{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(offer))
        draft.replace(path)
    except OSError as error:
        raise InitError(
            f"rank 0 cannot hand a key to the other ranks: there is no MUNGE here, and {path} cannot be written "
            f"({error.strerror}); {_BY_HAND}"
        ) from None
    atexit.register(_remove, path, os.getpid())
    return offer


def _take(world: World, munge: Munge | None, patience: Patience, lack: str) -> Offer:
    path, places = _path(world.meeting.run), world.meeting.places
    for look in itertools.count():
        found = _read(path, world.meeting.run)
        if found is None and munge is not None and places:
            # Rank 0 is on the first node, or on any node if the user has arranged the tasks.
            likely = dict.fromkeys((places[0], places[look % len(places)]))
            found = take_by_munge(munge, world.meeting.run, list(likely), world.rank)
        if found is not None:
            return found
        if patience.left_s <= 0:
            raise InitError(
                f"rank {world.rank} got no key from rank 0 within {patience.total_s:g} s (HOROVOD_START_TIMEOUT): "
                f"{lack}, and there is no {path}. If rank 0 has called init(), {_BY_HAND}"
            )
        patience.check()
        patience.remind("rank 0, which makes the key of the job")
        time.sleep(_LOOK_S)
    raise AssertionError


_BY_HAND = (
    "type this where the job is started, and see that all hosts get it: export HOROVOD_SECRET_KEY=$(openssl rand -hex "
    "32)"
)


def _path(run: str) -> Path:
    return Path.home() / ".horovod" / hashlib.sha256(f"{os.getuid()} {run}".encode()).hexdigest()[:32]


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: Path, run: str) -> Offer | None:
    """Return the offer in a file, if only this user can have written it and can read it."""
    try:
        os.listdir(path.parent)  # noqa: PTH208 - makes NFS refresh the folder
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            return None
        return _decoded(file.read(_MOST), run)


def _decoded(data: bytes, run: str) -> Offer | None:
    try:
        offer = msgspec.msgpack.decode(data, type=Offer)
    except msgspec.MsgspecError:
        return None
    return offer if offer.run == run and len(offer.key) == _KEY_BYTES else None


def offer_by_munge(munge: Munge, offer: Offer, others: int, timeout_s: float) -> None:
    """Serve a key to all other ranks, in a thread that ends when all have it, or after ``timeout_s``.

    Raises:
        InitError: all ports are taken.
    """
    for port in _ports(offer.run, munge.uid):
        with contextlib.suppress(OSError):
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
            break
    else:
        raise InitError(f"rank 0 cannot hand a key to the other ranks: all of its ports are taken; {_BY_HAND}")
    threading.Thread(
        target=_serve, args=(listener, munge, offer, others, timeout_s), name="horovod-key", daemon=True
    ).start()


def _serve(listener: socket.socket, munge: Munge, offer: Offer, others: int, timeout_s: float) -> None:
    """Send the credential to everybody who connects, at once, so that a silent stranger delays nobody."""
    payload, deadline = msgspec.msgpack.encode(offer), time.monotonic() + timeout_s
    thanked: set[int] = set()
    guests: dict[socket.socket, None] = {}  # in the order in which they came
    with listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while len(thanked) < others and (left_s := deadline - time.monotonic()) > 0:
            ready = [key.fileobj for key, _ in selector.select(None if math.isinf(left_s) else left_s)]
            leaving = [guest for guest in guests if guest in ready]
            for guest in leaving:
                thanked |= _thanked(guest, offer.key)
            with contextlib.suppress(OSError, MungeError):
                if listener in ready:
                    guest, _ = listener.accept()
                    guests[guest] = None
                    selector.register(guest, selectors.EVENT_READ)
                    guest.setblocking(False)
                    guest.send(munge.encode(payload))
                    guest.shutdown(socket.SHUT_WR)
            for guest in dict.fromkeys(leaving + list(guests)[:-_MOST_GUESTS]):
                selector.unregister(guest)
                guest.close()
                del guests[guest]
    for guest in guests:
        guest.close()


def _thanked(guest: socket.socket, key: bytes) -> set[int]:
    """Return the rank that has thanked for the key; none if it is a stranger."""
    with contextlib.suppress(OSError):
        answer = guest.recv(_MOST)
        rank = int.from_bytes(answer[:4], "big")
        if hmac.compare_digest(answer[4:], _thanks(key, rank)):
            return {rank}
    return set()


def take_by_munge(munge: Munge, run: str, places: Sequence[str], rank: int) -> Offer | None:
    """Return rank 0's offer; None as long as there is none. Rank 0 is on one of ``places``, usually the first."""
    for place in places:
        for port in _ports(run, munge.uid):
            try:
                with socket.create_connection((place, port), _ANSWER_S) as connection:
                    data, deadline = b"", time.monotonic() + _ANSWER_S
                    while len(data) < _MOST and time.monotonic() < deadline and (more := connection.recv(_MOST)):
                        data += more
                    found = munge.decode(data)
                    offer = _decoded(found.payload, run) if found.uid == munge.uid else None
                    if offer is not None:
                        connection.sendall(rank.to_bytes(4, "big") + _thanks(offer.key, rank))
                        return offer
            except (OSError, MungeError, UnicodeError):
                continue  # not there yet, or another process has the port
    return None


def _ports(run: str, uid: int) -> list[int]:
    return ports_of(b"horovod vouching", f"{uid} {run}")


def _thanks(key: bytes, rank: int) -> bytes:
    return hmac.digest(key, f"thanks {rank}".encode(), "sha256")
