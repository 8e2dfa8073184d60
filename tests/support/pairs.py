"""Engines of several ranks in one process, over the local and the shm link, on a ``Stage``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from interleaving import Stage

from horovod import config as configuration
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.config import Config
from horovod.core.requests import Kind
from horovod.engine import engine as engines
from horovod.engine import execution, handles, loop, signals, state
from horovod.engine.calls import call
from horovod.engine.engine import Engine
from horovod.engine.handles import Handle
from horovod.engine.link import Link
from horovod.engine.ports import SILENT
from horovod.links import local
from horovod.links.shm import link as shm
from horovod.links.shm.board import ShmBoard
from horovod.rendezvous.messages import HostMeeting
from horovod.transports import between
from horovod.transports.shm import futex
from horovod.transports.shm.arena import Arena
from horovod.transports.shm.control import Control
from horovod.transports.shm.flags import Spinner
from horovod.transports.shm.mapping import create_memfd
from horovod.world import World

__all__ = ["FILES", "Ranks", "on_stage"]

#: Whose lines are moments: what several threads of a rank run at the same time.
FILES = frozenset(str(module.__file__) for module in (engines, execution, handles, loop, state))
_ARENA_BYTES = 32 << 20
_ADAPTER = NumpyAdapter()


def on_stage(stage: Stage, patch: pytest.MonkeyPatch, hands_over: bool = False, looks: int = 0) -> None:
    """Let engines that are made from now on sleep, lock and start threads on a stage.

    Args:
        stage: which.
        patch: undone by the caller.
        hands_over: whether callers may be interrupted, and so must not do the engine's work themselves.
        looks: how often to look before sleeping; others may go on before each.
    """

    def let_go_on(spinner: Spinner, has_come: Callable[[], bool]) -> bool:
        for _ in range(looks):
            stage.sleep(0)
            if has_come():
                return True
        return False

    patch.setattr(loop, "threading", SimpleNamespace(Lock=stage.lock, Thread=stage.thread))
    patch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: stage.clock, sleep=stage.sleep))
    for module in (loop, local):
        patch.setattr(module, "allocate_lock", stage.lock)
    patch.setattr(futex, "wait", stage.futex_wait)
    patch.setattr(futex, "wake", stage.futex_wake)
    # To look again and again before sleeping changes nothing but the time, and who goes without the coordinator.
    patch.setattr(Spinner, "look", let_go_on)
    patch.setattr(signals.DeferredSignals, "install", lambda self: None)
    patch.setattr(signals.DeferredSignals, "allows", lambda self: not hands_over)


class Ranks:
    """A job of one rank over the local link, or of several over shm."""

    def __init__(self, stage: Stage, size: int) -> None:
        settings = configuration.load({})
        self.stage = stage
        links = [local.assemble(settings)] if size == 1 else _shm_links(stage, size, settings)
        self.engines = [Engine(link, settings, SILENT) for link in links]
        for engine in self.engines:
            engine.start()

    def submit(self, rank: int, name: str = "", patient: bool = False) -> Handle:
        """Submit the sum over all ranks of their number plus 1."""
        value = np.full(2, rank + 1.0)
        request = call(Kind.ALLREDUCE, name or None)
        return self.engines[rank].submit(request, _ADAPTER, [value], None, None, patient)

    def run(self, rank: int, name: str = "") -> list[float]:
        """Return the sum over all ranks of their number plus 1, submitted and waited for in one step."""
        value = np.full(2, rank + 1.0)
        return list(self.engines[rank].run(call(Kind.ALLREDUCE, name or None), _ADAPTER, [value]).outputs[0].tolist())

    def wait(self, rank: int, handle: Handle) -> list[float]:
        """Return the result."""
        return list(self.engines[rank].wait(handle)[0].tolist())

    @property
    def total(self) -> list[float]:
        """Return the expected result."""
        size = len(self.engines)
        return [size * (size + 1) / 2] * 2

    def stop(self) -> None:
        """Let all leave; nothing of that is a moment."""
        self.stage.is_recording = False
        self.stage.play(*[lambda engine=engine: engine.stop("the end") for engine in self.engines])


def _shm_links(stage: Stage, size: int, settings: Config) -> list[Link]:
    """Assemble what ``init()`` does, after a meeting that needs no sockets."""
    control_fd = create_memfd("horovod-control-test", ShmBoard.nbytes(size, size))
    arena_fds = [create_memfd("horovod-arena-test", _ARENA_BYTES) for _ in range(size)]

    @contextlib.contextmanager
    def sharing(world: World, settings: Config, page_bytes: int, rank: int) -> Iterator[shm.Shared]:
        # More cores than ranks, so that nobody makes room for anybody.
        control = Control(control_fd, world.rank, size, 4 * size)
        stage.words.update(zip(control._bell_address, range(size), strict=True))
        arenas = [Arena(fd, _ARENA_BYTES) for fd in arena_fds]
        pid_fds = [os.pidfd_open(os.getpid()) for _ in range(size)]
        pids, hosts = [os.getpid()] * size, ["here"] * size
        sizes, ranks = [_ARENA_BYTES] * size, list(range(size))
        yield shm.Shared(HostMeeting(control_fd, arena_fds, sizes, pid_fds, pids, hosts, ranks), control, arenas)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm, "sharing", sharing)
            patch.setattr(between, "installed", frozenset)  # looking for them would take a fifth of the time
            return [
                shm.assemble(World(rank, size, rank, size, 0, 1, "here", "none", "job", b""), settings, 1, SILENT)
                for rank in range(size)
            ]
    finally:
        for fd in (control_fd, *arena_fds):
            os.close(fd)
