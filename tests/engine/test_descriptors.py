"""Something in a rank closes descriptors of the package: that is not a death of another rank."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import numpy as np
import pytest
from harness import Ranks

from horovod.errors import HorovodInternalError, PeerLostError

VICTIM = 1


def _closes(is_reused: bool) -> None:
    import horovod.numpy as hvd
    from horovod import context

    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == VICTIM:
        peers: Any = context.engine().peers
        for fd in peers.fds.values():
            os.close(fd)
            if is_reused:  # a plain file is always ready to be read
                os.dup2(os.open("/dev/null", os.O_RDONLY), fd)
        hvd.allreduce(np.ones(3), name="never")
    hvd.allreduce(np.ones(3), name="other")


@pytest.mark.slow
@pytest.mark.parametrize("is_reused", [False, True])
def test_closed_descriptors_blame_nobody(is_reused: bool) -> None:
    own, other = (outcome.error for outcome in reversed(Ranks(2, _closes, (is_reused,)).outcomes()))
    assert isinstance(own, HorovodInternalError) and not isinstance(own, PeerLostError)
    assert "file descriptor" in str(own) and "no rank has died" in str(own)
    # The other one hears who failed, and why.
    assert isinstance(other, PeerLostError) and other.rank == VICTIM
    assert f"rank {VICTIM}" in str(other) and "file descriptor" in str(other)


def _cannot_sleep(error: BaseException) -> None:
    import horovod.numpy as hvd
    from horovod import context

    if hvd.rank() == VICTIM:
        doorbell: Any = context.engine()._loop._doorbell
        sleep, has_failed = doorbell.sleep, threading.Event()

        def refuse(*args: Any, **options: Any) -> None:
            if threading.current_thread().name != "horovod-engine":
                return sleep(*args, **options)
            has_failed.set()
            raise error

        doorbell.sleep = refuse
        doorbell.ring()  # it may sleep for half a minute
        assert has_failed.wait(120)
    hvd.allreduce(np.ones(3), name="never")


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("by PyThreadState_SetAsyncExc")], ids=repr
)
def test_an_engine_that_cannot_sleep_ends_the_job(error: Exception) -> None:
    """Its thread would be gone otherwise: then the other ranks wait for work that it leaves undone."""
    own, other = (outcome.error for outcome in reversed(Ranks(2, _cannot_sleep, (error,)).outcomes()))
    assert isinstance(own, HorovodInternalError) and not isinstance(own, PeerLostError)
    assert "engine failed" in str(own) and error.args[-1] in str(own)
    assert isinstance(other, PeerLostError) and other.rank == VICTIM
