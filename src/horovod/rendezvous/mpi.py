"""Under MPI, the ranks exchange their hosts, a secret, and the endpoints of the job service.

Only ranks on several hosts come here, so that one host needs no mpi4py. Every wait has a time limit, even where MPI
has none. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from horovod.errors import InitError, PeerLostError
from horovod.launchers import cross_place
from horovod.rendezvous.endings import Endings
from horovod.rendezvous.hosting import host_service
from horovod.rendezvous.interfaces import machine_name
from horovod.rendezvous.waiting import Patience
from horovod.world import World, process_status

__all__ = ["introduce", "limit_end"]

_TAG, _SLICE_S, _KEY_BYTES = 77, 0.1, 32
#: Time limit for the end of MPI in a failed rank: MPI waits for all ranks there, and some may never come.
_END_S = 10
#: The likely cause if all ranks did call init().
_BROUGHT_TOGETHER = (
    "; or they did, and MPI does not bring them together: where hosts have networks that lead nowhere, such as "
    "docker0, name the one that leads to the others (Open MPI: --mca btl_tcp_if_include eth0; MPICH: -iface eth0; "
    "horovodrun --mpi: --network-interfaces eth0)"
)
_communicators: dict[tuple[int, ...], Any] = {}
_introductions: dict[tuple[int, ...], _Introduction] = {}


class _Card(msgspec.Struct, array_like=True, frozen=True):
    """A rank's entry in the exchange through MPI."""

    machine: str  # the same text on all ranks of a host
    daemon: str  # the launcher's process on this host, equal for all ranks of a host; or empty
    key: bytes  # a secret for the job, from rank 0; empty from the others
    local_rank: int  # local rank from the launcher
    service: list[str]  # endpoints of the job service, from rank 0


class _Introduction:
    """Exchanges the cards of all ranks, in its own thread: MPI's operations on all ranks have no time limit.

    The exchange goes on when no thread waits for it any more; a later ``init()`` waits for it again.
    """

    def __init__(self, card: _Card, communicator: Callable[[], Any]) -> None:
        self.card = card
        self.cards: list[_Card] = []
        self.error: Exception | None = None
        self._communicator = communicator
        self._thread = threading.Thread(target=self._run, name="horovod-mpi", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            gathered = _all_gather(self._communicator(), msgspec.msgpack.encode(self.card))
            self.cards = [msgspec.msgpack.decode(data, type=_Card) for data in gathered]
        except Exception as error:
            self.error = error

    def wait(self, patience: Patience, otherwise: str, hint: str) -> list[_Card]:
        """Return the entries of all ranks."""
        while self._thread.is_alive():
            if (left_s := patience.left_s) <= 0:
                raise InitError(f"{otherwise} within {patience.total_s:g} s (HOROVOD_START_TIMEOUT){hint}")
            self._thread.join(min(_SLICE_S, left_s))
            patience.check()
            patience.remind("all ranks to call init()")
        if self.error is not None:
            raise self.error
        return self.cards


def introduce(world: World, timeout_s: float) -> World:
    """Return the place of this rank as MPI knows it, and a secret that all ranks have.

    Raises:
        InitError: mpi4py is missing, or belongs to another MPI than the launcher; or a rank did not come in time.
        PeerLostError: a rank of this host has ended.

    Blocks until all ranks have called, or ``timeout_s``.
    """
    members = _members(world, timeout_s)
    if members is None:
        return world
    with contextlib.closing(Endings(world)) as ended:
        others = [rank for rank in range(world.size) if rank != world.rank] if not world.is_spread else []

        def check() -> None:
            if found := ended.ended(others):
                raise PeerLostError(found[1], rank=found[0])

        patience = Patience(timeout_s, check)
        if members not in _introductions:
            key = world.key if world.meeting.has_key else secrets.token_bytes(_KEY_BYTES)
            daemon = world.job if world.meeting.is_place_known else ""
            own = _Card(machine_name(), daemon, b"", world.local_rank, [])
            if world.rank == 0:
                with_key = replace(world, key=key, meeting=replace(world.meeting, kind="addresses"))
                own = _Card(own.machine, daemon, key, world.local_rank, host_service(with_key))
            _introductions[members] = _Introduction(own, lambda: _communicator(members))
        introduction = _introductions[members]
        cards = introduction.wait(patience, f"not all of the {world.size} ranks called init()", _BROUGHT_TOGETHER)
    card = introduction.card
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(cards):
        hosts.setdefault((each.machine, each.daemon), []).append(rank)
    mine = hosts[card.machine, card.daemon]
    local_rank = mine.index(world.rank)
    cross_rank, cross_size = cross_place([*map(len, hosts.values())], [*hosts.values()].index(mine), local_rank)
    return replace(
        world,
        local_rank=local_rank,
        local_size=len(mine),
        cross_rank=cross_rank,
        cross_size=cross_size,
        key=cards[0].key,
        meeting=replace(
            world.meeting, kind="addresses", places=tuple(cards[0].service), has_key=True, is_place_known=True
        ),
    )


def limit_end() -> None:
    """Make this process, which has failed, end soon: at its end, MPI waits for ranks that may never come."""
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806 - as everybody calls it; None as well where no MPI library was found
    if MPI is None:
        return
    if MPI.Is_initialized() and not MPI.Is_finalized() and threading.current_thread() is threading.main_thread():
        # No Python code can run any more when MPI ends.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_S)


def _members(world: World, timeout_s: float) -> tuple[int, ...] | None:
    """Return the member ranks among MPI's ranks; None where MPI knows of no other rank."""
    try:
        MPI = _start_mpi_within_horovod_start_timeout(timeout_s)  # noqa: N806 - as everybody calls it
    except Exception as error:  # ImportError, or RuntimeError where there is no MPI library
        if not world.is_spread:
            return None
        ours = f"{world.size} ranks, {world.local_size} of them on this host, were started by {world.launcher}"
        if isinstance(error, ImportError):
            raise InitError(f"{ours}: to find each other they need mpi4py; pip install mpi4py ({error})") from error
        raise InitError(
            f"{ours}: to find each other they need mpi4py, which finds no MPI library; add the folder of libmpi.so to "
            f"LD_LIBRARY_PATH, or set MPI4PY_LIBMPI ({str(error).splitlines()[0]})"
        ) from error
    members = world.meeting.members or tuple(range(world.size))
    size = MPI.COMM_WORLD.Get_size()
    if max(members) >= size:
        if not world.is_spread:
            return None
        raise InitError(
            f"{world.launcher} has started {world.size} ranks, but mpi4py, which uses {_library()}, knows of {size}: "
            f"install an mpi4py that uses the MPI which starts the ranks (pip install --no-binary=mpi4py mpi4py)"
        )
    return members


def _communicator(members: tuple[int, ...]) -> Any:
    """Make our own communicator of the member ranks."""
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(list(members))
    _communicators[members] = MPI.COMM_WORLD.Create_group(group, _TAG)
    return _communicators[members]


def _start_mpi_within_horovod_start_timeout(timeout_s: float) -> Any:
    """Load MPI, which blocks Python until all ranks do; after the timeout, faulthandler ends us and prints this name.

    Source: faulthandler.dump_traceback_later in Python's documentation.
    """
    if "mpi4py.MPI" in sys.modules:
        return _load()
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or 2)
    try:
        return _load()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load() -> Any:
    """Return mpi4py; if it finds no MPI library, with the library of the MPI that has started this process."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except RuntimeError:
        library = _library_of_launcher()
        if not library:
            raise
        os.environ["MPI4PY_LIBMPI"] = library
        try:
            return importlib.import_module("mpi4py.MPI")
        finally:
            del os.environ["MPI4PY_LIBMPI"]


def _library_of_launcher() -> str:
    """Return the path of libmpi beside the program of an ancestor of this process; empty when there is none."""
    pid = os.getppid()
    while pid > 1:
        try:
            folder = Path(os.readlink(f"/proc/{pid}/exe")).parent.parent / "lib"  # noqa: PTH115 - may be deleted
            pid = int(process_status(Path("/proc"), pid)[1])
        except (OSError, ValueError, IndexError):
            break
        for path in sorted(folder.glob("libmpi.so.[0-9]*")):
            return str(path)
    return ""


def _library() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version()).partition(",")[0].partition("\n")[0].strip()


def _all_gather(comm: Any, data: bytes) -> list[bytes]:
    """Return the data of each rank, by rank."""
    size = comm.Get_size()
    counts = bytearray(8 * size)
    comm.Allgather(len(data).to_bytes(8, "little"), counts)
    nbytes = [int.from_bytes(counts[8 * i : 8 * i + 8], "little") for i in range(size)]
    whole = bytearray(sum(nbytes))
    starts = [sum(nbytes[:i]) for i in range(size)]
    from mpi4py import MPI

    comm.Allgatherv(data, [whole, nbytes, starts, MPI.BYTE])
    return [bytes(whole[start : start + count]) for start, count in zip(starts, nbytes, strict=True)]
