"""Watches the processes of one host that another launcher has started, and reports their ends to the job service.

It is a process of its own on every host, started by the first rank there; on the service's host it is a thread. Its
standard input begins with a line of JSON: secret, endpoints of the service, name of the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import zmq

from horovod.errors import InitError
from horovod.rendezvous.client import connected
from horovod.rendezvous.programs import start_program
from horovod.rendezvous.protocol import WatchNews, WatchOrders, pack, unpack
from horovod.rendezvous.waiting import Patience, Ticks
from horovod.syscalls import open_process, send_signal
from horovod.world import is_stopped

__all__ = ["ignore_signals", "main", "start_watch", "watch_host"]

_BEAT_S, _CONNECT_S = 1.0, 60.0
#: After so long without an answer, the service has ended or cannot be reached; then its ranks end by themselves.
_LOST_S = 10.0
#: A longer pause means that this process did not run: Slurm stops those of a suspended job.
_LONGEST_S = 2.0


def start_watch(secret: bytes, places: Sequence[str], host: str) -> None:
    """Start watching this host.

    Raises:
        InitError: the program does not start.
    """
    start_program(__name__, [secret.hex(), list(places), host], subprocess.DEVNULL)


def watch_host(secret: bytes, places: Sequence[str], host: str) -> None:
    """Watch the processes of this host until the service says that the job has ended, or is lost."""
    with contextlib.suppress(InitError):  # the ranks report that
        with connected(secret, lambda: places, Patience(_CONNECT_S), "the job service has ended") as (socket, _):
            _Watch(socket, host).run()


class _Watch:
    def __init__(self, socket: zmq.Socket[bytes], host: str) -> None:
        self._socket, self._host = socket, host
        self._fds: dict[tuple[int, int], int] = {}  # pidfds, by number of the slot and process id
        self._ended: dict[tuple[int, int], None] = {}
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        ticks, silent_s, beat_at, is_over = Ticks(_LONGEST_S), 0.0, 0.0, False
        while not is_over and silent_s < _LOST_S:
            silent_s += ticks.passed_s(now := time.monotonic())
            if now >= beat_at:
                self._speak()
                beat_at = time.monotonic() + _BEAT_S
            for found, _ in self._poller.poll(max(0, int((beat_at - time.monotonic()) * 1000)) + 1):
                if found != self._socket:
                    self._note_end(found)
                    beat_at = 0.0
            while self._socket.poll(0):
                orders = unpack(self._socket.recv(), WatchOrders)
                if orders is not None:
                    silent_s, is_over = 0.0, orders.is_over
                    if self._obey(orders):
                        beat_at = 0.0

    def _speak(self) -> None:
        try:
            self._socket.send(pack(WatchNews(self._host, [number for number, _ in self._ended])), zmq.NOBLOCK)
        except zmq.Again:
            pass  # connecting again

    def _note_end(self, fd: int) -> None:
        which = next(which for which, one in self._fds.items() if one == fd)
        self._poller.unregister(fd)
        os.close(self._fds.pop(which))
        self._ended[which] = None

    def _obey(self, orders: WatchOrders) -> bool:
        """Carry out the service's orders; return whether there are new ends to report."""
        wanted = {(number, pid) for number, pid in orders.pids}
        self._ended = {which: None for which in self._ended if which in wanted}  # the service knows the others
        before = len(self._ended)
        for which in wanted - self._fds.keys() - self._ended.keys():
            try:
                self._fds[which] = open_process(which[1])
            except OSError:
                self._ended[which] = None
            else:
                self._poller.register(self._fds[which], zmq.POLLIN)
        for (number, pid), fd in self._fds.items():
            if number in orders.kill or (number in orders.kill_stopped and is_stopped(pid)):
                send_signal(fd, signal.SIGKILL)
        return len(self._ended) > before


def ignore_signals() -> None:
    """Ignore signals, to live until the job has ended: Slurm signals all processes of a step, not only its tasks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    """Entry point of the process."""
    ignore_signals()
    secret, places, host = json.loads(sys.stdin.buffer.readline())
    watch_host(bytes.fromhex(secret), places, host)
    return 0
