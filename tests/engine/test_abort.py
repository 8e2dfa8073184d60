"""An engine that is aborted ends every wait of every thread, also one in the middle of an operation."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import LIMIT_S, Ranks, on_ranks

import horovod.numpy as hvd
from horovod import context
from horovod.errors import HorovodInternalError, PeerLostError
from horovod.transports.shm import transport


@pytest.mark.parametrize("where", ["main", "timer"])
@on_ranks(2, returns=[["1 the job goes on without rank 1"] * 4, []])
def test_abort_ends_every_wait(where: str) -> list[str]:
    """Rank 0 waits in three threads for rank 1, which never comes; a fourth one aborts."""
    engine = context.engine()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
    if hvd.rank() == 1:
        with pytest.raises(HorovodInternalError):
            hvd.allreduce(np.ones(1), name="other")
        return []
    said: list[str] = []

    def note(act: Any) -> None:
        try:
            act()
        except PeerLostError as error:
            said.append(f"{error.rank} {error}")

    handle = hvd.allreduce_async(np.ones(1), name="x")
    acts = [lambda: hvd.allreduce(np.ones(1), name="y"), lambda: hvd.synchronize(handle)]
    threads = [threading.Thread(target=note, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()

    def abort() -> None:
        while len(engine.in_flight()) < 3:
            time.sleep(0.001)
        engine.abort(PeerLostError("the job goes on without rank 1", rank=1))

    threads.append(threading.Thread(target=abort))
    threads[-1].start()
    if where == "timer":  # then the main thread does not do the work itself
        signal.signal(signal.SIGALRM, lambda *_: None)
    note(lambda: hvd.allreduce(np.ones(1), name="z"))
    for thread in threads:
        thread.join(LIMIT_S / 4)
        assert not thread.is_alive()
    note(lambda: hvd.allreduce(np.ones(1), name="later"))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return said


def _ended_in_the_middle(way: str) -> list[str]:
    """Rank 1 stops in the middle of an operation, in which rank 0 waits for it; return the threads that stay there."""
    engine = context.engine()
    hvd.allreduce(np.ones(1), name="before")
    if hvd.rank() == 1:
        transport.ShmTransport.run = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment,method-assign]

    def end() -> None:
        while not engine._state.executing:
            time.sleep(0.001)
        if way == "abort":
            engine.abort(PeerLostError("the job goes on without rank 1", rank=1))
        else:
            hvd.shutdown()

    ending = threading.Thread(target=end)
    if hvd.rank() == 0:
        ending.start()
    with pytest.raises(HorovodInternalError, match="goes on without rank 1" if way == "abort" else "shutdown"):
        hvd.allreduce(np.ones(1 << 20), name="large")
    ending.join()
    hvd.shutdown()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("horovod")]


@pytest.mark.parametrize("way", ["abort", "shutdown"])
def test_an_operation_that_does_not_go_on_can_be_ended(way: str) -> None:
    ranks = Ranks(2, _ended_in_the_middle, (way,), env={"HOROVOD_STALL_CHECK_DISABLE": "1"})
    pid = ranks.pid(1)
    ranks.processes[0].join(LIMIT_S)
    os.kill(pid, signal.SIGKILL)
    outcome = ranks.outcomes()[0]
    assert outcome.value == [], outcome.text


@on_ranks(1)
def test_a_rank_alone_can_be_aborted() -> None:
    context.engine().abort(HorovodInternalError("enough"))
    with pytest.raises(HorovodInternalError, match="enough"):
        hvd.allreduce(np.ones(1))
