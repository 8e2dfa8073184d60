"""The process that watches a host's ranks, which another launcher has started."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from meetings import LONG_S

from horovod.rendezvous import host_watch
from horovod.rendezvous.protocol import WatchOrders, pack


def test_a_watch_that_was_stopped_does_not_take_the_service_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm stops all processes of a suspended job."""
    ahead_s = [0.0]
    monkeypatch.setattr(host_watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0]))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as service, context.socket(zmq.DEALER) as own:
        service.bind("inproc://service")
        own.connect("inproc://service")
        watch = threading.Thread(target=host_watch._Watch(own, "a").run, daemon=True)
        watch.start()
        for is_over in (False, True):
            assert service.poll(LONG_S * 1000)
            service.recv_multipart()
            ahead_s[0] += 2 * host_watch._LOST_S
            assert service.poll(host_watch._LOST_S * 1000), "it has ended"
            sender, _ = service.recv_multipart()
            service.send_multipart([sender, pack(WatchOrders([], [], [], is_over))])
        watch.join(LONG_S)
        assert not watch.is_alive()
